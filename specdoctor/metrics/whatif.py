"""What acceptance would be with other settings, from the arrays of one pass.

Contract: pure functions of `TextAcceptance`s. A `Variant` is a way to draft and to trim; for each, rounds are followed
through every text (`specdoctor.metrics.renewal`) and summed by prompt, so that any figure of a variant is a ratio of
sums with an interval. Only texts of which every anchor was looked at can be followed.

Exact given the texts, with one exception: how many drafts a confidence threshold sends to the target beyond the first
rejected one. There the confidence head reads drafts that are not in the text; their share is taken from the replayed
rounds of all texts together. It touches cost (rows verified), never acceptance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdoctor.metrics.renewal import (
    Array,
    LengthRule,
    accepted_law,
    expected_committed,
    rule_committed,
    rule_visits,
    survival,
    visits,
)
from specdoctor.metrics.text_acceptance import TextAcceptance

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Variant:
    """K drafts, of which those before the first confidence below `threshold` are verified.

    `cumulative`: the threshold is on the product of confidences so far. `temperature` labels a draft temperature other
    than that of the run. `allowed` gives, for a text, which ids [vocabulary] the drafter could propose at all.
    """

    name: str
    draft_tokens: int
    threshold: float | None = None
    cumulative: bool = False
    temperature: str | None = None
    allowed: Callable[[TextAcceptance], Bools] | None = None
    perfect: bool = False  # every allowed draft is accepted
    tree_width: int | None = None  # a draft is accepted if it is among so many likeliest ones


@dataclass(slots=True)
class Totals:
    """Expected sums by prompt [P] of one variant, and rounds by number of drafts verified [P, K + 1]."""

    rounds: Array
    committed: Array
    accepted: Array
    drafted: Array
    lengths: Array


def keep_mask(confidence: NDArray, threshold: float | None, cumulative: bool = False) -> Bools:
    """Which drafts [..., K] are verified: those before the first confidence (or product of them) below `threshold`."""
    if threshold is None:
        return np.ones(confidence.shape, np.bool_)
    values = np.cumprod(confidence, axis=-1) if cumulative else confidence
    return np.logical_and.accumulate(values >= threshold, axis=-1)


def untrimmed(text: TextAcceptance, variant: Variant) -> Array:
    """Conditional acceptance [A, depth] of a variant's drafts, 0 for those that it does not make."""
    accept = text.accept if variant.temperature is None else text.by_temperature[variant.temperature]
    if variant.tree_width is not None:
        assert text.rank is not None
        inside = (text.rank >= 0) & (text.rank < variant.tree_width)
        accept = np.where(np.isnan(accept), np.nan, inside)
    if variant.perfect:
        accept = np.where(np.isnan(accept), np.nan, 1.0)
    if variant.allowed is not None:
        ahead = text.anchors[:, None] + 1 + np.arange(accept.shape[1])
        tokens = text.tokens[np.minimum(ahead, len(text.tokens) - 1)]
        accept = accept * variant.allowed(text)[tokens]
    made = np.arange(accept.shape[1]) < np.minimum(variant.draft_tokens, text.room)[:, None]
    return np.where(made, accept, 0.0).astype(np.float64)


def trimmed(text: TextAcceptance, variant: Variant) -> Array:
    """The same, 0 for drafts that are not sent to the target either."""
    accept = untrimmed(text, variant)
    if variant.threshold is None or text.confidence is None:
        return accept
    return accept * keep_mask(text.confidence, variant.threshold, variant.cumulative)


def prompt_index(texts: Sequence[TextAcceptance]) -> tuple[list[str], NDArray[np.int64]]:
    """Prompt ids in order of appearance, and the prompt of each text."""
    order: dict[str, int] = {}
    index = np.array([order.setdefault(text.prompt_id, len(order)) for text in texts], np.int64)
    return list(order), index


def follow(texts: Sequence[TextAcceptance], variants: Sequence[Variant]) -> list[Totals]:
    """Follow the rounds of every variant through every text."""
    prompts, index = prompt_index(texts)
    depth = max((text.accept.shape[1] for text in texts), default=0)
    deviated = [_deviated(texts, variant) for variant in variants]
    out = [_empty(len(prompts), depth) for _ in variants]
    for text, prompt in zip(texts, index, strict=True):
        assert text.whole, "a sample of anchors does not show where rounds start"
        alive = survival(np.stack([trimmed(text, variant) for variant in variants]))  # [W, A, depth]
        starts, committed = visits(alive), expected_committed(alive)
        for w, variant in enumerate(variants):
            totals, law = out[w], _length_law(text, variant, deviated[w])
            totals.rounds[prompt] += starts[w].sum()
            totals.committed[prompt] += starts[w] @ committed[w]
            totals.accepted[prompt] += starts[w] @ alive[w].sum(axis=-1)
            totals.drafted[prompt] += starts[w] @ np.minimum(variant.draft_tokens, text.room)
            totals.lengths[prompt] += starts[w] @ law
    return out


def follow_rule(texts: Sequence[TextAcceptance], rule: LengthRule) -> Totals:
    """The same for a rule that changes the draft length from round to round."""
    prompts, index = prompt_index(texts)
    K = len(rule.following) - 1
    totals = _empty(len(prompts), K)
    everything = Variant(rule.name, K)
    for text, prompt in zip(texts, index, strict=True):
        alive = survival(untrimmed(text, everything)[:, :K])
        by_length = rule_visits(alive, rule)  # [A, K + 1]
        so_far = np.concatenate([np.zeros((len(alive), 1)), np.cumsum(alive, axis=-1)], axis=-1)
        made = np.minimum(np.arange(K + 1), text.room[:, None])
        totals.rounds[prompt] += by_length.sum()
        totals.committed[prompt] += (by_length * rule_committed(alive)).sum()
        totals.accepted[prompt] += (by_length * so_far).sum()
        totals.drafted[prompt] += (by_length * made).sum()
        totals.lengths[prompt] += np.bincount(made.ravel(), by_length.ravel(), minlength=K + 1)
    return totals


def tree_coverage(
    texts: Sequence[TextAcceptance], width: int, weights: Callable[[TextAcceptance], Array]
) -> tuple[Array, Array]:
    """Per prompt and position [P, depth]: anchors whose next tokens are all among the `width` likeliest drafts so far;
    and those of them that were so up to the position before. `weights` [A] of a text's anchors."""
    prompts, index = prompt_index(texts)
    depth = texts[0].accept.shape[1]
    covered, reached = np.zeros((len(prompts), depth)), np.zeros((len(prompts), depth))
    for text, prompt in zip(texts, index, strict=True):
        assert text.rank is not None
        known = text.anchors[:, None] + 1 + np.arange(depth) < len(text.tokens)
        inside = np.logical_and.accumulate((text.rank >= 0) & (text.rank < width), axis=-1)
        before = np.concatenate([np.ones((len(inside), 1), np.bool_), inside[:, :-1]], axis=-1)
        weight = weights(text)
        covered[prompt] += weight @ (inside & known)
        reached[prompt] += weight @ (before & known)
    return covered, reached


def frequency_ranks(texts: Sequence[TextAcceptance], vocabulary: int) -> tuple[Array, dict[str, int]]:
    """Rank of every id by frequency [2, vocabulary] (inf: never seen), and which of the two each prompt is judged by.

    A prompt is judged by the counts of the other half of the prompts: its own would flatter a small vocabulary.
    """
    prompts, index = prompt_index(texts)
    half = index % 2
    ranks = np.empty((2, vocabulary))
    for side in (0, 1):
        counts = np.zeros(vocabulary, np.int64)
        for text in (t for t, h in zip(texts, half, strict=True) if h != side):
            counts += np.bincount(text.tokens[: text.length], minlength=vocabulary)
        order = np.argsort(-counts, kind="stable")
        ranks[side, order] = np.arange(vocabulary)
        ranks[side, counts == 0] = np.inf
    return ranks, {prompt: i % 2 for i, prompt in enumerate(prompts)}


def _empty(prompts: int, depth: int) -> Totals:
    rounds, committed, accepted, drafted = np.zeros((4, prompts))
    return Totals(rounds, committed, accepted, drafted, np.zeros((prompts, depth + 1)))


def _length_law(text: TextAcceptance, variant: Variant, deviated: Array | None) -> Array:
    """P(n drafts are verified | round at anchor a) [A, depth + 1]."""
    A, depth = text.accept.shape
    made = np.minimum(np.minimum(variant.draft_tokens, text.room), depth)
    if variant.threshold is None or text.confidence is None:
        return np.eye(depth + 1)[made]
    keep = keep_mask(text.confidence, variant.threshold, variant.cumulative)
    law = accepted_law(survival(untrimmed(text, variant)))  # as if all were verified
    verified = np.zeros((A, depth))
    reached = np.concatenate([np.ones((A, 1)), survival(untrimmed(text, variant))[:, :-1]], axis=-1)
    for k in range(depth):  # draft k is verified: its confidence read y's tokens, or drafts rejected at j < k
        verified[:, k] = reached[:, k] * keep[:, k]
        for j in range(k):
            share = keep[:, k] if deviated is None else keep[:, j] * deviated[j, k]
            verified[:, k] += law[:, j] * share
    verified *= np.arange(depth) < made[:, None]
    verified = np.minimum.accumulate(verified, axis=-1)  # shares come from other rounds: keep it a distribution
    return accepted_law(verified)


def _deviated(texts: Sequence[TextAcceptance], variant: Variant) -> Array | None:
    """[K, K] share of rounds that fell at draft j, verified, of which draft k > j is verified too.

    Where no round fell at j, what rounds that fell anywhere before k show.
    """
    followed_any = any(t.reads_drafts and t.rounds and t.rounds.confidence is not None for t in texts)
    if variant.threshold is None or not followed_any:
        return None  # the head does not read drafts, and then y's confidences are those of any draft
    depth = texts[0].accept.shape[1]
    both, fell = np.zeros((depth, depth)), np.zeros(depth)
    for text in texts:
        if text.rounds is None or text.rounds.confidence is None:
            continue
        followed = ~np.isnan(text.rounds.confidence).any(axis=-1)
        keep = keep_mask(text.rounds.confidence[followed], variant.threshold, variant.cumulative)
        for j in range(min(depth, keep.shape[1])):
            rows = keep[(text.rounds.accepted[followed] == j) & keep[:, j]]
            both[j, : keep.shape[1]] += rows.sum(axis=0)
            fell[j] += len(rows)
    pooled = np.triu(both, 1).sum(axis=0) / np.maximum(1.0, np.array([fell[:k].sum() for k in range(depth)]))
    return np.where(fell[:, None] > 0, both / np.maximum(fell, 1.0)[:, None], pooled[None])
