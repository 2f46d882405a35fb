"""P-EAGLE: EAGLE-3's network, all drafts of a round from one forward (formats page 1.7.5; P-EAGLE, arXiv 2602.01469).

Depth 0 reads the anchor and the target's last feature. Depth d reads the mask token and, in the place of the taps, the
trained `mask_hidden`; it stands d positions further on and sees the features before it and the depths above: in
training a depth sees the depth-0 rows up to its own anchor and the lower depths of the same anchor, which is causal
attention over [features, depth 0, depth 1, ...]. The columns of the depths are never kept.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from specdoctor.drafters.binding import Binding
from specdoctor.drafters.block_tree import marginals
from specdoctor.drafters.eagle3 import bound_eagle3
from specdoctor.drafters.recurrent import RecurrentDrafter
from specdoctor.drafters.tree_drafting import Expansion
from specdoctor.engine.draft import Draft
from specdoctor.engine.sequence import Sequence


class ParallelEagleDrafter(RecurrentDrafter):
    """A P-EAGLE drafter bound to a target. Drafts of a round do not depend on one another."""

    runs_ahead = True
    mask_hidden: Tensor  # [1, n * Ht]

    def propose(self, sequences: Seq[Sequence], budget: int) -> list[Draft]:
        logits = self.depth_logits(sequences, budget).flatten(0, 1)  # [R * K, dV]
        uniforms = self.uniforms(sequences, budget)
        flat = None if uniforms is None else uniforms.flatten()
        tokens, q = self.choose(logits, sequences[0].sampling, flat)
        R = len(sequences)
        return self.drafts(tokens.view(R, budget), None if q is None else q.view(R, budget, -1))

    def expansion(self, sequences: Seq[Sequence], depth: int) -> Expansion:
        """A tree is a product of marginals: no depth knows what was drafted above it."""
        return marginals(self.depth_logits(sequences, depth))

    def depth_logits(self, sequences: Seq[Sequence], depths: int) -> Tensor:
        """Draft logits [R, depths, dV] behind each anchor, from one forward over the waiting features and the masks."""
        counts = [sum(len(part) for part in s.drafter_state.waiting) for s in sequences]
        starts = [self.cache.lengths[s.drafter_state.slot] for s in sequences]
        tokens, features = self.take(sequences, counts)
        masks = self.network.features(self.mask_hidden).expand(depths - 1, -1)
        ids = [token for part in tokens for token in [*part, *[self.spec.mask_id] * (depths - 1)]]
        rows = self.rows(sequences, starts, [n + depths - 1 for n in counts])
        _, scored = self.step(
            torch.tensor(ids, device=self.device), torch.cat([x for part in features for x in (part, masks)]), rows, 0
        )
        for sequence, count in zip(sequences, counts, strict=True):
            self.cache.keep(sequence.drafter_state.slot, range(count))
        ends = torch.tensor([n + depths - 1 for n in counts], device=self.device).cumsum(0)
        wanted = ends[:, None] - depths + torch.arange(depths, device=self.device)  # [R, depths]
        return self.logits(scored[wanted])


def bind_peagle(binding: Binding) -> ParallelEagleDrafter:
    """A P-EAGLE drafter from its checkpoint."""
    mask = binding.tensors.pop("mask_hidden")
    drafter = bound_eagle3(binding, ParallelEagleDrafter)
    drafter.mask_hidden = mask.view(1, -1)
    return drafter
