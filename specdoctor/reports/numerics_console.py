"""`check-nan` for a person: drawn from the JSON document, so that both say the same. Nothing is computed here."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from specdoctor.reports.findings import print_closing, print_findings
from specdoctor.reports.output import result_table

SHOWN_LAYERS = 8


def print_numerics_report(document: Mapping[str, Any], console: Console) -> None:
    """Weights, dtypes, headroom, and the findings, worst first."""
    console.print(Text.assemble(("target   ", "bold"), document["target"]), soft_wrap=True)
    if document["drafter"] is not None:
        console.print(Text.assemble(("drafter  ", "bold"), document["drafter"]), soft_wrap=True)
    _print_weights(document, console)
    if document["dtypes"]:
        _print_dtypes(document, console)
    if document["headroom"] is not None:
        _print_headroom(document["headroom"], console)
    print_findings(document["findings"], console)
    print_closing(document, console)


def _print_weights(document: Mapping[str, Any], console: Console) -> None:
    table = result_table(
        console, "Weights", "side", "dtype", "tensors", "numbers", "NaN", "inf", "denormal", "largest", left=2
    )
    for row in document["weights"]:
        table.add_row(
            row["side"],
            " ".join(row["dtypes"]),
            f"{row['tensors']}",
            f"{row['numbers']:,}",
            f"{row['nan']}",
            f"{row['inf']}",
            f"{row['denormal']}",
            f"{row['largest']:.3g}",
        )
    console.print()
    console.print(table)


def _print_dtypes(document: Mapping[str, Any], console: Console) -> None:
    table = result_table(
        console, "Runs", "dtype", "target", "drafter", "emulated", "tau_step", "rounds", "accepted/drafted", left=4
    )
    for run in document["dtypes"]:
        if run["error"]:
            table.add_row(run["dtype"], f"cannot be run here: {run['error']}", "", "", "", "", "")
            continue
        tau, rounds = run["tau_step"], run["rounds"]
        table.add_row(
            run["dtype"],
            _health(run, "target"),
            _health(run, "drafter") if document["drafter"] else "-",
            _emulated(run),
            "-" if tau is None else f"{tau:.2f}",
            "-" if rounds is None else f"{rounds}",
            "-" if rounds is None else f"{run['accepted']}/{run['drafted']}",
        )
    console.print(table)


def _health(run: Mapping[str, Any], side: str) -> str:
    birth = run["births"].get(side)
    if birth is None:
        return "finite"
    return f"{birth['cause']} in {birth['module'].partition(': ')[2] or side}"


def _emulated(run: Mapping[str, Any]) -> str:
    """Which operations were computed in float32 and rounded, for want of a kernel."""
    names = run["emulated_operations"]
    return ", ".join(sorted(names)) if names else "none"


def _print_headroom(headroom: Mapping[str, Any], console: Console) -> None:
    rows = sorted(headroom["layers"], key=lambda row: -row["largest"])
    title = f"Headroom in float16, measured in {headroom['measured_in']}"
    table = result_table(console, title, "layer", "module", "largest", "headroom", left=2)
    for row in rows[:SHOWN_LAYERS]:
        room = row["headroom_in_float16"]
        table.add_row(row["layer"], row["module"], f"{row['largest']:.4g}", "-" if room is None else f"{room:,.1f} x")
    console.print(table)
    if len(rows) > SHOWN_LAYERS:
        console.print(Text(f"the highest {SHOWN_LAYERS} of {len(rows)} layers and modules; all with --json", "dim"))
