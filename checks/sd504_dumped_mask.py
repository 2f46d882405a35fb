"""A dumped mask: what another engine shows each draft token is what its tree allows.

## What it checks
A mask saved from an engine (`--mask`), against the tree that it should be of (`--parents`): each row sees all
committed tokens, its ancestors and itself, and nothing else. The first wrong entry is named, and the kind of mistake:
inverted, transposed, causal instead of tree, shifted by one, everything visible; sibling, descendant, other branch or
padding visible; ancestor or the token itself hidden; context cut.

## Why it matters
A wrong mask raises no error. Acceptance is low, most of all in the branches that are not first, and looks like a weak
drafter.

## How it is measured
Square masks hold the tree's own columns; wider ones hold the context before them (`--context N` where padding stands
behind). One row more than `--parents` has nodes is the anchor's, the first. True, 1 or an addend of 0 is visible.

## Fix
Build the mask from the parents: row i is row parent(i) with its own column added, parents before children.
`specdoctor check-mask --parents ...` prints the matrix that is right.

## References
- Sibling tokens visible: https://github.com/PaddlePaddle/FastDeploy/pull/3514
- No tree configuration runs, the mask is unfinished: https://github.com/sgl-project/sglang-jax/issues/1611
"""

from typing import TYPE_CHECKING

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.mask_words import ENTRY_KINDS, short_list
from specdoctor.checks.registry import Check

if TYPE_CHECKING:  # listing the checks must not import torch
    from specdoctor.checks.mask_case import DumpedMask, MaskCase
    from specdoctor.checks.mask_faults import MaskFault


def run(case: "MaskCase") -> list[Finding]:
    """A finding for each kind of mistake, that of the first wrong entry first."""
    return [] if case.mask is None else [_finding(case.mask, fault) for fault in case.mask.faults]


def _finding(mask: "DumpedMask", fault: "MaskFault") -> Finding:
    value = mask.dump.values[fault.row, fault.column].item()
    row, column = mask.node(fault.row), mask.column(fault.column)
    title = (
        f"{fault.kind}: row {fault.row} ({row}), column {fault.column} ({column}) is {value!r}, expected "
        f"{'visible' if fault.expected else 'hidden'}; {ENTRY_KINDS[fault.kind]}"
    )
    evidence = {
        "kind": fault.kind,
        "row": fault.row,
        "column": fault.column,
        "value": _as_json(value),
        "expected": "visible" if fault.expected else "hidden",
        "wrong_entries": fault.entries,
        "rows": short_list(fault.rows),
    }
    where = {"file": str(mask.dump.path), "tensor": mask.dump.tensor, "row": str(fault.row)}
    fix = "Row i of the mask is the row of its parent with its own column added; build parents before children."
    return Finding("SD504", Severity.ERROR, title, evidence, where, fix, "mask.block-tree-visibility", fault.kind)


def _as_json(value: float | bool) -> float | bool | str:
    """JSON has no infinity."""
    return value if value == value and abs(value) != float("inf") else str(value)


CHECK = Check("SD504", "A dumped mask against its tree", "static", run)
