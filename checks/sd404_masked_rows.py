"""Rows that see nothing: softmax over scores that are all -inf, and whether -65504 in their place cures it.

## What it checks
Every softmax and every fused attention of target and drafter: that each row has a score that is not hidden. `--mask`
runs the target with a mask dumped from an engine.

## Why it matters
Softmax of a row of -inf is NaN. torch's fused attention gives zeros instead, some kernels the mean of all columns; each
of the three is wrong in its own way, and all show as low acceptance only.

## How it is measured
Rows whose largest score is below -60000 are counted, and what softmax made of them. Where there are any, all is run
again with -65504 in place of every -inf: if NaN is gone, the mask's number was the trouble, and the row is now the
mean of all columns: finite, and still not what its token should see.

## Fix
Let each row see at least itself, rows of padding included. Hide by the most negative finite number of the dtype
(float16: -65504), not by -inf. `specdoctor check-mask --mask` names the row and the kind of mistake.

## References
- Fully masked rows in torch: https://github.com/pytorch/pytorch/issues/103963
- -inf, -1e4 and the most negative finite number: https://github.com/huggingface/transformers/pull/17306
"""

from typing import TYPE_CHECKING

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.numerics_case import NumericsCase, by_key, place
from specdoctor.checks.registry import Check

if TYPE_CHECKING:  # listing the checks must not import torch
    from specdoctor.measure.numerics import DtypeRun

_FIX = "Let each row see at least itself, and hide by the most negative finite number (float16: -65504), not by -inf."


def run(case: NumericsCase) -> list[Finding]:
    """One finding a side and outcome, naming the first module."""
    seen = [(run, rows) for run in case.runs for rows in run.record.masked]
    groups = by_key(((rows.module.partition(":")[0], rows.gives), run.dtype) for run, rows in seen)
    return [_finding(case, side, gives, dtypes) for (side, gives), dtypes in groups.items()]


def _finding(case: NumericsCase, side: str, gives: str, dtypes: list[str]) -> Finding:
    run = next(run for run in case.runs if run.dtype == dtypes[0])
    rows = [r for r in run.record.masked if r.module.startswith(f"{side}:") and r.gives == gives]
    first = rows[0]
    title = (
        f"{first.module}: row {first.row} of the {first.phase} sees nothing, and {first.operation} gives {gives} "
        f"({', '.join(dtypes)}){_cure(run)}"
    )
    evidence = {
        "dtypes": dtypes,
        "row": first.row,
        "rows": first.count,
        "of": first.of,
        "modules": len({r.module for r in rows}),
        "gives": gives,
        "operation": first.operation,
        "cured_by_-65504": run.cured,
    }
    return Finding(
        "SD404",
        Severity.ERROR,
        title,
        evidence,
        dict(place(first.module)),
        _FIX,
        "mask.block-tree-visibility",
        gives,
    )


def _cure(run: "DtypeRun") -> str:
    if run.cured is None:
        return ""
    if run.cured:
        return "; with -65504 in place of -inf no NaN is left, and the row is the mean of all columns"
    return "; -65504 in place of -inf does not cure it"


CHECK = Check("SD404", "Attention rows that see nothing", "forward", run)
