"""Where rounds start: the renewal process of speculative decoding along a fixed text.

A round begins at the last committed token and ends with the token after its accepted drafts, so where rounds start
depends on how earlier ones went. Given the text y, draft k of a round anchored at a is accepted, the drafts before it
having been, with a known probability (`specdoctor.metrics.text_acceptance`); rounds are then a renewal process over the
positions of y, followed here exactly.

Contract: pure numpy. Letters: A anchors (every token of the completion but the last, in order), K draft positions, W
variants side by side in leading dimensions. The first token of the completion comes from the prefill: a round starts
at anchor 0 with probability 1. The completion ends with its last token, by a stop token or by the cap alike; what a
round would commit beyond is cut.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def survival(accept: ArrayLike) -> Array:
    """Conditional acceptance [..., A, K] to P(drafts 0..k of a round at a are all accepted | y) [..., A, K]."""
    known = np.nan_to_num(np.asarray(accept, np.float64), nan=0.0)
    return np.asarray(np.cumprod(known, axis=-1), np.float64)


def accepted_law(surviving: Array) -> Array:
    """[..., A, K] survival to P(exactly j drafts accepted | round at a, y), j = 0..K: [..., A, K + 1]."""
    ones = np.ones((*surviving.shape[:-1], 1))
    whole = np.concatenate([ones, surviving, np.zeros_like(ones)], axis=-1)
    return whole[..., :-1] - whole[..., 1:]


def visits(surviving: Array) -> Array:
    """P(a round starts at anchor a | y) [..., A]; their sum is the expected number of rounds."""
    law = accepted_law(surviving)
    *lead, A, width = law.shape
    visited = np.zeros((*lead, A + width))
    if A:
        visited[..., 0] = 1.0
    for a in range(A):
        visited[..., a + 1 : a + 1 + width] += visited[..., a, None] * law[..., a, :]
    return visited[..., :A]


def expected_committed(surviving: Array, left: ArrayLike | None = None) -> Array:
    """Expected tokens [..., A] that a round at anchor a commits, the token after the drafts included, cut at the end.

    `left` [A]: tokens after each anchor; by default the anchors are all of them, in order, and then
    `sum(visits * expected_committed)` is the length of the completion less its first token, whatever the acceptance.
    """
    A, K = surviving.shape[-2:]
    left = A - np.arange(A) if left is None else np.asarray(left)
    counted = np.arange(1, K + 1) < left[:, None]  # accepted drafts 0..k give k + 2 tokens; the last may not fit
    return 1.0 + (surviving * counted).sum(axis=-1)


@dataclass(frozen=True, slots=True)
class LengthRule:
    """A rule that sets the next round's draft length from this round's: `following[k, j]` after j of k accepted."""

    name: str
    formula: str
    first: int
    following: NDArray[np.int64]  # [K + 1, K + 1]; row and column 0 included


def length_rules(K: int) -> list[LengthRule]:
    """Dynamic draft lengths that look at nothing but the round before (K >= 1)."""
    k, j = np.meshgrid(np.arange(K + 1), np.arange(K + 1), indexing="ij")
    all_accepted = j >= k
    rules = {
        "last+1": ("one more than were accepted last", np.minimum(j + 1, K)),
        "up-down": (
            "+2 after a round accepted whole, -1 after any other (transformers' heuristic schedule)",
            np.where(all_accepted, k + 2, k - 1),
        ),
        "double-halve": (
            "twice after a round accepted whole, half after any other",
            np.where(all_accepted, 2 * k, k // 2),
        ),
    }
    return [
        LengthRule(name, formula, K, np.clip(following, 1, K).astype(np.int64))
        for name, (formula, following) in rules.items()
    ]


def rule_visits(surviving: Array, rule: LengthRule) -> Array:
    """P(a round of draft length k starts at anchor a | y) [A, K + 1] under a rule; surviving is [A, K]."""
    A, K = surviving.shape
    visited = np.zeros((A + K + 1, K + 1))
    if not A:
        return visited[:0]
    visited[0, rule.first] = 1.0
    lengths, counts = np.meshgrid(np.arange(K + 1), np.arange(K + 1), indexing="ij")
    possible = counts <= lengths
    reach, stop = np.ones(K + 1), np.zeros(K + 1)
    for a in range(A):
        here = visited[a]
        if not here.any():
            continue
        reach[1:], stop[:-1] = surviving[a], surviving[a]
        # Exactly j accepted: j survive and the next falls, unless j was all that was drafted.
        law = np.where(counts == lengths, reach, reach - stop) * possible
        np.add.at(visited, (a + 1 + counts, rule.following), here[:, None] * law)
    return visited[:A]


def rule_committed(surviving: Array) -> Array:
    """Expected tokens [A, K + 1] that a round of draft length k at anchor a commits, cut at the end."""
    A, K = surviving.shape
    left = A - np.arange(A)
    counted = surviving * (np.arange(1, K + 1) < left[:, None])
    return 1.0 + np.concatenate([np.zeros((A, 1)), np.cumsum(counted, axis=-1)], axis=-1)


def replay(surviving: Array, uniform: ArrayLike, start: int = 0) -> list[tuple[int, int]]:
    """One run of rounds drawn from the law given y: (anchor, accepted drafts, not cut at the end) from `start` on.

    `uniform` [A] decides the round at each anchor, were it to start there. With acceptance 0 or 1 (greedy) there is
    one possible run only: what decoding does.
    """
    accepted = (np.asarray(uniform)[:, None] < surviving).sum(axis=-1)  # survival falls with k, so this is inversion
    rounds = []
    at = start
    while at < len(accepted):
        rounds.append((at, int(accepted[at])))
        at += int(accepted[at]) + 1
    return rounds
