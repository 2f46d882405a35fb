"""Hand-worked trees: every form of the tree mask, the positions and the acceptance are as worked out by hand.

## What it checks
For ten small trees whose mask, positions and accepted paths were written down by hand: that the boolean mask, the
additive masks of float16, bfloat16 and float32, the packed ancestor bits, flex attention's mask and the engine's own
row visibility are that matrix, that positions follow depth, and that greedy verification accepts the right path.

## Why it matters
A wrong mask raises no error, it only lowers acceptance. Everything else here is judged by these functions, so they
are judged first, on this machine and this version of torch.

## How it is measured
All entries are compared. Trees: seven nodes of depth three in depth order and shuffled, chains (one listed from its
leaf), stars, branching 2,2,1, and forests of two and three requests with nodes in turns.

## Fix
A finding here is a fault of specdoctor or of the installed torch, not of a model: please report it with
`specdoctor env`.

## References
- SpecInfer, tree attention: https://arxiv.org/abs/2305.09781
- Sibling tokens were visible because a kernel skipped the mask in the lower triangle:
  https://github.com/PaddlePaddle/FastDeploy/pull/3514
"""

from typing import TYPE_CHECKING

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.registry import Check

if TYPE_CHECKING:  # listing the checks must not import torch
    from specdoctor.checks.mask_case import MaskCase
    from specdoctor.checks.tree_forms import Difference

_FIX = "A fault of specdoctor or of the installed torch: please report it with the output of `specdoctor env`."


def run(case: "MaskCase") -> list[Finding]:
    """Findings on specdoctor's own masks; none on a sound installation."""
    from specdoctor.checks.tree_forms import differences

    return [_finding(difference) for tree in case.trees for difference in differences(tree)]


def _finding(difference: "Difference") -> Finding:
    return Finding(
        "SD501",
        Severity.ERROR,
        f"tree {difference.tree!r}: {difference.what}, not as worked out by hand",
        difference.evidence,
        {"tree": difference.tree},
        _FIX,
        "mask.block-tree-visibility",
        difference.subject,
    )


CHECK = Check("SD501", "Tree masks against trees worked out by hand", "static", run)
