"""The static confidence threshold: where a chain is cut, and that a cut to nothing is plain decoding."""

import math
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_target, write_drafter

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.draft import Draft, chain_parents
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.scheduling.confidence import confidence_threshold

V = 32
PROMPT = [3, 1, 4, 1, 5]


def draft(confidence: list[float] | None, n: int | None = None) -> Draft:
    n = len(confidence or []) if n is None else n
    values = None if confidence is None else torch.tensor(confidence)
    return Draft(torch.arange(n), chain_parents(n), torch.rand(n, V), values)


@pytest.mark.parametrize(
    ("confidence", "threshold", "kept"),
    [
        ([0.9, 0.8, 0.7], 0.5, 3),
        ([0.9, 0.4, 0.8], 0.5, 1),  # the first one below ends it, whatever comes after
        ([0.4, 0.9, 0.9], 0.5, 0),
        ([0.9, 0.9, 0.4], 0.5, 2),
        ([0.5, 0.5, 0.25], 0.5, 2),  # "below": at the threshold is kept
        ([0.1, 0.0, 0.2], 0.0, 3),
        ([0.999, 1.0], 1.0, 0),
        ([1.0, 1.0], 1.0, 2),
    ],
)
def test_the_chain_is_cut_at_the_first_confidence_below(confidence: list[float], threshold: float, kept: int) -> None:
    whole = draft(confidence)
    (cut,) = confidence_threshold(threshold)([], [whole])
    assert len(cut) == len(cut.tokens) == len(cut.probs) == len(cut.confidence) == kept
    assert torch.equal(cut.tokens, whole.tokens[:kept]) and torch.equal(cut.probs, whole.probs[:kept])
    assert len(whole) == len(confidence)  # the proposal itself is not touched: the records need it


def test_each_draft_is_cut_for_itself() -> None:
    """Near the end of the context drafts differ in length, and an empty one has no confidence at all."""
    drafts = [draft([0.9, 0.1]), draft(None, 0), draft([0.9, 0.9, 0.9, 0.2]), draft([0.1]), draft([0.8])]
    assert [len(d) for d in confidence_threshold(0.5)([], drafts)] == [1, 0, 3, 0, 1]


def test_drafts_without_confidence_pass() -> None:
    drafts = [draft(None, 3), draft(None, 0)]
    assert [len(d) for d in confidence_threshold(0.9)([], drafts)] == [3, 0]


@pytest.mark.parametrize("threshold", [-0.1, 1.1, math.nan, math.inf])
def test_a_threshold_that_is_no_probability_is_refused(threshold: float) -> None:
    with pytest.raises(SpecdoctorError, match=f"--confidence-threshold {threshold}: expected a probability"):
        confidence_threshold(threshold)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(V))


def run(target: Target, folder: Path, threshold: float | None, sampling: Sampling) -> Sequence:
    schedule = None if threshold is None else confidence_threshold(threshold)
    sequence = Sequence(PROMPT, max_new_tokens=24, sampling=sampling)
    Engine(target, load_drafter(folder, target), schedule=schedule).generate([sequence])
    return sequence


def test_cut_to_nothing_is_one_plain_token_a_round(target: Target, tmp_path: Path) -> None:
    plain = Sequence(PROMPT, max_new_tokens=24)
    Engine(target).generate([plain])
    sequence = run(target, write_drafter(tmp_path, vocab=V), 1.0, Sampling())
    assert sequence.ids == plain.ids
    assert len(sequence.records) == 23
    for record in sequence.records:
        assert (record.drafted, record.verified, record.accepted, record.committed) == (4, 0, 0, 1)
        assert record.outcomes == ["trimmed"] * 4
        assert record.confidence is not None and len(record.confidence) == 4


def test_zero_cuts_nothing(target: Target, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path, vocab=V)
    for sampling in (Sampling(), Sampling(1.0, seed=2)):
        cut, whole = run(target, folder, 0.0, sampling), run(target, folder, None, sampling)
        assert cut.ids == whole.ids
        assert [r.verified for r in cut.records] == [r.verified for r in whole.records]


def test_what_is_verified_follows_from_the_recorded_confidences(target: Target, tmp_path: Path) -> None:
    records = run(target, write_drafter(tmp_path, vocab=V), 0.5, Sampling(1.0, seed=3)).records
    for record in records:
        expected = next((i for i, c in enumerate(record.confidence) if c < 0.5), 4)
        assert record.verified == expected
        assert record.outcomes.count("trimmed") == 4 - expected
    assert {record.verified for record in records} > {0}  # both short and longer drafts occurred


def test_greedy_text_does_not_depend_on_the_threshold(target: Target, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path, vocab=V)
    texts = {tuple(run(target, folder, threshold, Sampling()).ids) for threshold in (None, 0.0, 0.3, 0.5, 0.7, 1.0)}
    assert len(texts) == 1
