"""Acceptance metrics: values by hand, identities as properties, absence with reasons, speed."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdoctor.errors import SpecdoctorError
from specdoctor.metrics import acceptance
from specdoctor.metrics.record import RoundRecord


def record(prompt: str, accepted: int, drafted: int = 3, verified: int | None = None, **more: object) -> RoundRecord:
    verified = drafted if verified is None else verified
    committed = more.pop("committed", accepted + 1)
    index = more.pop("round", 0)
    return RoundRecord("arm", prompt, index, drafted, verified, accepted, list(range(committed)), **more)  # type: ignore


def simulated(prompts: int, K: int, seed: int = 0, repeats: int = 1) -> list[RoundRecord]:
    rng = np.random.default_rng(seed)
    records = []
    for prompt in range(prompts):
        alpha, count = rng.beta(6, 4), int(rng.integers(20, 60))
        lengths = (rng.random((count, K)) < alpha).cumprod(axis=1).sum(axis=1)
        for repeat in range(repeats):
            records += [record(str(prompt), int(a), K, repeat=repeat, context=40 * i) for i, a in enumerate(lengths)]
    return records


def test_a_trimmed_draft_is_not_at_risk_beyond_its_trim() -> None:
    records = [record("a", 2, 4, verified=2), record("b", 1, 4, verified=4), record("c", 4, 4, verified=4)]
    marginal, conditional = acceptance.marginal(records), acceptance.conditional(records)
    assert [(e.value, e.n) for e in marginal] == [(1.0, 3), (pytest.approx(2 / 3), 3), (0.5, 2), (0.5, 2)]
    assert [(e.value, e.n) for e in conditional] == [(1.0, 3), (pytest.approx(2 / 3), 3), (1.0, 1), (1.0, 1)]
    assert acceptance.alpha_draft(records).value == pytest.approx(7 / 12)  # trimmed drafts were drafted
    assert acceptance.alpha_verified(records).value == pytest.approx(10 / 13)  # and were not verified
    assert acceptance.waste(records).value == pytest.approx(5 / 10)
    assert acceptance.efficiency(records).value == pytest.approx((10 / 3) / 5)
    assert acceptance.efficiency(records, proposal_length=9).value == pytest.approx((10 / 3) / 10)
    assert acceptance.accepted_length_histogram(records) == [0, 1, 1, 0, 1]


def test_a_request_is_a_prompt_and_a_repeat() -> None:
    records = [record("a", 3), record("a", 0, repeat=1), record("a", 1, repeat=1), record("b", 2)]
    estimate = acceptance.tau_request(records)
    assert (estimate.value, estimate.n) == (pytest.approx((4 + 1.5 + 3) / 3), 3)
    assert acceptance.tau_step(records).value == pytest.approx(10 / 4)


def test_repeats_of_a_prompt_narrow_nothing() -> None:
    once, thrice = acceptance.tau_step(simulated(20, 3)), acceptance.tau_step(simulated(20, 3, repeats=3))
    assert (once.value, once.low, once.high) == pytest.approx((thrice.value, thrice.low, thrice.high))
    assert thrice.n == 3 * once.n


def test_plain_decoding_has_tau_one_and_no_alpha() -> None:
    records = [record(prompt, 0, 0, round=i) for prompt in "ab" for i in range(3)]
    for estimate in (
        acceptance.alpha_draft(records),
        acceptance.alpha_verified(records),
        acceptance.efficiency(records),
    ):
        assert estimate.value is None and "autoregressive" in (estimate.reason or "")
    assert acceptance.marginal(records) == [] and acceptance.accepted_length_histogram(records) == []
    tau = acceptance.tau_step(records)
    assert (tau.value, tau.low, tau.high, tau.n) == (1.0, 1.0, 1.0, 6)
    assert "all prompts equal" in (tau.reason or "")


def test_no_rounds_and_one_prompt_say_so() -> None:
    empty = acceptance.summarise([])
    for estimate in (empty.tau_step, empty.tau_request, empty.alpha_draft, empty.waste):
        assert (estimate.value, estimate.reason) == (None, "no rounds")
    one = acceptance.tau_step([record("a", 1), record("a", 3)])
    assert (one.value, one.low, one.high) == (3.0, None, None) and "one prompt" in (one.reason or "")


def test_several_arms_are_refused() -> None:
    other = record("a", 1)
    other.arm = "other"
    with pytest.raises(SpecdoctorError, match="found 2 arms"):
        acceptance.tau_step([record("a", 1), other])


def test_splits_by_category_and_context() -> None:
    records = [
        record("a", 3, category="code", context=10),
        record("a", 1, category="code", context=511),
        record("b", 0, category="chat", context=512),
        record("c", 2, context=40000),
    ]
    summary = acceptance.summarise(records)
    assert {name: row["tau_step"].value for name, row in summary.by_category.items()} == {
        "chat": 1.0,
        "code": 3.0,
        "uncategorised": 3.0,
    }
    assert {name: row["tau_step"].n for name, row in summary.by_context.items()} == {
        "0-511": 2,
        "512-1023": 1,
        "32768+": 1,
    }
    with pytest.raises(SpecdoctorError, match="rising"):
        acceptance.by_context(records, [0, 5, 5])


def test_summary_is_strict_json_and_counts() -> None:
    row = json.loads(json.dumps(acceptance.summarise(simulated(5, 3)).to_json(), allow_nan=False))
    assert row["prompts"] == row["requests"] == 5
    assert row["committed"] == row["accepted"] + row["rounds"] and row["drafted"] == 3 * row["rounds"]
    assert sum(row["accepted_length_histogram"]) == row["rounds"] and len(row["marginal"]) == 3


lengths = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=2, max_size=6)


@settings(deadline=None, max_examples=40)
@given(lengths)
def test_tau_is_one_plus_the_marginals_and_marginals_never_rise(requests: list[list[int]]) -> None:
    records = [record(str(i), a, 5) for i, row in enumerate(requests) for a in row]
    tau, marginal = acceptance.tau_step(records), acceptance.marginal(records)
    values = [e.value or 0.0 for e in marginal]
    assert tau.value == pytest.approx(1 + sum(values))
    assert all(deep <= shallow for shallow, deep in pairwise(values))
    product = 1.0
    for value, survival in zip(values, acceptance.conditional(records), strict=True):
        product *= survival.value or 0.0
        assert value == pytest.approx(product)


@settings(deadline=None, max_examples=25)
@given(lengths, st.randoms(use_true_random=False))
def test_intervals_hold_their_value_and_the_order_of_records_is_nothing(
    requests: list[list[int]], random: object
) -> None:
    records = [record(str(i), a, 5) for i, row in enumerate(requests) for a in row]
    estimate = acceptance.tau_step(records)
    assert estimate.low is not None and estimate.high is not None and estimate.value is not None
    assert 1 <= estimate.low <= estimate.high <= 6
    random.shuffle(records)  # type: ignore[attr-defined]
    assert acceptance.tau_step(records).value == pytest.approx(estimate.value)


def test_a_cut_breaks_the_identity() -> None:
    """Negative control: with a round cut at EOS, tau is below 1 + sum of marginals."""
    records = [record("a", 3, committed=1), record("b", 2)]
    assert (acceptance.tau_step(records).value or 0) < 1 + sum(e.value or 0 for e in acceptance.marginal(records)) - 0.5


def test_the_same_seed_gives_the_same_intervals() -> None:
    records = simulated(60, 10)
    summary = acceptance.summarise(records)
    estimates = 6 + len(summary.marginal) + len(summary.conditional) + 2 * len(summary.by_context) + 2
    assert estimates >= 30
    again = acceptance.summarise(records)
    assert again.to_json() == summary.to_json()
    assert acceptance.tau_step(records, seed=1).low != summary.tau_step.low
