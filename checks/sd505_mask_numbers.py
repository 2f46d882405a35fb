"""Numbers of a dumped mask: each hides what it should, in the dtype that the engine computes in.

## What it checks
A mask saved from an engine (`--mask`): no NaN; no row that sees nothing, all -inf or all equally hidden; no positive
number in an additive mask; no number too near zero to hide; no number beyond float16 where float16 is computed in
(-1e9 there is -inf); no 0 and 1 in a float mask that will be added. `--dtype` names what the engine computes in.

## Why it matters
Softmax of a row of -inf is NaN, and a NaN row argmaxes to token 0: rejected, with no error. A row hidden by finite
numbers everywhere attends to all columns alike. A 0/1 mask that is added hides nothing.

## How it is measured
All entries are looked at, after unit dimensions and equal heads have fallen away. An addend above -1000 is taken to
leave a weight. -inf in another dtype than float16 is only mentioned as long as each row sees something.

## Fix
Use the most negative finite number of the dtype: -65504 in float16. Make sure that each row, those of padding
included, sees at least itself.

## References
- -inf, -1e4 and the most negative finite number, and what each does in float16:
  https://github.com/huggingface/transformers/pull/17306
- torch's attention and rows that see nothing: https://github.com/pytorch/pytorch/issues/103963
"""

from typing import TYPE_CHECKING

from specdoctor.checks.finding import Finding, Severity, counted
from specdoctor.checks.mask_words import VALUE_KINDS, short_list
from specdoctor.checks.registry import Check

if TYPE_CHECKING:  # listing the checks must not import torch
    from specdoctor.checks.mask_case import DumpedMask, MaskCase
    from specdoctor.checks.mask_values import ValueFault

_SEVERITIES = {"dtype overflow": Severity.WARNING, "0/1 numbers": Severity.WARNING, "-inf": Severity.INFO}
_FIXES = {
    "0/1 numbers": "Give the engine booleans, or 0 for visible and the most negative finite number for hidden.",
    "-inf": "Nothing to do; the most negative finite number of the dtype would be safe for empty rows too.",
}
_FIX = "Use 0 for visible and the most negative finite number of the dtype (float16: -65504) for hidden."
_ROW_FIX = "Let each row, those of padding included, see at least itself; hide by -65504 in float16, never by -inf."


def run(case: "MaskCase") -> list[Finding]:
    """A finding for each kind of wrong number."""
    return [] if case.mask is None else [_finding(case.mask, fault) for fault in case.mask.value_faults]


def _finding(mask: "DumpedMask", fault: "ValueFault") -> Finding:
    of_rows = fault.kind in ("all -inf row", "row sees nothing")
    count = counted(fault.entries, "row") if of_rows else f"{fault.entries:,} of {mask.dump.values.numel():,} entries"
    place = f"row {fault.row} ({mask.node(fault.row)})"
    if not of_rows:
        place += f", column {fault.column} ({mask.column(fault.column)})"
    title = f"{fault.kind}: {place} is {fault.value:g}; {VALUE_KINDS[fault.kind]} ({count})"
    evidence = {
        "kind": fault.kind,
        "row": fault.row,
        "column": fault.column,
        "value": f"{fault.value:g}",
        "count": fault.entries,
        "rows": short_list(fault.rows),
        "stored_dtype": str(mask.dump.values.dtype).removeprefix("torch."),
    }
    return Finding(
        "SD505",
        _SEVERITIES.get(fault.kind, Severity.ERROR),
        title,
        evidence,
        {"file": str(mask.dump.path), "tensor": mask.dump.tensor, "row": str(fault.row)},
        _ROW_FIX if of_rows else _FIXES.get(fault.kind, _FIX),
        "mask.block-tree-visibility",
        fault.kind,
    )


CHECK = Check("SD505", "Numbers and empty rows of a dumped mask", "static", run)
