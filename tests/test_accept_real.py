"""`accept` against real rollouts on SmolLM2 with two drafters of real size. Minutes."""

from pathlib import Path

import numpy as np
import pytest

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.formats.sources import cache_root, resolve_model
from specdoctor.measure.accept import AcceptSettings, measure_acceptance
from specdoctor.measure.corpus import Corpus, Manifest
from specdoctor.measure.prompts import load_bundled, load_tokenizer, render, template_record
from specdoctor.metrics.accept_summary import AcceptanceFigures, by_round
from specdoctor.metrics.acceptance import tau_step
from specdoctor.metrics.whatif import Variant

DRAFTERS = ("dspark-smollm2-135m", "dflash-smollm2-135m")
CATEGORIES = ("code", "chat", "math")
PROMPTS, TOKENS = 10, 48  # of each category
# Twelve comparisons at once: their joint 95 % interval (Bonferroni) is this much wider than each one's own.
SIMULTANEOUS = 2.87 / 1.96

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.skipif(
        not (cache_root() / "models" / "smollm2-135m" / "config.json").is_file(),
        reason="needs smollm2-135m in the cache",
    ),
]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(resolve_model("smollm2-135m"), "cpu", "float32")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", DRAFTERS)
def test_tau_agrees_with_rollouts(target: Target, tmp_path: Path, name: str, temperature: float) -> None:
    drafter = load_drafter(resolve_model(name), target)
    tokenizer = load_tokenizer(target.folder)
    prompts = render(load_bundled(CATEGORIES, PROMPTS * len(CATEGORIES)), tokenizer)
    sampling = Sampling(temperature)
    real = {}
    for category in CATEGORIES:
        real[category] = [
            Sequence(
                prompt.ids,
                max_new_tokens=TOKENS,
                sampling=Sampling(temperature, seed=1000 + i),
                stop_ids=target.stop_ids,
                prompt_id=prompt.id,
            )
            for i, prompt in enumerate(prompts)
            if prompt.category == category
        ]
        Engine(target, drafter).generate(real[category])
    manifest = Manifest.of(target, template_record(tokenizer), sampling, target.stop_ids, seed=0)
    settings = AcceptSettings(sampling=sampling, max_new_tokens=TOKENS, what_if=False)
    run = measure_acceptance(target, {name: drafter}, prompts, Corpus(tmp_path, manifest), settings)
    (arm,) = run.arms
    for category in CATEGORIES:
        mine = [text for text in arm.texts if text.category == category]
        sequences = real[category]
        ours = AcceptanceFigures(mine, Variant("all", drafter.max_draft), by_round).tau()
        theirs = tau_step([r for s in sequences for r in s.records])
        joint = np.hypot((ours.high - ours.low) / 2, (theirs.high - theirs.low) / 2)
        print(
            f"{name} T={temperature} {category}: accept {ours.value:.3f} [{ours.low:.3f}, {ours.high:.3f}], rollouts "
            f"{theirs.value:.3f} [{theirs.low:.3f}, {theirs.high:.3f}], difference {ours.value - theirs.value:+.3f} "
            f"of +-{joint:.3f}"
        )
        assert abs(ours.value - theirs.value) <= SIMULTANEOUS * joint
        if temperature == 0:
            same = 0
            for text, sequence in zip(mine, sequences, strict=True):
                if text.tokens[: text.length].tolist() == sequence.completion_ids:
                    same += 1
                    assert text.rounds.accepted.tolist() == [r.accepted for r in sequence.records]
            assert same >= PROMPTS - 1, "float32: near ties between batched and single forwards are rare"
