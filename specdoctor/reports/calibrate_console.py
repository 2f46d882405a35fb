"""A calibration for a person, drawn from the JSON result."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from specdoctor.metrics.temperature_scaling import FEWEST
from specdoctor.reports.bench_console import estimate
from specdoctor.reports.output import result_table

Json = Mapping[str, Any]
PERCENT = "{:.1%}"
AT_END = "at the grid's end: the head is wrong, not only too sure or unsure; train it longer"


def print_calibration(result: Json, console: Console) -> None:
    """What it was fitted on, the positions on held-out prompts, the mean, and what became of the file."""
    sampling, fitted, held = result["sampling"], result["fitted"], result["held_out"]
    drawn = "greedy" if sampling["temperature"] == 0 else f"T {sampling['temperature']:g}"
    line = (
        f"{result['draft']['name']} beside {result['target']['name']} ({result['target']['dtype']}) · {drawn} · fitted "
        f"on {fitted['rounds']} rounds of {fitted['prompts']} prompts, judged on {held['rounds']} rounds of "
        f"{held['prompts']} others"
    )
    console.print(Text(line), soft_wrap=True)
    console.print()
    _positions(held["positions"], console)
    for name, side in (("held out", held), ("fitted", fitted)):
        mean = side["mean_ece"]
        change = estimate(mean["change"], "{:+.1%}")
        text = f"ECE {estimate(mean['before'], PERCENT)} -> {estimate(mean['after'], PERCENT)}, change {change}"
        console.print(Text.assemble((f"{name:<9} ", "bold"), text), soft_wrap=True)
    if result["written"]:
        console.print(Text.assemble(("written   ", "bold"), result["path"]), soft_wrap=True)
    else:
        text = "on prompts that it was not fitted on these temperatures are no better than none; give more prompts"
        console.print(Text.assemble(("not written: ", "bold yellow"), text), soft_wrap=True)


def _positions(rows: list[Json], console: Console) -> None:
    columns = ("position", "temperature", "n", "predicted", "after", "happened", "ECE", "ECE after", "AUROC", "after")
    table = result_table(console, "Product of confidences on held-out prompts", *columns)
    for row in rows:
        before, after = row["before"], row["after"]
        table.add_row(
            str(row["position"]),
            _temperature(row),
            str(before["ece"]["n"]),
            _number(before["mean_prediction"]),
            _number(after["mean_prediction"]),
            _number(before["mean_label"]),
            estimate(before["ece"], PERCENT),
            estimate(after["ece"], PERCENT),
            estimate(before["auroc"], "{:.3f}", interval=False),
            estimate(after["auroc"], "{:.3f}", interval=False),
        )
    console.print(table)
    note = "ECE of the product c1 ... ck in 20 bins; brackets: 95 %, bootstrap clustered by prompt."
    console.print(Text(note, "dim"))
    if not all(row["fitted"] for row in rows):
        few = f"too few: of the rounds fitted on, fewer than {FEWEST} had their drafts accepted up to this position "
        console.print(Text(few + f"or fewer than {FEWEST} had not; the temperature stays 1.", "dim"), soft_wrap=True)
    if any(row["at_grid_end"] for row in rows):
        console.print(Text(f"end: {AT_END}.", "yellow"), soft_wrap=True)
    console.print()


def _temperature(row: Json) -> str:
    if not row["fitted"]:
        return "1 (too few)"
    return f"{row['temperature']:.3f}" + (" (end)" if row["at_grid_end"] else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
