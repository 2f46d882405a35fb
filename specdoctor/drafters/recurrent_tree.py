"""Trees from a feature-recurrent drafter: one forward a level, each node fed with its own parent's state.

A level's keys and values are written behind the committed ones and the levels above; each node sees its ancestors. None
of them is kept.
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdoctor.engine.rows import PackedRows
from specdoctor.engine.sequence import Sequence

if TYPE_CHECKING:
    from specdoctor.drafters.recurrent import RecurrentDrafter


class LevelRows:
    """Lays out the levels of R growing trees in a KV cache, all with the same number of nodes a level."""

    def __init__(self, slots: Seq[int], bases: Seq[int], device: torch.device) -> None:
        self.slots, self.bases, self.device = list(slots), list(bases), device
        self._depths: list[int] = []
        self._level = 0
        self._seen = torch.empty(len(slots), 0, 0, dtype=torch.bool, device=device)  # [R, M, columns] of the last level

    def next(self, nodes: int, origin: Tensor) -> PackedRows:
        """The rows of the next level of `nodes` nodes; `origin` [R, nodes] are their parents in the level before."""
        R, written = len(self.slots), len(self._depths)
        own = torch.eye(nodes, dtype=torch.bool, device=self.device).expand(R, -1, -1)
        if self._level:
            above = self._seen.gather(1, origin.unsqueeze(-1).expand(-1, -1, written))
            own = torch.cat([above, own], dim=-1)
        self._seen = own
        self._depths += [self._level] * nodes
        self._level += 1
        starts = [base + written for base in self.bases]
        depths = [self._depths] * R
        return PackedRows(self.slots, starts, [nodes] * R, self.device, list(own.unbind()), depths, self.bases)


class RecurrentExpansion:
    """Levels of a tree from a recurrent drafter."""

    def __init__(self, drafter: "RecurrentDrafter", sequences: Seq[Sequence]) -> None:
        self.drafter, self.sequences = drafter, sequences
        self.hidden = torch.empty(0)  # [R, M, H] states of the last level
        self.level = 0

    def root(self) -> Tensor:
        hidden, scored = self.drafter.extend(self.sequences)
        slots = [s.drafter_state.slot for s in self.sequences]
        bases = [self.drafter.cache.lengths[slot] for slot in slots]
        self.rows = LevelRows(slots, bases, self.drafter.device)
        self.hidden = hidden.unsqueeze(1)
        return self.drafter.logits(scored).unsqueeze(1)

    def below(self, tokens: Tensor, origin: Tensor) -> Tensor:
        R, M = tokens.shape
        self.level += 1
        parent = self.hidden.gather(1, origin.unsqueeze(-1).expand(-1, -1, self.hidden.shape[-1]))
        rows = self.rows.next(M, origin)
        hidden, scored = self.drafter.step(tokens.flatten(), parent.flatten(0, 1), rows, self.level)
        self.hidden = hidden.view(R, M, -1)
        return self.drafter.logits(scored).view(R, M, -1)
