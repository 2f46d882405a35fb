"""How much a metric changed between a baseline and a run, with a 95 % interval that respects who shares what.

Contract: the unit of chance is the prompt. In the order of strength: `paired` (the same prompts on both sides),
`independent` (per-prompt counts on both sides, different prompts), `intervals` (each source publishes a value with an
interval), `points` (values only: no interval, nothing can be decided). A change is counted so that below zero is
worse: of tau - 1 for an acceptance length, relative for rates and speeds, absolute and turned round for a calibration
error.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.statistics import CONFIDENCE, RESAMPLES, Array, cluster_interval
from specdoctor.metrics.sums import Definition, Sums, columns_of

Evidence = Literal["paired", "independent", "intervals", "points"]
Rows = Mapping[str, NDArray[np.float64]]
Between = Callable[[Array, Array], Array]  # of the values of the run and of the baseline
Z = 1.959963984540054  # of a two-sided 95 % interval


@dataclass(frozen=True, slots=True)
class Change:
    """`change.n` counts prompts (0: unknown). `standard_error` is that of `change`; None when there is no interval.

    `difference` is plainly run - baseline in the unit of the metric.
    """

    definition: Definition
    evidence: Evidence
    run: Estimate
    baseline: Estimate
    change: Estimate
    difference: Estimate
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
            "difference": self.difference.to_json(),
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
    tables = [_stack(rows, shared) for rows in (left, right)]  # 2 x [P, C]

    def bootstrapped(between: Between) -> tuple[Estimate, float | None]:
        def statistic(weights: Array) -> Array:
            return between(*(definition.value(weights @ table) for table in tables))

        interval = cluster_interval(statistic, len(shared), seed)
        value = float(statistic(np.ones(len(shared))))
        widened = _widened(value, interval.low, interval.high, len(shared), interval.reason)
        return widened, interval.standard_error

    notes = [_left_out("run", run, left, shared), _left_out("baseline", baseline, right, shared)]
    return _assembled(definition, "paired", tables, bootstrapped, [note for note in notes if note])


def independent_change(
    definition: Definition, run: Mapping[str, Sums], baseline: Mapping[str, Sums], seed: int = 0
) -> Change | None:
    """Change between different prompts: both sides are resampled on their own, so the interval is a wide one."""
    left, right = columns_of(definition, run), columns_of(definition, baseline)
    if not left or not right:
        return None
    tables = [_stack(rows, list(rows)) for rows in (left, right)]
    few = min(len(table) for table in tables)

    def bootstrapped(between: Between) -> tuple[Estimate, float | None]:
        value = float(between(*(definition.value(table.sum(axis=0)) for table in tables)))
        if few < 2:
            return Estimate(value, n=few, reason="one prompt only: no interval"), None
        low, high, error = _two_sample(tables, definition, between, seed)
        return _widened(value, low, high, few, None), error

    return _assembled(definition, "independent", tables, bootstrapped, [])


def _assembled(
    definition: Definition,
    evidence: Evidence,
    tables: list[Array],
    bootstrapped: Callable[[Between], tuple[Estimate, float | None]],
    notes: list[str],
) -> Change:
    run, baseline = (Estimate(float(definition.value(table.sum(axis=0))), n=len(table)) for table in tables)
    difference, _ = bootstrapped(lambda here, there: np.asarray(here - there))
    assert run.value is not None and baseline.value is not None
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(change_between(definition, np.array(run.value), np.array(baseline.value)))
    if not math.isfinite(value):
        absent = _undefined(definition, difference.n)
        return Change(definition, evidence, run, baseline, absent, difference, notes=tuple(notes))
    change, error = bootstrapped(lambda here, there: change_between(definition, here, there))
    return Change(definition, evidence, run, baseline, change, difference, error, tuple(notes))


def _two_sample(tables: list[Array], definition: Definition, between: Between, seed: int) -> tuple[float, float, float]:
    """Percentile interval and standard error when the two sides are resampled on their own."""
    from scipy.stats import bootstrap

    def statistic(*indices: NDArray[np.int64], axis: int = -1) -> Array:
        sides = [definition.value(table[index].sum(axis=-2)) for table, index in zip(tables, indices, strict=True)]
        return between(*sides)

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
    return low, high, float(result.standard_error)


def _left_out(name: str, side: Mapping[str, Sums], known: Rows, shared: list[str]) -> str:
    """A note on the prompts of one side that are not compared; '' when there are none."""
    alone, empty = len(set(known) - set(shared)), len(set(side) - set(known))
    parts = [f"{alone} without a partner"] * bool(alone) + [f"{empty} that say nothing"] * bool(empty)
    return f"{name}: left out {' and '.join(parts)} of {len(side)} prompts" if parts else ""


def interval_change(definition: Definition, run: Estimate, baseline: Estimate) -> Change:
    """Change between published values. With intervals on both sides: normal approximation, the sides independent.

    For runs over the same prompts that is on the safe side, as what they share makes the difference steadier.
    """
    if run.value is None or baseline.value is None:
        missing = Estimate.absent((run.reason if run.value is None else baseline.reason) or "not stated")
        return Change(definition, "points", run, baseline, missing, missing)
    gap = run.value - baseline.value
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(change_between(definition, np.array(run.value), np.array(baseline.value)))
    here, there = _published_error(run), _published_error(baseline)
    if not math.isfinite(value) or here is None or there is None:
        why = "no interval on either side" if here is there is None else "no interval on one side"
        change = Estimate(value, reason=why) if math.isfinite(value) else _undefined(definition, 0)
        return Change(definition, "points", run, baseline, change, Estimate(gap, reason=why))
    error = plain = math.hypot(here, there)
    if definition.scale != "absolute":
        floor = 1.0 if definition.scale == "excess" else 0.0
        bottom = baseline.value - floor
        error = math.hypot(here / bottom, there * (run.value - floor) / bottom**2)
    reason = "normal approximation from published intervals"
    change, difference = (
        Estimate(middle, middle - Z * spread, middle + Z * spread, 0, reason)
        for middle, spread in ((value, error), (gap, plain))
    )
    return Change(definition, "intervals", run, baseline, change, difference, error)


def _stack(rows: Rows, order: list[str]) -> Array:
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


def _undefined(definition: Definition, n: int) -> Estimate:
    floor = "1 (nothing was accepted)" if definition.scale == "excess" else "0"
    return Estimate.absent(f"no change can be given beside a baseline of {floor}", n)
