"""`accept` against real rounds of the engine: identical in greedy, the same law when sampling."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import tiny_target, write_drafter

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.measure.accept_pass import AcceptancePass, PassOptions
from specdoctor.measure.corpus import CorpusText
from specdoctor.metrics.accept_summary import AcceptanceFigures, by_round, prompt_sums
from specdoctor.metrics.acceptance import marginal, tau_step
from specdoctor.metrics.text_acceptance import TextAcceptance
from specdoctor.metrics.whatif import Variant, follow
from specdoctor.scheduling.confidence import confidence_threshold

GOLDEN = Path(__file__).parent / "data" / "golden"
BLOCK_DRAFTERS = [
    "deepspec-dspark-vanilla",
    "deepspec-dspark-gated",
    "deepspec-dspark-rnn",
    "deepspec-dflash",
    "zlab-dflash",
]
V = 24
KINDS = {"vanilla": {"head": "vanilla"}, "rnn": {"head": "rnn"}, "zlab": {"family": "zlab"}}


@pytest.fixture(scope="module")
def golden_target() -> Target:
    return Target.load(GOLDEN / "target", "cpu", "float32")


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(V))


def text_of(sequence: Sequence, length: int | None = None) -> CorpusText:
    """What a corpus would hold of this request, further tokens being look-ahead."""
    prompt = sequence.ids[: sequence.prompt_length]
    return CorpusText(sequence.prompt_id, sequence.category, 0, prompt, sequence.completion_ids, None, length or 0)


def look(target: Target, drafter: object, text: CorpusText, length: int, **options: object) -> TextAcceptance:
    K = drafter.max_draft
    settings = {"draft_tokens": K, "depth": K, "tree_width": 8} | options
    sampling = settings.pop("sampling", Sampling())
    return AcceptancePass(target, drafter, sampling, PassOptions(**settings)).run(text, length)


@pytest.mark.parametrize("folder", BLOCK_DRAFTERS)
def test_golden_rounds_are_identical(golden_target: Target, folder: str) -> None:
    """The accepted lengths of the public reference implementations, without decoding with the drafter."""
    drafter = load_drafter(GOLDEN / folder, golden_target)
    for prompt in json.loads((GOLDEN / folder / "expected_greedy.json").read_text())["prompts"]:
        longer = Sequence(prompt["prompt_ids"], max_new_tokens=48 + drafter.max_draft)
        Engine(golden_target).generate([longer])
        assert longer.ids[: len(prompt["output_ids"])] == prompt["output_ids"]
        result = look(golden_target, drafter, text_of(longer), 48)
        assert (result.rounds.accepted + 1).tolist() == prompt["acceptance_lengths_with_bonus"]
        assert result.disagreements == 0


@pytest.mark.parametrize("K", [1, 3, 5])
def test_greedy_rounds_and_confidences_equal_the_engines(golden_target: Target, K: int) -> None:
    """Every round: anchor, accepted drafts, and the confidences, those behind a rejected draft included."""
    drafter = load_drafter(GOLDEN / "deepspec-dspark-rnn", golden_target)
    for ids in ([32, 120, 32, 105, 110], list(b"def f(x):\n    return "), [65] * 40):
        real = Sequence(ids, max_new_tokens=60)
        Engine(golden_target, drafter, draft_tokens=K).generate([real])
        plain = Sequence(ids, max_new_tokens=60 + K)
        Engine(golden_target).generate([plain])
        result = look(golden_target, drafter, text_of(plain), 60, draft_tokens=K, depth=K)
        assert result.rounds.accepted.tolist() == [r.accepted for r in real.records]
        assert (result.rounds.anchor + len(ids)).tolist() == [r.context for r in real.records]
        np.testing.assert_allclose(result.rounds.confidence, [r.confidence for r in real.records], atol=2e-6)
        (sums,) = prompt_sums([result], Variant("all", K))
        assert sums.expected_rounds == len(real.records)
        assert sums.expected_committed == sum(r.committed for r in real.records) == 59
        assert sums.expected_accepted == sum(r.accepted for r in real.records)


def test_what_if_lengths_and_thresholds_equal_engine_runs(golden_target: Target) -> None:
    """One pass over the whole block tells what engines with other settings really do, in greedy to the round."""
    drafter = load_drafter(GOLDEN / "deepspec-dspark-vanilla", golden_target)
    ids = list(b"for i in range(10):\n    print(")
    plain = Sequence(ids, max_new_tokens=80 + 5)
    Engine(golden_target).generate([plain])
    result = look(golden_target, drafter, text_of(plain), 80)
    variants = [Variant(str(k), k) for k in range(1, 6)] + [Variant(str(t), 5, t) for t in (0.2, 0.4, 0.6)]
    for variant, totals in zip(variants, follow([result], variants), strict=True):
        schedule = None if variant.threshold is None else confidence_threshold(variant.threshold)
        real = Sequence(ids, max_new_tokens=80)
        Engine(golden_target, drafter, draft_tokens=variant.draft_tokens, schedule=schedule).generate([real])
        assert totals.rounds[0] == len(real.records), variant
        assert totals.accepted[0] == sum(r.accepted for r in real.records)
        verified = totals.lengths[0] @ np.arange(6)
        assert totals.lengths.sum() == pytest.approx(len(real.records))
        if variant.threshold is None:
            assert verified == sum(r.verified for r in real.records)
        else:  # how far rejected drafts were verified is taken from the replayed rounds: near, not exact
            assert verified == pytest.approx(sum(r.verified for r in real.records), rel=0.15)


def test_the_end_of_the_context_limits_drafts(tmp_path: Path) -> None:
    """Near the target's last position the engine drafts less; so does the pass."""
    target = Target(tiny_target(V))  # 512 positions
    drafter = load_drafter(write_drafter(tmp_path, vocab=V), target)
    ids = torch.randint(0, V, (490,)).tolist()
    real = Sequence(ids, max_new_tokens=100)
    Engine(target, drafter).generate([real])
    assert real.stop_reason == "context"
    result = look(target, drafter, text_of(real), len(real.completion_ids))
    assert result.rounds.accepted.tolist() == [r.accepted for r in real.records]
    assert result.room.min() == 0


def rollouts(target: Target, drafter: object, sampling: dict, count: int, tokens: int) -> list[Sequence]:
    """Sampled requests in one batch, each prompt a cluster of its own."""
    rng = np.random.default_rng(5)
    sequences = [
        Sequence(
            rng.integers(0, V, 6).tolist(),
            max_new_tokens=tokens,
            sampling=Sampling(**sampling, seed=seed),
            prompt_id=f"p{seed}",
        )
        for seed in range(count)
    ]
    Engine(target, drafter).generate(sequences)
    return sequences


def z_of_rounds(sequences: list[Sequence], expect: Callable[[Sequence], float]) -> float:
    """(rounds that happened - rounds expected given the very same text) in standard errors."""
    surplus = np.array([len(s.records) - expect(s) for s in sequences])
    if not np.abs(surplus).max() > 1e-6:  # drafts that are not sampled leave nothing to chance, given the text
        return 0.0
    return float(surplus.sum() / np.sqrt((surplus**2).sum()))


def expected_rounds(target: Target, drafter: object, sampling: dict) -> Callable[[Sequence], float]:
    """What accept expects of a request's own text."""

    def rounds(sequence: Sequence) -> float:
        length = len(sequence.completion_ids)
        result = look(target, drafter, text_of(sequence), length, sampling=Sampling(**sampling), drafted_paths=False)
        return prompt_sums([result], Variant("all", drafter.max_draft))[0].expected_rounds

    return rounds


SAMPLINGS = [
    {"temperature": 0.8},
    {"temperature": 1.0, "draft_temperature": "0.5x"},
    {"temperature": 0.8, "draft_temperature": "0"},
    {"temperature": 1.0, "top_k": 6, "top_p": 0.9},
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_rounds_have_the_expected_number_given_their_text(
    target: Target, tmp_path: Path, kind: str, sampling: dict
) -> None:
    """The sharpest test there is: the engine's own texts, each with the rounds it took, against what accept expects."""
    drafter = load_drafter(write_drafter(tmp_path, vocab=V, **KINDS[kind]), target)
    sequences = rollouts(target, drafter, sampling, count=100, tokens=20)
    assert abs(z_of_rounds(sequences, expected_rounds(target, drafter, sampling))) < 4


def test_another_q_is_found_out(target: Target, tmp_path: Path) -> None:
    """Negative control of the test above: expectations from the q of another draft temperature."""
    drafter = load_drafter(write_drafter(tmp_path, vocab=V), target)
    sequences = rollouts(target, drafter, {"temperature": 0.8}, count=100, tokens=20)
    wrong = {"temperature": 0.8, "draft_temperature": "2x"}
    assert abs(z_of_rounds(sequences, expected_rounds(target, drafter, wrong))) > 6


def test_tau_of_separate_texts_lies_within_the_joint_interval(target: Target, tmp_path: Path) -> None:
    """As a user has it: rollouts here, a corpus of other texts there."""
    drafter = load_drafter(write_drafter(tmp_path, vocab=V), target)
    real = [r for s in rollouts(target, drafter, {"temperature": 0.8}, 200, 24) for r in s.records]
    plain = rollouts(target, None, {"temperature": 0.8}, 200, 24 + drafter.max_draft)
    texts = [look(target, drafter, text_of(s), 24, sampling=Sampling(0.8)) for s in plain]
    figures = AcceptanceFigures(texts, Variant("all", drafter.max_draft), by_round)
    # The first two positions: deeper ones are so rare here that rollouts see none and have no interval.
    pairs = [(figures.tau(), tau_step(real)), *zip(figures.marginal()[:2], marginal(real)[:2], strict=True)]
    for ours, theirs in pairs:
        joint = np.hypot((ours.high - ours.low) / 2, (theirs.high - theirs.low) / 2)
        assert abs(ours.value - theirs.value) < 1.5 * joint + 1e-9
    assert (pairs[0][0].high - pairs[0][0].low) < (pairs[0][1].high - pairs[0][1].low), "less noise than rollouts"


def test_confidences_along_drafted_paths_have_the_rollouts_law(target: Target, tmp_path: Path) -> None:
    """Sampled: what a Markov confidence head says of later drafts depends on drafts that were then rejected."""
    drafter = load_drafter(write_drafter(tmp_path, vocab=V, seed=9), target)
    sequences = rollouts(target, drafter, {"temperature": 0.8}, 200, 24)
    real = np.array([r.confidence for s in sequences for r in s.records if r.drafted == 4])
    texts = [look(target, drafter, text_of(s), 24, sampling=Sampling(0.8)) for s in sequences]
    followed = np.concatenate([t.rounds.confidence for t in texts])
    followed = followed[~np.isnan(followed).any(axis=1)]
    along_y = np.concatenate([t.confidence[t.rounds.anchor] for t in texts])
    spread = real.std(axis=0) / np.sqrt(len(real)) + followed.std(axis=0) / np.sqrt(len(followed))
    assert (np.abs(real.mean(axis=0) - followed.mean(axis=0)) < 4 * spread).all()
    assert (np.abs(real.mean(axis=0) - along_y.mean(axis=0)) > 4 * spread).any(), "along y it is another law"


def test_memory_and_chunks_do_not_change_the_result(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small chunks of rows and blocks give what one big one gives."""
    drafter = load_drafter(write_drafter(tmp_path, vocab=V, head="rnn"), target)
    (sequence,) = rollouts(target, None, {"temperature": 0.8}, 1, 60)
    whole = look(target, drafter, text_of(sequence), 50, sampling=Sampling(0.8), temperatures=(("0.5x", 0.4),))
    from specdoctor.measure import known_text

    monkeypatch.setattr(known_text, "LOGIT_BYTES", 8 * V * 4)
    monkeypatch.setattr(known_text, "SCORE_BYTES", 1)
    monkeypatch.setattr(known_text, "PREFILL_ROWS", 7)
    small = look(target, drafter, text_of(sequence), 50, sampling=Sampling(0.8), temperatures=(("0.5x", 0.4),))
    np.testing.assert_allclose(small.accept, whole.accept, atol=1e-5)
    np.testing.assert_allclose(small.by_temperature["0.5x"], whole.by_temperature["0.5x"], atol=1e-5)
    np.testing.assert_array_equal(small.rank, whole.rank)
    np.testing.assert_allclose(small.confidence, whole.confidence, atol=1e-5)


def test_a_sample_of_anchors_agrees_with_all_of_them(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(write_drafter(tmp_path, vocab=V), target)
    (sequence,) = rollouts(target, None, {"temperature": 0.8}, 1, 60)
    every = look(target, drafter, text_of(sequence), 50, sampling=Sampling(0.8))
    some = look(target, drafter, text_of(sequence), 50, sampling=Sampling(0.8), anchors=9)
    assert len(some.anchors) == 9 and some.weight.sum() == 49 and not some.whole and every.whole
    np.testing.assert_allclose(some.accept, every.accept[some.anchors], atol=1e-6)
    figures = AcceptanceFigures([some], Variant("all", 4), by_round)
    assert figures.tau().value is None and "sample" in figures.tau().reason


@pytest.mark.parametrize("window", [3, 8])
def test_sliding_and_causal_layers_see_what_they_see_in_decoding(target: Target, tmp_path: Path, window: int) -> None:
    """A layer with a window, and one causal in the block: the packed mask against the engine's."""
    changes = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": window,
        "use_sliding_window": True,
    }
    drafter = load_drafter(write_drafter(tmp_path, vocab=V, family="zlab", block=5, config_changes=changes), target)
    assert drafter.spec.layers[0].window == window
    ids = torch.randint(0, V, (12,)).tolist()
    real = Sequence(ids, max_new_tokens=40)
    Engine(target, drafter).generate([real])
    plain = Sequence(ids, max_new_tokens=45)
    Engine(target).generate([plain])
    result = look(target, drafter, text_of(plain), 40)
    assert result.rounds.accepted.tolist() == [r.accepted for r in real.records]
