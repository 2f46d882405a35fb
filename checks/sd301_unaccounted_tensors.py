"""Tensors not accounted for: weights in the checkpoint that its format does not use.

## What it checks
Every tensor name against what the reader of the recognised format expects from config.json, and against the names that
are known not to matter (a redundant vocabulary map, the target's own weights around MTP layers).

## Why it matters
A loader with `strict=False` drops such tensors without a word: a Markov head under an early prefix, q/k norms of
another backbone, biases of Medusa blocks. What is left still drafts, only worse.

## How it is measured
Names from file headers. Names that differ in a layer number only are one finding.

## Fix
Find out what the tensor does. Either config.json is of another version than the weights, or the format is newer than
this version of specdoctor. Loading the drafter is refused until it is settled.

## References
- Biases dropped by a loader's defaults: https://github.com/vllm-project/vllm
- The prefix of early SpecForge heads: https://github.com/sgl-project/SpecForge
"""

from specdoctor.checks.draft_places import by_pattern
from specdoctor.checks.finding import Finding, Severity, counted
from specdoctor.checks.registry import Check
from specdoctor.formats.drafts.checkpoint import DraftCheckpoint
from specdoctor.measure.inspect import Inspection


def run(inspection: Inspection) -> list[Finding]:
    """One error for each kind of tensor that nothing uses."""
    checkpoint = inspection.checkpoint
    if checkpoint is None:
        return []
    return [_finding(pattern, names, checkpoint) for pattern, names in by_pattern(checkpoint.unused()).items()]


def _finding(pattern: str, names: list[str], checkpoint: DraftCheckpoint) -> Finding:
    source = checkpoint.source
    return Finding(
        code="SD301",
        severity=Severity.ERROR,
        title=f"{pattern}: {counted(len(names), 'tensor')} that this format does not use",
        evidence={"tensors": len(names), "shape": list(source.shape(names[0])), "dtype": source.dtype(names[0])},
        where={"file": source.file_of(names[0]).name, "tensor": pattern},
        fix="Find out what it is: a drafter without it is not the one that was trained.",
        fault="weights.unaccounted",
        subject=pattern,
    )


CHECK = Check("SD301", "Tensors that a draft format does not use", "static", run)
