"""Blocks of a packed batch: which tokens are anchors, and what every row of every block is and should say.

Contract: A isolated blocks of B rows each lie one after another, [A * B] rows without padding; block j belongs to the
sequence of its anchor and sees that sequence's features before the anchor and its own rows. Proposing row k (of K)
predicts token anchor + 1 + k; a row whose token is beyond the answer has no weight and never meets the LM head.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from specdoctor.training.batch import TrainingBatch


@dataclass(slots=True)
class Blocks:
    """A blocks over a batch of N packed tokens, the blocks of a sequence together."""

    anchors: Tensor  # [A] packed index of each anchor
    firsts: Tensor  # [A] packed index of the first token of its sequence
    bounds: list[int]  # [S + 1] blocks of sequence s are bounds[s] to bounds[s + 1]
    block: int  # B
    tokens: Tensor  # [A, K + 1] the anchor and the tokens behind it; the batch's last one stands for those beyond
    valid: Tensor  # [A, K] bool: proposing row k has an answer token to predict
    states: Tensor  # [A, K] packed index of the state whose logits are the target's for row k

    @property
    def count(self) -> int:
        return len(self.anchors)

    @property
    def offsets(self) -> Tensor:
        """[A] positions of the anchors in their sequences; block j sees so many features."""
        return self.anchors - self.firsts

    @property
    def positions(self) -> Tensor:
        """[A * B] position of each block row in its sequence."""
        return (self.offsets[:, None] + torch.arange(self.block, device=self.anchors.device)).flatten()

    @property
    def labels(self) -> Tensor:
        """[A, K] the token that proposing row k predicts."""
        return self.tokens[:, 1:]

    @property
    def previous(self) -> Tensor:
        """[A, K] the token before it, as the sequential head is told (teacher forcing)."""
        return self.tokens[:, :-1]


def candidates(batch: TrainingBatch) -> Tensor:
    """Packed indices [C] of tokens that may be anchors: an answer token whose next token is one of the same sequence.

    As in decoding, where the first anchor is the first token that the target wrote itself.
    """
    allowed = batch.loss_mask.cpu().clone()
    allowed[:-1] &= allowed[1:].clone()
    allowed[torch.tensor(batch.starts[1:]) - 1] = False
    return allowed.nonzero().squeeze(1)


def sample_blocks(
    batch: TrainingBatch, per_sequence: int, block: int, proposals: int, generator: torch.Generator
) -> Blocks:
    """At most `per_sequence` anchors of each sequence, drawn without replacement, in order.

    `generator` is a CPU one, so the same anchors are drawn on every device.
    """
    possible = candidates(batch)
    edges = torch.searchsorted(possible, torch.tensor(batch.starts)).tolist()
    chosen, bounds = [], [0]
    for low, high in pairwise(edges):
        own = possible[low:high]
        if len(own) > per_sequence:
            own = own[torch.randperm(len(own), generator=generator)[:per_sequence].sort().values]
        chosen.append(own)
        bounds.append(bounds[-1] + len(own))
    return lay_blocks(batch, torch.cat(chosen), bounds, block, proposals)


def lay_blocks(batch: TrainingBatch, anchors: Tensor, bounds: list[int], block: int, proposals: int) -> Blocks:
    """Blocks below `anchors` [A], packed indices on the host, of which `bounds` says whose they are."""
    counts = torch.tensor([high - low for low, high in pairwise(bounds)])
    firsts = torch.tensor(batch.starts[:-1]).repeat_interleave(counts)
    ends = torch.tensor(batch.starts[1:]).repeat_interleave(counts)
    index = anchors[:, None] + torch.arange(proposals + 1)  # [A, K + 1]
    inside = index < ends[:, None]
    index = index.clamp_max(batch.starts[-1] - 1)
    valid = (batch.loss_mask.cpu()[index] & inside)[:, 1:].int().cumprod(1).bool()
    device = batch.ids.device
    index = index.to(device)
    return Blocks(
        anchors=anchors.to(device),
        firsts=firsts.to(device),
        bounds=bounds,
        block=block,
        tokens=batch.ids[index],
        valid=valid.to(device),
        states=index[:, :-1],
    )
