"""`specdoctor train` from a recipe to its result object."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdoctor.engine.target import Target
from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.formats.drafts.read import read_draft
from specdoctor.formats.sources import resolve_model, shipped_drafters
from specdoctor.formats.spec import DraftSpec
from specdoctor.training.checkpoint_hash import checkpoint_hash
from specdoctor.training.features import CachedFeatures, FeatureSource, OnlineFeatures
from specdoctor.training.held_out import HeldOutPrompts
from specdoctor.training.loop import TrainLoop, TrainProgress, TrainResult
from specdoctor.training.objective import OBJECTIVES, Objective
from specdoctor.training.processes import Processes
from specdoctor.training.recipe import Recipe
from specdoctor.training.run_folder import RunFolder
from specdoctor.training.samples import SampleSet

SCHEMA_VERSION = 1
MADE = ("target-layers", "scratch")  # draft.init that is no folder


def train(
    recipe: Recipe, resume: bool = False, on_step: Callable[[TrainProgress], None] | None = None
) -> dict[str, Any]:
    """Run a recipe to its end; the result's `exit_code` is what the command should exit with.

    Under `accelerate launch` or torchrun every process calls this; the first one writes. Raises `SpecdoctorError` for
    anything that does not fit, before anything is trained.
    """
    init = recipe.draft.init
    start = None if init in MADE else Path(init)
    if start is not None and not start.exists():  # what is here goes before a known name, as everywhere
        start = shipped_drafters().get(init, start)
    if start is not None and not start.exists():
        raise SpecdoctorError(
            f"draft.init is {init}: no such drafter; expected {', '.join(MADE)}, or the folder or known name of one"
        )
    processes = Processes()
    folder = RunFolder(recipe.output, recipe, resume) if processes.main else None
    try:
        target = Target.load(resolve_model(recipe.target), processes.device(recipe.device), recipe.dtype)
        objective = OBJECTIVES[recipe.algorithm](recipe, target, start)
        source = feature_source(recipe, target, objective, processes)
        measure = None
        if folder is not None:
            measure = HeldOutPrompts(recipe, target, recipe.output / "held-out").measure
        processes.wait()  # for the first one, which may have refused
        shown = on_step if processes.main else None
        loop = TrainLoop(recipe, objective, source, processes, folder, measure, shown)
        state = RunFolder.read(recipe.output, recipe) if resume else None
        result = loop.run(state)
    finally:
        if folder is not None:
            folder.close()
        processes.leave()
    return described(recipe, objective, result)


def feature_source(recipe: Recipe, target: Target, objective: Objective, processes: Processes) -> FeatureSource:
    """The recipe's data with what the objective taps, this process's share."""
    data, share = recipe.data, {"rank": processes.rank, "world": processes.world}
    if data.cache is not None:
        name = None if target.folder is None else checkpoint_hash(target.folder)
        return CachedFeatures(data.cache, data.tokens_per_batch, objective.taps, name, target.device, **share)
    assert data.samples is not None
    samples = SampleSet(data.samples, data.max_length)
    return OnlineFeatures(target, samples, objective.taps, data.tokens_per_batch, **share)


def described(recipe: Recipe, objective: Objective, result: TrainResult) -> dict[str, Any]:
    """The result object."""
    interrupted = result.stopped == "interrupted"
    unkept = None if result.drafter is None else _unkept_length(objective, result.drafter)
    notes = [] if unkept is None else [f"the format does not keep draft.block_size; give -K {unkept} to bench and eval"]
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "train",
        "stopped": result.stopped,
        "exit_code": int(ExitCode.INTERRUPTED if interrupted else ExitCode.OK),
        "algorithm": recipe.algorithm,
        "parameters": sum(p.numel() for p in objective.module.parameters()),
        "steps": result.steps,
        "epochs": result.epochs,
        "seconds": round(result.seconds, 3),
        "loss": result.loss,
        "held_out": result.held_out,
        "drafter": None if result.drafter is None else str(result.drafter),
        "output": str(recipe.output),
        "target": recipe.target,
        "draft_tokens": unkept,
        "confidence": getattr(_spec(objective), "confidence", None) is not None,
        "notes": notes,
    }


def _spec(objective: Objective) -> DraftSpec | None:
    return getattr(objective, "spec", None)


def _unkept_length(objective: Objective, drafter: Path) -> int | None:
    """Tokens a round that the drafter was trained for, where what was saved says another number."""
    spec = _spec(objective)
    if spec is None or read_draft(drafter, spec.num_target_layers).spec.default_draft == spec.default_draft:
        return None
    return spec.default_draft
