"""Where the time of a pair goes, against what this machine could do, and what would help most.

Contract: three separate repeats. One plain run gives tau and the speed, one with wrapped steps the phases, one under
torch.profiler the trace: none disturbs the other. The verdict names the rule and the numbers that it used.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specdoctor.engine.engine import Engine
from specdoctor.engine.sequence import Sequence
from specdoctor.errors import SpecdoctorError
from specdoctor.measure.arms import EngineArm
from specdoctor.measure.bench import BASELINE, BenchRun, run_bench
from specdoctor.measure.cost_table import CONTEXTS, CostTable, measure_drafter, measure_target
from specdoctor.measure.environment import environment
from specdoctor.measure.phases import PhaseLog, counted_host_reads, logged_phases
from specdoctor.measure.roofline import Roofline, measure_machine, roofline
from specdoctor.measure.trace import read_trace, record_trace
from specdoctor.measure.workload import BenchRequest, Workload, load_workload
from specdoctor.metrics.acceptance import tau_step
from specdoctor.metrics.record import RoundRecord
from specdoctor.metrics.speedup import SpeedupModel, limiting_term

TRACED_ROUNDS = 4
BATCHES = (1, 2, 4, 8, 16, 32)
# Engine marks that are no step of drafter or target. What no phase covers is the host's: Python between the steps.
HOST = "host"
ENGINE_PHASES = {"schedule": "schedule", "accept": "sampling and acceptance", "commit": "cache and commit"}


def run_profile(request: BenchRequest, trace: Path | None, on_step: Callable[[str], None]) -> dict[str, Any]:
    """Profile one drafter on a workload; the `--json` object of `specdoctor profile`."""
    load = load_workload(request)
    arm = _the_drafter(load)
    on_step("decoding")
    run = run_bench(load.target, load.arms, load.prompts, load.settings)
    if not run.records(arm.name):
        raise SpecdoctorError("no round was decoded: every answer ended with its first token; use other prompts")
    on_step("timing the phases of rounds")
    phases, reads = _phases(arm.engine, load)
    on_step("measuring forwards of 1 to 256 rows")
    table = _cost_table(load, arm, run)
    on_step("measuring the machine")
    machine = measure_machine(load.target.device, load.target.dtype)
    context = sum(r.context for r in run.records(arm.name)) / len(run.records(arm.name))
    K = arm.engine.draft_tokens
    roofs = [
        roofline(load.target, machine, rows, round(context), table.target_seconds(rows, context)) for rows in (1, K + 1)
    ]
    model = _model(run, arm, table, context)
    batches = _batches(model, table, context)
    traced = _trace(arm.engine, load, trace) if trace is not None else None
    dtype = str(load.target.dtype).removeprefix("torch.")
    return {
        "schema_version": 1,
        "kind": "profile",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "environment": environment() | {"device": str(load.target.device), "dtype": dtype},
        "settings": load.described,
        "arm": arm.name,
        "interrupted": run.interrupted,
        "tau_step": tau_step(run.records(arm.name)).to_json(),
        "speedup_model": model.to_json(),
        "phases": phases,
        "host_reads_per_round": reads,
        "machine": {
            "bytes_per_second": machine.bytes_per_second,
            "operations_per_second": machine.operations_per_second,
        },
        "roofline": [roof.to_json() for roof in roofs],
        "batches": batches,
        "cost_table": table.to_json(),
        "sps": table.to_json()["sps"],
        "trace": traced,
        "verdict": _verdict(model, roofs, batches),
    }


def _the_drafter(load: Workload) -> EngineArm:
    drafting = [arm for arm in load.arms if isinstance(arm, EngineArm) and arm.engine.drafter is not None]
    if len(drafting) != 1:
        raise SpecdoctorError(f"profile: found {len(drafting)} drafters, expected one; give one --draft")
    return drafting[0]


def _phases(engine: Engine, load: Workload) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Seconds a round and share of the round by phase, and how often a round the host reads a device value."""
    log, reads, records = PhaseLog(load.target.device), dict[str, int](), list[RoundRecord]()
    for index in range(len(load.prompts)):
        request = _request(load, index)
        try:
            engine.prefill([request])
            with logged_phases(engine, log), counted_host_reads(reads):
                while not request.finished:
                    engine.step([request])
        finally:
            engine.release([request])
        records += request.records
    seconds = dict(log.seconds)
    for mark, phase in ENGINE_PHASES.items():
        seconds[phase] = sum(r.times[mark] for r in records)
    whole = sum(r.times["round"] for r in records)
    seconds[HOST] = whole - sum(seconds.values())
    rows = [
        {"phase": phase, "seconds_per_round": value / len(records), "share": value / whole}
        for phase, value in seconds.items()
    ]
    return rows, {method: count / len(records) for method, count in sorted(reads.items())}


def _request(load: Workload, index: int) -> Sequence:
    prompt, settings = load.prompts[index], load.settings
    stop_ids = frozenset() if settings.ignore_stop else load.target.stop_ids
    return Sequence(
        prompt.ids,
        max_new_tokens=settings.max_new_tokens,
        sampling=settings.sampling(index),
        stop_ids=stop_ids,
        prompt_id=prompt.id,
    )


def _cost_table(load: Workload, arm: EngineArm, run: BenchRun) -> CostTable:
    """T(N) at context lengths up to those of the workload, and the draft at the same."""
    longest = max(r.context for r in run.records())
    contexts = sorted({c for c in CONTEXTS if c <= 2 * longest} | {longest})
    drafter = arm.engine.drafter
    assert drafter is not None
    records = run.records(arm.name)
    kept = round(sum(r.committed for r in records) / len(records))
    return CostTable(
        load.described["target"],
        str(load.target.device),
        str(load.target.dtype).removeprefix("torch."),
        measure_target(load.target, contexts=contexts),
        {arm.name: measure_drafter(load.target, drafter, arm.engine.draft_tokens, kept, contexts)},
    )


def _model(run: BenchRun, arm: EngineArm, table: CostTable, context: float) -> SpeedupModel:
    """The speed-up that tau of the plain run and the cost table's times add up to."""
    measured = SpeedupModel.from_records(run.records(arm.name), run.records(BASELINE))
    return replace(
        measured,
        t_target=table.target_seconds(1, context),
        t_draft=table.draft_seconds(arm.name, context),
        t_verify=table.target_seconds(measured.proposal_length + 1, context),
    )


def _batches(model: SpeedupModel, table: CostTable, context: float) -> list[dict[str, Any]]:
    """Speed-up when R requests run together: R rows a plain step, R (K + 1) rows a verify step.

    The draft is taken to cost the same for each request, which is the pessimistic end; the optimistic one shares it.
    """
    most = max(p.rows for p in table.sps)
    rows = []
    for R in BATCHES:
        if R * (model.proposal_length + 1) > most:
            break
        plain, verify = table.target_seconds(R, context), table.target_seconds(R * (model.proposal_length + 1), context)
        rows.append(
            {
                "requests": R,
                "speedup_draft_per_request": model.tau * plain / (R * model.t_draft + verify + model.t_overhead),
                "speedup_draft_shared": model.tau * plain / (model.t_draft + verify + model.t_overhead),
            }
        )
    return rows


def _trace(engine: Engine, load: Workload, folder: Path) -> dict[str, Any]:
    """Trace a few rounds of the first prompt, and read the file back through torch-tb-profiler."""
    request = _request(load, 0)
    request.max_new_tokens, request.stop_ids = 10**6, frozenset()
    try:
        engine.prefill([request])
        engine.step([request])
        with logged_phases(engine, PhaseLog(load.target.device)):
            file = record_trace(
                folder, lambda: engine.step([request]), TRACED_ROUNDS, load.target.device.type == "cuda"
            )
    finally:
        engine.release([request])
    return {"file": str(file), "rounds": TRACED_ROUNDS, "operators": read_trace(file)}


def _verdict(model: SpeedupModel, roofs: list[Roofline], batches: list[dict[str, Any]]) -> dict[str, Any]:
    """The limiting term, what the target's forward is bound by, and the batch at which speculation stops paying."""
    limit = limiting_term(model)
    one, block = roofs
    losing = [row["requests"] for row in batches if row["speedup_draft_shared"] < 1]
    crossover = losing[0] if losing else None
    bound = (
        f"A target forward of 1 row takes {1000 * one.measured_seconds:.2f} ms, {one.efficiency:.0%} of the "
        f"{'memory' if one.memory_seconds >= one.compute_seconds else 'compute'} roof; of {block.rows} rows "
        f"{1000 * block.measured_seconds:.2f} ms ({block.bound} bound)."
    )
    batch = (
        f"Speculation stops paying at {crossover} requests in a batch."
        if crossover
        else f"Speculation pays up to {batches[-1]['requests']} requests in a batch, the most that was measured."
        if batches
        else "The cost table is too narrow for a batch crossover."
    )
    return limit.to_json() | {
        "bound": one.bound,
        "bound_sentence": bound,
        "crossover": crossover,
        "batch_sentence": batch,
    }
