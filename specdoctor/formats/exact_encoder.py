"""Text to ids whose bytes are exactly that text, whatever the tokenizer would add, normalise or refuse.

The tokenizer's own cut is taken where its tokens spell the bytes given. Where they do not (a space put in front, a
normaliser, half a character at the end), the longest tokens that match stand in: any ids that spell the text will do
for a draft, since verification judges them.
"""

import codecs
from functools import cached_property
from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.vocabulary import Vocabulary


class ExactEncoder:
    """Encodes and decodes bytes with the tokenizer of a model folder; adds no bos or eos."""

    def __init__(self, folder: Path, vocabulary: Vocabulary, rows: int) -> None:
        """`rows` of the model's embedding: ids beyond are never given."""
        self.vocabulary, self.rows = vocabulary, rows
        self._encode = _tokenizer(folder)

    def bytes_of(self, ids: list[int]) -> bytes:
        """The text of `ids`; one without a token spells nothing."""
        tokens = self.vocabulary.tokens
        return b"".join(tokens[i] or b"" for i in ids if i < len(tokens))

    def encode(self, data: bytes) -> list[int]:
        """Ids that spell `data`. Bytes that no token of the vocabulary has are left out."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            text = decoder.decode(data)
        except UnicodeDecodeError:
            return self.longest_match(data)
        begun = decoder.getstate()[0]  # the first bytes of a character that is not complete
        whole = data[: len(data) - len(begun)]
        ids = self._encode(text) if text else []
        spelled = self.bytes_of(ids)
        if ids and spelled == b" " + whole and self.vocabulary.tokens[ids[0]] == b" ":
            ids = ids[1:]
        elif spelled != whole or any(i >= self.rows for i in ids):
            ids = self.longest_match(whole)
        return ids + self.longest_match(begun)

    def longest_match(self, data: bytes) -> list[int]:
        """Greedy: the longest token that the rest of `data` begins with."""
        ids, at = [], 0
        while at < len(data):
            for length in range(min(self._longest, len(data) - at), 0, -1):
                token_id = self._text_ids.get(data[at : at + length])
                if token_id is not None:
                    ids.append(token_id)
                    at += length
                    break
            else:
                at += 1
        return ids

    @cached_property
    def _text_ids(self) -> dict[bytes, int]:
        added = self.vocabulary.added
        return {token: i for token, i in self.vocabulary.id_of.items() if i < self.rows and i not in added}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._text_ids), default=0)


def _tokenizer(folder: Path) -> Any:
    """A function from text to ids, without special tokens around them."""
    try:
        if (folder / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
            fast.no_truncation()
            fast.no_padding()
            return lambda text: fast.encode(text, add_special_tokens=False).ids
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return lambda text: slow.encode(text, add_special_tokens=False)
    except Exception as error:  # whatever a broken file makes the many tokenizer classes raise
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise SpecdoctorError(
            f"{folder}: cannot load the tokenizer: {type(error).__name__}: {reason}; copy all tokenizer files of the "
            "model into the folder"
        ) from None
