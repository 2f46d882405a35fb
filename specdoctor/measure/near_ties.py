"""Is a greedy difference a fault, or two tokens too close to call?

A forward over K+1 rows uses other kernels, and so other roundings, than one over a single row, and the keys and values
that it leaves behind carry them on. Where the target's two best tokens lie closer than that noise, either is the
target's greedy answer.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from specdoctor.engine.rows import PackedRows
from specdoctor.engine.target import PREFILL_ROWS, Target

Round = tuple[int, int]  # rows of a verify forward, and how many of them were kept


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token where an arm left the baseline's greedy text."""

    arm: str
    prompt_id: str
    position: int  # of the completion, 0-based
    expected: int  # the baseline's token
    found: int
    gap: float | None  # |logit(expected) - logit(found)|, one-row forward
    noise: float  # largest change of these two logits when the same text is run in forwards of other shapes
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
    target: Target,
    arm: str,
    prompt_id: str,
    prompt_ids: list[int],
    baseline: list[int],
    found: list[int],
    block: int,
    rounds: Seq[Round] = (),
) -> Divergence | None:
    """Measure gap and noise at the first difference of two greedy completions; None when there is none.

    `block` is the K + 1 of the arm's verify forward, `rounds` what it really ran, where that is known. The two logits
    are computed in several ways that differ in rounding only; noise is the largest change.
    """
    at = first_difference(baseline, found)
    if at is None:
        return None
    if at >= min(len(baseline), len(found)):  # one text simply ended: no rounding explains that
        longer = baseline if len(baseline) > len(found) else found
        ended = -1
        expected, got = (longer[at], ended) if longer is baseline else (ended, longer[at])
        return Divergence(arm, prompt_id, at, expected, got, None, 0.0, False)
    pair = torch.tensor([baseline[at], found[at]], device=target.device)
    alone = _one_forward(target, prompt_ids + baseline[:at], 1, 0)[pair].float()
    gap, noise = float((alone[0] - alone[1]).abs()), 0.0
    for logits in _other_ways(target, prompt_ids, baseline[:at], block, rounds):
        noise = max(noise, float((logits[pair].float() - alone).abs().sum()))
        if noise >= gap:  # explained; the costlier ways need not be tried
            break
    return Divergence(arm, prompt_id, at, int(pair[0]), int(pair[1]), gap, noise, gap <= noise)


def _other_ways(
    target: Target, prompt_ids: list[int], text: list[int], block: int, rounds: Seq[Round]
) -> Iterator[Tensor]:
    """The logits [V] after `text` in forwards of other shapes, cheap ones first.

    Keys and values of earlier tokens carry their own roundings, so the decodings themselves are replayed too: the
    baseline's, row by row, then the arm's.
    """
    ids = prompt_ids + text
    for before in sorted({0, (block - 1) // 2, block - 1}):
        if before < len(ids) and len(ids) + block - 1 - before <= target.max_positions:
            yield _one_forward(target, ids, block, before)
    if not text:
        return
    yield _replayed(target, prompt_ids, text, [(1, 1)] * len(text))
    yield _replayed(target, prompt_ids, text, rounds or [(block, block)] * len(text))


def _one_forward(target: Target, ids: list[int], rows: int, before: int) -> Tensor:
    """Logits [V] after `ids`: `before` of its tokens, the last, and others behind it share one forward of `rows`."""
    behind = rows - 1 - before
    ids = ids + (ids * rows)[:behind]  # any tokens behind the row do for its rounding
    slot = target.open()
    try:
        _feed(target, slot, ids[: len(ids) - rows])
        return _forward(target, slot, ids[len(ids) - rows :])[before]
    finally:
        target.close(slot)


def _replayed(target: Target, prompt_ids: list[int], text: list[int], rounds: Seq[Round]) -> Tensor:
    """Logits [V] after `text`, decoded in `rounds`, each of some rows, of which some are kept."""
    slot = target.open()
    try:
        _feed(target, slot, prompt_ids)
        done = 0
        for rows, kept in rounds:
            rows = min(rows, target.max_positions - target.cache.lengths[slot])
            piece = (text[done:] + prompt_ids * rows)[:rows]
            logits = _forward(target, slot, piece)
            if done + kept >= len(text):
                break
            target.cache.keep(slot, range(kept))
            done += kept
        return logits[len(text) - done - 1]
    finally:
        target.close(slot)


def _feed(target: Target, slot: int, ids: list[int]) -> None:
    """Prefill, in the pieces that the engine would take."""
    for start in range(0, len(ids), PREFILL_ROWS):
        piece = ids[start : start + PREFILL_ROWS]
        _forward(target, slot, piece, torch.tensor([len(piece) - 1], device=target.device))
        target.cache.keep(slot, range(len(piece)))


def _forward(target: Target, slot: int, ids: list[int], logit_rows: Tensor | None = None) -> Tensor:
    rows = PackedRows([slot], [target.cache.lengths[slot]], [len(ids)], target.device)
    return target.forward(rows, torch.tensor(ids, device=target.device), logit_rows=logit_rows).logits
