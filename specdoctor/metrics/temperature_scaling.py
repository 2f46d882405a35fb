"""Sequential temperature scaling of confidences (DSpark paper, section 3.2.1), and how far off they are on the whole.

Contract: pure functions of `ConfidenceRounds`. A temperature T_k divides the logit of the conditional confidence at
position k: order-preserving, so no position ranks its drafts differently. Positions are fitted from left to right; each
takes the T of a fixed grid that makes the calibration error of the product c_0 ... c_k smallest, the T of the positions
before it frozen. The error is that of `metrics.calibration`: 20 bins of equal width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdoctor.metrics.accept_calibration import ConfidenceRounds, scaled
from specdoctor.metrics.calibration import BINS, NO_PREDICTIONS
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.statistics import cluster_interval

Array = NDArray[np.float64]
Statistic = Callable[[Array], Array]
EDGES = np.linspace(0, 1, BINS + 1)
TIE = 1e-12
FEWEST = 20  # rounds that took a draft, and rounds that did not: below, no temperature can be told from noise


@dataclass(frozen=True, slots=True)
class Grid:
    """Temperatures to try: `points` of them, geometric from `low` to `high`; 1, no change, is always among them."""

    low: float = 0.2
    high: float = 5.0
    points: int = 161

    def values(self) -> Array:
        """Rising temperatures."""
        values = np.geomspace(self.low, self.high, self.points)
        values[np.abs(np.log(values)) < 1e-9] = 1.0
        return np.union1d(values, [1.0])

    def ends_at(self, temperature: float) -> bool:
        """Whether it is the lowest or the highest to try: a better one may lie beyond."""
        return any(abs(temperature / end - 1) < 1e-9 for end in (self.low, self.high))


@dataclass(frozen=True, slots=True)
class Fit:
    """Temperatures by position, and the error of the product with them on the rounds that they were fitted on."""

    temperatures: list[float]
    error: list[float | None]  # None: left at 1, too few rounds


def fit_sequentially(rounds: ConfidenceRounds, grid: Grid | None = None) -> Fit:
    """Fit one temperature a position, from left to right.

    Of equally good temperatures the one nearest to 1 is taken. A position keeps 1 where fewer than FEWEST rounds got so
    far, or fewer than FEWEST did not: its error is then all noise, and the temperature of least noise means nothing.
    """
    tried = (grid or Grid()).values()
    product = np.ones(len(rounds.prompt))
    temperatures: list[float] = []
    errors: list[float | None] = []
    for k in range(rounds.logit.shape[1]):
        seen = rounds.shown > k
        label = (rounds.accepted > k)[seen]
        if min(label.sum(), (~label).sum()) < FEWEST:
            temperatures.append(1.0)
            errors.append(None)
            product = product * scaled(rounds.logit[:, k], 1.0)
            continue
        logit, before = rounds.logit[seen, k], product[seen]
        found = np.array([calibration_error(before * scaled(logit, t), label) for t in tried])
        best = np.flatnonzero(found <= found.min() + TIE)
        chosen = best[np.argmin(np.abs(np.log(tried[best])))]
        temperatures.append(float(tried[chosen]))
        errors.append(float(found[chosen]))
        product = product * scaled(rounds.logit[:, k], tried[chosen])
    return Fit(temperatures, errors)


def calibration_error(pred: Array, label: NDArray) -> float:
    """The value of `metrics.calibration.expected_calibration_error`, without its interval: the fit needs it often."""
    gaps = np.bincount(_bin_of(pred), pred - label, minlength=BINS)
    return float(np.abs(gaps).sum() / len(pred))


def mean_error(rounds: ConfidenceRounds, temperatures: Sequence[float] | None = None, seed: int = 0) -> Estimate:
    """Error of the product averaged over positions by their counts, as DeepSpec's evaluation prints it.

    The interval resamples prompts; n = predictions. Biased upwards as every binned error is.
    """
    gaps, sizes = _cells(rounds, temperatures)
    return _over_prompts(lambda weights: np.abs(weights @ gaps).sum(axis=-1) / (weights @ sizes), sizes, seed)


def mean_error_change(rounds: ConfidenceRounds, temperatures: Sequence[float], seed: int = 0) -> Estimate:
    """Mean error with temperatures less the one without, on the same prompts: below 0 is better."""
    before, sizes = _cells(rounds, None)
    after, _ = _cells(rounds, temperatures)

    def statistic(weights: Array) -> Array:
        change = np.abs(weights @ after).sum(axis=-1) - np.abs(weights @ before).sum(axis=-1)
        return np.asarray(change / (weights @ sizes))

    return _over_prompts(statistic, sizes, seed)


def _over_prompts(statistic: Statistic, sizes: Array, seed: int) -> Estimate:
    total = int(sizes.sum())
    if not total:
        return Estimate.absent(NO_PREDICTIONS)
    interval = cluster_interval(statistic, len(sizes), seed)
    return Estimate(float(statistic(np.ones(len(sizes)))), interval.low, interval.high, total, interval.reason)


def _cells(rounds: ConfidenceRounds, temperatures: Sequence[float] | None) -> tuple[Array, Array]:
    """Sums of prediction less label [P, K * BINS] by prompt, position and bin; predictions [P]."""
    R, K = rounds.logit.shape
    product = np.cumprod(scaled(rounds.logit, 1.0 if temperatures is None else temperatures), axis=-1)
    label = rounds.accepted[:, None] > np.arange(K)
    seen = rounds.shown[:, None] > np.arange(K)
    _, prompt = np.unique(rounds.prompt, return_inverse=True)
    prompts = int(prompt.max()) + 1 if R else 0
    cell = (prompt.reshape(-1, 1) * K + np.arange(K)) * BINS + _bin_of(product)
    gaps = np.bincount(cell[seen], (product - label)[seen], minlength=prompts * K * BINS)
    sizes = np.bincount(np.broadcast_to(prompt.reshape(-1, 1), seen.shape)[seen], minlength=prompts)
    return gaps.astype(np.float64).reshape(prompts, K * BINS), sizes.astype(np.float64)


def _bin_of(pred: NDArray) -> NDArray[np.int64]:
    return np.clip(np.searchsorted(EDGES, pred, side="right") - 1, 0, BINS - 1)
