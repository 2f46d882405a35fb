"""What the makers of objectives share: which keys a recipe may have, a drafter to go on from, saving it whole."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import DraftCheckpoint
from specdoctor.formats.drafts.pair import TargetShape, misfits
from specdoctor.formats.drafts.read import read_draft
from specdoctor.training.recipe import Draft, Recipe


def refuse_foreign(recipe: Recipe, *own: str) -> None:
    """Raise for a key of `draft` that the algorithm has not (`own`: those it has), and for a loss that it has not."""
    for key in sorted(recipe.draft.model_fields_set - {"init", *own}):
        value = getattr(recipe.draft, key)
        if value != Draft.model_fields[key].default:
            raise SpecdoctorError(
                f"draft.{key} is {value}, which {recipe.algorithm} does not have (it has init, {', '.join(own)}); "
                "leave it out"
            )
    for losses in ([recipe.losses] if "losses" in recipe.model_fields_set else []) + list(recipe.phases):
        for name in ("confidence", "feature"):
            if getattr(losses, name):
                raise SpecdoctorError(
                    f"losses.{name} is {getattr(losses, name)}, which {recipe.algorithm} does not have; leave it out"
                )


def read_start(start: Path, target: Target, algorithm: str) -> DraftCheckpoint:
    """The drafter to go on from. Raises `SpecdoctorError` for another algorithm or another target."""
    checkpoint = read_draft(start, target.num_layers)
    checkpoint.refuse_if_broken()
    if checkpoint.spec.algorithm != algorithm:
        raise SpecdoctorError(
            f"{start}: {checkpoint.title} ({checkpoint.spec.algorithm}), expected a drafter of the recipe's algorithm, "
            f"{algorithm}"
        )
    rows = target.embedding.weight.shape[0]
    shape = TargetShape(target.name, target.hidden_size, target.num_layers, target.vocab_size, rows)
    if (misfit := next(misfits(checkpoint, shape), None)) is not None:
        raise SpecdoctorError(misfit.line)
    return checkpoint


def drop_copies(where: Path, tensors: dict[str, Tensor], target: Target, ids: Tensor | None = None) -> None:
    """Take copies of the target's embedding and head (its rows `ids`) out of `tensors`.

    Raises `SpecdoctorError` for others than the target's: they are not trained here, and would be lost.
    """
    for name, theirs in (("embed_tokens.weight", target.embedding.weight), ("lm_head.weight", target.lm_head.weight)):
        own = tensors.pop(name, None)
        if own is None:
            continue
        wanted = theirs.detach().cpu()
        wanted = wanted[ids] if ids is not None and name == "lm_head.weight" else wanted
        if own.shape != wanted.shape or not own.float().equal(wanted.to(own.dtype).float()):
            raise SpecdoctorError(
                f"{where}: tensor {name} is not the target's; expected a drafter that shares it with {target.name}: "
                "only such can be trained here"
            )


def write_whole(folder: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a folder beside `folder`, which gets its name when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        write(scratch / folder.name)
        (scratch / folder.name).rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
