"""Which rows of one flat forward belong to which sequence, and what each may see.

Contract: R sequences contribute `counts[r]` rows each, N in all, one after another in one flat row. Row j of sequence r
sees every committed column of its slot and, among the rows of the same forward, those that `visible` allows: itself and
the earlier ones ("causal": a chain or a prefill chunk), all of them ("all": a bidirectional draft block), or what an
explicit [n, n] matrix says (a draft tree's ancestor closure).
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from functools import cached_property

import torch
from torch import Tensor

from specdoctor.kernels.attention import HIDDEN

COLUMN_BUCKET = 64


class PackedRows:
    """The layout of one forward over a KV cache. Letters: R sequences, N rows in all, n = most rows of one sequence."""

    def __init__(
        self,
        slots: Seq[int],
        starts: Seq[int],
        counts: Seq[int],
        device: torch.device,
        visible: Seq[Tensor] | str = "causal",
        depths: Seq[Seq[int]] | None = None,
        bases: Seq[int] | None = None,
    ) -> None:
        self.slots, self.starts, self.counts = list(slots), list(starts), list(counts)
        self.device = device
        # Columns from `bases` on are of one tree that is written level by level: `visible` and `depths` are about them.
        self.bases = self.starts if bases is None else list(bases)
        self.visible = visible  # "causal", "all", or one bool matrix [n_r, start_r - base_r + n_r] for each sequence
        # Tree depth of each column from `bases` on, these rows' own included; None: its index (a chain).
        self.depths = depths
        self.n = max(self.counts)
        needed = max(start + count for start, count in zip(self.starts, self.counts, strict=True))
        self.limit = needed  # above every position and column of this forward
        self.columns = -(-needed // COLUMN_BUCKET) * COLUMN_BUCKET
        self._masks: dict[tuple[int | None, bool, bool], Tensor] = {}  # by the arguments of `mask`

    @property
    def uniform(self) -> bool:
        return min(self.counts) == self.n

    @property
    def slots_adjacent(self) -> bool:
        return self.slots == list(range(self.slots[0], self.slots[0] + len(self.slots)))

    @cached_property
    def positions(self) -> Tensor:
        """[N] position of each row: the sequence's committed length plus the row's depth."""
        if self.depths is None:
            flat = [start + d for start, count in zip(self.starts, self.counts, strict=True) for d in range(count)]
        else:
            rows = zip(self.bases, self.counts, self.depths, strict=True)
            flat = [base + d for base, count, depths in rows for d in depths[-count:]]
        return torch.tensor(flat, device=self.device)

    @cached_property
    def row_sequence(self) -> Tensor:
        return torch.tensor([r for r, count in enumerate(self.counts) for _ in range(count)], device=self.device)

    @cached_property
    def row_offset(self) -> Tensor:
        return torch.tensor([j for count in self.counts for j in range(count)], device=self.device)

    @cached_property
    def slot_index(self) -> Tensor:
        return torch.tensor(self.slots, device=self.device)

    @cached_property
    def row_slot(self) -> Tensor:
        return self.slot_index[self.row_sequence]

    @cached_property
    def row_column(self) -> Tensor:
        return torch.tensor(self.starts, device=self.device)[self.row_sequence] + self.row_offset

    def spread(self, x: Tensor) -> Tensor:
        """[h, N, D] in flat order to [R, h, n, D] (rows beyond a sequence's own count are zeros)."""
        h, _, D = x.shape
        R = len(self.counts)
        if R == 1:
            return x.unsqueeze(0)
        if self.uniform:
            return x.view(h, R, self.n, D).transpose(0, 1)
        out = x.new_zeros(R, h, self.n, D)
        out[self.row_sequence, :, self.row_offset] = x.transpose(0, 1)
        return out

    def gather(self, x: Tensor) -> Tensor:
        """[R, h, n, D] back to [N, h, D] in flat order."""
        if len(self.counts) == 1:
            return x[0].transpose(0, 1)
        if self.uniform:
            return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])
        return x[self.row_sequence, :, self.row_offset]

    def mask(self, window: int | None = None, causal: bool = False, from_anchor: bool = False) -> Tensor:
        """Additive float32 mask [R, 1, n, columns], made once a forward.

        `window` W leaves keys less than W positions away from the query or, with `from_anchor`, the same keys for every
        row: from W positions before the sequence's first row on. `causal` overrides `visible` (layers of one drafter
        may differ).
        """
        key = (window, causal, from_anchor)
        if key not in self._masks:
            visible = self._visible_columns("causal" if causal else self.visible)
            if window and from_anchor:
                edges = torch.tensor(self.starts, device=self.device)[:, None, None] - window
                visible = visible & (self._key_positions()[:, None, :] >= edges)
            elif window:
                distance = self._query_positions()[:, :, None] - self._key_positions()[:, None, :]
                visible = visible & (distance.abs() < window)
            zero = torch.zeros((), device=self.device)
            self._masks[key] = torch.where(visible, zero, HIDDEN).unsqueeze(1)
        return self._masks[key]

    def _visible_columns(self, rule: Seq[Tensor] | str) -> Tensor:
        """Boolean [R, n, columns]; no row is empty, padding rows included."""
        starts = torch.tensor(self.starts, device=self.device)[:, None, None]
        column = torch.arange(self.columns, device=self.device)[None, None, :]
        if rule == "causal":
            return column <= starts + torch.arange(self.n, device=self.device)[None, :, None]
        if rule == "all":
            counts = torch.tensor(self.counts, device=self.device)[:, None, None]
            return (column < starts + counts).expand(-1, self.n, -1)
        assert not isinstance(rule, str)
        bases = torch.tensor(self.bases, device=self.device)[:, None, None]
        out = (column <= bases).repeat(1, self.n, 1)  # the column at `base` too, for padding rows
        for r, (base, start, count) in enumerate(zip(self.bases, self.starts, self.counts, strict=True)):
            out[r, :count, base : start + count] = rule[r]
        return out

    def _query_positions(self) -> Tensor:
        out = torch.zeros(len(self.starts), self.n, dtype=torch.long, device=self.device)
        out[self.row_sequence, self.row_offset] = self.positions
        return out

    def _key_positions(self) -> Tensor:
        out = torch.arange(self.columns, device=self.device).repeat(len(self.starts), 1)
        for r, depths in enumerate(self.depths or []):
            base = self.bases[r]
            out[r, base : base + len(depths)] = torch.tensor(depths, device=self.device) + base
        return out


def pack_pieces(spans: Seq[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Batches of pieces (i, start, end) that cover the spans [first, last) of sequences i, at most `most` rows in each.

    Never two pieces of one sequence in a batch: the later needs the earlier's columns.
    """
    batch: list[tuple[int, int, int]] = []
    rows = 0
    for i, (first, last) in enumerate(spans):
        for start in range(first, last, most):
            end = min(start + most, last)
            if batch and (rows + end - start > most or batch[-1][0] == i):
                yield batch
                batch, rows = [], 0
            batch.append((i, start, end))
            rows += end - start
    if batch:
        yield batch
