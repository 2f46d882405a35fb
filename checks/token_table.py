"""Two id -> bytes tables side by side: which ids mean something else, and which of those any text can reach.

Contract: an id counts as differing only when a text can reach it. Padding, place-holders and added tokens that neither
side's template, roles nor sample uses are kept apart as `idle`: refusing a pair for those is a false alarm.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from specdoctor.formats.vocabulary import Vocabulary, is_unused_slot, show

SAME_FAMILY_SHARE = 0.5  # of shared ids; vocabularies of unlike families agree on fewer than 1 in 100
SAME_FAMILY_OVERLAP = 0.8  # of token strings: an inserted token shifts every id and leaves the strings


class Why(StrEnum):
    """Why a differing id matters, worst first."""

    ORDINARY = "ordinary token"
    MOVED = "same token at another id"
    RENAMED = "special token in use"
    NO_ROW = "no row in the drafter's embedding"
    IDLE = "not in use"


@dataclass(frozen=True)
class DifferingId:
    """One id that does not mean the same on both sides; `None` = no token there."""

    id: int
    target: bytes | None
    drafter: bytes | None
    why: Why
    count: int  # uses in the encoded sample
    weight: float | None  # the same as a share of the sample's tokens
    used: bool  # in the sample, in a chat template or in a role (bos, eos, ...) of either side

    def as_json(self) -> dict[str, object]:
        return {
            "id": self.id,
            "target": show(self.target),
            "drafter": show(self.drafter),
            "why": str(self.why),
            "count": self.count,
            "weight": self.weight,
            "used": self.used,
        }


@dataclass(frozen=True)
class Speech:
    """What of one side's vocabulary texts reach: uses in the sample, and ids with a role or a place in the template."""

    counts: Mapping[int, int]
    named: frozenset[int]

    def uses(self, token_id: int) -> bool:
        return token_id in self.named or self.counts.get(token_id, 0) > 0


class TokenTable:
    """The comparison of two vocabularies. `drafter_rows`: rows of the drafter's embedding, if known."""

    def __init__(
        self,
        target: Vocabulary,
        drafter: Vocabulary,
        target_speech: Speech,
        drafter_speech: Speech,
        drafter_rows: int | None,
    ) -> None:
        self._sides = (target, drafter)
        self._speech = (target_speech, drafter_speech)
        self._drafter_rows = drafter_rows
        self.shared_range = min(target.size, drafter.size)
        self.all_ids = max(target.size, drafter.size)
        pairs = zip(target.tokens, drafter.tokens, strict=False)
        unequal = [i for i, (mine, theirs) in enumerate(pairs) if mine != theirs]
        self.unequal = len(unequal)
        ids = unequal + list(range(self.shared_range, self.all_ids))
        if self.unlike_families:  # every id differs: list those that the sample meets
            ids = [token_id for token_id in ids if self._counted.get(token_id)]
        entries = [entry for entry in map(self._entry, ids) if entry.target is not None or entry.drafter is not None]
        self.differing = sorted((e for e in entries if e.why is not Why.IDLE), key=lambda e: (-e.count, e.id))
        self.idle = [entry for entry in entries if entry.why is Why.IDLE]

    @property
    def differing_count(self) -> int:
        """How many ids differ, those included that are not listed because every id does."""
        return max(self.unequal, len(self.differing)) if self.unlike_families else len(self.differing)

    @property
    def same_share(self) -> float:
        """Share of the shared id range that means the same on both sides."""
        return 1 - self.unequal / self.shared_range if self.shared_range else 0.0

    @cached_property
    def overlap(self) -> float:
        """Token strings on both sides, as a share of those on either (Jaccard index)."""
        mine, theirs = (set(side.tokens) - {None} for side in self._sides)
        return len(mine & theirs) / max(1, len(mine | theirs))

    @property
    def unlike_families(self) -> bool:
        """Whether these are two vocabularies rather than two versions of one."""
        return self.same_share < SAME_FAMILY_SHARE and self.overlap < SAME_FAMILY_OVERLAP

    @property
    def differing_weight(self) -> float | None:
        """Share of the sample's tokens that fall on differing ids; None when nothing was encoded."""
        return sum(entry.count for entry in self.differing) / self._total if self._total else None

    @cached_property
    def coverage(self) -> tuple[float, float | None]:
        """Share of the target's tokens whose bytes are a drafter token too: of the vocabulary, and of the sample."""
        target, drafter = self._sides
        known, counts = drafter.id_of.keys(), self._speech[0].counts
        tokens = set(target.tokens) - {None}
        total, used = sum(counts.values()), sum(n for i, n in counts.items() if target.tokens[i] in known)
        return len(tokens & known) / max(1, len(tokens)), used / total if total else None

    @cached_property
    def _total(self) -> int:
        return sum(self._counted.values())

    @property
    def _counted(self) -> Mapping[int, int]:
        return self._speech[0].counts or self._speech[1].counts

    def _entry(self, token_id: int) -> DifferingId:
        target, drafter = (side.tokens[token_id] if token_id < side.size else None for side in self._sides)
        used = any(speech.uses(token_id) for speech in self._speech)
        why = self._why(token_id, target, drafter)
        count = self._counted.get(token_id, 0)
        return DifferingId(token_id, target, drafter, why, count, count / self._total if self._total else None, used)

    def _why(self, token_id: int, target: bytes | None, drafter: bytes | None) -> Why:
        tokens = enumerate((target, drafter))
        kinds = {self._alone(side, token_id, token) for side, token in tokens if token is not None}
        rows = self._drafter_rows
        if drafter is None and rows is not None and token_id >= rows and self._speech[0].uses(token_id):
            return Why.NO_ROW
        if Why.RENAMED in kinds and (target is None or drafter is None):
            kinds = {Why.IDLE}  # the other side has a free row there, not another token
        return next((why for why in Why if why in kinds), Why.IDLE)

    def _alone(self, side: int, token_id: int, token: bytes) -> Why:
        """What one side's token says about an id that the other side fills with something else."""
        mine, other = self._sides[side], self._sides[1 - side]
        in_use = Why.RENAMED if self._speech[side].uses(token_id) else Why.IDLE
        if is_unused_slot(token):
            return in_use
        if token_id not in mine.added:
            return Why.ORDINARY
        return Why.MOVED if other.id_of.get(token, token_id) != token_id else in_use
