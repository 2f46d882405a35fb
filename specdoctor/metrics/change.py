"""How much a metric changed between a baseline and a run, with a 95 % interval that respects who shares what.

Contract: the unit of chance is the prompt. In the order of strength: `paired` (the same prompts on both sides),
`independent` (per-prompt counts on both sides, different prompts), `intervals` (each source publishes a value with an
interval), `points` (values only: no interval, nothing can be decided). A change is counted so that below zero is
worse: of tau - 1 for an acceptance length, relative for rates and speeds, absolute and turned round for a calibration
error.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.statistics import CONFIDENCE, RESAMPLES, Array, cluster_interval
from specdoctor.metrics.sums import Definition, Sums, columns_of

Evidence = Literal["paired", "independent", "intervals", "points"]
Rows = Mapping[str, NDArray[np.float64]]
Z = 1.959963984540054  # of a two-sided 95 % interval


@dataclass(frozen=True, slots=True)
class Change:
    """`change.n` counts prompts (0: unknown). `standard_error` is that of `change`; None when there is no interval."""

    definition: Definition
    evidence: Evidence
    run: Estimate
    baseline: Estimate
    change: Estimate
    standard_error: float | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "metric": self.definition.metric,
            "definition": self.definition.name,
            "formula": self.definition.formula,
            "evidence": self.evidence,
            "run": self.run.to_json(),
            "baseline": self.baseline.to_json(),
            "change": self.change.to_json() | {"of": scale_text(self.definition)},
        }
        return row | ({"notes": list(self.notes)} if self.notes else {})


def scale_text(definition: Definition) -> str:
    """What a change of this metric is measured in."""
    if definition.scale == "excess":
        return f"{definition.metric} - 1"
    return definition.metric if definition.scale == "relative" else f"{definition.metric}, absolute"


def change_between(definition: Definition, run: Array, baseline: Array) -> Array:
    """The change of values [...]; below zero is worse."""
    if definition.scale == "absolute":
        difference = run - baseline
    else:
        floor = 1.0 if definition.scale == "excess" else 0.0
        difference = (run - floor) / (baseline - floor) - 1
    return np.asarray(-difference if definition.lower_is_better else difference)


def widening(clusters: int) -> float:
    """Factor by which a bootstrap interval of few clusters is too narrow (Hesterberg 2015, section 4.4).

    The bootstrap divides by n instead of n - 1 and knows no t distribution; 1.22 at ten clusters, 1.02 at eighty.
    """
    from scipy.stats import t

    if clusters < 2:
        return math.inf
    return float(t.ppf(0.5 + CONFIDENCE / 2, clusters - 1)) / Z * math.sqrt(clusters / (clusters - 1))


def paired_change(
    definition: Definition, run: Mapping[str, Sums], baseline: Mapping[str, Sums], seed: int = 0
) -> Change | None:
    """Change on the prompts that both sides have; None when there are none, or a side lacks the counts."""
    left, right = columns_of(definition, run), columns_of(definition, baseline)
    shared = sorted(set(left) & set(right)) if left and right else []
    if not left or not right or not shared:
        return None
    table = np.concatenate([stack(left, shared), stack(right, shared)], axis=1)  # [P, 2C]
    width = table.shape[1] // 2

    def statistic(weights: Array) -> Array:
        sums = weights @ table
        return change_between(definition, definition.value(sums[..., :width]), definition.value(sums[..., width:]))

    ones = np.ones(len(shared))
    interval = cluster_interval(statistic, len(shared), seed)
    values = (Estimate(float(definition.value(ones @ part)), n=len(shared)) for part in (table[:, :width], table[:, width:]))
    notes = []
    for name, side, known in (("run", run, left), ("baseline", baseline, right)):
        if len(side) > len(shared):
            empty = len(set(side) - set(known))
            alone = len(set(known) - set(shared))
            parts = [f"{alone} without a partner"] * bool(alone) + [f"{empty} that say nothing"] * bool(empty)
            notes.append(f"{name}: left out {' and '.join(parts)} of {len(side)} prompts" if parts else "")
    value = float(statistic(ones))
    if not math.isfinite(value):
        return _undefined(Change(definition, "paired", *values, Estimate.absent("-"), notes=tuple(filter(None, notes))))
    change = _widened(value, interval.low, interval.high, len(shared), interval.reason)
    return Change(definition, "paired", *values, change, interval.standard_error, tuple(filter(None, notes)))


def independent_change(
    definition: Definition, run: Mapping[str, Sums], baseline: Mapping[str, Sums], seed: int = 0
) -> Change | None:
    """Change between different prompts: both sides are resampled on their own, so the interval is a wide one."""
    left, right = columns_of(definition, run), columns_of(definition, baseline)
    if not left or not right:
        return None
    tables = [stack(rows, list(rows)) for rows in (left, right)]
    values = [Estimate(float(definition.value(table.sum(axis=0))), n=len(table)) for table in tables]
    value = float(change_between(definition, *(np.float64(side.value) for side in values)))
    few = min(len(table) for table in tables)
    bare = Change(definition, "independent", *values, Estimate(value, n=few, reason="no interval"))
    if not math.isfinite(value):
        return _undefined(bare)
    if few < 2:
        return replace(bare, change=Estimate(value, n=few, reason="one prompt only: no interval"))
    from scipy.stats import bootstrap

    def statistic(*indices: NDArray[np.int64], axis: int = -1) -> Array:
        sides = [definition.value(table[index].sum(axis=-2)) for table, index in zip(tables, indices, strict=True)]
        return change_between(definition, *sides)

    with np.errstate(invalid="ignore", divide="ignore"):
        result = bootstrap(
            tuple(np.arange(len(table)) for table in tables),
            statistic,
            n_resamples=RESAMPLES,
            batch=max(1, 4_000_000 // sum(table.size for table in tables)),
            vectorized=True,
            confidence_level=CONFIDENCE,
            method="percentile",
            random_state=np.random.default_rng(seed),
        )
    low, high = (float(end) for end in result.confidence_interval)
    return replace(bare, change=_widened(value, low, high, few, None), standard_error=float(result.standard_error))


def interval_change(definition: Definition, run: Estimate, baseline: Estimate) -> Change:
    """Change between published values. With intervals on both sides: normal approximation, the sides independent.

    For runs over the same prompts that is on the safe side, as what they share makes the difference steadier.
    """
    if run.value is None or baseline.value is None:
        reason = run.reason if run.value is None else baseline.reason
        return Change(definition, "points", run, baseline, Estimate.absent(reason or "not stated"))
    value = float(change_between(definition, np.float64(run.value), np.float64(baseline.value)))
    points = Change(definition, "points", run, baseline, Estimate(value, reason="no interval on either side"))
    if not math.isfinite(value):
        return _undefined(points)
    errors = [_published_error(side) for side in (run, baseline)]
    if errors[0] is None or errors[1] is None:
        return points
    if definition.scale == "absolute":
        error = math.hypot(errors[0], errors[1])
    else:
        floor = 1.0 if definition.scale == "excess" else 0.0
        tops = (run.value - floor, baseline.value - floor)
        error = math.hypot(errors[0] / tops[1], errors[1] * tops[0] / tops[1] ** 2)
    change = Estimate(value, value - Z * error, value + Z * error, 0, "normal approximation from published intervals")
    return replace(points, evidence="intervals", change=change, standard_error=error)


def stack(rows: Rows, order: list[str]) -> Array:
    """[P, C] in the given order."""
    return np.array([rows[prompt] for prompt in order])


def _published_error(estimate: Estimate) -> float | None:
    if estimate.low is None or estimate.high is None:
        return None
    return (estimate.high - estimate.low) / (2 * Z)


def _widened(value: float, low: float | None, high: float | None, n: int, reason: str | None) -> Estimate:
    if low is None or high is None:
        return Estimate(value, n=n, reason=reason)
    factor = widening(n)
    return Estimate(value, value - factor * (value - low), value + factor * (high - value), n, reason)


def _undefined(change: Change) -> Change:
    floor = "1: the baseline accepts nothing" if change.definition.scale == "excess" else "0"
    return replace(change, change=Estimate.absent(f"no change can be given beside a baseline of {floor}", change.change.n))
