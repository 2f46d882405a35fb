"""One canonical vocabulary for every tokenizer file: id -> bytes.

Contract: byte-level BPE (GPT-2's printable alphabet), SentencePiece (U+2581 for the space, <0xNN> for a byte) and
tiktoken ranks all reduce to the bytes that a token stands for, so the same vocabulary compares equal whatever file it
came from. Readers fill a `Vocabulary`; nothing here opens a file.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.merges_text import MergesText

HIGHEST_ID = (1 << 24) - 1
FLAG_NAMES = ("lstrip", "rstrip", "single_word", "normalized")
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNUSED_SLOT = re.compile(
    r"[<\[].*(unused|reserved|extra|pad|dummy|place\W?holder|spare|filler|blank)[^0-9]*\d+.*[>\]]", re.IGNORECASE
)


class TextEncoder(Protocol):
    """Turns texts into ids, without adding bos or eos."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...


@dataclass(frozen=True)
class AddedToken:
    """A token matched in the raw text before the model sees it: special tokens, chat markers, whitespace runs."""

    id: int
    text: str
    special: bool
    flags: frozenset[str] = frozenset()  # those of FLAG_NAMES that are set


@dataclass(frozen=True, kw_only=True)
class Segmentation:
    """How text is cut before and inside the model. `None` for a part that this kind of file does not hold."""

    normalizer: Any = None
    names_normalizer: bool = True  # False: this kind of file has no place for one
    pre_tokenizer: Any = None
    merges: Any = None  # compared by value only
    options: Any = None

    def describes_same(self, other: "Segmentation") -> bool:
        """Whether both certainly cut every text alike (False also when it cannot be told)."""
        if self.merges is None or other.merges is None:
            return False
        mine, theirs = ((part.normalizer, part.pre_tokenizer, part.options) for part in (self, other))
        return mine == theirs and _same_merges(self.merges, other.merges)

    def share_merges(self, other: "Segmentation") -> None:
        """Let merges of the same text be parsed once for both."""
        mine, theirs = self.merges, other.merges
        if isinstance(mine, MergesText) and mine is not theirs and mine.same_text(theirs):
            mine.twin = theirs


def _same_merges(mine: Any, theirs: Any) -> bool:
    """Merges are written "a b" or ["a", "b"]; both mean the same."""
    if mine == theirs:
        return True
    if isinstance(mine, Mapping) or isinstance(theirs, Mapping) or len(mine) != len(theirs):
        return False
    spelled = [[m if isinstance(m, str) else " ".join(map(str, m)) for m in merges] for merges in (mine, theirs)]
    return spelled[0] == spelled[1]


@dataclass
class Vocabulary:
    """What a tokenizer file says, in canonical form."""

    kind: str  # tokenizer.json | vocab.json | gguf | tiktoken | tekken | sentencepiece
    file: str  # name of the file, relative to what the user gave
    family: str  # byte-level BPE | SentencePiece BPE | SentencePiece unigram | WordPiece | WordLevel | BPE | Unigram
    tokens: list[bytes | None]  # index = id; None = no token at this id
    added: dict[int, AddedToken] = field(default_factory=dict)
    lists_added: bool = True  # False: this kind of file cannot name its added tokens
    declared_rows: int | None = None  # rows the file reserves, padding included (GGUF)
    segmentation: Segmentation = field(default_factory=Segmentation)
    encoder_for: Callable[[Sequence[str]], TextEncoder] | None = None
    encoder_is_exact: bool = True  # False: the file holds no pre-tokenizer, ids are good for frequencies only
    prefix_ids: tuple[int, ...] | None = None  # ids put before a text (bos); None = not in the file
    conflicts: list[str] = field(default_factory=list)  # places where the side's own files disagree

    @property
    def size(self) -> int:
        """Highest id that holds a token, plus one: `len(tokenizer)`."""
        return len(self.tokens)

    @cached_property
    def id_of(self) -> Mapping[bytes, int]:
        """Bytes -> lowest id. Duplicates (a byte token beside the same character) keep the lower id."""
        table = dict(zip(reversed(self.tokens), range(self.size - 1, -1, -1), strict=True))
        table.pop(None, None)
        # A special token is found by its own text even where an ordinary token has the same bytes.
        table.update({token.text.encode(): i for i, token in self.added.items()})
        return cast(Mapping[bytes, int], table)

    def text_of(self, token_id: int) -> str | None:
        """Printable form of a token; bytes that are not UTF-8 are written \\xNN."""
        if not 0 <= token_id < len(self.tokens):
            return None
        return show(self.tokens[token_id])


def copy_of(vocabulary: Vocabulary) -> Vocabulary:
    """A vocabulary whose tables can be changed without changing the first."""
    return replace(
        vocabulary,
        tokens=list(vocabulary.tokens),
        added=dict(vocabulary.added),
        conflicts=list(vocabulary.conflicts),
    )


def show(token: bytes | None) -> str | None:
    """A token as text; bytes that are not UTF-8 are written \\xNN."""
    return None if token is None else token.decode("utf-8", "backslashreplace")


def is_unused_slot(token: bytes | None) -> bool:
    """Whether a token is a numbered place-holder (`<unused7>`, `<|reserved_special_token_3|>`, `[PAD9]`)."""
    if token is None or len(token) > 64 or token[:1] not in (b"<", b"["):
        return False
    return _UNUSED_SLOT.fullmatch(token.decode("utf-8", "replace")) is not None


def is_padding_piece(piece: str, token_id: int) -> bool:
    """Whether a GGUF converter made this piece up to fill an embedding row: `[PAD151669]` at id 151669."""
    return piece == f"[PAD{token_id}]"


def _printable_alphabet() -> dict[str, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(b): chr(b) for b in printable} | {chr(256 + n): chr(b) for n, b in enumerate(moved)}


BYTE_ALPHABET = _printable_alphabet()  # GPT-2's printable character -> the character of that byte value
_FROM_ALPHABET = str.maketrans(BYTE_ALPHABET)


def bytes_of_byte_level(piece: str) -> bytes:
    """Byte-level BPE piece to bytes; a piece outside the alphabet (an added token) stands for its own text."""
    try:
        return piece.translate(_FROM_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()


def bytes_of_sentencepiece(piece: str) -> bytes:
    """SentencePiece piece to bytes: U+2581 is a space, <0xNN> is one byte."""
    if len(piece) == 6 and (match := _BYTE_PIECE.fullmatch(piece)):
        return bytes([int(match[1], 16)])
    return piece.replace("\u2581", " ").encode()


def table_of(pairs: Mapping[int, bytes], path: Path) -> list[bytes | None]:
    """Dense id -> bytes list from a sparse mapping. Raises SpecdoctorError on an id that no vocabulary can hold."""
    if not pairs:
        return []
    low, high = min(pairs), max(pairs)
    if low < 0 or high > HIGHEST_ID:
        raise SpecdoctorError(f"{path}: token id {low if low < 0 else high}, expected 0 to {HIGHEST_ID:,}.")
    if high == len(pairs) - 1:
        return [pairs[i] for i in range(len(pairs))]
    tokens: list[bytes | None] = [None] * (high + 1)
    for token_id, token in pairs.items():
        tokens[token_id] = token
    return tokens
