"""Reused buffers: a draft that was rolled back leaves nothing behind, and a kept path is what was kept.

## What it checks
In the real model, with the same cache slot used again: that a tree gives the same numbers after a longer draft was
written over it and rolled back; that the rows that may move are still the right ones below a kept path; and that the
tree below a kept path gives what it gives below a fresh prefill of the same text.

## Why it matters
Mask bits, columns and positions live in buffers that outlast a round. What is not cleared shows in the second round
and not in the first, and wrongness grows with the length of the text.

## How it is measured
Tree, junk draft of more rows (not kept), the same tree: equal to the last bit. Then the deepest path is kept, with the
gaps between its rows closed, other tokens are drafted in the same tree, and the replacement of tokens is repeated.
The comparison with the fresh prefill is in units of the spread of the logits, with the rounding of the dtype allowed
(float32 0.001, float16 0.02, bfloat16 0.08, or four times what two shapes of the same text differ by).

## Fix
Run again with `--attention matmul`. In an engine of your own: clear the packed mask and the columns beyond the
committed length each round, or rebuild them; compact the kept rows before the next write.

## References
- A buffer of positions changed by the round before: https://github.com/vllm-project/vllm/issues/43820
- Masks and buffers of CUDA graphs are of the kind that outlasts a round; the test is the same as for any of them:
  https://github.com/PaddlePaddle/FastDeploy/pull/3514
"""

from typing import TYPE_CHECKING

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.mask_words import ENTRY_KINDS
from specdoctor.checks.registry import Check

if TYPE_CHECKING:  # listing the checks must not import torch
    from specdoctor.checks.mask_case import MaskCase
    from specdoctor.checks.tree_observation import TreeObservation

_FIX = "Run again with --attention matmul; if that is clean, the fused attention keeps something between calls."


def run(case: "MaskCase") -> list[Finding]:
    """The first tree that shows each trouble."""
    found: dict[str, Finding] = {}
    for observation in case.observed:
        for finding in (_stale(observation), _moved_again(observation), _kept(observation)):
            if finding is not None:
                found.setdefault(finding.subject, finding)
    return list(found.values())


def _stale(seen: "TreeObservation") -> Finding | None:
    typical = float(seen.fresh.direct.diagonal().median())
    if seen.stale <= seen.fresh.noise:
        return None
    title = (
        f"the tree {seen.layout.name!r} gives other numbers after a draft that was rolled back: states change by "
        f"{seen.stale:.3g}, which {seen.fresh.noise:.3g} of noise does not explain"
    )
    return _finding(seen, title, "stale", {"change": seen.stale, "noise": seen.fresh.noise, "typical_change": typical})


def _moved_again(seen: "TreeObservation") -> Finding | None:
    if seen.faults(seen.fresh):
        return None  # wrong from the start, and said so
    faults = seen.faults(seen.reused)
    if not faults:
        return None
    fault, labels = faults[0], seen.layout.labels
    title = (
        f"{fault.kind} on reused buffers only: below a kept path, row {labels[fault.row]} of the tree "
        f"{seen.layout.name!r} {'does not move' if fault.expected else 'moves'} with the token of row "
        f"{labels[fault.column]}; {ENTRY_KINDS[fault.kind]}"
    )
    change = float(seen.reused.direct[fault.row, fault.column])
    return _finding(seen, title, "moves", {"change": change, "noise": seen.reused.noise, "entries": fault.entries})


def _kept(seen: "TreeObservation") -> Finding | None:
    if not seen.kept_error > seen.limit:
        return None
    title = (
        f"below a kept path the tree {seen.layout.name!r} gives other logits than below a fresh prefill of the same "
        f"text: {seen.kept_error:.3g} of their spread, {seen.limit:.3g} is rounding"
    )
    return _finding(seen, title, "kept", {"error": seen.kept_error, "limit": seen.limit})


def _finding(seen: "TreeObservation", title: str, subject: str, evidence: dict[str, float]) -> Finding:
    where = {"side": "target", "tree": seen.layout.name}
    fault = "engine.kv-rollback" if subject == "kept" else "mask.block-tree-visibility"
    return Finding("SD503", Severity.ERROR, title, evidence, where, _FIX, fault, subject)


CHECK = Check("SD503", "Tree rows on buffers used before", "forward", run)
