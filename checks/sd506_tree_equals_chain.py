"""Tree rows equal chains: each path through a draft tree gives the logits that it gives as a plain chain.

## What it checks
In the real model, each row of a tree against the same path, from the anchor to that row, run alone as a causal chain
below the same committed tokens.

## Why it matters
Acceptance in a tree is only right if a node's logits are those of its own text. Beside the mask this needs positions
that follow depth, not the order of the rows, in every layer and for every kind of position the model has.

## How it is measured
The difference of the logits, as the ratio of standard deviations, must stay within rounding: 0.001 in float32, 0.02 in
float16, 0.08 in bfloat16, or four times what the same path differs by in two shapes. A wrong position or a hidden
ancestor gives 0.15 and more in a model of 135M parameters. Not looked at where the rows that move (SD502) are wrong
already.

## Fix
Look at positions first: a node at depth d stands at the anchor's position plus d. A model with positions of its own
making (a cumulative sum of the mask, a counter) cannot take trees. Then try `--attention matmul`.

## References
- Drafts seeded one position early: https://github.com/ikawrakow/ik_llama.cpp/pull/2296
- SpecInfer, tree attention: https://arxiv.org/abs/2305.09781
"""

from typing import TYPE_CHECKING

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.registry import Check

if TYPE_CHECKING:  # listing the checks must not import torch
    from specdoctor.checks.mask_case import MaskCase
    from specdoctor.checks.tree_observation import TreeObservation


def run(case: "MaskCase") -> list[Finding]:
    """One finding, for the first tree that differs."""
    wrong = [seen for seen in case.observed if _differs(seen) and not seen.faults(seen.fresh)]
    return [_finding(wrong)] if wrong else []


def _differs(seen: "TreeObservation") -> bool:
    return not bool((seen.chain_error <= seen.limit).all())  # NaN differs


def _finding(wrong: "list[TreeObservation]") -> Finding:
    seen = wrong[0]
    row = int((~(seen.chain_error <= seen.limit)).nonzero()[0, 0])
    error = float(seen.chain_error[row])
    title = (
        f"row {seen.layout.labels[row]} of the tree {seen.layout.name!r} gives other logits than its path as a chain: "
        f"{error:.3g} of their spread, {seen.limit:.3g} is rounding; look at positions first"
    )
    evidence = {
        "trees": len(wrong),
        "row": seen.layout.labels[row],
        "error": error if error == error else "NaN",
        "limit": seen.limit,
        "rows_that_differ": int((~(seen.chain_error <= seen.limit)).sum()),
    }
    fix = "Check that positions follow depth (anchor's position + depth) in every layer; then try --attention matmul."
    where = {"side": "target", "tree": seen.layout.name}
    return Finding("SD506", Severity.ERROR, title, evidence, where, fix, "engine.position-offset", "chain")


CHECK = Check("SD506", "Tree rows equal their paths run as chains", "forward", run)
