"""Masks of draft trees, in every form that an attention kernel takes. All are the same relation.

Contract: a tree of n nodes is its parent list, `parents[i]` the node above node i and -1 a root; the order of the nodes
is free, and several roots (a forest: several requests, or several children of one anchor) are allowed. Row i sees
column j iff j is an ancestor of i or i itself, so no row is ever empty. Hidden columns of an additive mask hold the
most negative finite number of its dtype (float16: -65504), never -inf: a row of -inf is NaN after softmax.

Source: the first source document, part A (tree mask, mask dtype); SpecInfer (Miao et al. 2023), section 4.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdoctor.errors import SpecdoctorError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

WORD_BITS = 64


def checked_parents(parents: Iterable[object], where: str = "parents") -> tuple[int, ...]:
    """The parent list as integers. Raises `SpecdoctorError` for what is no list of trees: range, type, cycle."""
    checked: list[int] = []
    listed = list(parents)
    for node, parent in enumerate(listed):
        if isinstance(parent, bool) or not isinstance(parent, int):
            raise SpecdoctorError(f"{where}: parent of node {node} is {parent!r}, expected a whole number")
        if not -1 <= parent < len(listed):
            raise SpecdoctorError(
                f"{where}: parent of node {node} is {parent}, expected -1 (a root) or a node from 0 to "
                f"{len(listed) - 1}"
            )
        checked.append(parent)
    if cycle := _cycle(checked):
        raise SpecdoctorError(
            f"{where}: nodes {' -> '.join(map(str, cycle))} form a cycle, expected every node to lead up to a root "
            "(parent -1)"
        )
    return tuple(checked)


def _cycle(parents: Seq[int]) -> list[int]:
    """A cycle as node, parent, ..., node; empty when there is none."""
    settled = [False] * len(parents)
    for start in range(len(parents)):
        way: dict[int, int] = {}  # node -> its place on the way up
        node = start
        while node != -1 and not settled[node]:
            if node in way:
                loop = list(way)[way[node] :]
                return [*loop, loop[0]]
            way[node] = len(way)
            node = parents[node]
        for passed in way:
            settled[passed] = True
    return []


def tree_depths(parents: Seq[int]) -> list[int]:
    """Depth of each node, 0 for a root."""
    depths = [-1] * len(parents)
    for start in range(len(parents)):
        way: list[int] = []
        node = start
        while node != -1 and depths[node] < 0:
            way.append(node)
            node = parents[node]
        depth = -1 if node == -1 else depths[node]
        for passed in reversed(way):
            depth += 1
            depths[passed] = depth
    return depths


def tree_positions(parents: Seq[int], start: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Positions [n]: `start` for a root and one more for each level, whatever the order of the nodes."""
    return torch.tensor(tree_depths(parents), dtype=torch.long, device=device) + start


def with_anchor(parents: Seq[int]) -> tuple[int, ...]:
    """Parents of the rows [anchor, nodes...] that a target really verifies: the anchor is the root of all."""
    return (-1, *(parent + 1 for parent in parents))


def tree_attention_mask(parents: Seq[int], device: torch.device | str = "cpu") -> Tensor:
    """Boolean [n, n], True where row i sees column j: the ancestor closure, diagonal included."""
    n = len(parents)
    mask = torch.eye(n, dtype=torch.bool)
    for node in _top_down(parents):
        if parents[node] != -1:
            mask[node] |= mask[parents[node]]
    return mask.to(device)


def ancestor_bits(parents: Seq[int], device: torch.device | str = "cpu") -> Tensor:
    """The mask as packed words [n, ceil(n / 64)] of int64: bit b of word w says whether node 64 w + b is seen.

    Bit 63 is the sign: kernels shift right and take the lowest bit, so an arithmetic shift does no harm.
    """
    words = -(-len(parents) // WORD_BITS)
    rows: list[list[int]] = [[0] * words for _ in parents]
    for node in _top_down(parents):
        if parents[node] != -1:
            rows[node] = list(rows[parents[node]])
        rows[node][node // WORD_BITS] |= 1 << node % WORD_BITS
    signed = [[word - (1 << WORD_BITS) if word >> (WORD_BITS - 1) else word for word in row] for row in rows]
    return torch.tensor(signed, dtype=torch.long, device=device).view(len(parents), words)


def mask_of_bits(bits: Tensor, columns: int | None = None) -> Tensor:
    """Packed words [n, W] back to the boolean [n, columns] (default: n columns)."""
    column = torch.arange(bits.shape[0] if columns is None else columns, device=bits.device)
    return _bit(bits[:, column // WORD_BITS], column % WORD_BITS)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `visible` [..., n, columns] is True, the most negative finite number of `dtype` elsewhere.

    Raises `SpecdoctorError` for a row that sees nothing: no number can make its softmax right.
    """
    empty = ~visible.any(-1)
    if empty.any():
        row = int(empty.flatten().nonzero()[0, 0])
        raise SpecdoctorError(f"mask: row {row} sees no column, expected at least itself; build it from the parents")
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)


def tree_mask_mod(bits: Tensor, context: int = 0) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask as a `mask_mod` of flex attention: `context` columns that all rows see, then the tree's own."""
    n = bits.shape[0]

    def visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        node = column - context
        # Rows and columns are padded to whole blocks; what lies outside reads node 0 and is cut away again.
        inside, safe = (node >= 0) & (node < n), node.clamp(0, n - 1)
        seen = _bit(bits[row.clamp(0, n - 1), safe // WORD_BITS], safe % WORD_BITS)
        return (column < context) | (inside & seen)

    return visible


def tree_block_mask(parents: Seq[int], context: int = 0, device: torch.device | str = "cpu") -> "BlockMask":
    """The mask as a block mask for `torch.nn.attention.flex_attention`, [1, 1, n, context + n]."""
    from torch.nn.attention.flex_attention import create_block_mask

    mod = tree_mask_mod(ancestor_bits(parents, device), context)
    n = len(parents)
    return create_block_mask(mod, None, None, n, context + n, device=str(device))


def _bit(words: Tensor, place: Tensor) -> Tensor:
    return (words >> place & 1).bool()


def _top_down(parents: Seq[int]) -> list[int]:
    """Node indices, parents before children."""
    depths = tree_depths(parents)
    return sorted(range(len(parents)), key=depths.__getitem__)
