"""Missing or misshapen tensors: the weights are not those that config.json describes.

## What it checks
Every tensor that the recognised format needs under the settings of config.json: that it is there, and its shape.

## Why it matters
A loader that tolerates missing names leaves those weights at their random start. A head or a norm at its initial value
drafts plausible text that is never accepted, with no error anywhere.

## How it is measured
Names and shapes from file headers. Names that differ in a layer number only are one finding.

## Fix
Fetch the checkpoint again: a shard may be lost. If it is complete, config.json belongs to other weights; the shape
found tells which setting differs (rows: vocabulary; columns of fc: number of tapped layers).

## References
- What `from_pretrained` only warns about: https://github.com/huggingface/transformers
- Heads left at their initial values: https://github.com/vllm-project/vllm
"""

from specdoctor.checks.draft_places import by_pattern
from specdoctor.checks.finding import Finding, Severity, counted
from specdoctor.checks.registry import Check
from specdoctor.formats.drafts.checkpoint import DraftCheckpoint, Stored
from specdoctor.measure.inspect import Inspection

_FIX = "Fetch the checkpoint again; if it is complete, its config.json belongs to other weights."


def run(inspection: Inspection) -> list[Finding]:
    """One error for each kind of tensor that is missing or has another shape."""
    checkpoint = inspection.checkpoint
    if checkpoint is None:
        return []
    wrong = {stored.name: stored for stored in checkpoint.misshapen()}
    return [
        *(_missing(pattern, names, checkpoint) for pattern, names in by_pattern(checkpoint.missing()).items()),
        *(_misshapen(pattern, wrong[names[0]], len(names), checkpoint) for pattern, names in by_pattern(wrong).items()),
    ]


def _missing(pattern: str, names: list[str], checkpoint: DraftCheckpoint) -> Finding:
    shape = next(stored.shape for stored in checkpoint.tensors.values() if stored.name == names[0])
    return Finding(
        code="SD302",
        severity=Severity.ERROR,
        title=f"{pattern}: {counted(len(names), 'tensor')} missing that the config promises",
        evidence={"tensors": len(names), "expected_shape": list(shape)},
        where={"file": checkpoint.where.name, "tensor": pattern},
        fix=_FIX,
        fault="weights.missing",
        subject=f"missing-{pattern}",
    )


def _misshapen(pattern: str, expected: Stored, count: int, checkpoint: DraftCheckpoint) -> Finding:
    shape = list(checkpoint.source.shape(expected.name))
    return Finding(
        code="SD302",
        severity=Severity.ERROR,
        title=f"{pattern} has shape {shape}, expected {list(expected.shape)} by its config",
        evidence={"tensors": count, "shape": shape, "expected_shape": list(expected.shape)},
        where={"file": checkpoint.source.file_of(expected.name).name, "tensor": pattern},
        fix=_FIX,
        fault="weights.shape",
        subject=f"shape-{pattern}",
    )


CHECK = Check("SD302", "Missing or misshapen tensors of a drafter", "static", run)
