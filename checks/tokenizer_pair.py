"""The context of the SD1 checks: a target and a drafter as tokenizer files, and what several checks derive from both.

Contract: everything is computed on first use and once; nothing here needs weights, torch or transformers. A tokenizer
that cannot be built is a reason kept in `trouble`, not an exception: the tables can be compared all the same.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from specdoctor.checks.text_sample import TextSample, bundled_sample
from specdoctor.checks.token_table import Speech, TokenTable
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.chat_template import Refusal, render_all
from specdoctor.formats.tokenizer_files import TokenizerSide, read_side
from specdoctor.formats.vocabulary import TextEncoder, Vocabulary

IDENTICAL, PADDING_ONLY, IDS_DIFFER, DIFFERENT_FAMILIES = (
    "identical",
    "padding-only",
    "ids-differ",
    "different-families",
)


@dataclass(frozen=True)
class Encoded:
    """The sample as ids: one row per text, then one per rendered conversation."""

    texts: list[list[int]]
    chats: list[list[int]]
    exact: bool  # False: cut by a generic pre-tokenizer, good for frequencies only

    def counts(self) -> Counter[int]:
        return Counter(token_id for row in (*self.texts, *self.chats) for token_id in row)


class TokenizerPair:
    """Both sides, the sample, and lazily what they say about each other."""

    def __init__(self, target: TokenizerSide, drafter: TokenizerSide, sample: TextSample | None = None) -> None:
        if target.vocabulary is None:
            raise SpecdoctorError(
                f"{target.path}: the target has no tokenizer files (tokenizer.json, tekken.json, tokenizer.model, "
                "*.tiktoken or vocab.json); without them token ids have no meaning to compare."
            )
        if drafter.vocabulary is None and drafter.facts.is_empty:
            raise SpecdoctorError(
                f"{drafter.path}: the drafter has no tokenizer files, and neither a vocab_size in config.json nor "
                "safetensors files: nothing to compare."
            )
        self.target, self.drafter = target, drafter
        if drafter.vocabulary is not None:
            drafter.vocabulary.segmentation.share_merges(target.vocabulary.segmentation)
        self.sample = sample or bundled_sample()
        self.trouble: dict[str, str] = {}  # side -> why its texts could not be encoded
        self.broken: set[str] = set()  # sides whose tokenizer cannot be built at all

    @classmethod
    def read(cls, target: Path, drafter: Path) -> "TokenizerPair":
        """Read both sides from files. Raises SpecdoctorError on bad input."""
        first = read_side(target)
        return cls(first, read_side(drafter, like=first))

    @property
    def target_vocabulary(self) -> Vocabulary:
        assert self.target.vocabulary is not None  # refused in __init__
        return self.target.vocabulary

    @property
    def target_rows(self) -> int | None:
        return rows_of(self.target)

    @property
    def drafter_rows(self) -> int | None:
        return rows_of(self.drafter)

    @cached_property
    def same_template(self) -> bool:
        return self.target.chat_template == self.drafter.chat_template

    @cached_property
    def renderings(self) -> dict[str, list[str | Refusal]]:
        """Side -> each conversation through that side's template, both with the target's special tokens."""
        tokens = self.drafter.role_tokens() | self.target.role_tokens()
        sides = {"target": self.target.chat_template, "drafter": self.drafter.chat_template}
        return {
            side: render_all(template, self.sample.conversations, tokens) if template else []
            for side, template in sides.items()
        }

    @cached_property
    def target_encoded(self) -> Encoded | None:
        """The sample and the target's rendered conversations, by the target's tokenizer."""
        return self._encode("target", self.target_vocabulary)

    @cached_property
    def drafter_encoded(self) -> Encoded | None:
        """The same texts by the drafter's tokenizer; None without one."""
        return self._encode("drafter", self.drafter.vocabulary) if self.drafter.vocabulary else None

    def encode_with_target(self, texts: list[str]) -> list[list[int]] | None:
        """Ids of any texts by the target's tokenizer."""
        encoder = self._encoder("target", self.target_vocabulary, texts)
        return encoder.encode_batch(texts) if encoder else None

    @cached_property
    def same_tokens(self) -> bool:
        """Whether both tables are equal to the last id."""
        drafter = self.drafter.vocabulary
        return drafter is not None and drafter.tokens == self.target_vocabulary.tokens

    @cached_property
    def table(self) -> TokenTable | None:
        """Both vocabularies compared; None when the drafter has none of its own."""
        if self.drafter.vocabulary is None:
            return None
        if self.same_tokens:
            silent = Speech({}, frozenset())  # no id differs, so none has to be weighed
            return TokenTable(self.target_vocabulary, self.drafter.vocabulary, silent, silent, self.drafter_rows)
        # The drafter's own encoding would add little but its time: its added tokens are looked up in the texts.
        theirs = self._speech(self.drafter, None if self.target_encoded else self.drafter_encoded)
        return TokenTable(
            self.target_vocabulary, self.drafter.vocabulary, self._target_speech, theirs, self.drafter_rows
        )

    @cached_property
    def _target_speech(self) -> Speech:
        return self._speech(self.target, self.target_encoded)

    def target_uses(self, token_id: int) -> bool:
        """Whether the target's template, roles or the sample use an id."""
        return self._target_speech.uses(token_id)

    @cached_property
    def ids_without_row(self) -> list[int]:
        """Ids that the target embeds and text can reach, and that the drafter's embedding has no row for."""
        rows, vocabulary = self.drafter_rows, self.target_vocabulary
        end = vocabulary.size if self.target_rows is None else min(vocabulary.size, self.target_rows)
        if rows is None or rows >= end:
            return []
        beyond = [i for i in range(rows, end) if vocabulary.tokens[i] is not None]
        return [i for i in beyond if i not in vocabulary.added or self.target_uses(i)]

    @cached_property
    def verdict(self) -> str:
        """One of `identical`, `padding-only`, `ids-differ`, `different-families`."""
        if self.table is not None and self.table.differing:
            return DIFFERENT_FAMILIES if self.table.unlike_families else IDS_DIFFER
        if self.ids_without_row:
            return IDS_DIFFER
        rows = (self.target_rows, self.drafter_rows)
        same_rows = rows[0] == rows[1] or None in rows
        return IDENTICAL if same_rows and not (self.table and self.table.idle) else PADDING_ONLY

    def _speech(self, side: TokenizerSide, encoded: Encoded | None) -> Speech:
        vocabulary = side.vocabulary
        named = {role.id for role in side.roles.values() if role.id is not None}
        named |= {entry.value for entries in side.facts.special_ids.values() for entry in entries}
        if vocabulary is not None:
            spoken = "\0".join([side.chat_template or "", *self._texts])
            named |= {i for i, token in vocabulary.added.items() if token.text in spoken}
        return Speech(encoded.counts() if encoded else {}, frozenset(named))

    @cached_property
    def _texts(self) -> list[str]:
        """The sample and the target's rendered conversations."""
        return [*self.sample.texts, *(text for text in self.renderings["target"] if isinstance(text, str))]

    def _encode(self, side: str, vocabulary: Vocabulary) -> Encoded | None:
        encoder = self._encoder(side, vocabulary, self._texts)
        if encoder is None:
            return None
        rows, count = encoder.encode_batch(self._texts), len(self.sample.texts)
        return Encoded(rows[:count], rows[count:], vocabulary.encoder_is_exact)

    def _encoder(self, side: str, vocabulary: Vocabulary, texts: list[str]) -> TextEncoder | None:
        if vocabulary.encoder_for is None:
            self.trouble[side] = f"{vocabulary.file} holds no merges or scores to encode with"
            return None
        try:
            return vocabulary.encoder_for(texts)
        except Exception as error:  # `tokenizers` raises bare Exception on a component it does not know
            reason = str(error).partition("\n")[0]
            self.trouble[side] = f"{vocabulary.file} cannot be built as a tokenizer: {type(error).__name__}: {reason}"
            self.broken.add(side)
            return None


def rows_of(side: TokenizerSide) -> int | None:
    """Rows of a side's embedding: of the tensor, else as configured, else as its GGUF vocabulary reserves."""
    rows = side.facts.rows("embedding")
    if rows is None and side.facts.vocab_size is not None:
        rows = int(side.facts.vocab_size.value)
    if rows is None and side.vocabulary is not None:
        rows = side.vocabulary.declared_rows
    return rows
