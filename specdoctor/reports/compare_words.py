"""What every report of a comparison says, in the same words."""

from specdoctor.measure.compare import Comparison, Line
from specdoctor.metrics.change import scale_text
from specdoctor.metrics.sums import DEFINITIONS
from specdoctor.reports.gate_words import EVIDENCE, change_form, number, value_form

COLUMNS = ("result", "value", "difference", "change", "prompts")


def cells(comparison: Comparison, metric: str, line: Line) -> list[str]:
    """One row under `COLUMNS`; `how` is appended when the rows of the table do not all say the same there."""
    difference, change = "-", "-"
    if line.change is not None:
        form = {"alpha": "{:+.1%}", "tokens_per_s": "{:+.1f}"}.get(metric, "{:+.3f}")
        difference = number(line.change.difference, form)
        if line.change.change.value is not None and line.change.definition.scale != "absolute":
            change = change_form(line.change).format(line.change.change.value)
    elif line.reason:
        difference = "not comparable"
    prompts = line.change.change.n if line.change else line.estimate.n
    label = comparison.results[line.result].label
    row = [label, number(line.estimate, value_form(metric)), difference, change, str(prompts or "-")]
    return row if _uniform(comparison, metric) else [*row, _how(line)]


def columns(comparison: Comparison, metric: str) -> list[str]:
    """The header of a metric's table."""
    return [*COLUMNS] if _uniform(comparison, metric) else [*COLUMNS, "how"]


def caption(comparison: Comparison, metric: str) -> str:
    """What the differences of a metric are counted from, and in what."""
    lines = comparison.tables[metric]
    definition = DEFINITIONS[lines[0].definition]
    percent = "" if definition.scale == "absolute" else f"; change: per cent of {scale_text(definition)}"
    how = f"{_how(lines[1])}; " if _uniform(comparison, metric) and lines[1].change else ""
    return f"{how}difference: from {comparison.results[0].label}{percent}"


def _uniform(comparison: Comparison, metric: str) -> bool:
    """Whether one sentence tells how all lines were counted and compared."""
    first, *others = comparison.tables[metric]
    same = {line.definition for line in others} == {first.definition}
    return same and len({line.change.evidence if line.change else None for line in others}) == 1


def _how(line: Line) -> str:
    return f"{line.definition}, {EVIDENCE[line.change.evidence]}" if line.change else line.definition
