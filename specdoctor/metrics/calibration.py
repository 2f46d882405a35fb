"""Does a drafter's confidence mean what it says? Calibration error, Brier score, AUROC, reliability.

Contract: `pred` [N] and `label` [N] lie in [0, 1], `request` [N] names the request of each prediction. A label is 0 or
1, or the probability of acceptance when that is known analytically. Every interval resamples requests; bin edges stay
those of the full sample. n = predictions. Bad values raise; no predictions give an absent estimate.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specdoctor.errors import SpecdoctorError
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.statistics import Array, cluster_interval, ratio_of_sums

BINS = 20
NO_PREDICTIONS = "no predictions"


class _Sample(NamedTuple):
    pred: Array  # [N]
    label: Array  # [N]
    request: NDArray[np.int64]  # [N] 0..R-1
    requests: int


class _Binned(NamedTuple):
    edges: Array  # [bins + 1]
    size: Array  # [R, bins] predictions
    pred: Array  # [R, bins] sums
    label: Array  # [R, bins] sums


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Predictions in [low, high), the last bin closed; `label` is the observed frequency with its interval."""

    low: float
    high: float
    count: int
    mean_prediction: float | None
    label: Estimate

    def to_json(self) -> dict[str, Any]:
        row = {"low": self.low, "high": self.high, "count": self.count, "mean_prediction": self.mean_prediction}
        return row | {"label": self.label.to_json()}


def expected_calibration_error(
    pred: ArrayLike, label: ArrayLike, request: ArrayLike, bins: int = BINS, adaptive: bool = False, seed: int = 0
) -> Estimate:
    """Sum over bins of their share times |mean prediction - mean label| (Naeini et al. 2015).

    Bins of equal width, or with `adaptive` of equal mass. Biased upwards, most of all for a calibrated drafter, and its
    interval with it (about 87 % coverage in simulation): judge by `debiased_calibration_error`.
    """
    sample = _sample(pred, label, request)
    if not sample.pred.size:
        return Estimate.absent(NO_PREDICTIONS)
    binned = _bin(sample, bins, adaptive)
    gaps, sizes = binned.pred - binned.label, binned.size.sum(axis=1)

    def statistic(weights: Array) -> Array:
        return np.asarray(np.abs(weights @ gaps).sum(axis=-1) / (weights @ sizes))

    return _estimate(statistic, sample, seed)


def debiased_calibration_error(
    pred: ArrayLike, label: ArrayLike, request: ArrayLike, bins: int = BINS, adaptive: bool = False, seed: int = 0
) -> Estimate:
    """Root mean square calibration error without the upward bias of noise.

    The debiased plug-in estimator of Kumar, Liang and Ma 2019 (section 5), extended to clusters: the squared gap of a
    bin is the mean product of gaps over pairs of predictions of DIFFERENT requests, so neither the noise of a label nor
    what a request's tokens share is counted as miscalibration. With one prediction a request it is theirs. A negative
    sum reads zero. Bins with one request only cannot be debiased and are left out. Note: a root mean square, so not
    below a mean absolute error of the same gaps.
    """
    sample = _sample(pred, label, request)
    if not sample.pred.size:
        return Estimate.absent(NO_PREDICTIONS)
    binned = _bin(sample, bins, adaptive)
    gaps = binned.pred - binned.label

    def statistic(weights: Array) -> Array:
        # Copies of one request in a resample are the same request: their products are left out as well.
        sizes = weights @ binned.size
        products = (weights @ gaps) ** 2 - weights**2 @ gaps**2
        pairs = sizes**2 - weights**2 @ binned.size**2
        known = pairs > 0.5
        squared = np.where(known, products / np.where(known, pairs, 1.0), 0.0)
        shares = np.where(known, sizes, 0.0)
        with np.errstate(invalid="ignore"):
            return np.asarray(np.sqrt(np.maximum(0.0, (shares * squared).sum(axis=-1) / shares.sum(axis=-1))))

    estimate = _estimate(statistic, sample, seed)
    if estimate.value is not None and np.isnan(estimate.value):
        return Estimate.absent("no bin holds predictions of two requests: the bias cannot be removed", estimate.n)
    return estimate


def brier_score(pred: ArrayLike, label: ArrayLike, request: ArrayLike, seed: int = 0) -> Estimate:
    """Mean of (prediction - outcome)^2; for a probability as label, its expectation over the outcome."""
    sample = _sample(pred, label, request)
    scores = (sample.pred - sample.label) ** 2 + sample.label * (1 - sample.label)
    tops = np.bincount(sample.request, scores, minlength=sample.requests)
    return ratio_of_sums(tops, np.bincount(sample.request), sample.pred.size, NO_PREDICTIONS, seed)


def auroc(pred: ArrayLike, label: ArrayLike, request: ArrayLike, seed: int = 0) -> Estimate:
    """P(a success was predicted higher than a failure), ties one half; absent without both.

    A probability as label counts as a success of that weight and a failure of the rest.
    """
    sample = _sample(pred, label, request)
    if not sample.pred.size:
        return Estimate.absent(NO_PREDICTIONS)
    wins, successes, failures = _wins_by_request(sample)
    if not (successes.sum() > 0 and failures.sum() > 0):
        return Estimate.absent("all labels equal: no pair of a success and a failure", sample.pred.size)

    def statistic(weights: Array) -> Array:
        with np.errstate(invalid="ignore", divide="ignore"):
            pairs = (weights @ successes) * (weights @ failures)
            return np.asarray(((weights @ wins) * weights).sum(axis=-1) / pairs)

    return _estimate(statistic, sample, seed)


def reliability_bins(
    pred: ArrayLike, label: ArrayLike, request: ArrayLike, bins: int = BINS, adaptive: bool = False, seed: int = 0
) -> list[ReliabilityBin]:
    """The reliability diagram: observed frequency by predicted probability. Empty bins stay, with an absent label."""
    sample = _sample(pred, label, request)
    if not sample.pred.size:
        return []
    binned = _bin(sample, bins, adaptive)
    rows = []
    for index, (low, high) in enumerate(zip(binned.edges[:-1], binned.edges[1:], strict=True)):
        count = int(binned.size[:, index].sum())
        mean = float(binned.pred[:, index].sum() / count) if count else None
        observed = ratio_of_sums(
            binned.label[:, index], binned.size[:, index], count, "no prediction in this bin", seed
        )
        rows.append(ReliabilityBin(float(low), float(high), count, mean, observed))
    return rows


def _sample(pred: ArrayLike, label: ArrayLike, request: ArrayLike) -> _Sample:
    columns = {"pred": np.asarray(pred, np.float64), "label": np.asarray(label, np.float64)}
    names = np.asarray(request)
    for name, column in columns.items():
        if column.ndim != 1 or column.shape != names.shape:
            raise SpecdoctorError(
                f"calibration: {name} has shape {column.shape}, expected that of request, {names.shape}"
            )
        bad = int((~((column >= 0) & (column <= 1))).sum())
        if bad:
            raise SpecdoctorError(
                f"calibration: {name}: {bad} of {column.size} values are NaN or outside 0..1; apply the sigmoid"
            )
    found, index = np.unique(names, return_inverse=True)
    return _Sample(columns["pred"], columns["label"], index.reshape(-1), found.size)


def _bin(sample: _Sample, bins: int, adaptive: bool) -> _Binned:
    edges = np.linspace(0, 1, bins + 1)
    if adaptive:
        inner = np.quantile(sample.pred, edges[1:-1])  # equal predictions share a bin, so ties may merge bins
        edges = np.unique(np.concatenate([[0.0], inner, [1.0]]))
    last = edges.size - 2
    cell = sample.request * (last + 1) + np.clip(np.searchsorted(edges, sample.pred, side="right") - 1, 0, last)

    def table(weights: Array | None) -> Array:
        sums = np.bincount(cell, weights, minlength=sample.requests * (last + 1))
        return sums.reshape(sample.requests, last + 1).astype(np.float64)

    return _Binned(edges, table(None), table(sample.pred), table(sample.label))


def _wins_by_request(sample: _Sample) -> tuple[Array, Array, Array]:
    """[R, R] wins of the successes of one request over the failures of another; [R] successes; [R] failures.

    AUROC of any resample of requests is a quadratic form in these, so no resample sorts again.
    """
    values, level = np.unique(sample.pred, return_inverse=True)
    level = level.reshape(-1)
    wins = np.empty((sample.requests, sample.requests))
    for other in range(sample.requests):
        own = sample.request == other
        missed = np.bincount(level[own], 1 - sample.label[own], minlength=values.size)
        below = np.cumsum(missed) - missed / 2
        wins[:, other] = np.bincount(sample.request, sample.label * below[level], minlength=sample.requests)
    successes = np.bincount(sample.request, sample.label, minlength=sample.requests).astype(np.float64)
    failures = np.bincount(sample.request, 1 - sample.label, minlength=sample.requests).astype(np.float64)
    return wins, successes, failures


def _estimate(statistic: Any, sample: _Sample, seed: int) -> Estimate:
    interval = cluster_interval(statistic, sample.requests, seed)
    value = float(statistic(np.ones(sample.requests)))
    return Estimate(value, interval.low, interval.high, sample.pred.size, interval.reason)
