"""What the training loop minimises, one maker an algorithm.

Contract: an objective owns `module`, the float32 masters that the optimiser sees. Target, embedding and LM head are not
in it and never receive a gradient. `loss` is a pure function of the module, the batch, the generator and `weights`.
Adding an algorithm is a line in `_MAKERS` and a module with a function `(Recipe, Target, Path | None) -> Objective`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from specdoctor.engine.target import Target
from specdoctor.training.recipe import LossWeights, Recipe

if TYPE_CHECKING:
    from specdoctor.training.batch import TrainingBatch


@dataclass(slots=True)
class Losses:
    """One batch's loss. `parts` are detached scalars for the log, unweighted: ce, l1, accept_1, ..., tau."""

    total: Tensor  # scalar with a graph
    parts: dict[str, Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """An algorithm's module and its loss."""

    module: nn.Module  # what is trained, float32
    taps: tuple[int, ...]  # target states that a batch must bring, indices into HS[0..L]
    weights: LossWeights  # of the phase at hand: the loop sets it before each step

    def loss(self, batch: "TrainingBatch", generator: torch.Generator) -> Losses:
        """The loss of one batch, already averaged over what it counts (rows, positions)."""

    def save(self, folder: Path) -> None:
        """Make `folder`, a checkpoint that `load_drafter` reads; the caller has seen to it that it does not exist yet.

        Whatever is written is complete or absent: `folder` gets its name by a rename.
        """


Maker = Callable[[Recipe, Target, Path | None], Objective]

# Algorithm -> module of this package and function in it; imported when asked for.
_MAKERS = {
    "dspark": ("block_objective", "make_block"),
    "dflash": ("block_objective", "make_block"),
    "eagle3": ("eagle_objective", "make_eagle3"),
    "mtp": ("mtp_objective", "make_mtp"),
    "medusa": ("medusa_objective", "make_medusa"),
    "early-exit": ("early_exit_objective", "make_early_exit"),
    "causal-lm": ("causal_lm_objective", "make_causal_lm"),
}


def _later(module: str, function: str) -> Maker:
    def make(recipe: Recipe, target: Target, start: Path | None) -> Objective:
        return getattr(import_module(f"specdoctor.training.{module}"), function)(recipe, target, start)

    return make


OBJECTIVES: dict[str, Maker] = {name: _later(*place) for name, place in _MAKERS.items()}
