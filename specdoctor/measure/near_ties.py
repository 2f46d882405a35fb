"""Is a greedy difference a fault, or two tokens too close to call?

A forward over K+1 rows uses other kernels, and so other roundings, than one over a single row. Where the target's two
best tokens lie closer than that noise, either is the target's greedy answer.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from specdoctor.engine.rows import PackedRows
from specdoctor.engine.target import PREFILL_ROWS, Target


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token where an arm left the baseline's greedy text."""

    arm: str
    prompt_id: str
    position: int  # of the completion, 0-based
    expected: int  # the baseline's token
    found: int
    gap: float | None  # |logit(expected) - logit(found)|, one-row forward
    noise: float  # largest change of these logits when the same row is run in a block of K + 1
    near_tie: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first difference, or None when the shorter is a prefix of the longer and both ended alike."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


@torch.inference_mode()
def explain_divergence(
    target: Target, arm: str, prompt_id: str, prompt_ids: list[int], baseline: list[int], found: list[int], block: int
) -> Divergence | None:
    """Measure gap and noise at the first difference of two greedy completions; None when there is none.

    `block` is the K + 1 of the arm's verify forward.
    """
    at = first_difference(baseline, found)
    if at is None:
        return None
    if at >= min(len(baseline), len(found)):  # one text simply ended: no rounding explains that
        longer = baseline if len(baseline) > len(found) else found
        ended = -1
        expected, got = (longer[at], ended) if longer is baseline else (ended, longer[at])
        return Divergence(arm, prompt_id, at, expected, got, None, 0.0, False)
    ids = prompt_ids + baseline[:at]
    pair = torch.tensor([baseline[at], found[at]], device=target.device)
    alone = _logits(target, ids, 1)[0, pair].float()
    ahead = (found[at : at + block] * block)[:block]  # any tokens behind the row do for its rounding
    blocks = [
        _logits(target, [*ids, *ahead][: len(ids) + block - 1 - before], block)[before, pair].float()
        for before in sorted({0, (block - 1) // 2, block - 1})
        if before < len(ids)
    ]
    gap = float((alone[0] - alone[1]).abs())
    noise = max(float((other - alone).abs().sum()) for other in blocks)
    return Divergence(arm, prompt_id, at, int(pair[0]), int(pair[1]), gap, noise, gap <= noise)


def _logits(target: Target, ids: list[int], rows: int) -> Tensor:
    """Logits [rows, V] of the last `rows` tokens, run in one forward after the others."""
    slot = target.open()
    try:
        head = len(ids) - rows
        for start in range(0, head, PREFILL_ROWS):
            chunk = ids[start : min(start + PREFILL_ROWS, head)]
            layout = PackedRows([slot], [start], [len(chunk)], target.device)
            last = torch.tensor([len(chunk) - 1], device=target.device)
            target.forward(layout, torch.tensor(chunk, device=target.device), logit_rows=last)
            target.cache.keep(slot, range(len(chunk)))
        layout = PackedRows([slot], [head], [rows], target.device)
        return target.forward(layout, torch.tensor(ids[head:], device=target.device)).logits
    finally:
        target.close(slot)
