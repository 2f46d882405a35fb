"""`specdoctor accept` from its options to its result object."""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdoctor.drafters.block import BlockDrafter
from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.formats.drafts.calibration_file import StoredCalibration
from specdoctor.formats.drafts.detect import detect
from specdoctor.formats.drafts.read import describe, open_draft
from specdoctor.formats.sources import cache_root
from specdoctor.formats.spec import BlockSpec
from specdoctor.measure.accept import AcceptRun, AcceptSettings, measure_acceptance
from specdoctor.measure.accept_result import accept_result
from specdoctor.measure.arms import EngineArm
from specdoctor.measure.bench import Progress
from specdoctor.measure.corpus import Corpus, Manifest
from specdoctor.measure.cost_table import CostTable
from specdoctor.measure.prompts import TemplateRecord, load_tokenizer
from specdoctor.measure.token_classes import token_classes
from specdoctor.measure.workload import BenchRequest, Workload, draft_sources, load_workload
from specdoctor.metrics.round_cost import RoundCost


@dataclass(slots=True)
class AcceptRequest:
    """The options of the command. `workload` names target, drafters, prompts and sampling as for a bench."""

    workload: BenchRequest
    corpus: Path | None = None
    precision: float | None = None
    budget: float | None = None
    what_if: bool = True
    confidence: bool = True
    draft_temperatures: tuple[str, ...] | None = None
    anchors: int | None = None
    repeats: int = 1
    costs: Path | None = None
    calibration: Path | None = None
    command: str = "accept"  # which one asks, for what it refuses


@dataclass(slots=True)
class MeasuredAcceptance:
    """A finished run, with what it ran on."""

    run: AcceptRun
    load: Workload
    costs: dict[str, RoundCost]  # by arm; empty without a cost table


def run_accept_request(request: AcceptRequest, on_progress: Callable[[Progress], None] | None = None) -> dict[str, Any]:
    """Load, look, summarise. The result's `exit_code` is what the command should exit with.

    Raises `SpecdoctorError` for anything that does not fit, before anything is decoded.
    """
    measured = measure_request(request, on_progress)
    run, load = measured.run, measured.load
    template = load.described["template"]
    tokenizer = load_tokenizer(load.target.folder) if load.target.folder and template["kind"] != "bytes" else None
    result = accept_result(
        run,
        _described(load, run.settings, request),
        class_of=token_classes(run.arms[0].texts, tokenizer, template["kind"] == "bytes"),
        costs=measured.costs,
    )
    return result | {"command": sys.argv, "exit_code": int(_exit_code(run))}


def measure_request(
    request: AcceptRequest, on_progress: Callable[[Progress], None] | None = None
) -> MeasuredAcceptance:
    """Load and look. Raises as `run_accept_request` does; `KeyboardInterrupt` when there is nothing to keep."""
    if not request.workload.drafts:
        raise SpecdoctorError("--draft: found none, expected at least one drafter folder; accept judges drafters")
    settings = AcceptSettings(  # refused here before any model is loaded; the rest is known after
        draft_temperatures=request.draft_temperatures,
        anchors=request.anchors,
        precision=request.precision,
        budget=request.budget,
        what_if=request.what_if,
        confidence=request.confidence,
        seed=request.workload.seed,
    )
    settings.check()
    _refuse_other_drafters(request)
    load = load_workload(request.workload)
    settings.sampling = load.settings.sampling(0)
    settings.max_new_tokens = load.settings.max_new_tokens
    settings.confidence_threshold = load.described["confidence_threshold"]
    settings.repeats = request.repeats
    settings.check()
    drafters, settings.draft_tokens = _drafters(load)
    costs = round_costs(request.costs, request.workload.target, load, settings.draft_tokens)
    if request.calibration is not None:
        _calibrate(drafters.values(), request.calibration)
    corpus = _corpus(request, load, settings)
    run = measure_acceptance(load.target, drafters, load.prompts, corpus, settings, on_progress)
    if not run.arms[0].texts:
        if run.stopped == "interrupted":
            raise KeyboardInterrupt
        raise SpecdoctorError("no text was looked at; give prompts", ExitCode.NOTHING)
    return MeasuredAcceptance(run, load, costs)


def _refuse_other_drafters(request: AcceptRequest) -> None:
    """Name a drafter that accept cannot judge before a target is loaded for it."""
    others = "measure others with `specdoctor bench` or `specdoctor eval --rollouts`"
    if request.command == "eval":
        others = "give --rollouts for others"
    for name, source in draft_sources(request.workload).items():
        if request.workload.arms and name not in request.workload.arms:
            continue
        found = f"a prompt look-up ({source})" if isinstance(source, str) else _other_kind(source)
        if found:
            raise SpecdoctorError(
                f"{request.command}: {name} is {found}, expected a DSpark or DFlash drafter; {others}"
            )


def _other_kind(folder: Path) -> str:
    """What a checkpoint is when it is no block drafter, else an empty string."""
    config, tensors = open_draft(folder)
    found = detect(config, tensors)
    spec = describe(folder, config, tensors, found).spec
    return "" if isinstance(spec, BlockSpec) else f"{found.title} ({spec.algorithm})"


def _exit_code(run: AcceptRun) -> ExitCode:
    if run.stopped == "interrupted":
        return ExitCode.INTERRUPTED
    reached = run.settings.precision is None or run.stopped == "precision" or run.precise
    return ExitCode.OK if reached else ExitCode.INCONCLUSIVE


def _drafters(load: Workload) -> tuple[dict[str, BlockDrafter], dict[str, int]]:
    """Drafters and their K by arm name; accept has no arm for plain decoding."""
    drafters, lengths = {}, {}
    for arm in load.arms:
        if isinstance(arm, EngineArm) and arm.engine.drafter is not None:
            drafters[arm.name] = arm.engine.drafter
            lengths[arm.name] = arm.engine.draft_tokens
    if not drafters:
        raise SpecdoctorError("--arms: no drafter is left; name at least one")
    return drafters, lengths  # type: ignore[return-value]  # AcceptancePass refuses what it cannot take


def _corpus(request: AcceptRequest, load: Workload, settings: AcceptSettings) -> Corpus:
    stops = frozenset() if load.settings.ignore_stop else load.target.stop_ids
    template = TemplateRecord(**load.described["template"])
    manifest = Manifest.of(load.target, template, settings.sampling, stops, request.workload.seed)
    folder = request.corpus or cache_root() / "corpora" / f"{load.target.name}-{manifest.key}"
    return Corpus(folder, manifest)


def round_costs(path: Path | None, target: str, load: Workload, arms: Iterable[str]) -> dict[str, RoundCost]:
    """Cost of a round by arm: from a table of `profile` (at the prompts' mean length), or a plain one.

    Raises `SpecdoctorError` for a table of another `target`, device or dtype, or without one of `arms`.
    """
    if path is None:
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        table = None
    if not (isinstance(table, dict) and table.get("kind") in ("cost-table", "profile")):
        return dict.fromkeys(arms, RoundCost.read(path))
    measured = CostTable.read(path)
    dtype = str(load.target.dtype).removeprefix("torch.")
    measured.check(path, target, str(load.target.device), dtype)
    context = sum(len(prompt.ids) for prompt in load.prompts) / len(load.prompts) + load.settings.max_new_tokens / 2
    rows = sorted({point.rows for point in measured.sps})
    seconds = tuple(measured.target_seconds(n, context) for n in rows)
    costs = {}
    for name in arms:
        if name not in measured.drafts:
            raise SpecdoctorError(
                f"{path}: key drafts has {', '.join(measured.drafts) or 'no drafter'}, expected {name}; "
                "profile it too, or name the drafter alike with NAME=FOLDER"
            )
        costs[name] = RoundCost(tuple(rows), seconds, measured.draft_seconds(name, context))
    return costs


def _calibrate(drafters: Iterable[BlockDrafter], path: Path) -> None:
    """Use the temperatures of `--calibration` in the place of those beside the weights, whatever they were made for."""
    stored = StoredCalibration.read(path)
    for drafter in drafters:
        if drafter.confidence is not None:
            drafter.calibrate(stored.temperatures)


def _described(load: Workload, settings: AcceptSettings, request: AcceptRequest) -> dict[str, Any]:
    return load.described | {
        "repeats": settings.repeats,
        "precision": settings.precision,
        "budget": settings.budget,
        "what_if": settings.what_if,
        "anchors": settings.anchors,
        "costs": str(request.costs) if request.costs else None,
    }
