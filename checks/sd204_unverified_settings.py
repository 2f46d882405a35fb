"""Unverified settings: values that were taken by default or by inference, where writers do not agree.

## What it checks
Settings that config.json leaves out and whose default differs from writer to writer, and what a reader had to infer
because no public description settles it.

## Why it matters
Two engines that fill the same gap differently run two different drafters from one checkpoint. Tapped layers, the row
that predicts first and the norm flags of EAGLE-3 are such gaps; each costs acceptance and none raises an error.

## How it is measured
The origin of each canonical value. A default is a warning where the same project uses two (the norm flags of
speculators: false in the config class, true in the training command) and information elsewhere.

## Fix
Write the setting into config.json with the value used in training. To find out which it was, measure both with
`specdoctor accept`: the wrong one shows from the second draft token on.

## References
- Defaults of speculators' config and training command: https://github.com/vllm-project/speculators
- Defaults of SpecForge: https://github.com/sgl-project/SpecForge
"""

from typing import NamedTuple

from specdoctor.checks.draft_places import finding_of
from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.registry import Check
from specdoctor.formats.drafts.checkpoint import DraftCheckpoint
from specdoctor.measure.inspect import Inspection


class Gap(NamedTuple):
    """A field whose default differs between writers."""

    field: str
    others: str  # who takes what


# Keys whose absence speculators fills differently in two places, and no tensor tells which was used.
_INVISIBLE_FLAGS = ("norm_before_residual", "norm_output")
_GAPS = (
    Gap("taps", "speculators and EAGLE-3 take hidden states 2, L//2, L-3; z-lab evenly spaced ones, one a draft layer"),
    Gap("block_size", "z-lab and llama.cpp take 16, speculators 8"),
    Gap("row_offset", "speculators samples from the anchor for dspark and not for dflash"),
    Gap("markov", "DeepSpec has no default, the others take the vanilla head"),
    Gap("confidence", "SpecForge leaves the Markov row out of its input, speculators does not"),
)


def run(inspection: Inspection) -> list[Finding]:
    """Defaults that writers do not share, and what a reader could only infer."""
    inferred = [
        finding_of(
            remark,
            "SD204",
            Severity.WARNING if remark.subject in _INVISIBLE_FLAGS else Severity.INFO,
            "Compare with the writer's own code, or measure with `specdoctor accept`.",
            "config.ambiguous-default",
        )
        for remark in inspection.remarks
        if remark.kind == "unverified"
    ]
    checkpoint = inspection.checkpoint
    if checkpoint is None:
        return inferred
    origin = checkpoint.spec.origin
    open_gaps = [
        gap
        for gap in _GAPS
        if origin.get(gap.field, "").startswith("default of") and getattr(checkpoint.spec, gap.field) is not None
    ]
    return inferred + [_finding(gap, checkpoint) for gap in open_gaps]


def _finding(gap: Gap, checkpoint: DraftCheckpoint) -> Finding:
    value = getattr(checkpoint.spec, gap.field)
    shown = list(value) if isinstance(value, tuple) else value
    return Finding(
        code="SD204",
        severity=Severity.INFO,
        title=f"{gap.field} is {shown} by {checkpoint.spec.origin[gap.field]}; {gap.others}",
        evidence={"value": shown, "origin": checkpoint.spec.origin[gap.field]},
        where={"file": checkpoint.where.name, "field": gap.field},
        fix="Write it into config.json as it was in training; `specdoctor accept` tells which value that is.",
        fault="config.ambiguous-default",
        subject=f"default-{gap.field}",
    )


CHECK = Check("SD204", "Settings taken by default or inference", "static", run)
