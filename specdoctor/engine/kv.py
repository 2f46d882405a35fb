"""The engine's own KV cache: slots of columns, append and keep-rows.

Contract: column c of a slot holds the keys and values of the token at position c (of a draft tree, of the node that was
kept there). A forward writes its new rows behind the committed columns; `keep` commits some of them, in order, and what
is not kept is overwritten by the next write. Nothing is ever recomputed. Column counts grow in buckets, so backends
that plan for each shape see few shapes.
"""

from collections.abc import Sequence as Seq
from heapq import heappop, heappush

import torch
from torch import Tensor

from specdoctor.engine.rows import PackedRows


class KVCache:
    """Keys and values [slots, kv_heads, columns, head_dim] for each layer, allocated on first use in the shape seen."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lengths: list[int] = []  # committed columns by slot
        self._free: list[int] = []  # a heap
        self._columns = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def open(self) -> int:
        """Take an empty slot, the lowest free one (neighbours in a batch then lie side by side)."""
        if self._free:
            return heappop(self._free)
        self.lengths.append(0)
        return len(self.lengths) - 1

    def close(self, slot: int) -> None:
        self.lengths[slot] = 0
        heappush(self._free, slot)

    def write(self, layer: int, k: Tensor, v: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """Put `k`, `v` [hkv, N, D] behind the committed columns; return both [R, hkv, L, D] over all visible columns.

        L is the same bucketed width for all rows (`rows.columns`); columns beyond a sequence's own are zeros or stale
        and must be hidden by the mask.
        """
        keys, values = self._room(layer, k, v, rows.columns)
        if len(rows.slots) == 1:
            slot, start, n = rows.slots[0], rows.starts[0], rows.counts[0]
            keys[slot, :, start : start + n] = k
            values[slot, :, start : start + n] = v
        else:
            keys[rows.row_slot, :, rows.row_column] = k.transpose(0, 1)
            values[rows.row_slot, :, rows.row_column] = v.transpose(0, 1)
        first, R = rows.slots[0], len(rows.slots)
        if rows.slots_adjacent:
            return keys[first : first + R, :, : rows.columns], values[first : first + R, :, : rows.columns]
        index = rows.slot_index
        return keys[index, :, : rows.columns], values[index, :, : rows.columns]

    def keep(self, slot: int, rows: Seq[int]) -> None:
        """Commit the rows (0-based within the last write, ascending) and forget the others."""
        start = self.lengths[slot]
        if rows and rows[-1] != len(rows) - 1:  # ascending, so anything but a prefix ends beyond its own length
            self._close_gaps(slot, start, rows)
        self.lengths[slot] = start + len(rows)

    def cut(self, slot: int, length: int) -> None:
        """Forget the committed columns from `length` on; what comes next is written over them."""
        assert length <= self.lengths[slot]
        self.lengths[slot] = length

    @torch.inference_mode()  # as the tensors were made
    def _close_gaps(self, slot: int, start: int, rows: Seq[int]) -> None:
        source = torch.tensor([start + row for row in rows], device=self.device)
        for pair in self._layers.values():
            for tensor in pair:
                tensor[slot, :, start : start + len(rows)] = tensor[slot][:, source]

    def bytes(self) -> int:
        """Bytes held, by all layers and slots."""
        return sum(t.numel() * t.element_size() for pair in self._layers.values() for t in pair)

    def _room(self, layer: int, k: Tensor, v: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        self._columns = max(self._columns, columns)
        pair = self._layers.get(layer)
        if pair is None or pair[0].shape[0] < len(self.lengths) or pair[0].shape[2] < columns:
            width = self._columns
            if pair is not None:  # never narrower than what is held already, and in leaps where it has to grow
                old = pair[0].shape[2]
                width = max(width, old if columns <= old else min(2 * old, 2 * columns))
            pair = self._layers[layer] = (
                self._grown(pair and pair[0], k, width),
                self._grown(pair and pair[1], v, width),
            )
        return pair

    def _grown(self, old: Tensor | None, like: Tensor, columns: int) -> Tensor:
        # Zeros, not empty: hidden columns take part in the weighted sum with weight 0, and 0 * NaN is NaN.
        new = torch.zeros(
            len(self.lengths), like.shape[0], columns, like.shape[2], dtype=like.dtype, device=self.device
        )
        if old is not None:
            new[: old.shape[0], :, : old.shape[2]] = old
        return new
