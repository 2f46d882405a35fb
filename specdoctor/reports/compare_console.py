"""A comparison for a person: one table a metric."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdoctor.measure.compare import STYLES, Comparison, explain_conventions
from specdoctor.reports.compare_words import caption, cells, columns
from specdoctor.reports.gate_words import number
from specdoctor.reports.output import result_table


def print_comparison(comparison: Comparison, console: Console, conventions: bool = False) -> None:
    """A table for each metric that several results have; with `conventions` also the length as each tool prints it."""
    for metric, lines in comparison.tables.items():
        table = _folding(result_table(console, metric, *columns(comparison, metric)))
        for line in lines:
            table.add_row(*cells(comparison, metric, line))
        console.print(table)
        console.print(Text(caption(comparison, metric), "dim"), soft_wrap=True)
        for line in lines:
            if line.reason:
                label = comparison.results[line.result].label
                console.print(Text(f"{label} not comparable in {metric}: {line.reason}", "yellow"), soft_wrap=True)
        console.print()
    if conventions:
        _print_conventions(comparison, console)
    for note in comparison.notes:
        console.print(Text(f"note: {note}", "dim"), soft_wrap=True)


def _print_conventions(comparison: Comparison, console: Console) -> None:
    table = _folding(result_table(console, "Acceptance length as each tool prints it", "result", *STYLES))
    for result in comparison.results:
        lengths = [number(result.estimate(name), "{:.2f}", interval=False) for name in STYLES.values()]
        table.add_row(result.label, *lengths)
    console.print(table)
    for style, formula in explain_conventions().items():
        console.print(Text(f"{style}: {formula}", "dim"), soft_wrap=True)
    console.print()


def _folding(table: Table) -> Table:
    """On a narrow terminal rather two lines than half a number."""
    for column in table.columns:
        column.no_wrap, column.overflow = False, "fold"
    return table
