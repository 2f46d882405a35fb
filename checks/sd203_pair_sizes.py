"""Sizes of the pair: hidden size, depth, taps, vocabulary and mask id fit the target.

## What it checks
The drafter's hidden size of tapped states against the target's, the depth of the target that the drafter names, the
highest layer it taps, the rows of its vocabulary and head, and its mask id against the rows of the embedding that
supplies it. Only with `inspect --target`.

## Why it matters
Some engines check none of this. A drafter of a sibling model of the same width loads, taps layers that mean something
else, and accepts next to nothing; a mask id behind the last row reads another token's embedding or crashes on a GPU.

## How it is measured
From both config.json files (or GGUF headers): equality of sizes, taps up to the number of layers, ids below rows. Equal
sizes do not prove the right target: `check-tokenizer` compares ids, `accept` measures the rest.

## Fix
Use the target that the drafter was trained for; `_name_or_path`, `speculators_config.verifier` or the model card name
it.

## References
- Padded vocabularies that broke a shared head: https://github.com/vllm-project/vllm/pull/46435
- Layer numbers against taps: https://github.com/z-lab/dflash
"""

from pathlib import Path

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.registry import Check
from specdoctor.formats.drafts.pair import Misfit, misfits
from specdoctor.measure.inspect import Inspection


def run(inspection: Inspection) -> list[Finding]:
    """One error for each size in which the pair differs."""
    checkpoint, target = inspection.checkpoint, inspection.target
    if checkpoint is None or target is None:
        return []
    return [_finding(misfit, checkpoint.where) for misfit in misfits(checkpoint, target)]


def _finding(misfit: Misfit, where: Path) -> Finding:
    said, _, advice = misfit.line.removeprefix(f"{where}: ").partition("; ")
    advice = advice or "this drafter was made for another target"
    return Finding(
        code="SD203",
        severity=Severity.ERROR,
        title=said,
        evidence={"drafter": misfit.drafter, "target": misfit.target},
        where={"file": where.name, "key": misfit.key},
        fix=f"{advice[0].upper()}{advice[1:]}; use the target that it was trained for.",
        fault="pair.size",
        subject=misfit.key,
    )


CHECK = Check("SD203", "Sizes of drafter and target", "static", run)
