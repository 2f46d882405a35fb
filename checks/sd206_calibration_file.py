"""A calibration of the confidence that is not of this drafter: stale, another drafter's, or broken.

## What it checks
The file calibration.json beside a drafter's weights (of a GGUF: NAME.calibration.json): that it can be read, that it
has as many temperatures as the drafter has draft positions, that the weights it was fitted on are those beside it, and
that the drafter has a confidence head at all.

## Why it matters
Temperatures decide how much of a draft is sent to the target wherever a threshold or a scheduler reads the confidence.
Those of other weights make it over- or under-confident in a way that no error shows. specdoctor does not apply such a
file; another engine that reads it may.

## How it is measured
The count of temperatures and the key K against the block size of the config; the key draft.weights_hash against a hash
over names, shapes and sampled bytes of the weights.

## Fix
Run `specdoctor calibrate` again after training, or delete the file. A drafter without it works, its confidence as its
head gives it.

## References
- Temperature scaling: https://arxiv.org/abs/1706.04599
- DSpark, sequential temperature scaling (section 3.2.1): https://github.com/deepseek-ai/DeepSpec
"""

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.registry import Check
from specdoctor.measure.inspect import Inspection


def run(inspection: Inspection) -> list[Finding]:
    """One warning where the file is not applied."""
    found = inspection.calibration
    if found is None or not found.problem:
        return []
    named = found.stored.weights_hash if found.stored else None
    return [
        Finding(
            code="SD206",
            severity=Severity.WARNING,
            title=found.problem.removeprefix(f"{found.path}: "),
            evidence={"K": found.stored.K if found.stored else None, "weights_hash": named},
            where={"file": found.path.name},
            fix="Run `specdoctor calibrate` for these weights, or delete the file.",
            fault="confidence.calibration",
            subject="stale-calibration",
        )
    ]


CHECK = Check("SD206", "Calibration of other weights", "static", run)
