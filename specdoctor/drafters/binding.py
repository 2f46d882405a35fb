"""What a drafter is made from: a checkpoint's tensors on their device, beside the target that it drafts for."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdoctor.engine.target import FINAL_NORMED, Target
from specdoctor.formats.drafts.checkpoint import DraftCheckpoint


@dataclass
class Binding:
    """A checkpoint brought together with a target, after the checks that all algorithms share."""

    checkpoint: DraftCheckpoint
    target: Target
    name: str
    device: torch.device
    dtype: torch.dtype
    tensors: dict[str, Tensor]  # under canonical names, without embedding and head
    embedding: Tensor  # [V, H], the checkpoint's own or the target's
    head: Tensor  # [V or dV, H]
    attention: Any  # the attention path of kernels.attention for this device and dtype

    @property
    def spec(self) -> Any:
        return self.checkpoint.spec

    @property
    def taps(self) -> tuple[int, ...]:
        """The states that the engine hands over: a tap L is the raw one, or the one after the final norm."""
        last = self.target.num_layers if self.spec.tap_final_is_prenorm else FINAL_NORMED
        return tuple(last if tap == self.target.num_layers else tap for tap in self.spec.taps)

    def fill(self, module: nn.Module, tensors: dict[str, Tensor]) -> None:
        """Put tensors, named as the module names them, into a module made on the meta device; strict."""
        module.load_state_dict(tensors, strict=True, assign=True)
        module.requires_grad_(False)
        module.eval()


def shared(own: Tensor | None, target: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The target's tensor, unless the checkpoint has one of its own that differs."""
    target = target.detach()
    theirs = target if target.device == device and target.dtype == dtype else target.to(device, dtype)
    if own is None or (own.shape == theirs.shape and torch.equal(own, theirs)):
        return theirs
    return own
