"""Several results side by side: each with its own interval, and its paired difference from the first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdoctor.formats.results.result_set import ResultSet
from specdoctor.measure.comparability import (
    change_of,
    definitions_of,
    differences,
    nothing_to_compare,
    unknown_settings,
    why_not,
)
from specdoctor.metrics.change import Change
from specdoctor.metrics.conventions import CONVENTIONS
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.sums import DEFINITIONS, METRICS

SCHEMA_VERSION = 1
# Lengths by the name of the tool that prints them so.
STYLES = {
    "vLLM-style": "vllm_mean_acceptance_length",
    "AIPerf-style": "aiperf_acceptance_length",
    "SGLang-style": "sglang_accept_length",
    "SGLang per request": "sglang_accept_length_per_request",
    "DeepSpec-style": "tau_step",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of one result. `change` is None for the first result, and where the two share no definition."""

    result: int  # index into `results`
    definition: str
    estimate: Estimate
    change: Change | None = None
    reason: str | None = None  # why there is no change

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {"result": self.result, "definition": self.definition} | self.estimate.to_json()
        if self.change is not None:
            row["change"] = self.change.change.to_json()
            row["evidence"] = self.change.evidence
            row["notes"] = list(self.change.notes)
        elif self.reason:
            row["no_change_because"] = self.reason
        return row


@dataclass(frozen=True, slots=True)
class Comparison:
    """`tables` holds a list of lines, one a result, for each metric that any of them has."""

    results: list[ResultSet]
    tables: dict[str, list[Line]]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "compare",
            "results": [result.describe() for result in self.results],
            "metrics": {metric: [line.to_json() for line in lines] for metric, lines in self.tables.items()},
            "conventions": [
                {style: result.estimate(name).to_json() for style, name in STYLES.items()} for result in self.results
            ],
            "notes": self.notes,
        }


def compare(results: Sequence[ResultSet], seed: int = 0) -> Comparison:
    """Compare two or more results with the first. Settings that differ are noted, not refused.

    Raises (exit code 5) when no two of them share a metric.
    """
    first, *others = results
    tables: dict[str, list[Line]] = {}
    reasons: list[str] = []
    notes: list[str] = []
    for metric in METRICS:
        changes = [change_of(metric, other, first, seed) for other in others]
        lines = [_own(metric, 0, first, changes, seed)]
        for index, (other, change) in enumerate(zip(others, changes, strict=True), 1):
            reason = None if change else why_not(metric, other, first)
            lines.append(_line(metric, index, other, change, reason, seed))
            reasons += [f"{metric}: {reason}"] if reason else []
        having = [results[line.result].label for line in lines if line.estimate.value is not None]
        if len(having) > 1:
            tables[metric] = lines
        elif having:
            notes.append(f"{metric}: only {having[0]} has it")
    if not any(line.change for lines in tables.values() for line in lines):
        raise nothing_to_compare(others[0], first, reasons[:1])
    for other in others:
        notes += [
            f"{other.label} and {first.label} differ in {d.key}: {d.run}, {d.baseline}"
            for d in differences(other, first)
        ]
        notes += [f"{other.label}: {note}" for note in unknown_settings(other, first)]
    notes += [f"{result.label}: {note}" for result in results for note in result.notes]
    return Comparison(list(results), tables, list(dict.fromkeys(notes)))


def _own(metric: str, index: int, result: ResultSet, changes: list[Change | None], seed: int) -> Line:
    """The line of the first result, under the definition that most of the changes used."""
    used = [change.definition.name for change in changes if change]
    name = max(used, key=used.count) if used else _best(metric, result, seed)
    return Line(index, name, result.estimate(name, seed))


def _line(metric: str, index: int, result: ResultSet, change: Change | None, reason: str | None, seed: int) -> Line:
    name = change.definition.name if change else _best(metric, result, seed)
    return Line(index, name, result.estimate(name, seed), change, reason)


def _best(metric: str, result: ResultSet, seed: int) -> str:
    """The first definition of a metric that a result has, or ours when it has none."""
    names = [definition.name for definition in definitions_of(metric)]
    return next((name for name in names if result.estimate(name, seed).value is not None), names[0])


def explain_conventions() -> dict[str, str]:
    """Formula of each style, for the report."""
    return {
        style: CONVENTIONS[name].formula if name in CONVENTIONS else DEFINITIONS[name].formula
        for style, name in STYLES.items()
    }
