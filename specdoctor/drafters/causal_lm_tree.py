"""Trees from a causal LM drafter: one forward a level, behind the text that the model has read.

None of a tree's columns is kept: what is accepted is read again with the token after it, in one forward.
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdoctor.drafters.recurrent_tree import LevelRows
from specdoctor.engine.sequence import Sequence

if TYPE_CHECKING:
    from specdoctor.drafters.causal_lm import CausalLMDrafter


class CausalLMExpansion:
    """Levels of a tree from a draft model."""

    def __init__(self, drafter: "CausalLMDrafter", sequences: Seq[Sequence]) -> None:
        self.drafter, self.sequences = drafter, sequences

    def root(self) -> Tensor:
        drafter = self.drafter
        logits = drafter.catch_up(self.sequences)
        slots = [s.drafter_state.slot for s in self.sequences]
        self.rows = LevelRows(slots, [drafter.model.cache.lengths[slot] for slot in slots], drafter.device)
        return drafter.vocabularies.narrow(logits).unsqueeze(1)

    def below(self, tokens: Tensor, origin: Tensor) -> Tensor:
        R, M = tokens.shape
        drafter = self.drafter
        own = drafter.own_ids[tokens.to(drafter.device)].flatten()
        logits = drafter.model.forward(self.rows.next(M, origin), own).logits
        return drafter.vocabularies.narrow(logits).view(R, M, -1)


def own_ids(drafter: "CausalLMDrafter") -> Tensor:
    """[target rows] the draft model's id of each target id that it can propose; -1 for the others."""
    vocabularies = drafter.direct_vocabularies
    rows = vocabularies.narrow(torch.empty(1, drafter.model.vocab_size, device=drafter.device)).shape[-1]
    every = torch.arange(rows, device=drafter.device)
    out = torch.full((drafter.target_rows,), -1, device=drafter.device)
    out[vocabularies.target_ids(every)] = vocabularies.draft_ids(every)
    return out
