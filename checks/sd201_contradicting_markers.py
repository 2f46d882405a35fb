"""Contradicting markers: config and tensors say that this is two different kinds of drafter.

## What it checks
Every mark of a draft format in config.json (architectures, speculators_model_type, the writers' own keys) and in the
tensor names (Markov head, candidate selector, midlayer, vocabulary map, MTP layers). A mark that the recognised family
cannot have is a contradiction.

## Why it matters
Families share a backbone and differ in what a row predicts, which layer an id means and what is added to the logits.
A checkpoint loaded as the wrong one runs without a complaint and drafts tokens shifted by one, or drops a head. Engines
that load with `strict=False` do just that.

## How it is measured
From config keys and tensor names, no values. All marks are looked at, not only the first that decides; the family is
then left open rather than guessed.

## Fix
Ask whoever wrote the checkpoint which of the two it is, and remove the other's keys or tensors. A converter that copies
the target's or an older drafter's config is the usual cause.

## References
- DeepSpec's DSpark and DFlash share one class name: https://github.com/deepseek-ai/DeepSpec
- Formats that speculators writes and converts: https://github.com/vllm-project/speculators
"""

from specdoctor.checks.draft_places import finding_of
from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.registry import Check
from specdoctor.measure.inspect import Inspection


def run(inspection: Inspection) -> list[Finding]:
    """One finding for each mark of another family, and for each key that the tensors contradict."""
    return [
        finding_of(
            remark,
            "SD201",
            Severity.ERROR if remark.fatal else Severity.WARNING,
            "Find out which of the two it is and remove the other's marks.",
            "config.contradiction",
        )
        for remark in inspection.remarks
        if remark.kind == "contradiction"
    ]


CHECK = Check("SD201", "Contradicting markers of draft formats", "static", run)
