"""Rows that move: in the real model, a draft token changes the rows below it and no others.

## What it checks
That a row of a draft tree moves with the tokens of its ancestors and its own, and with no other: no sibling, no
descendant, no other branch, no other request of the same forward; and that it does move with each ancestor.

## Why it matters
A visible sibling or a hidden ancestor makes the target judge drafts for another text than the one that is committed.
Nothing fails; acceptance drops, and greedy text may differ from the target's own.

## How it is measured
The target runs the tree below random committed tokens, through the engine's own forward, in the dtype and attention
path given. Then one token at a time is replaced, and every row's state is compared with before: after layer 0, where a
row can only move if it looks at the token itself, and after the last layer, where anything that any layer lets through
shows. Hidden columns weigh exactly zero, so a row that may not move is the same to the last bit; the limit is four
times the noise of two equal forwards (with experts, also a thousandth of the typical move). Before a row is said not
to move, eight other tokens are tried: sharp attention gives most tokens no weight at all.

## Fix
Try another attention path (`--attention matmul`): if that is clean, the fused kernel or the driver is at fault. If
not, the model's code adds a mask of its own, or ignores the one it is given.

## References
- A kernel skipped the mask inside the lower triangle: https://github.com/PaddlePaddle/FastDeploy/pull/3514
- A wrong block mask, found after training: https://github.com/sgl-project/SpecForge/pull/473
"""

from typing import TYPE_CHECKING

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.mask_words import ENTRY_KINDS
from specdoctor.checks.registry import Check

if TYPE_CHECKING:  # listing the checks must not import torch
    from specdoctor.checks.mask_case import MaskCase
    from specdoctor.checks.mask_faults import MaskFault
    from specdoctor.checks.tree_observation import TreeObservation


def run(case: "MaskCase") -> list[Finding]:
    """Findings by kind of mistake, over all trees that were run."""
    seen = [(o, fault) for o in case.observed for fault in o.faults(o.fresh)]
    kinds = dict.fromkeys(fault.kind for _, fault in seen)
    return [_finding(kind, [(o, fault) for o, fault in seen if fault.kind == kind]) for kind in kinds]


def _finding(kind: str, rows: "list[tuple[TreeObservation, MaskFault]]") -> Finding:
    observation, fault = rows[0]
    labels, change = observation.layout.labels, observation.fresh.direct
    verb = "does not move" if fault.expected else "moves"
    title = (
        f"{kind}: row {labels[fault.row]} of the tree {observation.layout.name!r} {verb} with the token of row "
        f"{labels[fault.column]}; {ENTRY_KINDS[kind]}"
    )
    examples = [
        {
            "tree": o.layout.name,
            "row": o.layout.labels[f.row],
            "token of": o.layout.labels[f.column],
            "should move": "yes" if f.expected else "no",
            "change": float(o.fresh.direct[f.row, f.column]),
            "wrong entries": f.entries,
        }
        for o, f in rows
    ]
    evidence = {
        "trees": len(rows),
        "change": float(change[fault.row, fault.column]),
        "typical_change": float(change.diagonal().median()),
        "noise": observation.fresh.noise,
        "examples": examples,
    }
    fix = "Run again with --attention matmul; if that is clean, the fused attention is at fault, else the model's code."
    where = {"side": "target", "tree": observation.layout.name}
    return Finding("SD502", Severity.ERROR, title, evidence, where, fix, "mask.block-tree-visibility", kind)


CHECK = Check("SD502", "Rows that move with a draft token in the real model", "forward", run)
