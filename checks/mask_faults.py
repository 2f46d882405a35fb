"""What is wrong with a mask: the first wrong entry, and the kind of mistake that explains it.

Contract: `visible` says which columns each of n rows sees, laid out [context | tree | padding]; expected is that all
rows see the context and their own ancestors, and nothing sees padding. A mistake that explains the whole matrix
(transposed, causal, shifted, inverted, everything visible) is one fault; else there is one fault for each kind of wrong
entry. A right mask has none.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from specdoctor.kernels.tree_mask import tree_attention_mask

SMALLEST_FOR_A_SHIFT = 3  # rows below which nearly anything is a shift of something


@dataclass(frozen=True)
class MaskFault:
    """One kind of mistake: its first entry by row and column of the matrix, and how many entries it explains."""

    kind: str
    row: int
    column: int
    expected: bool  # whether the row should see the column
    entries: int
    rows: tuple[int, ...]  # rows that have such an entry


def expected_visibility(parents: Seq[int], context: int, columns: int, window: int | None = None) -> Tensor:
    """Boolean [n, columns]: context and ancestors visible, padding hidden.

    `window`: a sliding window of so many positions, the row's own included; context is then the last `context` tokens.
    """
    n = len(parents)
    expected = torch.zeros(n, columns, dtype=torch.bool)
    expected[:, :context] = True
    expected[:, context : context + n] = closure = tree_attention_mask(parents)
    if window is not None:
        depth = closure.sum(-1) - 1
        position = torch.cat([torch.arange(context), context + depth, torch.zeros(columns - context - n).long()])
        expected &= (context + depth)[:, None] - position[None, :] < window
    return expected


def mask_faults(
    visible: Tensor,
    parents: Seq[int],
    context: int = 0,
    window: int | None = None,
    requests: Seq[int] | None = None,
    skip_empty: bool = False,
) -> list[MaskFault]:
    """Faults of a mask, that of the first wrong entry first. `visible` is bool [n, columns].

    `requests` [n] tells nodes of different requests apart. `skip_empty` leaves out rows that see nothing, where
    somebody else reports them.
    """
    expected = expected_visibility(parents, context, visible.shape[1], window)
    wrong = visible != expected
    if not wrong.any():
        return []
    if torch.equal(visible, ~expected):
        return [_fault("inverted boolean", wrong, expected)]
    tree = slice(context, context + len(parents))
    kind = _of_the_tree(visible[:, tree], expected[:, tree])
    if kind is None and _shifted(visible.T, expected.T):
        return [_fault("shifted by one column", wrong, expected)]
    if kind is None and _shifted(visible[:, tree], expected[:, tree]):
        kind = "shifted by one row"
    if kind is None and _shifted(visible[:, tree].T, expected[:, tree].T):
        kind = "shifted by one column"
    explained = []
    if kind is not None:
        of_tree = torch.zeros_like(wrong)
        of_tree[:, tree] = wrong[:, tree]
        explained, wrong = [_fault(kind, of_tree, expected)], wrong & ~of_tree
    rest = _Entries(visible, expected, parents, context, requests or [0] * len(parents))
    return sorted(explained + rest.faults(wrong, skip_empty), key=lambda fault: (fault.row, fault.column))


def _of_the_tree(seen: Tensor, right: Tensor) -> str | None:
    """The one mistake that explains the tree's columns [n, n]."""
    everything = torch.ones_like(right)
    candidates = {
        "everything visible": everything,
        "transposed": right.T,
        "causal instead of tree": everything.tril(),
        "self hidden": right & ~torch.eye(len(right), dtype=torch.bool),
    }
    if torch.equal(seen, right):
        return None
    return next((kind for kind, matrix in candidates.items() if torch.equal(seen, matrix)), None)


def _shifted(seen: Tensor, right: Tensor) -> bool:
    """Whether each row of `seen` is the one before it, or the one behind it, of `right`."""
    if min(seen.shape) < SMALLEST_FOR_A_SHIFT or torch.equal(seen, right):
        return False
    return torch.equal(seen[1:], right[:-1]) or torch.equal(seen[:-1], right[1:])


@dataclass(frozen=True)
class _Entries:
    """A mask whose wrong entries are sorted by kind, one by one."""

    visible: Tensor
    expected: Tensor
    parents: Seq[int]
    context: int
    requests: Seq[int]

    def faults(self, wrong: Tensor, skip_empty: bool) -> list[MaskFault]:
        kinds: dict[str, Tensor] = {}
        empty = ~self.visible.any(-1)
        closure = tree_attention_mask(self.parents)
        for row, column in wrong.nonzero().tolist():
            if empty[row] and skip_empty:
                continue
            kind = "row sees nothing" if empty[row] else self._kind(row, column - self.context, closure)
            kinds.setdefault(kind, torch.zeros_like(wrong))[row, column] = True
        return [_fault(kind, entries, self.expected) for kind, entries in kinds.items()]

    def _kind(self, row: int, node: int, closure: Tensor) -> str:
        """Kind of one wrong entry; `node` below 0 is context, beyond the tree padding."""
        hidden = bool(self.expected[row, node + self.context])
        if node >= len(self.parents):
            return "padding visible"
        if not hidden and (node < 0 or closure[row, node]):
            return "beyond the window visible"
        if node < 0:
            return "context cut"
        if hidden:
            return "self hidden" if node == row else "ancestor hidden"
        if self.requests[node] != self.requests[row]:
            return "other request visible"
        if closure[node, row]:
            return "descendant visible"
        return "sibling visible" if self.parents[node] == self.parents[row] else "other branch visible"


def _fault(kind: str, wrong: Tensor, expected: Tensor) -> MaskFault:
    row, column = wrong.nonzero()[0].tolist()
    rows = tuple(wrong.any(-1).nonzero().flatten().tolist())
    return MaskFault(kind, row, column, bool(expected[row, column]), int(wrong.sum()), rows)
