"""Intervals and tests for measurements whose unit of chance is the prompt, not the token.

Contract: tokens of one request share its difficulty, so every interval here resamples whole clusters (a prompt with all
its repeats) through `scipy.stats.bootstrap`; a naive interval over tokens is about five times too narrow. Two arms are
compared on the prompts that both ran. The same seed gives the same interval. With fewer than about ten clusters any
bootstrap interval is optimistic.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specdoctor.errors import SpecdoctorError
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.record import RoundRecord

Array = NDArray[np.float64]
Totals = Mapping[str, tuple[float, float]]  # prompt id -> (numerator, denominator), summed over rounds and repeats
Scale = Literal["difference", "ratio"]

CONFIDENCE = 0.95
RESAMPLES = 2000


class Interval(NamedTuple):
    low: float | None
    high: float | None
    standard_error: float | None
    reason: str | None


def cluster_interval(statistic: Callable[[Array], Array], clusters: int, seed: int = 0) -> Interval:
    """95 % bootstrap interval of a statistic over `clusters` exchangeable clusters.

    `statistic` maps multiplicities [..., clusters] to values [...]; multiplicities of one give the estimate itself.
    BCa (Efron 1987); where BCa does not exist the percentile interval, and the reason says so. One cluster has no
    interval: both ends are None.
    """
    if clusters < 2:
        return Interval(None, None, None, "one prompt only: no interval")
    from scipy.stats import bootstrap

    def over_indices(indices: NDArray[np.int64], axis: int = -1) -> Array:
        return np.asarray(statistic(_multiplicities(indices, clusters)))

    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore")  # the degenerate cases are named below
        result = bootstrap(
            (np.arange(clusters),),
            over_indices,
            n_resamples=RESAMPLES,
            batch=max(1, 4_000_000 // clusters),
            vectorized=True,
            confidence_level=CONFIDENCE,
            method="BCa",
            random_state=np.random.default_rng(seed),
        )
        low, high = (float(end) for end in result.confidence_interval)
        values = np.asarray(result.bootstrap_distribution)
        values = values[np.isfinite(values)]
    if values.size < 2:
        return Interval(None, None, None, "undefined in almost every resample: no interval")
    spread = float(values.std(ddof=1))
    if np.ptp(values) <= 1e-12 * max(1.0, float(np.abs(values).max())):
        return Interval(
            float(values.min()), float(values.max()), 0.0, "all prompts equal: percentile interval, no spread seen"
        )
    if math.isfinite(low) and math.isfinite(high):
        return Interval(low, high, spread, None)
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(end) for end in np.quantile(values, [tail, 1 - tail]))
    return Interval(low, high, spread, "BCa degenerates here: percentile interval")


def _multiplicities(indices: NDArray[np.int64], clusters: int) -> Array:
    flat = indices.reshape(-1, indices.shape[-1])
    shifted = flat + clusters * np.arange(len(flat))[:, None]
    counts = np.bincount(shifted.ravel(), minlength=clusters * len(flat))
    return counts.reshape(*indices.shape[:-1], clusters).astype(np.float64)


def ratio_of_sums(numerators: ArrayLike, denominators: ArrayLike, n: int, absent: str, seed: int = 0) -> Estimate:
    """sum(numerators) / sum(denominators) over clusters [P], with the clustered bootstrap interval.

    Equals `scipy.stats.bootstrap((numerators, denominators), ratio, paired=True, method="BCa")`. Clusters with a zero
    denominator carry no information and are left out; when none is left the estimate is absent for the reason `absent`.
    """
    top, bottom = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    top, bottom = top[bottom > 0], bottom[bottom > 0]
    if not bottom.size:
        return Estimate.absent(absent, n)
    interval = cluster_interval(lambda weights: (weights @ top) / (weights @ bottom), bottom.size, seed)
    return Estimate(top.sum() / bottom.sum(), interval.low, interval.high, n, interval.reason)


def one_arm(records: Sequence[RoundRecord]) -> str:
    """The name of the arm that all records belong to ('' without records); raises when there are several."""
    arms = sorted({r.arm for r in records})
    if len(arms) > 1:
        raise SpecdoctorError(
            f"records: found {len(arms)} arms ({', '.join(arms)}), expected one; split the records by arm first"
        )
    return arms[0] if arms else ""


def committed_and_rounds(records: Sequence[RoundRecord]) -> dict[str, tuple[float, float]]:
    """Per prompt of one arm: tokens committed, rounds. The totals behind a difference of `tau_step`."""
    one_arm(records)
    return _totals((r.prompt_id, r.committed, 1.0) for r in records)


def committed_and_seconds(records: Sequence[RoundRecord]) -> dict[str, tuple[float, float]]:
    """Per prompt of one arm: tokens committed, seconds of its rounds. The totals behind a speed-up in tokens/s."""
    one_arm(records)
    for r in records:
        if "round" not in r.times:
            raise SpecdoctorError(
                f"record of arm {r.arm!r}, prompt {r.prompt_id!r}, round {r.round}: times has no 'round' "
                f"(found {sorted(r.times) or 'nothing'}); a speed-up needs records of a timed run"
            )
    return _totals((r.prompt_id, r.committed, r.times["round"]) for r in records)


def _totals(rows: Any) -> dict[str, tuple[float, float]]:
    totals: dict[str, tuple[float, float]] = {}
    for prompt, top, bottom in rows:
        before = totals.get(prompt, (0.0, 0.0))
        totals[prompt] = (before[0] + top, before[1] + bottom)
    return totals


def paired_ratio(a: Totals, b: Totals, seed: int = 0) -> Estimate:
    """(ratio of sums of `a`) / (that of `b`) on the shared prompts: a speed-up is `paired_ratio(arm, baseline)`."""
    return _paired(a, b, "ratio", seed)[0]


def paired_difference(a: Totals, b: Totals, seed: int = 0) -> Estimate:
    """(ratio of sums of `a`) - (that of `b`) on the shared prompts, for example a difference of `tau_step`."""
    return _paired(a, b, "difference", seed)[0]


def _paired(a: Totals, b: Totals, scale: Scale, seed: int) -> tuple[Estimate, float | None]:
    """The comparison and the standard error of it."""
    shared = [prompt for prompt in a if prompt in b and a[prompt][1] > 0 and b[prompt][1] > 0]
    if not shared:
        return Estimate.absent("the two arms share no prompt"), None
    totals = np.array([(*a[prompt], *b[prompt]) for prompt in shared], np.float64)  # [P, 4]
    if scale == "ratio" and totals[:, 2].sum() <= 0:
        return Estimate.absent("the second arm's numerator is zero", len(shared)), None

    def statistic(weights: Array) -> Array:
        top_a, bottom_a, top_b, bottom_b = np.moveaxis(weights @ totals, -1, 0)
        left, right = top_a / bottom_a, top_b / bottom_b
        return np.asarray(left / right if scale == "ratio" else left - right)

    interval = cluster_interval(statistic, len(shared), seed)
    left_out = len(set(a) | set(b)) - len(shared)
    notes = [interval.reason, f"{left_out} prompts without a partner left out" if left_out else None]
    reason = "; ".join(note for note in notes if note) or None
    value = float(statistic(np.ones(len(shared))))
    return Estimate(value, interval.low, interval.high, len(shared), reason), interval.standard_error


def minimum_detectable_effect(
    a: Totals, b: Totals, power: float = 0.8, scale: Scale = "difference", seed: int = 0
) -> Estimate:
    """Smallest true effect that these paired prompts would show as significant (5 %, two-sided) with the given power.

    In the unit of `scale`: tokens per round for a difference of tau, 0.05 for five per cent of a ratio. Normal
    approximation: (z(0.975) + z(power)) times the bootstrap standard error.
    """
    estimate, standard_error = _paired(a, b, scale, seed)
    if standard_error is None:
        return Estimate.absent(estimate.reason or "no standard error", estimate.n)
    return Estimate(_z_sum(power) * standard_error, n=estimate.n, reason=estimate.reason)


def further_prompts(
    a: Totals, b: Totals, margin: float, power: float = 0.8, scale: Scale = "difference", seed: int = 0
) -> Estimate:
    """How many more prompts like these make an effect of size `margin` detectable; 0 when it is already.

    The standard error falls with the square root of the number of prompts. Raises when `margin` is not positive.
    """
    if not margin > 0:
        raise SpecdoctorError(
            f"margin: found {margin}, expected a number above 0; give the smallest effect that matters"
        )
    effect = minimum_detectable_effect(a, b, power, scale, seed)
    if effect.value is None:
        return effect
    needed = math.ceil(effect.n * (effect.value / margin) ** 2 - 1e-9)
    return Estimate(max(0, needed - effect.n), n=effect.n, reason=effect.reason)


def _z_sum(power: float) -> float:
    from scipy.stats import norm

    if not 0 < power < 1:
        raise SpecdoctorError(f"power: found {power}, expected a number between 0 and 1, such as 0.8")
    return float(norm.ppf(1 - (1 - CONFIDENCE) / 2) + norm.ppf(power))


@dataclass(frozen=True, slots=True)
class GoodnessOfFit:
    """Pearson's chi-square. `statistic` is infinite and `p` zero when something impossible was observed."""

    statistic: float | None
    dof: int
    p: float | None
    pooled: int = 0  # cells that were put together because too little was expected in them
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        statistic = self.statistic if self.statistic is not None and math.isfinite(self.statistic) else None
        row = {"statistic": statistic, "dof": self.dof, "p": self.p, "pooled": self.pooled}
        return row | ({"reason": self.reason} if self.reason else {})


def goodness_of_fit(observed: ArrayLike, probabilities: ArrayLike, min_expected: float = 5.0) -> GoodnessOfFit:
    """Do counts [V] fit probabilities [V]? Cells with less than `min_expected` expected counts are pooled into one.

    A pool still below the minimum takes in the next smallest cells. Raises on shapes that differ, negative numbers, or
    probabilities that do not sum to one.
    """
    counts, chances = np.asarray(observed, np.float64), np.asarray(probabilities, np.float64)
    if counts.shape != chances.shape or counts.ndim != 1:
        raise SpecdoctorError(f"goodness of fit: {counts.shape} counts against {chances.shape} probabilities")
    if (counts < 0).any() or (chances < 0).any() or not abs(chances.sum() - 1) < 1e-4:
        raise SpecdoctorError(
            f"goodness of fit: counts and probabilities must not be negative and probabilities must sum to 1, "
            f"found a sum of {chances.sum():.6g}"
        )
    total = counts.sum()
    impossible = int(counts[chances == 0].sum())
    if impossible:
        reason = f"{impossible} of {int(total)} observations have probability zero"
        return GoodnessOfFit(math.inf, int((chances > 0).sum()) - 1, 0.0, reason=reason)
    counts, expected = counts[chances > 0], chances[chances > 0] / chances.sum() * total
    order = np.argsort(expected, kind="stable")
    counts, expected = counts[order], expected[order]
    pooled = int((expected < min_expected).sum())
    if pooled:
        pooled = max(pooled, int(np.searchsorted(np.cumsum(expected), min_expected)) + 1)
        counts = np.concatenate([[counts[:pooled].sum()], counts[pooled:]])
        expected = np.concatenate([[expected[:pooled].sum()], expected[pooled:]])
    if counts.size < 2:
        reason = f"{int(total)} observations are too few: fewer than two cells expect {min_expected:g} or more"
        return GoodnessOfFit(None, 0, None, pooled, reason)
    from scipy.stats import chisquare

    result = chisquare(counts, expected * (total / expected.sum()))
    return GoodnessOfFit(float(result.statistic), counts.size - 1, float(result.pvalue), pooled)
