"""The optimiser of a run: AdamW, or Muon for the matrices of the network and AdamW for the rest.

Muon (Jordan 2024; torch.optim.Muon) orthogonalises the momentum of a matrix before it steps along it. Its step has the
size of one of AdamW (`match_rms_adamw`), so one learning rate serves both.
"""

from typing import Any

import torch
from torch import nn

from specdoctor.errors import SpecdoctorError
from specdoctor.training.recipe import Optimiser

TABLE = 64  # a matrix this many times as long as wide has a row for each token: no map from states to states


def make_optimiser(settings: Optimiser, module: nn.Module, world: int = 1) -> torch.optim.Optimizer:
    """The optimiser over what `module` trains, on `world` processes; weight decay on matrices only."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    if settings.name == "adamw":
        return _adamw(settings, parameters)
    if not hasattr(torch.optim, "Muon"):
        raise SpecdoctorError(f"optimiser.name is muon, which torch {torch.__version__} has not; expected 2.9 or newer")
    if world > 1:
        raise SpecdoctorError(f"optimiser.name is muon, which runs in one process, found {world}; set it to adamw")
    maps = [p for p in parameters if p.dim() == 2 and 1 < max(p.shape) < TABLE * min(p.shape)]
    if not maps:
        raise SpecdoctorError("optimiser.name is muon, but the drafter has no matrix for it; set it to adamw")
    own = {id(p) for p in maps}
    muon = torch.optim.Muon(maps, lr=settings.lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw")
    rest = [p for p in parameters if id(p) not in own]
    return _Together([muon, _adamw(settings, rest)] if rest else [muon])


def _adamw(settings: Optimiser, parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = parameters[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused)


class _Together(torch.optim.Optimizer):
    """Optimisers of disjoint parameters as one; each keeps its own groups and state."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
