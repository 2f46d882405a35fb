"""The gate for a person."""

from rich.console import Console
from rich.text import Text

from specdoctor.measure.gate import GateReport
from specdoctor.metrics import gate as rule
from specdoctor.metrics.gate import MARGINS
from specdoctor.metrics.sums import DEFINITIONS
from specdoctor.reports.gate_words import (
    SIGNS,
    change_form,
    headline,
    notes,
    number,
    power,
    sentence,
    unit,
    value_form,
)
from specdoctor.reports.output import result_table

STYLES = {"pass": "bold green", "regression": "bold red", "inconclusive": "bold yellow"}


def print_gate(report: GateReport, console: Console) -> None:
    """Verdict, table of metrics, reasons, power, notes."""
    console.print(Text(headline(report), STYLES[report.outcome]), soft_wrap=True)
    console.print()
    table = result_table(console, "", "metric", "verdict", "baseline", "run", "change", "margin", left=2)
    for column in table.columns:
        column.no_wrap, column.overflow = False, "fold"  # on a narrow terminal rather two lines than half a number
    for result in report.results:
        verdict = Text(SIGNS[result.verdict.outcome], STYLES[result.verdict.outcome])
        change, form = result.change, value_form(result.metric)
        if change is None:
            table.add_row(result.metric, verdict, "-", "-", "-", f"{result.verdict.margin:g}")
            continue
        table.add_row(
            result.metric,
            verdict,
            number(change.baseline, form, interval=False),
            number(change.run, form, interval=False),
            number(change.change, change_form(change)),
            unit(change, result.verdict.margin),
        )
    console.print(table)
    for result in report.results:
        console.print(Text(sentence(result)), soft_wrap=True)
        if further := power(result):
            console.print(Text(f"  {further}", "dim"), soft_wrap=True)
    console.print()
    for note in notes(report):
        console.print(Text(f"note: {note}", "dim"), soft_wrap=True)


def print_rule(console: Console) -> None:
    """`--explain`: the rule of decision, the margins, and the formula of every definition."""
    console.print(Text((rule.__doc__ or "").strip()), soft_wrap=True)
    console.print()
    console.print(Text("Margins: " + ", ".join(f"{metric} {margin:g}" for metric, margin in MARGINS.items())))
    console.print(Text("Of tau the excess tau - 1 is judged, of the others the value itself; that of ece is absolute."))
    console.print()
    for definition in DEFINITIONS.values():
        console.print(Text(f"{definition.metric}: {definition.name} = {definition.formula}"), soft_wrap=True)
