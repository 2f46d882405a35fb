"""Encoders that know only what a given set of texts can use, with the ids of the full vocabulary.

A BPE merge whose result is not a substring of the (normalised) text can never be applied to it, nor can a unigram piece
that does not occur in it. Leaving those out gives the same ids for these texts and loads in milliseconds, where the
whole tokenizer of 260k entries takes over a second.
"""

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from specdoctor.formats.vocabulary import TextEncoder

_SLICE_LENGTH = 24  # longer tokens are few: they are searched for one by one
_PREFIXES = ("\u2581", "\u0120")  # a space in front of a word, put there by some tokenizers

# The pre-tokenizer that most rank files go with; used where the file names none, for frequencies only.
GENERIC_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


class Substrings:
    """Which tokens can occur in a set of texts: never one too few, now and then one too many."""

    def __init__(self, texts: Iterable[Any]) -> None:
        self._texts = [text for text in texts if text]
        self._slices = {
            text[start : start + length]
            for text in self._texts
            for length in range(1, _SLICE_LENGTH + 1)
            for start in range(len(text) - length + 1)
        }

    def among(self, tokens: AbstractSet[Any], prefixes: Iterable[Any] = ()) -> set[Any]:
        """Those of `tokens` that can occur, as they are or behind a prefix that the text itself does not have."""
        found = self._occurring(tokens)
        for prefix in prefixes:
            bare = {token[len(prefix) :]: token for token in tokens if token.startswith(prefix)}
            found.update(bare[rest] for rest in self._occurring(bare.keys()))
            if prefix in tokens:
                found.add(prefix)
        return found

    def _occurring(self, tokens: AbstractSet[Any]) -> set[Any]:
        # Set against set: asking one by one takes half a second for 260k tokens.
        long = {token for token in tokens if len(token) > _SLICE_LENGTH and any(token in text for text in self._texts)}
        return set(self._slices & tokens) | long


class _ReducedTokenizer:
    """A `tokenizers.Tokenizer` over a part of the vocabulary; `true_ids` where the part had to be renumbered."""

    def __init__(self, tokenizer: Any, true_ids: Sequence[int] | None) -> None:
        self._tokenizer, self._true_ids = tokenizer, true_ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        rows = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]
        return rows if self._true_ids is None else [[self._true_ids[i] for i in row] for row in rows]


def encoder_from_tokenizer_json(data: Mapping[str, Any], texts: Sequence[str]) -> TextEncoder:
    """Encoder for `texts` from a parsed tokenizer.json (or its equivalent made from other files).

    Raises whatever `tokenizers` raises when it cannot build a part of the pipeline.
    """
    from tokenizers import Tokenizer

    outer = {**data, "truncation": None, "padding": None, "post_processor": None}
    possible = Substrings(_model_inputs(outer, texts))
    model, true_ids = _reduced_model(data["model"], data.get("added_tokens") or [], possible)
    return _ReducedTokenizer(Tokenizer.from_str(json.dumps({**outer, "model": model})), true_ids)


def _model_inputs(outer: Mapping[str, Any], texts: Sequence[str]) -> list[str]:
    """The texts as the model sees them: normalised, in its alphabet, words joined so that any other cut is inside."""
    from tokenizers import Tokenizer

    empty_model = {"type": "BPE", "vocab": {}, "merges": []}
    pipeline = Tokenizer.from_str(json.dumps({**outer, "added_tokens": [], "model": empty_model}))
    inputs = []
    for text in texts:
        normal = pipeline.normalizer.normalize_str(text) if pipeline.normalizer else text
        words = pipeline.pre_tokenizer.pre_tokenize_str(normal) if pipeline.pre_tokenizer else [(normal, None)]
        inputs.append("".join(word for word, _ in words))
    return inputs


def _reduced_model(
    model: Mapping[str, Any], added: Sequence[Mapping[str, Any]], possible: Substrings
) -> tuple[dict[str, Any], list[int] | None]:
    if isinstance(model["vocab"], list):
        return _reduced_unigram(model, added, possible)
    pieces, suffix, inner = model["vocab"], model.get("end_of_word_suffix"), model.get("continuing_subword_prefix")
    kept = possible.among(pieces.keys(), [*_prefixes_of(pieces), *([inner] if inner else [])])
    if suffix:
        bare = {piece.removesuffix(suffix): piece for piece in pieces if piece.endswith(suffix)}
        kept |= {bare[rest] for rest in possible.among(bare.keys(), _prefixes_of(pieces))}
    if model.get("byte_fallback"):
        kept |= {piece for piece in pieces if piece.startswith("<0x")}
    if model.get("unk_token") in pieces:
        kept.add(model["unk_token"])
    vocab = {piece: pieces[piece] for piece in kept}
    reduced = {**model, "vocab": vocab}
    if model.get("merges") is not None:
        reduced["merges"] = _possible_merges(model["merges"], vocab, inner or "")
        reduced["dropout"] = None
    # `tokenizers` gives an added token the id that the model has for its text, and else a fresh one.
    vocab.update({entry["content"]: entry["id"] for entry in added})
    return reduced, None


def _prefixes_of(pieces: Container[str]) -> list[str]:
    return [prefix for prefix in _PREFIXES if prefix in pieces]


def _possible_merges(merges: Sequence[Any], vocab: Mapping[str, int], prefix: str) -> list[Any]:
    if merges and isinstance(merges[0], str) and not prefix:
        # Set against list: splitting half a million merges takes longer than all else here.
        cuts = ((piece[:at], piece[at:]) for piece in vocab for at in range(1, len(piece)))
        wanted = {f"{left} {right}" for left, right in cuts if left in vocab and right in vocab}
        return [merge for merge in merges if merge in wanted]
    if merges and isinstance(merges[0], str):
        merges = [merge.split(" ", 1) for merge in merges]
    known = [pair for pair in merges if pair[0] in vocab and pair[1] in vocab]
    return [[left, right] for left, right in known if left + right.removeprefix(prefix) in vocab]


def _reduced_unigram(
    model: Mapping[str, Any], added: Sequence[Mapping[str, Any]], possible: Substrings
) -> tuple[dict[str, Any], list[int]]:
    pieces, unk_id = model["vocab"], model.get("unk_id")
    texts = {piece for piece, _ in pieces}
    occurring = possible.among(texts, _prefixes_of(texts))
    # The score of an unknown character is derived from the lowest score, so that piece has to stay.
    lowest = min(range(len(pieces)), key=lambda i: pieces[i][1]) if pieces else None
    kept = [
        i
        for i, (piece, _) in enumerate(pieces)
        if piece in occurring or i in (unk_id, lowest) or (model.get("byte_fallback") and piece.startswith("<0x"))
    ]
    declared = {entry["content"]: entry["id"] for entry in added}
    present = {pieces[i][0] for i in kept}
    extra = [entry for entry in added if entry["content"] not in present]
    vocab = [list(pieces[i]) for i in kept]
    vocab += [[entry["content"], 0.0 if lowest is None else pieces[lowest][1]] for entry in extra]
    true_ids = [declared.get(pieces[i][0], i) for i in kept] + [entry["id"] for entry in extra]
    return {**model, "vocab": vocab, "unk_id": None if unk_id is None else kept.index(unk_id)}, true_ids


class _RankEncoder:
    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encoding.encode_ordinary(text) for text in texts]


def encoder_from_ranks(ranks: Mapping[bytes, int], pattern: str, texts: Sequence[str]) -> TextEncoder:
    """Encoder for `texts` from byte-pair ranks (rank = id) and a pre-tokenizer pattern."""
    import tiktoken

    possible = Substrings(text.encode() for text in texts)
    kept = {token: ranks[token] for token in possible.among(ranks.keys()) | {t for t in ranks if len(t) == 1}}
    return _RankEncoder(tiktoken.Encoding("reduced", pat_str=pattern, mergeable_ranks=kept, special_tokens={}))
