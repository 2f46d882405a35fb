"""Intervals that cover what they claim, pairing that helps, and a chi-square by hand."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from specdoctor.errors import SpecdoctorError
from specdoctor.metrics import acceptance
from specdoctor.metrics.record import RoundRecord
from specdoctor.metrics.statistics import (
    committed_and_rounds,
    committed_and_seconds,
    further_prompts,
    goodness_of_fit,
    minimum_detectable_effect,
    paired_difference,
    paired_ratio,
    ratio_of_sums,
)

K = 3
# E[1 + a + a^2 + a^3] for a ~ Beta(6, 4): the moments are 6/10, 6/10 * 7/11, 6/10 * 7/11 * 8/12.
TRUE_TAU = 1 + 6 / 10 * (1 + 7 / 11 * (1 + 8 / 12))


def committed_lengths(rng: np.random.Generator, requests: int = 80) -> list[NDArray[np.int64]]:
    """Tokens committed by each round of each request: a chain of K drafts, one acceptance a request."""
    rows = []
    for alpha in rng.beta(6, 4, requests):
        accepted = (rng.random((rng.integers(20, 121), K)) < alpha).cumprod(axis=1)
        rows.append(1 + accepted.sum(axis=1))
    return rows


def test_the_clustered_interval_covers_and_the_naive_one_does_not() -> None:
    rng = np.random.default_rng(11)
    repetitions, clustered, naive, widths = 300, 0, 0, []
    for seed in range(repetitions):
        rows = committed_lengths(rng)
        estimate = ratio_of_sums([r.sum() for r in rows], [r.size for r in rows], 80, "", seed)
        assert estimate.low is not None and estimate.high is not None
        clustered += estimate.low <= TRUE_TAU <= estimate.high
        flat = np.concatenate(rows)
        half = 1.96 * flat.std(ddof=1) / math.sqrt(flat.size)
        naive += abs(flat.mean() - TRUE_TAU) <= half
        widths.append((estimate.high - estimate.low) / (2 * half))
    assert 0.90 <= clustered / repetitions <= 0.98
    assert not 0.90 <= naive / repetitions <= 0.98 and naive / repetitions < 0.6  # negative control
    assert np.median(widths) > 3


def test_tau_step_is_that_interval() -> None:
    rows = committed_lengths(np.random.default_rng(3), 12)
    records = [
        RoundRecord("arm", str(i), j, K, K, int(c) - 1, [0] * int(c))
        for i, r in enumerate(rows)
        for j, c in enumerate(r)
    ]
    direct = ratio_of_sums([r.sum() for r in rows], [r.size for r in rows], len(records), "")
    assert acceptance.tau_step(records) == direct


def test_the_interval_is_scipys_paired_bootstrap() -> None:
    from scipy.stats import bootstrap

    rows = committed_lengths(np.random.default_rng(5), 30)
    tops, bottoms = np.array([r.sum() for r in rows]), np.array([r.size for r in rows])
    ours = ratio_of_sums(tops, bottoms, 30, "", seed=4)
    theirs = bootstrap(
        (tops, bottoms),
        lambda top, bottom, axis: top.sum(axis) / bottom.sum(axis),
        paired=True,
        method="BCa",
        n_resamples=2000,
        random_state=np.random.default_rng(4),
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))
    assert ours.reason is None


def test_degenerate_data_get_a_reason() -> None:
    equal = ratio_of_sums([2, 4, 6], [1, 2, 3], 6, "")
    assert (equal.value, equal.low, equal.high) == (2.0, 2.0, 2.0) and "percentile" in (equal.reason or "")
    single = ratio_of_sums([2, 0], [1, 0], 1, "")
    assert (single.value, single.low) == (2.0, None) and "one prompt" in (single.reason or "")
    none = ratio_of_sums([0, 0], [0, 0], 0, "nothing drafted")
    assert (none.value, none.reason) == (None, "nothing drafted")


def two_arms(gain: float, prompts: int = 60) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]]]:
    """Arm b has `gain` tokens a round more than arm a on every prompt, give or take a little; prompts differ a lot."""
    rng = np.random.default_rng(1)
    tau, rounds = rng.uniform(1.5, 4.0, prompts), rng.integers(40, 60, prompts)
    other = tau + gain + rng.normal(0, 0.05, prompts)
    a = {str(i): (float(t * n), float(n)) for i, (t, n) in enumerate(zip(tau, rounds, strict=True))}
    b = {str(i): (float(t * n), float(n)) for i, (t, n) in enumerate(zip(other, rounds, strict=True))}
    return a, b


def test_pairing_finds_what_separate_intervals_cannot() -> None:
    a, b = two_arms(0.1)
    difference, ratio = paired_difference(b, a), paired_ratio(b, a)
    assert difference.low is not None and difference.high is not None and ratio.low is not None
    assert 0 < difference.low < 0.1 < difference.high and ratio.low > 1
    alone = [ratio_of_sums([t for t, _ in arm.values()], [n for _, n in arm.values()], 60, "") for arm in (a, b)]
    assert alone[0].high is not None and alone[1].low is not None and alone[1].low < alone[0].high
    assert paired_difference(a, b).value == pytest.approx(-(difference.value or 0))


def test_pairs_by_hand_and_prompts_without_a_partner() -> None:
    a, b = {"x": (30.0, 10.0), "y": (10.0, 10.0), "z": (99.0, 1.0)}, {"x": (20.0, 10.0), "y": (10.0, 20.0)}
    assert paired_ratio(a, b).value == pytest.approx(2.0 / 1.0)
    estimate = paired_difference(a, b)
    assert (estimate.value, estimate.n) == (pytest.approx(1.0), 2)
    assert "1 prompts without a partner" in (estimate.reason or "")
    nothing = paired_ratio({"x": (1.0, 1.0)}, {"y": (1.0, 1.0)})
    assert nothing.value is None and "share no prompt" in (nothing.reason or "")


def test_totals_per_prompt_and_missing_times() -> None:
    records = [
        RoundRecord("arm", "p", 0, 3, 3, 1, [1, 2], times={"round": 0.5}),
        RoundRecord("arm", "p", 0, 3, 3, 2, [1, 2, 3], times={"round": 0.25}, repeat=1),
    ]
    assert committed_and_rounds(records) == {"p": (5, 2)}
    assert committed_and_seconds(records) == {"p": (5, 0.75)}
    records[1].times = {}
    with pytest.raises(SpecdoctorError, match=r"arm 'arm', prompt 'p', round 0: times has no 'round'"):
        committed_and_seconds(records)


def test_the_minimum_detectable_effect_is_detected_at_its_power() -> None:
    """An effect of that size comes out significant in about 80 % of runs."""
    rng = np.random.default_rng(2)
    prompts, spread = 40, 0.3
    zero = {str(i): (2.0, 1.0) for i in range(prompts)}
    sizes, found = [], 0
    exact = 2.80 * spread / math.sqrt(prompts)
    for seed in range(150):
        arm = {str(i): (2.0 + exact + rng.normal(0, spread), 1.0) for i in range(prompts)}
        sizes.append(minimum_detectable_effect(arm, zero, seed=seed).value)
        low = paired_difference(arm, zero, seed=seed).low
        found += low is not None and low > 0
    assert np.mean([s for s in sizes if s is not None]) == pytest.approx(exact, rel=0.1)
    assert 0.70 <= found / 150 <= 0.92


def test_further_prompts_follow_the_square_root_law() -> None:
    a, b = two_arms(0.1)
    effect = minimum_detectable_effect(b, a)
    assert effect.value is not None
    assert further_prompts(b, a, effect.value / 2).value == 3 * 60
    assert further_prompts(b, a, effect.value * 2).value == 0
    assert further_prompts(b, a, effect.value).value == 0
    with pytest.raises(SpecdoctorError, match="margin"):
        further_prompts(b, a, 0.0)
    with pytest.raises(SpecdoctorError, match="power"):
        minimum_detectable_effect(b, a, power=1.5)
    lonely = minimum_detectable_effect({"x": (1.0, 1.0)}, {"x": (2.0, 1.0)})
    assert lonely.value is None and "one prompt" in (lonely.reason or "")


def test_chi_square_by_hand_with_pooled_cells() -> None:
    # Expected 50, 30, 16, 3, 1: the last two are pooled, still 4, and take in the cell of 16.
    fit = goodness_of_fit([45, 35, 15, 4, 1], [0.5, 0.3, 0.16, 0.03, 0.01])
    assert (fit.dof, fit.pooled) == (2, 3)
    assert fit.statistic == pytest.approx(25 / 50 + 25 / 30 + 0)
    assert fit.p == pytest.approx(math.exp(-(25 / 50 + 25 / 30) / 2))  # chi-square with 2 degrees of freedom


def test_chi_square_accepts_its_own_distribution_and_refuses_another() -> None:
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.full(200, 0.3))
    ps = [goodness_of_fit(rng.multinomial(3000, probabilities), probabilities).p for _ in range(200)]
    assert 0.01 <= np.mean([p < 0.05 for p in ps if p is not None]) <= 0.10
    other = 0.9 * probabilities + 0.1 * np.roll(probabilities, 1)
    wrong = goodness_of_fit(rng.multinomial(3000, other / other.sum()), probabilities)
    assert wrong.p is not None and wrong.p < 1e-6


def test_chi_square_of_the_impossible_and_of_too_little() -> None:
    impossible = goodness_of_fit([99, 1, 0], [0.5, 0.0, 0.5])
    assert (
        impossible.p == 0.0
        and impossible.to_json()["statistic"] is None
        and "probability zero" in str(impossible.reason)
    )
    little = goodness_of_fit([2, 1], [0.5, 0.5])
    assert little.p is None and "too few" in (little.reason or "")
    with pytest.raises(SpecdoctorError, match=r"sum of 0\.9"):
        goodness_of_fit([1, 1], [0.5, 0.4])
    with pytest.raises(SpecdoctorError, match="counts against"):
        goodness_of_fit([1, 1], [1.0])
