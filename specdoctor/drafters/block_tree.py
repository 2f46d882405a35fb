"""Trees from one parallel block: the backbone runs once, and only the sequential head walks the tree.

First source document, part A: DSpark's bias for a node is conditioned on that node's own path; without a head (DFlash,
Medusa) a tree is a product of marginals, the same distribution for all nodes of a level.
"""

from typing import Any

import torch
from torch import Tensor


class BlockExpansion:
    """Levels of a tree from the rows of a block. `head` is a sequential head of `drafters.heads`, or None."""

    def __init__(self, head: Any, anchors: Tensor, hidden: Tensor, base: Tensor) -> None:
        """`anchors` [R], `hidden` [R, depth, H], `base` [R, depth, dV] logits before the head."""
        self.head, self.anchors, self.hidden, self.base = head, anchors, hidden, base
        self.level = 0
        self.state: Tensor | None = None  # of the head, [R, M, ...] along each node's path

    def root(self) -> Tensor:
        R = len(self.anchors)
        state = None if self.head is None else self.head.start(R).unsqueeze(1)
        return self._logits(self.anchors.unsqueeze(1), state)

    def below(self, tokens: Tensor, origin: Tensor) -> Tensor:
        self.level += 1
        state = self.state
        if state is not None:
            state = state.gather(1, origin.unsqueeze(-1).expand(-1, -1, state.shape[-1]))
        return self._logits(tokens, state)

    def _logits(self, previous: Tensor, state: Tensor | None) -> Tensor:
        """Previous tokens [R, M] and the head's states [R, M, r] to logits [R, M, dV]."""
        R, M = previous.shape
        base = self.base[:, self.level].unsqueeze(1).expand(-1, M, -1)
        if self.head is None:
            return base
        assert state is not None
        hidden = self.hidden[:, self.level].unsqueeze(1).expand(-1, M, -1)
        code, after = self.head.step(state.flatten(0, 1), previous.flatten(), hidden.flatten(0, 1))
        self.state = after.view(R, M, -1)
        return self.head.corrected(base.flatten(0, 1), code).view(R, M, -1)


def marginals(logits: Tensor) -> BlockExpansion:
    """A product of marginals from logits [R, depth, dV]."""
    return BlockExpansion(None, torch.empty(len(logits), device=logits.device), logits, logits)
