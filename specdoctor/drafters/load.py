"""From a checkpoint to a drafter bound to a target: the facts that both must share are checked here.

Adding an algorithm is a line in `BINDERS` and a module with a function `(Binding) -> Drafter`.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from specdoctor.drafters.binding import Binding, shared
from specdoctor.drafters.block import bind_block
from specdoctor.drafters.eagle3 import bind_eagle3
from specdoctor.engine.device import resolve_device, resolve_dtype
from specdoctor.engine.draft import Drafter
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import DraftCheckpoint
from specdoctor.formats.drafts.read import read_draft
from specdoctor.kernels.attention import choose_attention

# By `DraftSpec.algorithm`.
BINDERS: dict[str, Callable[[Binding], Drafter]] = {
    "dspark": bind_block,
    "dflash": bind_block,
    "eagle3": bind_eagle3,
}


def load_drafter(folder: Path, target: Target, *, name: str = "", device: str = "same", dtype: str = "same") -> Drafter:
    """Read a draft checkpoint and bind it to `target`; `same` takes the target's device and dtype.

    Raises `SpecdoctorError` when the checkpoint is broken or the pair cannot fit: hidden size, taps, vocabulary rows,
    mask id.
    """
    checkpoint = read_draft(folder, target.num_layers)
    checkpoint.refuse_if_broken()
    if checkpoint.spec.algorithm not in BINDERS:
        raise SpecdoctorError(
            f"{folder}: recognised as {checkpoint.title} (by {checkpoint.evidence}); it can be inspected, but there is "
            "no engine for this algorithm here"
        )
    _check_pair(checkpoint, target)
    where = target.device if device == "same" else resolve_device(device, "--draft-device")
    kind = target.dtype if dtype == "same" else resolve_dtype(dtype, where, folder, "--draft-dtype")
    with torch.inference_mode(False):
        loaded = checkpoint.load()
    tensors = {
        key: value.to(where, kind) if value.is_floating_point() else value.to(where) for key, value in loaded.items()
    }
    binding = Binding(
        checkpoint,
        target,
        name or folder.stem,
        where,
        kind,
        tensors,
        # A frozen copy of the target's own tensor is shared with it, where device and dtype allow.
        embedding=shared(tensors.pop("embed_tokens.weight", None), target.embedding.weight, where, kind),
        head=shared(tensors.pop("lm_head.weight", None), target.lm_head.weight, where, kind),
        attention=choose_attention(where, kind).compute,
    )
    try:
        return BINDERS[checkpoint.spec.algorithm](binding)
    except SpecdoctorError as error:
        raise SpecdoctorError(f"{checkpoint.where}: {error}") from None


def _check_pair(checkpoint: DraftCheckpoint, target: Target) -> None:
    """What every drafter shares with its target; an algorithm's binder checks what is its own."""
    spec, where = checkpoint.spec, checkpoint.where
    needed = spec.target_hidden_size or spec.hidden_size
    if spec.taps and needed != target.hidden_size:
        key = "target_hidden_size" if spec.target_hidden_size else "hidden_size"
        raise SpecdoctorError(
            f"{where}: key {key} is {needed}, but the target {target.name} has {target.hidden_size}; "
            "this drafter was made for another target"
        )
    if spec.num_target_layers is not None and spec.num_target_layers != target.num_layers:
        raise SpecdoctorError(
            f"{where}: key num_target_layers is {spec.num_target_layers}, but the target {target.name} has "
            f"{target.num_layers} layers; this drafter was made for another target"
        )
    if spec.taps and max(spec.taps) > target.num_layers:
        raise SpecdoctorError(
            f"{where}: target_layer_ids ends with layer {max(spec.taps) - 1}, but the target {target.name} has "
            f"layers 0 to {target.num_layers - 1}"
        )
    mask_id = getattr(spec, "mask_id", None)
    rows = spec.vocab_size if spec.embed_source == "checkpoint" else target.embedding.weight.shape[0]
    if mask_id is not None and not 0 <= mask_id < rows:
        raise SpecdoctorError(f"{where}: key mask_token_id is {mask_id}, but the embedding has rows 0 to {rows - 1}")
    head_rows = spec.head_rows if spec.head_source == "checkpoint" else target.vocab_size
    if spec.algorithm != "causal-lm" and (
        spec.vocab_size != target.vocab_size or (head_rows != target.vocab_size and not spec.has_vocabulary_map)
    ):
        raise SpecdoctorError(
            f"{where}: vocab_size is {spec.vocab_size} and the head has {head_rows} rows, but the target {target.name} "
            f"has {target.vocab_size}; run `specdoctor check-tokenizer` on the pair"
        )
