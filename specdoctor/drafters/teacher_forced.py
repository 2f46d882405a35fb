"""Many blocks of one text at once, their drafts forced to be the text: what exact acceptance is computed from.

Contract: the features of the text lie once in the drafter's cache, written through `observe`. Any number of blocks, one
below each anchor, then run in one packed forward without padding: block j sees the features before its own anchor and
the rows of its own block, nothing of its neighbours, so each row gets what it would get in decoding. The sequential
head walks all blocks a position at a time with the tokens it is told, so no logits [blocks, K, V] ever exist.
"""

from collections.abc import Sequence as Seq
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from specdoctor.drafters.block import BlockDrafter
from specdoctor.drafters.draft_vocabulary import over_target_vocabulary
from specdoctor.engine.rows import PackedRows
from specdoctor.kernels.attention import HIDDEN


class AnchorBlocks(PackedRows):
    """The layout of A blocks of B rows behind C committed columns of one slot. Row j * B + i is row i of block j."""

    def __init__(self, slot: int, columns: int, anchors: Seq[int], block: int, device: torch.device) -> None:
        """`anchors` [A] are the positions of the blocks' first tokens; block j sees the columns before `anchors[j]`."""
        assert max(anchors) <= columns, "a block needs the features of everything before its anchor"
        super().__init__([slot], [columns], [len(anchors) * block], device)
        self.anchors = torch.tensor(list(anchors), device=device)  # [A]
        self.block = block

    @cached_property
    def positions(self) -> Tensor:
        """[A * B]: blocks overlap in position, never in column."""
        return (self.anchors[:, None] + torch.arange(self.block, device=self.device)).flatten()

    def mask(self, window: int | None = None, causal: bool = False, from_anchor: bool = False) -> Tensor:
        """Additive float32 mask [1, 1, A * B, columns], made once a forward; the arguments are `PackedRows.mask`'s."""
        key = (window, causal, from_anchor)
        if key not in self._masks:
            column = torch.arange(self.columns, device=self.device)
            row = torch.arange(self.n, device=self.device)
            committed = self.starts[0]
            inside = column - committed  # place of a column among the rows of this forward
            same_block = torch.div(inside, self.block, rounding_mode="floor") == (row // self.block)[:, None]
            own = same_block & (inside >= 0) & (inside < self.n)
            if causal:
                own = own & (inside <= row[:, None])
            visible = own | (column < self.anchors.repeat_interleave(self.block)[:, None])
            if window:
                where = column.clone()  # of a feature: its column; of a block's row: its position
                where[committed : committed + self.n] = self.positions
                if from_anchor:
                    visible = visible & (where >= self.anchors.repeat_interleave(self.block)[:, None] - window)
                else:
                    visible = visible & ((self.positions[:, None] - where).abs() < window)
            zero = torch.zeros((), device=self.device)
            self._masks[key] = torch.where(visible, zero, HIDDEN)[None, None]
        return self._masks[key]


def blocks_hidden(drafter: BlockDrafter, slot: int, anchors: Seq[int], anchor_ids: Tensor) -> Tensor:
    """Final hidden states [A, max_draft, H] of the proposing rows of one block below each anchor.

    `anchors` [A] positions, `anchor_ids` [A] their tokens. The same rows as `BlockDrafter.block_hidden`, for many
    anchors of one text. Leaves the cache as it was.
    """
    spec, A = drafter.spec, len(anchors)
    ids = torch.full((A, spec.block_size), spec.mask_id, device=drafter.device)
    ids[:, 0] = anchor_ids
    x = F.embedding(ids.view(-1), drafter.embedding)
    if spec.embed_scale != 1.0:
        x = x * spec.embed_scale
    columns = drafter.backbone.cache.lengths[slot]
    rows = AnchorBlocks(slot, columns, anchors, spec.block_size, drafter.device)
    hidden = drafter.backbone(x, rows).view(A, spec.block_size, -1)
    return hidden[:, 1 - spec.row_offset :]


class HeadWalk:
    """The sequential head over blocks whose previous tokens are given, one position at a time.

    Rows may be dropped on the way (`keep`): what is no longer needed costs nothing further.
    """

    def __init__(self, drafter: BlockDrafter, hidden: Tensor) -> None:
        """`hidden` [A, K, H] of the blocks."""
        self.drafter, self.hidden = drafter, hidden
        self.rows = torch.arange(hidden.shape[0], device=hidden.device)  # blocks still walked
        self._state = None if drafter.markov is None else drafter.markov.start(hidden.shape[0])
        self._k = 0

    def keep(self, kept: Tensor) -> None:
        """Go on with these of the walked rows only: indices into `rows`."""
        self.rows = self.rows[kept]
        if self._state is not None:
            self._state = self._state[kept]

    def step(self, prev: Tensor, base: Tensor | None = None) -> Tensor:
        """Draft logits [rows, V] of the next position, given the token [rows] before it; -inf where no draft row is.

        `base` [rows, dV]: the logits before the sequential head, where the caller has them already.
        """
        hidden = self.hidden[self.rows, self._k]  # [rows, H]
        base = self.base() if base is None else base
        self._k += 1
        if self.drafter.markov is not None and self._state is not None:
            code, self._state = self.drafter.markov.step(self._state, prev, hidden)
            base = self.drafter.markov.corrected(base, code)
        return over_target_vocabulary(base, self.drafter.d2t, self.drafter.spec.vocab_size, -torch.inf)

    def base(self) -> Tensor:
        """Logits [rows, dV] of the next position before the sequential head."""
        return self.drafter.base_logits(self.hidden[self.rows, self._k].unsqueeze(1))[:, 0]
