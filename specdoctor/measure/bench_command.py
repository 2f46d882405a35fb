"""`specdoctor bench` from its options to its result object."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdoctor.errors import ExitCode
from specdoctor.measure.bench import BenchRun, Progress, run_bench
from specdoctor.measure.bench_result import bench_result
from specdoctor.measure.cost_table import CostTable
from specdoctor.measure.workload import BenchRequest, load_workload
from specdoctor.metrics.record import write_jsonl

__all__ = ["BenchRequest", "run_bench_request"]


def run_bench_request(
    request: BenchRequest,
    on_progress: Callable[[Progress], None] | None = None,
    costs: Path | None = None,
) -> dict[str, Any]:
    """Load, decode, summarise. The result's `exit_code` is what the command should exit with.

    `costs` is a cost table of `specdoctor profile`: then the expected speed-up comes from it, not from this run.
    """
    table = CostTable.read(costs) if costs else None
    load = load_workload(request)
    if table is not None and costs is not None:
        dtype = str(load.target.dtype).removeprefix("torch.")
        table.check(costs, request.target, str(load.target.device), dtype)
    run = run_bench(load.target, load.arms, load.prompts, load.settings, on_progress)
    if request.records is not None:
        write_jsonl(run.records(), request.records)
    result = bench_result(run, load.described, str(request.records) if request.records else None, table)
    return result | {"command": sys.argv, "exit_code": int(_exit_code(run, result))}


def _exit_code(run: BenchRun, result: dict[str, Any]) -> ExitCode:
    if run.interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.FINDINGS if any(arm["greedy_mismatches"] for arm in result["arms"]) else ExitCode.OK
