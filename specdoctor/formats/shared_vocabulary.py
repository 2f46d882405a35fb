"""Which tokens two vocabularies share: the same bytes, and special in both or in neither.

Token-level intersection of Timor et al. 2025 ("Accelerating LLM inference with lossless speculative decoding algorithms
for heterogeneous vocabularies"): a drafter may propose the shared tokens, each under the other side's id.
"""

from dataclasses import dataclass, field
from functools import cached_property

from specdoctor.formats.tokenizer_files import TokenizerSide
from specdoctor.formats.vocabulary import Vocabulary


@dataclass
class SharedVocabulary:
    """The intersection of a draft and a target vocabulary, within the rows that their models have."""

    draft: Vocabulary
    target: Vocabulary
    draft_rows: int  # of the draft model's head; tokens beyond cannot be proposed
    target_rows: int
    roles: dict[int, int] = field(default_factory=dict)  # target id -> draft id of the same role (bos, eos, ...)

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """(draft id, target id) of every shared token, by rising draft id; no id stands in two pairs."""
        shared = self.draft.id_of.keys() & self.target.id_of.keys()
        both = ((self.draft.id_of[token], self.target.id_of[token]) for token in shared)
        return sorted(pair for pair in both if self._fits(*pair))

    @cached_property
    def draft_id_of(self) -> dict[int, int]:
        """Target id -> the draft id of the same bytes; of several target ids with the same bytes, for each of them."""
        found = dict(self.roles)
        for target_id, token in enumerate(self.target.tokens):
            draft_id = None if token is None else self.draft.id_of.get(token)
            if draft_id is not None and self._fits(draft_id, target_id):
                found[target_id] = draft_id
        return found

    @property
    def equal(self) -> bool:
        """Whether every id means the same on both sides; padding rows and place-holders without a token aside."""
        return _trimmed(self.draft.tokens) == _trimmed(self.target.tokens) and all(
            is_special(self.draft, i) == is_special(self.target, i) for i in self.draft.added.keys() | self.target.added
        )

    def _fits(self, draft_id: int, target_id: int) -> bool:
        inside = draft_id < self.draft_rows and target_id < self.target_rows
        return inside and is_special(self.draft, draft_id) == is_special(self.target, target_id)


def shared_vocabulary(
    draft: TokenizerSide, target: TokenizerSide, draft_rows: int, target_rows: int
) -> SharedVocabulary:
    """The intersection of two sides that both have a vocabulary."""
    assert draft.vocabulary is not None and target.vocabulary is not None
    roles: dict[int, int] = {}
    for role, theirs in target.roles.items():
        mine = draft.roles.get(role)
        if theirs.id is not None and mine is not None and mine.id is not None and mine.id < draft_rows:
            roles.setdefault(theirs.id, mine.id)
    return SharedVocabulary(draft.vocabulary, target.vocabulary, draft_rows, target_rows, roles)


def is_special(vocabulary: Vocabulary, token_id: int) -> bool:
    """Whether the token is a marker rather than text."""
    token = vocabulary.added.get(token_id)
    return token is not None and token.special


def _trimmed(tokens: list[bytes | None]) -> list[bytes | None]:
    end = len(tokens)
    while end and tokens[end - 1] is None:
        end -= 1
    return tokens[:end]
