"""What kind of token is it? Acceptance differs by an order of magnitude between digits and the rest of a word.

Contract: `token_classes` names every id that occurs once, by the text it stands for; a token's class also depends on
the one before it, as a word at the start of a line has no space of its own.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specdoctor.metrics.text_acceptance import TextAcceptance

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLASSES = ("digits", "whitespace", "punctuation", "word-start", "continuation", "special")

ClassOf = Callable[[TextAcceptance], NDArray[np.int64]]


def token_classes(
    texts: Iterable[TextAcceptance], tokenizer: "PreTrainedTokenizerBase | None", as_bytes: bool = False
) -> ClassOf | None:
    """A function that gives the class index [n + lookahead] of a text's tokens; None without a way to read ids.

    `as_bytes`: ids are bytes, as with template `bytes`.
    """
    if tokenizer is None and not as_bytes:
        return None
    seen = {int(token) for text in texts for token in np.unique(text.tokens)}
    special: set[int] = set()
    if tokenizer is None:
        pieces = {token: chr(token) for token in seen}
    else:
        special = set(tokenizer.all_special_ids) | {
            token for token, added in tokenizer.added_tokens_decoder.items() if added.special
        }
        pieces = _pieces(seen - special, tokenizer)
    return lambda text: _classify(text.tokens, pieces, special)


def classify_piece(piece: str, after_space: bool) -> str:
    """Class of a token by its text; `after_space`: the text before it ends a word."""
    core = piece.strip()
    if not core:
        return "whitespace" if piece else "continuation"  # an empty piece is part of a character
    if core.isdigit():
        return "digits"
    if not any(character.isalnum() or character == "\ufffd" for character in core):
        return "punctuation"
    return "word-start" if piece[0].isspace() or after_space else "continuation"


def _classify(tokens: NDArray[np.int64], pieces: dict[int, str], special: set[int]) -> NDArray[np.int64]:
    names = []
    after_space = True
    for token in tokens.tolist():
        if token in special:
            names.append("special")
            after_space = True
            continue
        piece = pieces[token]
        names.append(classify_piece(piece, after_space))
        after_space = piece[-1:].isspace()
    return np.array([CLASSES.index(name) for name in names], np.int64)


def _pieces(ids: Iterable[int], tokenizer: "PreTrainedTokenizerBase") -> dict[int, str]:
    """Text of each id in the middle of a text: some tokenizers drop the space of a first token."""
    lead = tokenizer.encode("a", add_special_tokens=False)
    before = tokenizer.decode(lead, clean_up_tokenization_spaces=False)
    pieces = {}
    for token in ids:
        both = tokenizer.decode([*lead, token], clean_up_tokenization_spaces=False)
        pieces[token] = both[len(before) :] if both.startswith(before) else both
    return pieces
