"""From a checkpoint to a drafter bound to a target: the facts that both must share are checked here.

Adding an algorithm is a line in `BINDERS` and a module with a function `(Binding) -> Drafter`.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from specdoctor.drafters.binding import Binding, shared
from specdoctor.drafters.block import bind_block
from specdoctor.drafters.calibrated import apply_calibration
from specdoctor.drafters.causal_lm import load_causal_lm
from specdoctor.drafters.draft_vocabulary import cut_to, ids_to_cut_to
from specdoctor.drafters.eagle import bind_eagle
from specdoctor.drafters.eagle3 import bind_eagle3
from specdoctor.drafters.early_exit import bind_early_exit
from specdoctor.drafters.medusa import bind_medusa
from specdoctor.drafters.mtp import bind_mtp
from specdoctor.drafters.peagle import bind_peagle
from specdoctor.engine.device import resolve_device, resolve_dtype
from specdoctor.engine.draft import Drafter
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import DraftCheckpoint
from specdoctor.formats.drafts.pair import TargetShape, misfits
from specdoctor.formats.drafts.read import read_draft
from specdoctor.kernels.attention import choose_attention

# By `DraftSpec.algorithm`.
BINDERS: dict[str, Callable[[Binding], Drafter]] = {
    "dspark": bind_block,
    "dflash": bind_block,
    "dflash2": bind_block,
    "eagle": bind_eagle,
    "early-exit": bind_early_exit,
    "eagle3": bind_eagle3,
    "peagle": bind_peagle,
    "medusa": bind_medusa,
    "mtp": bind_mtp,
}


def load_drafter(
    folder: Path,
    target: Target,
    *,
    name: str = "",
    device: str = "same",
    dtype: str = "same",
    vocabulary: str = "auto",
    quantize: str | None = None,
    draft_vocabulary: str | Path | None = None,
) -> Drafter:
    """Read a draft checkpoint and bind it to `target`; `same` takes the target's device and dtype.

    `vocabulary` and `quantize` are of a causal LM drafter (see `load_causal_lm`); others have neither.
    `draft_vocabulary` is a JSON list of the ids that the drafter may propose (see `cut_to`), or `own`. A calibration
    beside the weights is applied to the confidences, or warned of where it was made for other weights. Raises
    `SpecdoctorError` when the checkpoint is broken or the pair cannot fit: hidden size, taps, vocabulary rows, mask id.
    """
    checkpoint = read_draft(folder, target.num_layers)
    checkpoint.refuse_if_broken()
    if checkpoint.spec.algorithm not in (*BINDERS, "causal-lm"):
        raise SpecdoctorError(
            f"{folder}: recognised as {checkpoint.title} (by {checkpoint.evidence}); it can be inspected, but there is "
            "no engine for this algorithm here"
        )
    _check_pair(checkpoint, target)
    where = target.device if device == "same" else resolve_device(device, "--draft-device")
    kind = target.dtype if dtype == "same" else resolve_dtype(dtype, where, folder, "--draft-dtype")
    ids = ids_to_cut_to(draft_vocabulary, checkpoint, folder)
    if checkpoint.spec.algorithm == "causal-lm":  # transformers reads its tensors, not we
        return load_causal_lm(checkpoint, target, name or folder.stem, where, kind, vocabulary, quantize)
    with torch.inference_mode(False):
        loaded = checkpoint.load()
    whole = [key for key, value in loaded.items() if key != "d2t" and not value.is_floating_point()]
    if whole:
        raise SpecdoctorError(
            f"{folder}: tensor {checkpoint.tensors[whole[0]].name} holds {loaded[whole[0]].dtype}, expected floating "
            "point numbers; convert the checkpoint back from its quantised form"
        )
    tensors = {
        key: value.to(where, kind) if value.is_floating_point() else value.to(where) for key, value in loaded.items()
    }
    # A frozen copy of the target's own tensor is shared with it, where device and dtype allow.
    embedding = shared(tensors.pop("embed_tokens.weight", None), target.embedding.weight, where, kind)
    head = shared(tensors.pop("lm_head.weight", None), target.lm_head.weight, where, kind)
    if ids is not None:
        checkpoint, tensors, head = cut_to(ids, checkpoint, tensors, head)
    binding = Binding(
        checkpoint,
        target,
        name or folder.stem,
        where,
        kind,
        tensors,
        embedding,
        head,
        attention=choose_attention(where, kind).compute,
    )
    try:
        drafter = BINDERS[checkpoint.spec.algorithm](binding)
    except SpecdoctorError as error:
        raise SpecdoctorError(f"{checkpoint.where}: {error}") from None
    apply_calibration(drafter, checkpoint)
    return drafter


def _check_pair(checkpoint: DraftCheckpoint, target: Target) -> None:
    """Raise for the first fact that every drafter shares with its target and this one does not."""
    rows = target.embedding.weight.shape[0]
    shape = TargetShape(target.name, target.hidden_size, target.num_layers, target.vocab_size, rows)
    for misfit in misfits(checkpoint, shape):
        raise SpecdoctorError(misfit.line)
