"""The gate: one run against one baseline, metric by metric. Reports print what is decided here."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdoctor.errors import ExitCode
from specdoctor.formats.results.result_set import ResultSet
from specdoctor.measure.comparability import (
    Difference,
    change_of,
    definitions_of,
    differences,
    nothing_to_compare,
    refuse,
    unknown_settings,
    why_not,
)
from specdoctor.metrics import gate as rule
from specdoctor.metrics.change import Change
from specdoctor.metrics.gate import MARGINS, Outcome, Verdict
from specdoctor.metrics.sums import estimate_of

SCHEMA_VERSION = 1
INCONCLUSIVE_POLICIES = ("fail", "pass", "warn")


@dataclass(frozen=True, slots=True)
class MetricResult:
    """One metric: how it changed and what follows. `change` is None when the sides share no definition of it."""

    metric: str
    verdict: Verdict
    change: Change | None = None

    def to_json(self) -> dict[str, Any]:
        row = {"metric": self.metric} | (self.change.to_json() if self.change else {})
        return row | self.verdict.to_json()


@dataclass(frozen=True, slots=True)
class GateReport:
    """Everything that a report of the gate needs."""

    run: ResultSet
    baseline: ResultSet
    results: list[MetricResult]
    allowed: list[Difference]  # strict settings that differ and were allowed to
    notes: list[str]

    @property
    def outcome(self) -> Outcome:
        return rule.overall([result.verdict.outcome for result in self.results])

    def exit_code(self, inconclusive: str = "fail") -> ExitCode:
        """`inconclusive`: what an undecided gate means - fail (exit code 6), pass or warn (0)."""
        if self.outcome == "regression":
            return ExitCode.FINDINGS
        undecided = self.outcome == "inconclusive" and inconclusive == "fail"
        return ExitCode.INCONCLUSIVE if undecided else ExitCode.OK

    def to_json(self, inconclusive: str = "fail") -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "gate",
            "outcome": self.outcome,
            "exit_code": int(self.exit_code(inconclusive)),
            "metrics": [result.to_json() for result in self.results],
            "run": self.run.describe(),
            "baseline": self.baseline.describe(),
            "allowed_differences": [
                {"key": difference.key, "run": difference.run, "baseline": difference.baseline}
                for difference in self.allowed
            ],
            "notes": self.notes,
        }


def gate(
    run: ResultSet,
    baseline: ResultSet,
    metrics: Sequence[str] = ("tau",),
    margins: Mapping[str, float] | None = None,
    allow: Collection[str] = (),
    seed: int = 0,
) -> GateReport:
    """Judge each metric of a run against a baseline.

    Raises when the runs differ in a setting that is not allowed to (exit code 2), or share no metric (exit code 5).
    """
    for metric in metrics:
        definitions_of(metric)  # an unknown name is a usage error, before anything else
    found = differences(run, baseline)
    refuse(found, allow)
    results, reasons = [], []
    for metric in dict.fromkeys(metrics):
        margin = {**MARGINS, **(margins or {})}[metric]
        change = change_of(metric, run, baseline, seed)
        if change is None:
            reason = why_not(metric, run, baseline)
            reasons.append(f"{metric}: {reason}")
            results.append(MetricResult(metric, Verdict("inconclusive", f"nothing to compare: {reason}", margin)))
        else:
            results.append(
                MetricResult(metric, rule.judge(change, margin), _with_intervals(change, run, baseline, seed))
            )
    if not any(result.change for result in results):
        raise nothing_to_compare(run, baseline, reasons)
    notes = [difference.text for difference in found if not difference.strict]
    notes += unknown_settings(run, baseline) + [f"run: {note}" for note in run.notes]
    notes += [f"baseline: {note}" for note in baseline.notes]
    strict = [difference for difference in found if difference.strict]
    return GateReport(run, baseline, results, strict, notes)


def _with_intervals(change: Change, run: ResultSet, baseline: ResultSet, seed: int) -> Change:
    """The two values with intervals of their own, over the prompts that were compared."""
    if change.evidence not in ("paired", "independent") or not run.prompts or not baseline.prompts:
        return change
    sides = [run.prompts, baseline.prompts]
    if change.evidence == "paired":
        shared = run.prompts.keys() & baseline.prompts.keys()
        sides = [{prompt: sums for prompt, sums in side.items() if prompt in shared} for side in sides]
    here, there = (estimate_of(change.definition, side, seed) for side in sides)
    return replace(change, run=here or change.run, baseline=there or change.baseline)
