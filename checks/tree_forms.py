"""Where specdoctor's own masks, positions and acceptance differ from a tree worked out by hand."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdoctor.checks.hand_worked_trees import HandWorkedTree, engine_acceptance
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


@dataclass(frozen=True)
class Difference:
    """One thing that is not as worked out by hand."""

    tree: str
    what: str  # in words, with its place
    subject: str  # which form, or which case of acceptance
    evidence: dict[str, Any]


def differences(tree: HandWorkedTree) -> Iterator[Difference]:
    """All that differs; nothing on a sound installation."""
    parents = checked_parents(tree.parents, tree.name)
    for form, visible in mask_forms(tree, parents):
        if not torch.equal(visible, tree.visible):
            row, column = (visible != tree.visible).nonzero()[0].tolist()
            evidence = {"row": row, "column": column, "visible": bool(visible[row, column])}
            yield Difference(tree.name, f"the {form} differs at row {row}, column {column}", form, evidence)
    starts = torch.tensor([tree.starts[request] for request in tree.requests])
    found = tuple((tree_positions(parents) + starts).tolist())
    if found != tree.positions:
        evidence = {"found": list(found), "expected": list(tree.positions)}
        yield Difference(tree.name, f"positions are {found}", "positions", evidence)
    for number, case in enumerate(tree.acceptance):
        paths, committed = engine_acceptance(tree, case)
        if paths != case.path or committed != case.committed:
            evidence = {"path": paths, "expected_path": case.path, "committed": committed, "expected": case.committed}
            yield Difference(tree.name, f"greedy verification takes the path {paths}", f"acceptance {number}", evidence)


def mask_forms(tree: HandWorkedTree, parents: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    """Every form of the mask, as the boolean matrix [n, n] that it stands for."""
    closure = tree_attention_mask(parents)
    yield "boolean mask", closure
    for dtype in DTYPES:
        added = additive_mask(closure, dtype)
        # What is not finite is wrong, whatever it hides.
        seen = torch.where(added.isfinite(), added == 0, ~tree.visible)
        yield f"additive mask of {str(dtype).removeprefix('torch.')}", seen
    bits = ancestor_bits(parents)
    yield "ancestor bits", mask_of_bits(bits)
    index, nothing = torch.arange(len(parents)), torch.zeros((), dtype=torch.long)
    yield "mask of flex attention", tree_mask_mod(bits)(nothing, nothing, index[:, None], index[None, :])
    if all(parent < node for node, parent in enumerate(parents)) and max(tree.requests) == 0:
        yield "row visibility of the engine", rows_visible(parents, torch.device("cpu"))[1:, 1:]
