"""The headline figures of `accept`: tau, alpha, acceptance by position and by what the text is like.

Contract: pure functions of `TextAcceptance`s and the `Variant` that was asked for. Two averages, never mixed up:
`by round` weighs an anchor by the chance that a round starts there (what decoding shows), `by anchor` counts every
position of the text once. They differ, because rounds pile up where drafts fail. Every estimate is a ratio of sums over
prompts with an interval clustered by prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdoctor.metrics.acceptance import CONTEXT_EDGES
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.renewal import Array, accepted_law, expected_committed, survival, visits
from specdoctor.metrics.statistics import ratio_of_sums
from specdoctor.metrics.text_acceptance import TextAcceptance
from specdoctor.metrics.whatif import Variant, follow, keep_mask, prompt_index, trimmed

ANSWER_EDGES = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
NO_ANCHORS = "no text has more than one token"
SAMPLED = "anchors were sampled, and a sample does not show where rounds start; leave --anchors out"


@dataclass(slots=True)
class PromptSums:
    """Expected sums of one prompt, all its texts together: what a paired comparison needs."""

    id: str
    category: str
    texts: int = 0
    completion_tokens: int = 0
    anchors: float = 0.0
    anchor_committed: float = 0.0
    expected_rounds: float | None = None  # None: anchors were sampled
    expected_committed: float | None = None
    expected_accepted: float | None = None
    expected_drafted: float | None = None
    expected_verified: float | None = None
    survived: list[float] = field(default_factory=list)  # [K] rounds whose drafts 0..k were all accepted
    at_risk: list[float] = field(default_factory=list)  # [K] rounds that drafted k, as far as the text shows

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(slots=True)
class _Weighted:
    """One text with the weight of its anchors, under one of the two averages."""

    text: TextAcceptance
    weight: Array  # [A]
    alive: Array  # [A, K] survival of the drafts, trimmed ones counted as fallen
    made: NDArray[np.bool_]  # [A, K] draft k is made, and the text shows its true token
    keep: NDArray[np.bool_]  # [A, K] it is verified too, if the ones before it were accepted
    committed: Array  # [A]
    accepted: Array  # [A]
    drafted: Array  # [A] drafts of which the text shows the true token


def by_round(text: TextAcceptance, variant: Variant) -> Array:
    """[A] P(a round starts at the anchor)."""
    return visits(survival(trimmed(text, variant)))


def by_anchor(text: TextAcceptance, variant: Variant) -> Array:
    """[A] anchors that each one stands for."""
    return text.weight.astype(np.float64)


class AcceptanceFigures:
    """Texts under one average, with the sums that the figures are ratios of."""

    def __init__(
        self,
        texts: Sequence[TextAcceptance],
        variant: Variant,
        weigh: Callable[[TextAcceptance, Variant], Array] = by_round,
        seed: int = 0,
    ) -> None:
        self.prompts, self.index = prompt_index(texts)
        self.variant, self.seed = variant, seed
        self.known = weigh is by_anchor or all(text.whole for text in texts)
        self.rows = [_weighted(text, variant, weigh) for text in texts] if self.known else []
        self.K = variant.draft_tokens

    def tau(self) -> Estimate:
        """Committed tokens per round (or per anchor), cut at the end of the text; n = rounds or anchors."""
        return self.ratio(lambda row: row.weight @ row.committed, lambda row: row.weight.sum())

    def alpha(self) -> Estimate:
        """Accepted drafts / drafted tokens, a draft at any position of the block counting alike."""
        return self.ratio(lambda row: row.weight @ row.accepted, lambda row: row.weight @ row.drafted)

    def marginal(self) -> list[Estimate]:
        """[K] P(drafts 0..k all accepted), over all rounds: a draft that was not verified was not accepted."""
        return [self._at(k, lambda row, k: row.alive[:, k], _made) for k in range(self.K)]

    def conditional(self) -> list[Estimate]:
        """[K] P(draft k accepted given 0..k-1 were), over rounds that got so far."""
        return [self._at(k, lambda row, k: row.alive[:, k], _at_risk) for k in range(self.K)]

    def histogram(self) -> list[float]:
        """[K + 1] expected rounds by accepted drafts, over the rounds of which the text shows all drafts."""
        total = np.zeros(self.K + 1)
        for row in self.rows:
            shown = ~np.isnan(row.text.accept[:, : self.K]).any(axis=-1)
            total += (row.weight * shown) @ accepted_law(row.alive)
        return total.tolist()

    def split(self, labels: Sequence[str], bins: Callable[[TextAcceptance], NDArray[np.int64]]) -> dict[str, Any]:
        """tau and alpha of the rounds that start in each bin; `bins` [A] of a text's anchors. No empty bins."""
        where = [bins(row.text) for row in self.rows]
        out = {}
        for i, label in enumerate(labels):
            weights = [row.weight * (bin_of == i) for row, bin_of in zip(self.rows, where, strict=True)]
            if not any(weight.any() for weight in weights):
                continue
            pairs = list(zip(weights, self.rows, strict=True))
            starts = [weight.sum() for weight in weights]
            out[label] = {
                "tau": self._pooled([w @ row.committed for w, row in pairs], starts),
                "alpha_draft": self._pooled(
                    [w @ row.accepted for w, row in pairs], [w @ row.drafted for w, row in pairs]
                ),
            }
        return out

    def by_class(
        self, classes: Sequence[str], class_of: Callable[[TextAcceptance], NDArray[np.int64]]
    ) -> dict[str, Any]:
        """Conditional acceptance of drafts whose true token is of a class; `class_of` [n + lookahead] of the tokens.

        n of an estimate = drafts at risk: verified, everything before them accepted.
        """
        pairs = []
        for row in self.rows:
            ahead = row.text.anchors[:, None] + 1 + np.arange(self.K)
            cls = class_of(row.text)[np.minimum(ahead, len(row.text.tokens) - 1)]  # [A, K]
            risk = row.weight[:, None] * np.stack([_at_risk(row, k) for k in range(self.K)], axis=-1)
            taken = row.weight[:, None] * row.alive * row.made
            pairs.append((cls, taken, risk))
        out = {}
        for i, name in enumerate(classes):
            tops = [float(taken[cls == i].sum()) for cls, taken, _ in pairs]
            bottoms = [float(risk[cls == i].sum()) for cls, _, risk in pairs]
            if sum(bottoms) > 0:
                out[name] = self._pooled(tops, bottoms)
        return out

    def ratio(self, top: Callable[[_Weighted], Any], bottom: Callable[[_Weighted], Any]) -> Estimate:
        """Ratio of sums over texts of two functions of a text."""
        if not self.known:
            return Estimate.absent(SAMPLED)
        return self._pooled([top(row) for row in self.rows], [bottom(row) for row in self.rows])

    def _at(self, k: int, top: Callable[[_Weighted, int], Array], risk: Callable[[_Weighted, int], Array]) -> Estimate:
        return self.ratio(
            lambda row: (row.weight * row.made[:, k]) @ top(row, k),
            lambda row: row.weight @ risk(row, k),
        )

    def _pooled(self, tops: Sequence[float], bottoms: Sequence[float]) -> Estimate:
        size = len(self.prompts)
        return ratio_of_sums(
            np.bincount(self.index, tops, minlength=size),
            np.bincount(self.index, bottoms, minlength=size),
            round(sum(bottoms)),
            NO_ANCHORS,
            self.seed,
        )


def prompt_sums(texts: Sequence[TextAcceptance], variant: Variant) -> list[PromptSums]:
    """Per prompt, in order of appearance, the sums behind the headline."""
    prompts, index = prompt_index(texts)
    sums = [PromptSums(prompt, "") for prompt in prompts]
    K = variant.draft_tokens
    for text, prompt in zip(texts, index, strict=True):
        one = sums[prompt]
        row = _weighted(text, variant, by_anchor)
        one.category, one.texts = text.category, one.texts + 1
        one.completion_tokens += text.length
        one.anchors += float(row.weight.sum())
        one.anchor_committed += float(row.weight @ row.committed)
    if not all(text.whole for text in texts):
        return sums
    for one in sums:
        one.survived, one.at_risk = [0.0] * K, [0.0] * K
    for text, prompt in zip(texts, index, strict=True):
        one, row = sums[prompt], _weighted(text, variant, by_round)
        for k in range(K):
            one.survived[k] += float((row.weight * row.made[:, k]) @ row.alive[:, k])
            one.at_risk[k] += float(row.weight @ _made(row, k))
    (totals,) = follow(texts, [variant])
    for i, one in enumerate(sums):
        one.expected_rounds = float(totals.rounds[i])
        one.expected_committed = float(totals.committed[i])
        one.expected_accepted = float(totals.accepted[i])
        one.expected_drafted = float(totals.drafted[i])
        one.expected_verified = float(totals.lengths[i] @ np.arange(totals.lengths.shape[1]))
    return sums


def context_bins(edges: Sequence[int] = CONTEXT_EDGES) -> tuple[list[str], Callable[[TextAcceptance], Any]]:
    """Labels, and the bin of each anchor by the tokens before it."""
    return _labels(edges), lambda text: np.searchsorted(edges, text.prompt_tokens + text.anchors, side="right") - 1


def answer_bins(edges: Sequence[int] = ANSWER_EDGES) -> tuple[list[str], Callable[[TextAcceptance], Any]]:
    """Labels, and the bin of each anchor by its place in the completion."""
    return _labels(edges), lambda text: np.searchsorted(edges, text.anchors, side="right") - 1


def _labels(edges: Sequence[int]) -> list[str]:
    return [f"{low}-{high - 1}" for low, high in pairwise(edges)] + [f"{edges[-1]}+"]


def _weighted(text: TextAcceptance, variant: Variant, weigh: Callable[[TextAcceptance, Variant], Array]) -> _Weighted:
    K = variant.draft_tokens
    accept = trimmed(text, variant)[:, :K]
    alive = survival(accept)
    made = np.arange(K) < text.room[:, None]
    shown = ~np.isnan(text.accept[:, :K])
    keep = made
    if variant.threshold is not None and text.confidence is not None:
        keep = made & keep_mask(text.confidence[:, :K], variant.threshold, variant.cumulative)
    left = text.length - 1 - text.anchors
    return _Weighted(
        text=text,
        weight=weigh(text, variant),
        alive=alive,
        made=made & shown,
        keep=keep & shown,
        committed=expected_committed(alive, left),
        accepted=alive.sum(axis=-1),
        drafted=(made & shown).sum(axis=-1),
    )


def _at_risk(row: _Weighted, k: int) -> Array:
    """[A] P(draft k is verified and the ones before it were accepted)."""
    before = np.ones(len(row.alive)) if k == 0 else row.alive[:, k - 1]
    return before * row.keep[:, k]


def _made(row: _Weighted, k: int) -> Array:
    """[A] whether draft k is made."""
    return row.made[:, k].astype(np.float64)
