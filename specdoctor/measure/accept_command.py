"""`specdoctor accept` from its options to its result object."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdoctor.drafters.block import BlockDrafter
from specdoctor.errors import ExitCode, SpecdoctorError
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

CALIBRATION = "calibration.json"  # beside a drafter's weights: `temperatures`, one for each draft position


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


def run_accept_request(request: AcceptRequest, on_progress: Callable[[Progress], None] | None = None) -> dict[str, Any]:
    """Load, look, summarise. The result's `exit_code` is what the command should exit with.

    Raises `SpecdoctorError` for anything that does not fit, before anything is decoded.
    """
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
    _refuse_other_drafters(request.workload)
    load = load_workload(request.workload)
    settings.sampling = load.settings.sampling(0)
    settings.max_new_tokens = load.settings.max_new_tokens
    settings.confidence_threshold = load.described["confidence_threshold"]
    settings.repeats = request.repeats
    settings.check()
    drafters, settings.draft_tokens = _drafters(load)
    costs = _costs(request, load, settings.draft_tokens)
    temperatures = _temperatures(request, load)
    corpus = _corpus(request, load, settings)
    run = measure_acceptance(load.target, drafters, load.prompts, corpus, settings, on_progress)
    if not run.arms[0].texts:
        if run.stopped == "interrupted":
            raise KeyboardInterrupt
        raise SpecdoctorError("no text was looked at; give prompts", ExitCode.NOTHING)
    template = load.described["template"]
    tokenizer = load_tokenizer(load.target.folder) if load.target.folder and template["kind"] != "bytes" else None
    result = accept_result(
        run,
        _described(load, settings, request),
        class_of=token_classes(run.arms[0].texts, tokenizer, template["kind"] == "bytes"),
        costs=costs,
        temperatures=temperatures,
    )
    return result | {"command": sys.argv, "exit_code": int(_exit_code(run))}


def _refuse_other_drafters(request: BenchRequest) -> None:
    """Name a drafter that accept cannot judge before a target is loaded for it."""
    for name, source in draft_sources(request).items():
        if request.arms and name not in request.arms:
            continue
        found = f"a prompt look-up ({source})" if isinstance(source, str) else _other_kind(source)
        if found:
            raise SpecdoctorError(
                f"accept: {name} is {found}, expected a DSpark or DFlash drafter; measure others with `specdoctor "
                "bench`"
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


def _costs(request: AcceptRequest, load: Workload, lengths: Mapping[str, int]) -> dict[str, RoundCost]:
    """Cost of a round by arm: from a table of `profile` (at the prompts' mean length), or a plain one."""
    if request.costs is None:
        return {}
    try:
        table = json.loads(request.costs.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        table = None
    if not (isinstance(table, dict) and table.get("kind") in ("cost-table", "profile")):
        return dict.fromkeys(lengths, RoundCost.read(request.costs))
    measured = CostTable.read(request.costs)
    dtype = str(load.target.dtype).removeprefix("torch.")
    measured.check(request.costs, request.workload.target, str(load.target.device), dtype)
    context = sum(len(prompt.ids) for prompt in load.prompts) / len(load.prompts) + load.settings.max_new_tokens / 2
    rows = sorted({point.rows for point in measured.sps})
    seconds = tuple(measured.target_seconds(n, context) for n in rows)
    costs = {}
    for name in lengths:
        if name not in measured.drafts:
            raise SpecdoctorError(
                f"{request.costs}: key drafts has {', '.join(measured.drafts) or 'no drafter'}, expected {name}; "
                "profile it too, or name the arm alike with --draft NAME=FOLDER"
            )
        costs[name] = RoundCost(tuple(rows), seconds, measured.draft_seconds(name, context))
    return costs


def _temperatures(request: AcceptRequest, load: Workload) -> dict[str, list[float]]:
    """Stored temperatures of the confidence by arm: `--calibration`, or the file beside the drafter's weights."""
    found = {}
    for name, folder in load.described["drafts"].items():
        path = request.calibration or Path(folder) / CALIBRATION
        if request.calibration is not None or path.is_file():
            found[name] = _read_temperatures(path)
    return found


def _read_temperatures(path: Path) -> list[float]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))["temperatures"]
        return [float(value) for value in values]
    except OSError as error:
        raise SpecdoctorError(f"{path}: {error.strerror or error}; give the JSON file of a calibration") from None
    except (ValueError, KeyError, TypeError):
        raise SpecdoctorError(f"{path}: expected a JSON object with a list of numbers `temperatures`") from None


def _described(load: Workload, settings: AcceptSettings, request: AcceptRequest) -> dict[str, Any]:
    return load.described | {
        "repeats": settings.repeats,
        "precision": settings.precision,
        "budget": settings.budget,
        "what_if": settings.what_if,
        "anchors": settings.anchors,
        "costs": str(request.costs) if request.costs else None,
    }
