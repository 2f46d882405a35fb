"""Headroom: how far the largest numbers of each module are from the end of float16.

## What it checks
The largest magnitude that each module puts out, and that products within attention (query times key) reach before
scaling, on prompts, rounds and a tree: that it is less than half of 65504, float16's largest number.

## Why it matters
A model within a factor of two of overflow overflows on some other prompt: magnitudes grow with length, and single
channels of the residual stream are hundreds of times above the rest. In float16 that is NaN or infinity now and then,
seen as drafts that are lost now and then.

## How it is measured
In float32 where it was run, else in the widest dtype that was; only finite numbers. The result lists the peak of
each layer of each side and the module that has it. Fused attention keeps its scores in float32, so there the peaks of
"scores" do not apply.

## Fix
Run in bfloat16, whose range is that of float32.

## References
- One value of 66246 in float32, infinite in float16: https://github.com/huggingface/transformers/issues/5651
- Gemma 3 in float16: https://github.com/huggingface/transformers/pull/36832
"""

import re
from typing import TYPE_CHECKING

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.numerics_case import NumericsCase, place
from specdoctor.checks.registry import Check

if TYPE_CHECKING:  # listing the checks must not import torch
    from specdoctor.measure.numeric_probe import Peak
    from specdoctor.measure.numerics import DtypeRun

LARGEST_HALF = 65504.0
LEAST_HEADROOM = 2.0
_WIDEST_FIRST = ("float32", "bfloat16", "float16")
_LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$| )")


def run(case: NumericsCase) -> list[Finding]:
    """One finding a side: its highest peak, when that is too near the end."""
    measured = measured_run(case)
    if measured is None:
        return []
    findings = []
    for side in sorted({label.partition(":")[0] for label in measured.record.peaks}, reverse=True):
        if side in measured.record.births:
            continue  # overflows in this dtype already
        label, peak = max(
            ((label, peak) for label, peak in measured.record.peaks.items() if label.startswith(f"{side}:")),
            key=lambda entry: entry[1].magnitude,
        )
        if peak.magnitude * LEAST_HEADROOM > LARGEST_HALF and not _overflowed(case, side):
            findings.append(_finding(label, peak, measured.dtype))
    return findings


def measured_run(case: NumericsCase) -> "DtypeRun | None":
    """The run whose peaks are nearest to the true ones."""
    return next((found for dtype in _WIDEST_FIRST if (found := case.run(dtype)) is not None), None)


def layer_of(label: str) -> str:
    """The layer that a module is in: its name up to the first number; the module itself where there is none."""
    match = _LAYER.match(label)
    return match[1] if match else label


def _overflowed(case: NumericsCase, side: str) -> bool:
    """Whether float16 was run and SD402 says it already."""
    half = case.run("float16")
    return half is not None and side in half.record.births


def _finding(label: str, peak: "Peak", dtype: str) -> Finding:
    headroom = LARGEST_HALF / peak.magnitude
    end = "beyond float16's largest number" if headroom < 1 else f"{headroom:.2f} times below float16's largest number"
    title = f"{label} reaches {peak.magnitude:.4g} in the {peak.phase}, {end}"
    evidence = {"largest": peak.magnitude, "headroom": headroom, "measured_in": dtype, "phase": peak.phase}
    fix = "Run this side in bfloat16 or float32, not in float16."
    return Finding(
        "SD403", Severity.WARNING, title, evidence, dict(place(label)), fix, "numerics.dtype-overflow", "headroom"
    )


CHECK = Check("SD403", "Overflow headroom of each layer", "forward", run)
