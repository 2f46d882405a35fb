"""The profile for a person, drawn from its JSON."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from specdoctor.reports.bench_console import estimate
from specdoctor.reports.output import result_table

Json = Mapping[str, Any]


def print_profile(result: Json, console: Console) -> None:
    """Phases, forwards, roofline, batch, trace, verdict."""
    env = result["environment"]
    line = f"{result['settings']['target']} with {result['arm']} · {env['device']} {env['dtype']}"
    console.print(Text(f"{line} · tau_step {estimate(result['tau_step'])}"), soft_wrap=True)
    console.print()
    _phases(result, console)
    _forwards(result, console)
    _batches(result, console)
    if result["trace"]:
        _trace(result["trace"], console)
    verdict = result["verdict"]
    for label, text in (
        ("verdict", f"{verdict['sentence']} Try: {verdict['advice']}."),
        ("target", verdict["bound_sentence"]),
        ("batch", verdict["batch_sentence"]),
    ):
        console.print(Text.assemble((f"{label:<8} ", "bold"), text), soft_wrap=True)


def _phases(result: Json, console: Console) -> None:
    table = result_table(console, "A round", "phase", "ms", "share")
    for row in result["phases"]:
        table.add_row(row["phase"], f"{1000 * row['seconds_per_round']:.2f}", f"{row['share']:.1%}")
    whole = 1000 * sum(row["seconds_per_round"] for row in result["phases"])
    table.add_row("round", f"{whole:.2f}", "100.0%")
    console.print(table)
    reads = ", ".join(f"{method} {count:.2f}" for method, count in result["host_reads_per_round"].items()) or "none"
    console.print(
        Text(f"host: what lies between the steps. Reads of device values by the host, a round: {reads}.", "dim")
    )
    console.print()


def _forwards(result: Json, console: Console) -> None:
    contexts = sorted({point["context"] for point in result["sps"]})
    table = result_table(console, "Target forward, ms", "rows", *(f"context {c}" for c in contexts))
    for rows in sorted({point["rows"] for point in result["sps"]}):
        by_context = {p["context"]: p["seconds"] for p in result["sps"] if p["rows"] == rows}
        table.add_row(str(rows), *(f"{1000 * by_context[c]:.2f}" for c in contexts))
    console.print(table)
    table = result_table(console, "Roofline", "rows", "memory ms", "compute ms", "measured ms", "of the roof", "bound")
    for roof in result["roofline"]:
        seconds = (roof["memory_seconds"], roof["compute_seconds"], roof["measured_seconds"])
        table.add_row(
            str(roof["rows"]), *(f"{1000 * s:.2f}" for s in seconds), f"{roof['efficiency']:.0%}", roof["bound"]
        )
    console.print(table)
    machine = result["machine"]
    rates = (
        f"measured here: {machine['bytes_per_second'] / 1e9:.1f} GB/s, "
        f"{machine['operations_per_second'] / 1e9:.0f} GFLOP/s. host: over twice the nearer roof."
    )
    console.print(Text(rates, "dim"))
    console.print()


def _batches(result: Json, console: Console) -> None:
    if not result["batches"]:
        return
    table = result_table(console, "Speed-up by batch", "requests", "draft shared", "draft per request")
    for row in result["batches"]:
        table.add_row(
            str(row["requests"]), f"{row['speedup_draft_shared']:.2f}", f"{row['speedup_draft_per_request']:.2f}"
        )
    console.print(table)
    console.print()


def _trace(trace: Json, console: Console) -> None:
    table = result_table(console, f"Operators, {trace['rounds']} rounds", "operator", "calls", "own ms", "share")
    for row in trace["operators"]:
        table.add_row(
            row["operator"], str(row["calls"]), f"{1000 * row['self_seconds']:.2f}", f"{row['self_share']:.1%}"
        )
    console.print(table)
    console.print(
        Text(f"trace: {trace['file']} (TensorBoard with torch-tb-profiler, or Perfetto)", "dim"), soft_wrap=True
    )
    console.print()
