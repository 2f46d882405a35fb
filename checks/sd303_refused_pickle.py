"""Pickled file refused: the weights are a pickle that asks for more than tensors.

## What it checks
Weights in .bin, .pt or .pth files: whether torch's restricted unpickler can make tensors and plain containers of them
without importing anything else.

## Why it matters
A pickle is a program. Loading one from a stranger can run any code with the user's rights; several engines and scripts
load drafters this way without a second thought.

## How it is measured
The file is opened with `weights_only`; the first name outside the allowed ones stops it before anything runs. Nothing
of the file is used after that, so tensors cannot be checked.

## Fix
Get the checkpoint as safetensors, or have its author convert it. Do not load it elsewhere to convert it yourself unless
you trust the author: that runs the code.

## References
- The format without code: https://github.com/huggingface/safetensors
- torch.load and weights_only: https://docs.pytorch.org/docs/stable/generated/torch.load.html
"""

from pathlib import Path

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.registry import Check
from specdoctor.measure.inspect import Inspection


def run(inspection: Inspection) -> list[Finding]:
    """One error where a pickle was refused."""
    if not inspection.pickle:
        return []
    place, _, said = inspection.pickle.partition(": ")
    return [
        Finding(
            code="SD303",
            severity=Severity.ERROR,
            title=said.partition("; ")[0],
            where={"file": Path(place).name},
            fix="Get the checkpoint as safetensors; do not load this file elsewhere unless you trust its author.",
            fault="weights.pickle",
            subject="pickle",
        )
    ]


CHECK = Check("SD303", "Pickled weights that could run code", "static", run)
