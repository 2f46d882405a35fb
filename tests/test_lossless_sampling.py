"""Sampled output has the target's own distribution: chi-square against the enumerated law, with a negative control."""

import gc
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import tiny_target, write_drafter
from transformers import PreTrainedModel

from specdoctor.drafters.load import load_drafter
from specdoctor.engine import engine, rows
from specdoctor.engine.draft import Draft
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling, probabilities
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.metrics.statistics import goodness_of_fit
from specdoctor.scheduling.confidence import confidence_threshold

P_FAIL = 1e-4  # of some thirty tests with fixed seeds
V, DRAWS, BATCH = 5, 20_000, 2_000
# The first token comes from the prefill. Two drafts a round leave room for both and for the bonus token behind them,
# so every way for a round to end is seen: either draft rejected, both accepted, and a round after a short one.
LENGTH, K = 4, 2
PROMPT = [0, 3, 1]
SIZES = {"hidden": 32, "heads": 2, "inner": 32}

DRAFTERS = {
    "dspark-vanilla": {"head": "vanilla", "block": K},
    "dspark-gated": {"head": "gated", "block": K},
    "dspark-rnn": {"head": "rnn", "block": K},
    "dflash": {"head": None, "block": K},
    "dflash-zlab": {"family": "zlab", "block": K + 1},
}
# (target temperature, draft temperature, top-k, top-p)
SETTINGS = [
    (1.0, "1x", 0, 1.0),
    (0.7, "0.5x", 0, 1.0),
    (1.3, "0.4", 0, 1.0),
    (1.0, "0", 0, 1.0),
    (0.9, "1.5x", 4, 0.95),
]


@pytest.fixture(scope="module", autouse=True)
def cheap_draws() -> Iterator[None]:
    """Narrow column buckets, one prefill a batch, and no garbage collector walking through the libraries each time."""
    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "COLUMN_BUCKET", 16)
        patch.setattr(engine, "PREFILL_ROWS", 8192)
        yield
    gc.enable()


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(V, **SIZES))


def exact_law(target: Target, sampling: Sampling, model: PreTrainedModel | None = None) -> np.ndarray:
    """P(continuation) [V^LENGTH] by plain forwards of a fresh model with its own attention."""
    model = tiny_target(V, **SIZES) if model is None else model
    law = np.ones(1)
    for length in range(LENGTH):
        prefixes = torch.tensor([[*PROMPT, *p] for p in itertools.product(range(V), repeat=length)])
        with torch.inference_mode():
            logits = model(prefixes).logits[:, -1]
        p = probabilities(logits, sampling.temperature, sampling.top_k, sampling.top_p).double().numpy()
        law = (law[:, None] * p).reshape(-1)
    return law / law.sum()


def draw(decoder: Engine, temperature: float, draft_temperature: str, top_k: int, top_p: float) -> np.ndarray:
    counts: Counter[tuple[int, ...]] = Counter()
    for first in range(0, DRAWS, BATCH):
        sequences = [
            Sequence(
                PROMPT, max_new_tokens=LENGTH, sampling=Sampling(temperature, top_k, top_p, draft_temperature, seed)
            )
            for seed in range(first, first + BATCH)
        ]
        decoder.generate(sequences)
        counts.update(tuple(s.completion_ids) for s in sequences)
    return np.array([counts[c] for c in itertools.product(range(V), repeat=LENGTH)])


def p_value(observed: np.ndarray, law: np.ndarray) -> float:
    return goodness_of_fit(observed, law).p


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_sampled_text_has_the_targets_law(target: Target, tmp_path: Path, kind: str, setting: tuple) -> None:
    decoder = Engine(target, load_drafter(write_drafter(tmp_path, **SIZES, **DRAFTERS[kind]), target))
    observed = draw(decoder, *setting)
    assert p_value(observed, exact_law(target, Sampling(*setting[:1], *setting[2:]))) > P_FAIL


def test_a_planted_bug_is_found(target: Target, tmp_path: Path) -> None:
    """Negative control: drafts sampled from q, but verified as if q were the one-hot of its argmax."""
    drafter = load_drafter(write_drafter(tmp_path, **SIZES), target)
    honest = drafter.propose

    def lying(sequences: list[Sequence], budget: int) -> list[Draft]:
        drafts = honest(sequences, budget)
        for draft in drafts:
            draft.probs = torch.nn.functional.one_hot(draft.probs.argmax(-1), V).float()
        return drafts

    drafter.propose = lying
    observed = draw(Engine(target, drafter), *SETTINGS[0])
    assert p_value(observed, exact_law(target, Sampling(1.0))) < 1e-6


def test_confidence_threshold_keeps_the_law(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(write_drafter(tmp_path, **SIZES), target)
    decoder = Engine(target, drafter, schedule=confidence_threshold(0.5))
    observed = draw(decoder, *SETTINGS[0])
    assert p_value(observed, exact_law(target, Sampling(1.0))) > P_FAIL
