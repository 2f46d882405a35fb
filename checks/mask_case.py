"""What the SD5 checks look at: trees worked out by hand, a target to run trees on, a dumped mask.

Contract: `MaskCase` is made once; what costs forwards is done once, when the first check asks for it.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from specdoctor.checks.hand_worked_trees import HandWorkedTree
from specdoctor.checks.mask_faults import MaskFault, expected_visibility, mask_faults
from specdoctor.checks.mask_values import ValueFault, value_faults, visible_entries
from specdoctor.checks.tree_observation import RowLayout, TreeObservation, observe_tree
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.mask_dump import MaskDump
from specdoctor.kernels.tree_mask import with_anchor

EXPLAINS_EMPTY_ROWS = ("inverted boolean", "shifted by one column", "shifted by one row", "self hidden")


@dataclass
class DumpedMask:
    """A mask from somebody's engine beside the tree that it should be of."""

    dump: MaskDump
    parents: tuple[int, ...]  # of the mask's rows
    context: int
    anchor_row: bool  # the mask has a row for the anchor, which `--parents` does not count
    window: int | None
    dtype: torch.dtype | None  # that the engine computes in

    @classmethod
    def of(
        cls,
        dump: MaskDump,
        parents: Seq[int],
        context: int | None = None,
        window: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> "DumpedMask":
        """Find out how rows and columns lie. Raises `SpecdoctorError` when they cannot be those of the tree."""
        rows, columns = dump.values.shape
        n = len(parents)
        if rows not in (n, n + 1):
            raise SpecdoctorError(
                f"{dump.where}: {rows} rows for the {n} nodes of --parents, expected {n}, or {n + 1} with the anchor's"
            )
        before = columns - rows if context is None else context
        if before < 0 or before + rows > columns:
            wanted = f"{rows} and more" if context is None else f"at least {context} (--context) and {rows}"
            raise SpecdoctorError(f"{dump.where}: {columns} columns, expected {wanted}: a column for each row")
        own = with_anchor(parents) if rows == n + 1 else tuple(parents)
        return cls(dump, own, before, rows == n + 1, window, dtype)

    @cached_property
    def expected(self) -> Tensor:
        return expected_visibility(self.parents, self.context, self.dump.values.shape[1], self.window)

    @cached_property
    def visible(self) -> Tensor:
        """Bool [rows, columns]; where the number is NaN, as it should be: NaN is a fault of its own."""
        values = self.dump.values
        seen = visible_entries(values)
        return torch.where(values.isnan(), self.expected, seen) if values.is_floating_point() else seen

    @cached_property
    def faults(self) -> list[MaskFault]:
        return mask_faults(self.visible, self.parents, self.context, self.window, skip_empty=True)

    @cached_property
    def value_faults(self) -> list[ValueFault]:
        found = value_faults(self.dump.values, self.dtype)
        explained = {row for fault in self.faults if fault.kind in EXPLAINS_EMPTY_ROWS for row in fault.rows}
        return [fault for fault in found if not (fault.kind == "row sees nothing" and explained >= set(fault.rows))]

    def node(self, row: int) -> str:
        """What a row is called in terms of `--parents`."""
        if self.anchor_row:
            return "the anchor" if row == 0 else f"node {row - 1}"
        return f"node {row}"

    def column(self, column: int) -> str:
        """What a column is called."""
        if column < self.context:
            return f"context token {column}"
        if column - self.context >= len(self.parents):
            return f"padding {column - self.context - len(self.parents)}"
        return self.node(column - self.context)


@dataclass
class MaskCase:
    """The context of the SD5 checks. `layouts` are run on `target`, where there is one."""

    trees: list[HandWorkedTree]
    target: Target | None = None
    layouts: list[RowLayout] = field(default_factory=list)
    mask: DumpedMask | None = None
    progress: Callable[[Iterable[RowLayout]], Iterable[RowLayout]] = iter

    @cached_property
    def observed(self) -> list[TreeObservation]:
        """Every tree on the target; empty without one."""
        if self.target is None:
            return []
        return [observe_tree(self.target, layout, seed) for seed, layout in enumerate(self.progress(self.layouts))]
