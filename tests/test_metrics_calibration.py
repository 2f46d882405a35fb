"""Calibration metrics: values by hand, bias where it is known, soft labels as the mean of hard ones."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdoctor.errors import SpecdoctorError
from specdoctor.metrics import statistics
from specdoctor.metrics.calibration import (
    auroc,
    brier_score,
    debiased_calibration_error,
    expected_calibration_error,
    reliability_bins,
)


def test_expected_calibration_error_by_hand() -> None:
    pred, label, request = [0.12, 0.13, 0.81, 0.84], [0, 1, 1, 1], [0, 1, 0, 1]
    estimate = expected_calibration_error(pred, label, request)
    assert estimate.value == pytest.approx(0.5 * abs(0.125 - 0.5) + 0.5 * abs(0.825 - 1))
    assert estimate.n == 4 and estimate.low is not None
    # Two bins of equal mass split at the median, 0.47: the same pairs.
    assert expected_calibration_error(pred, label, request, bins=2, adaptive=True).value == pytest.approx(
        estimate.value
    )
    # One bin sees only the mean.
    assert expected_calibration_error(pred, label, request, bins=1).value == pytest.approx(0.75 - 0.475)


def test_edges_belong_to_the_bin_above_and_one_to_the_last() -> None:
    bins = reliability_bins([0.0, 0.5, 1.0], [0, 1, 1], [0, 1, 2], bins=2)
    assert [b.count for b in bins] == [1, 2]
    assert [(b.mean_prediction, b.label.value) for b in bins] == [(0.0, 0.0), (0.75, 1.0)]
    empty = reliability_bins([0.9, 0.9], [0, 1], [0, 1], bins=2)[0]
    assert (empty.count, empty.mean_prediction, empty.label.value) == (0, None, None) and empty.label.reason
    json.dumps([b.to_json() for b in bins], allow_nan=False)


def test_adaptive_bins_hold_equal_mass_and_keep_ties_together() -> None:
    rng = np.random.default_rng(0)
    pred = rng.beta(8, 1, 1000)
    counts = [b.count for b in reliability_bins(pred, pred > 0.5, np.arange(1000) % 50, adaptive=True)]
    assert counts == [50] * 20
    tied = reliability_bins([0.3] * 10 + [0.6] * 10, [0, 1] * 10, range(20), bins=5, adaptive=True)
    assert [b.count for b in tied if b.count] == [10, 10]


def test_brier_and_auroc_by_hand() -> None:
    pred, request = [0.9, 0.8, 0.3, 0.3], [0, 0, 1, 1]
    assert brier_score(pred, [1, 0, 0, 1], request).value == pytest.approx((0.01 + 0.64 + 0.09 + 0.49) / 4)
    # Pairs: 0.9>0.8, 0.9>0.3, 0.3<0.8, 0.3=0.3.
    assert auroc(pred, [1, 0, 0, 1], request).value == pytest.approx((1 + 1 + 0 + 0.5) / 4)
    assert auroc(pred, [1, 1, 0, 0], request).value == 1.0
    missing = auroc(pred, [1, 1, 1, 1], request)
    assert missing.value is None and "all labels equal" in (missing.reason or "")


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.sampled_from([0.1, 0.4, 0.7, 0.9]), st.integers(0, 8)), min_size=3, max_size=20))
def test_a_soft_label_is_the_mean_of_its_hard_labels(rows: list[tuple[float, int]]) -> None:
    """A label of j/8 says the same as eight predictions of which j came true."""
    pred, eighths = [p for p, _ in rows], [j for _, j in rows]
    soft, request = np.array(eighths) / 8, np.arange(len(rows)) % 3
    hard = np.concatenate([[1] * j + [0] * (8 - j) for j in eighths])
    repeated = (np.repeat(pred, 8), hard, np.repeat(request, 8))
    assert brier_score(pred, soft, request).value == pytest.approx(brier_score(*repeated).value)
    assert auroc(pred, soft, request).value == pytest.approx(auroc(*repeated).value)
    error = expected_calibration_error(*repeated).value
    assert expected_calibration_error(pred, soft, request).value == pytest.approx(error)


def calibrated(rng: np.random.Generator, requests: int, each: int, shift: float = 0.0, spread: float = 0.0) -> tuple:
    """Labels come true with chance pred + shift + an offset that a whole request shares."""
    pred, request = rng.uniform(0.2, 0.8, requests * each), np.repeat(np.arange(requests), each)
    offset = np.repeat(rng.normal(0, spread, requests), each) if spread else 0.0
    return pred, (rng.random(pred.size) < np.clip(pred + shift + offset, 0, 1)).astype(float), request


@pytest.fixture
def cheap_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at values only."""
    monkeypatch.setattr(statistics, "RESAMPLES", 10)


@pytest.mark.usefixtures("cheap_intervals")
def test_debiasing_takes_the_noise_away_and_leaves_the_fault() -> None:
    rng = np.random.default_rng(4)
    for shift in (0.0, 0.15):
        samples = [calibrated(rng, 30, 10, shift) for _ in range(40)]
        plain = np.mean([expected_calibration_error(*s).value for s in samples])
        squared = np.mean([debiased_calibration_error(*s).value ** 2 for s in samples])  # type: ignore[operator]
        if shift:
            assert squared**0.5 == pytest.approx(shift, abs=0.02)
        else:
            assert plain > 0.06  # negative control: a perfect drafter looks miscalibrated
            assert squared**0.5 < 0.04


@pytest.mark.usefixtures("cheap_intervals")
def test_what_a_request_shares_is_no_miscalibration() -> None:
    """Kumar's estimate with tokens as if independent finds a fault that is only the difference between requests."""
    rng = np.random.default_rng(5)
    requests, each, spread = 12, 40, 0.25
    samples = [calibrated(rng, requests, each, spread=spread) for _ in range(250)]

    def mean_square(clusters: int) -> float:
        values = [
            debiased_calibration_error(p, y, np.arange(p.size) * clusters // p.size, bins=2) for p, y, _ in samples
        ]
        return float(np.mean([v.value**2 for v in values if v.value is not None]))

    assert mean_square(requests * each) > 0.5 * spread**2 / requests  # negative control: what the offsets alone leave
    assert mean_square(requests) < 0.6 * mean_square(requests * each)


def test_one_prediction_a_request_is_the_published_estimator() -> None:
    # One bin, constant prediction: (p - mean)^2 - mean (1 - mean) / (n - 1).
    label = [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    value = debiased_calibration_error([0.8] * 10, label, range(10), bins=1).value
    assert value == pytest.approx((0.25 - 0.3 * 0.7 / 9) ** 0.5)


def test_intervals_resample_requests_not_tokens() -> None:
    rng = np.random.default_rng(6)
    pred, label, request = calibrated(rng, 30, 40, spread=0.2)
    for metric in (brier_score, auroc, expected_calibration_error, debiased_calibration_error):
        clustered, naive = metric(pred, label, request), metric(pred, label, rng.permutation(request))
        assert clustered == metric(pred, label, request)  # same seed, same interval
        assert clustered.low is not None and clustered.high is not None and clustered.low < clustered.high
        assert naive.low is not None and naive.high is not None
    wide, narrow = (reliability_bins(pred, label, r, bins=2) for r in (request, rng.permutation(request)))
    for a, b in zip(wide, narrow, strict=True):
        assert (
            a.label.high is not None
            and a.label.low is not None
            and b.label.high is not None
            and b.label.low is not None
        )
        assert a.label.high - a.label.low > 1.5 * (b.label.high - b.label.low)


def test_request_names_may_be_text() -> None:
    numbers = auroc([0.9, 0.1, 0.5, 0.6], [1, 0, 1, 0], [0, 0, 1, 1])
    assert auroc([0.9, 0.1, 0.5, 0.6], [1, 0, 1, 0], ["a", "a", "b", "b"]) == numbers


def test_absent_and_bad_input() -> None:
    for metric in (brier_score, auroc, expected_calibration_error, debiased_calibration_error):
        estimate = metric([], [], [])
        assert (estimate.value, estimate.reason) == (None, "no predictions")
        with pytest.raises(SpecdoctorError, match="pred: 1 of 2 values"):
            metric([0.5, float("nan")], [0, 1], [0, 1])
        with pytest.raises(SpecdoctorError, match="label: 1 of 2 values"):
            metric([0.5, 0.5], [0, 2], [0, 1])
        with pytest.raises(SpecdoctorError, match="expected that of request"):
            metric([0.5], [1], [0, 1])
    assert reliability_bins([], [], []) == []
    alone = debiased_calibration_error([0.5, 0.6], [0, 1], [0, 0])
    assert alone.value is None and "two requests" in (alone.reason or "")
