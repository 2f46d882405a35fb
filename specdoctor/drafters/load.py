"""From a checkpoint folder to a drafter bound to a target: the facts that both must share are checked here."""

from pathlib import Path

import torch
from torch import Tensor

from specdoctor.drafters.block import BlockDrafter
from specdoctor.engine.device import resolve_device, resolve_dtype
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.block_checkpoint import DraftCheckpoint, read_draft
from specdoctor.kernels.attention import choose_attention


def load_drafter(
    folder: Path, target: Target, *, name: str = "", device: str = "same", dtype: str = "same"
) -> BlockDrafter:
    """Read a draft checkpoint and bind it to `target`; `same` takes the target's device and dtype.

    Raises `SpecdoctorError` when the pair cannot fit: hidden size, taps, vocabulary rows, mask id.
    """
    checkpoint = read_draft(folder)
    _check_pair(checkpoint, target)
    where = target.device if device == "same" else resolve_device(device, "--draft-device")
    kind = target.dtype if dtype == "same" else resolve_dtype(dtype, where, folder, "--draft-dtype")
    tensors = {key: value.to(where, kind) for key, value in checkpoint.tensors.items()}
    # A frozen copy of the target's own tensor is shared with it, where device and dtype allow.
    embedding = _shared(tensors.pop("embed_tokens.weight", None), target.embedding.weight, where, kind)
    head = _shared(tensors.pop("lm_head.weight", None), target.lm_head.weight, where, kind)
    with torch.device("meta"):
        drafter = BlockDrafter(checkpoint.spec, name or folder.name, embedding, head)
    drafter.load_state_dict({_module_name(key): value for key, value in tensors.items()}, strict=True, assign=True)
    drafter.requires_grad_(False)
    drafter.verify_on = target.device
    try:
        drafter.backbone.prepare(checkpoint.spec, choose_attention(where, kind).compute)
    except SpecdoctorError as error:
        raise SpecdoctorError(f"{folder / 'config.json'}: {error}") from None
    return drafter.eval()


def _module_name(tensor: str) -> str:
    for prefix, module in (("markov_head.", "markov."), ("confidence_head.", "confidence.")):
        if tensor.startswith(prefix):
            return module + tensor.removeprefix(prefix)
    return f"backbone.{tensor}"


def _shared(own: Tensor | None, target: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    target = target.detach()
    theirs = target if target.device == device and target.dtype == dtype else target.to(device, dtype)
    if own is None or (own.shape == theirs.shape and torch.equal(own, theirs)):
        return theirs
    return own


def _check_pair(checkpoint: DraftCheckpoint, target: Target) -> None:
    spec, where = checkpoint.spec, checkpoint.folder / "config.json"
    if spec.hidden_size != target.hidden_size:
        raise SpecdoctorError(
            f"{where}: key hidden_size is {spec.hidden_size}, but the target {target.name} has {target.hidden_size}; "
            "this drafter was made for another target"
        )
    if spec.num_target_layers is not None and spec.num_target_layers != target.num_layers:
        raise SpecdoctorError(
            f"{where}: key num_target_layers is {spec.num_target_layers}, but the target {target.name} has "
            f"{target.num_layers} layers; this drafter was made for another target"
        )
    if max(spec.taps) > target.num_layers:
        raise SpecdoctorError(
            f"{where}: target_layer_ids ends with layer {max(spec.taps) - 1}, but the target {target.name} has "
            f"layers 0 to {target.num_layers - 1}"
        )
    rows = _rows(checkpoint, "embed_tokens.weight", target.embedding.weight)
    if not 0 <= spec.mask_id < rows:
        raise SpecdoctorError(
            f"{where}: key mask_token_id is {spec.mask_id}, but the embedding has rows 0 to {rows - 1}"
        )
    head_rows = _rows(checkpoint, "lm_head.weight", target.lm_head.weight)
    if head_rows != target.vocab_size or spec.vocab_size != target.vocab_size:
        raise SpecdoctorError(
            f"{where}: vocab_size is {spec.vocab_size} and the head has {head_rows} rows, but the target {target.name} "
            f"has {target.vocab_size}; run `specdoctor check-tokenizer` on the pair"
        )


def _rows(checkpoint: DraftCheckpoint, name: str, target: Tensor) -> int:
    return checkpoint.tensors[name].shape[0] if name in checkpoint.tensors else target.shape[0]
