"""Hand-worked trees: every form of the tree mask, the positions and the acceptance are what was worked out by hand.

## What it checks
For ten small trees whose mask, positions and accepted paths were written down by hand: that the boolean mask, the
additive masks of float16, bfloat16 and float32, the packed ancestor bits, flex attention's block mask and the engine's
own row visibility are that matrix, that positions follow depth, and that greedy verification accepts the path it should.

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

from collections.abc import Iterator

import torch
from torch import Tensor

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.hand_worked_trees import HandWorkedTree, engine_acceptance
from specdoctor.checks.mask_case import MaskCase
from specdoctor.checks.registry import Check
from specdoctor.engine.trees import rows_visible
from specdoctor.kernels.tree_mask import (
    additive_mask,
    ancestor_bits,
    checked_parents,
    mask_of_bits,
    tree_attention_mask,
    tree_mask_mod,
    tree_positions,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def run(case: MaskCase) -> list[Finding]:
    """Findings on specdoctor's own masks; none on a sound installation."""
    return [finding for tree in case.trees for finding in (*_masks(tree), *_acceptance(tree))]


def _masks(tree: HandWorkedTree) -> Iterator[Finding]:
    parents = checked_parents(tree.parents, tree.name)
    for form, visible in _forms(tree, parents):
        if not torch.equal(visible, tree.visible):
            row, column = (visible != tree.visible).nonzero()[0].tolist()
            evidence = {"row": row, "column": column, "visible": bool(visible[row, column])}
            yield _finding(tree, f"the {form} differs at row {row}, column {column}", form, evidence)
    starts = [tree.starts[request] for request in tree.requests]
    found = tuple((tree_positions(parents) + torch.tensor(starts)).tolist())
    if found != tree.positions:
        yield _finding(tree, f"positions are {found}", "positions", {"found": found, "expected": tree.positions})


def _forms(tree: HandWorkedTree, parents: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    """Every form of the mask, as the boolean matrix that it stands for."""
    closure = tree_attention_mask(parents)
    yield "boolean mask", closure
    for dtype in DTYPES:
        added = additive_mask(closure, dtype)
        name = str(dtype).removeprefix("torch.")
        yield f"additive mask of {name}", torch.where(added.isfinite(), added == 0, ~tree.visible)
    bits = ancestor_bits(parents)
    yield "ancestor bits", mask_of_bits(bits)
    index = torch.arange(len(parents))
    nothing = torch.zeros((), dtype=torch.long)
    yield "mask of flex attention", tree_mask_mod(bits)(nothing, nothing, index[:, None], index[None, :])
    if all(parent < node for node, parent in enumerate(parents)) and max(tree.requests) == 0:
        yield "row visibility of the engine", rows_visible(parents, torch.device("cpu"))[1:, 1:]


def _acceptance(tree: HandWorkedTree) -> Iterator[Finding]:
    for number, case in enumerate(tree.acceptance):
        paths, committed = engine_acceptance(tree, case)
        if paths != case.path or committed != case.committed:
            evidence = {"path": paths, "expected_path": case.path, "committed": committed, "expected": case.committed}
            yield _finding(tree, f"greedy verification takes the path {paths}", f"acceptance {number}", evidence)


def _finding(tree: HandWorkedTree, what: str, subject: str, evidence: dict[str, object]) -> Finding:
    return Finding(
        "SD501",
        Severity.ERROR,
        f"tree {tree.name!r}: {what}, not as worked out by hand",
        evidence,
        {"tree": tree.name},
        "A fault of specdoctor or of the installed torch: please report it with the output of `specdoctor env`.",
        "mask.block-tree-visibility",
        subject,
    )


CHECK = Check("SD501", "Tree masks against trees worked out by hand", "static", run)
