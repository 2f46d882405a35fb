"""The vocabulary inside a GGUF file to a canonical `Vocabulary`.

Token types (`tokenizer.ggml.token_type`): 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte. Only normal
pieces are in the model's alphabet; control and user-defined tokens stand for their own text.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.gguf_header import GgufHeader
from specdoctor.formats.sentencepiece_model import CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, encoder_from_pieces
from specdoctor.formats.split_patterns import WHOLE_WORDS_FIRST, pre_tokenizer_of
from specdoctor.formats.text_encoder import GENERIC_PATTERN, encoder_from_tokenizer_json
from specdoctor.formats.tokenizer_json import BYTE_LEVEL, added_entries, byte_level_pre_tokenizer
from specdoctor.formats.vocabulary import (
    AddedToken,
    Segmentation,
    Vocabulary,
    bytes_of_byte_level,
    bytes_of_sentencepiece,
    is_padding_piece,
)

_SENTENCEPIECE_TYPES = {"llama": "SentencePiece BPE", "t5": "SentencePiece unigram"}
_ROLE_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "mask": "mask"}


def read_gguf_vocabulary(header: GgufHeader) -> Vocabulary | None:
    """Vocabulary of a GGUF file, or None when it carries none (a bare drafter).

    Raises SpecdoctorError when the token arrays do not fit each other.
    """
    model, pieces = header.get("tokenizer.ggml.model"), header.get("tokenizer.ggml.tokens")
    if not pieces or model in (None, "none", "no_vocab"):
        return None
    types = header.get("tokenizer.ggml.token_type") or [NORMAL] * len(pieces)
    if len(types) != len(pieces):
        raise SpecdoctorError(
            f"{header.path}: tokenizer.ggml.token_type has {len(types)} entries, tokenizer.ggml.tokens {len(pieces)}; "
            "expected as many. Convert the model again."
        )
    byte_level = model == "gpt2"
    tokens = [
        _token_bytes(piece, kind, token_id, byte_level)
        for token_id, (piece, kind) in enumerate(zip(pieces, types, strict=True))
    ]
    while tokens and tokens[-1] is None:
        tokens.pop()
    added = {
        token_id: AddedToken(token_id, pieces[token_id], special=types[token_id] == CONTROL)
        for token_id, token in enumerate(tokens)
        if token is not None and types[token_id] in (CONTROL, USER_DEFINED, UNKNOWN)
    }
    vocabulary = Vocabulary(
        kind="gguf",
        file=header.path.name,
        family="byte-level BPE" if byte_level else _SENTENCEPIECE_TYPES.get(model, str(model)),
        tokens=tokens,
        added=added,
        declared_rows=len(pieces),
        segmentation=Segmentation(names_normalizer=not byte_level),
        prefix_ids=_prefix_ids(header),
    )
    _attach_encoder(vocabulary, header, model, pieces, types)
    return vocabulary


def gguf_roles(header: GgufHeader) -> dict[str, int]:
    """Role (bos, eos, pad, unk, mask) -> id, as the file declares them."""
    found = {role: header.get(f"tokenizer.ggml.{key}_token_id") for role, key in _ROLE_KEYS.items()}
    return {role: token_id for role, token_id in found.items() if isinstance(token_id, int)}


def _token_bytes(piece: str, kind: int, token_id: int, byte_level: bool) -> bytes | None:
    if kind == UNUSED or is_padding_piece(piece, token_id):
        return None
    if kind in (CONTROL, UNKNOWN) or (byte_level and kind == USER_DEFINED):
        return piece.encode()
    return bytes_of_byte_level(piece) if byte_level else bytes_of_sentencepiece(piece)


def _prefix_ids(header: GgufHeader) -> tuple[int, ...] | None:
    adds = header.get("tokenizer.ggml.add_bos_token")
    bos = header.get("tokenizer.ggml.bos_token_id")
    if adds is None:  # the default then depends on the engine
        return None
    return (bos,) if adds and isinstance(bos, int) else ()


def _attach_encoder(
    vocabulary: Vocabulary, header: GgufHeader, model: str, pieces: list[str], types: Sequence[int]
) -> None:
    merges = header.get("tokenizer.ggml.merges")
    if model == "gpt2" and merges:
        name = header.get("tokenizer.ggml.pre")
        pre_tokenizer = pre_tokenizer_of(name)
        vocabulary.encoder_is_exact = pre_tokenizer is not None
        data = _as_tokenizer_json(vocabulary, pieces, types, merges, pre_tokenizer)
        data["model"]["ignore_merges"] = name in WHOLE_WORDS_FIRST
        vocabulary.encoder_for = partial(encoder_from_tokenizer_json, data)
    elif model in _SENTENCEPIECE_TYPES and (scores := header.get("tokenizer.ggml.scores")):
        dummy_prefix = bool(header.get("tokenizer.ggml.add_space_prefix", True))
        unigram = model == "t5"
        vocabulary.encoder_for = partial(encoder_from_pieces, pieces, scores, types, unigram, dummy_prefix)
        vocabulary.segmentation = Segmentation(
            normalizer={"add_dummy_prefix": dummy_prefix}, merges=list(zip(pieces, scores, strict=True))
        )


def _as_tokenizer_json(
    vocabulary: Vocabulary, pieces: list[str], types: Sequence[int], merges: list[str], pre_tokenizer: Any
) -> dict[str, Any]:
    return {
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer or byte_level_pre_tokenizer(GENERIC_PATTERN),
        "decoder": BYTE_LEVEL,
        "added_tokens": added_entries(vocabulary.added),
        "model": {
            "type": "BPE",
            "vocab": {piece: i for i, (piece, kind) in enumerate(zip(pieces, types, strict=True)) if kind == NORMAL},
            "merges": merges,
        },
    }
