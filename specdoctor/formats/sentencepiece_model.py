"""SentencePiece models (`tokenizer.model`) to a canonical `Vocabulary`, and an encoder from bare pieces and scores.

GGUF keeps the pieces, scores and types of such a model but not the model itself, so a model is put together again
in its wire format: the library then cuts text exactly as it would with the original.
"""

import struct
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.text_encoder import Substrings
from specdoctor.formats.vocabulary import AddedToken, Segmentation, TextEncoder, Vocabulary, bytes_of_sentencepiece

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_UNIGRAM, _BPE = 1, 2


def read_sentencepiece(path: Path) -> Vocabulary:
    """Vocabulary of a SentencePiece model file. Raises SpecdoctorError when the file is something else."""
    import sentencepiece

    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except Exception as error:  # the library raises RuntimeError, TypeError or its own, by version
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SpecdoctorError(
            f"{path}: neither a tiktoken rank file nor a SentencePiece model that can be read ({reason})."
        ) from None
    ids = list(range(processor.get_piece_size()))
    pieces, scores = processor.id_to_piece(ids), processor.get_score(ids)
    types = _types_of(processor, ids)
    tokens = [
        None if kind == _UNUSED else piece.encode() if kind in (_UNKNOWN, _CONTROL) else bytes_of_sentencepiece(piece)
        for piece, kind in zip(pieces, types, strict=True)
    ]
    # BPE models number their merges: scores 0, -1, -2, ...; those of a unigram model are log probabilities.
    unigram = any(kind == _NORMAL and score != int(score) for kind, score in zip(types, scores, strict=True))
    return Vocabulary(
        kind="sentencepiece",
        file=path.name,
        family=f"SentencePiece {'unigram' if unigram else 'BPE'}",
        tokens=tokens,
        added={
            i: AddedToken(i, pieces[i], special=kind in (_CONTROL, _UNKNOWN))
            for i, kind in enumerate(types)
            if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED)
        },
        segmentation=Segmentation(merges=list(zip(pieces, scores, strict=True)), options={"unigram": unigram}),
        encoder_for=partial(_whole_encoder, processor),
    )


def sentencepiece_roles(path: Path) -> dict[str, int]:
    """Role -> id as the model file declares them (-1, not used, is left out)."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    found = {role: getattr(processor, f"{role}_id")() for role in ("bos", "eos", "pad", "unk")}
    return {role: token_id for role, token_id in found.items() if token_id >= 0}


class _PieceEncoder:
    def __init__(self, processor: Any, true_ids: Sequence[int] | None = None) -> None:
        self._processor, self._true_ids = processor, true_ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        rows = [self._processor.encode(text) for text in texts]
        return rows if self._true_ids is None else [[self._true_ids[i] for i in row] for row in rows]


def _whole_encoder(processor: Any, texts: Sequence[str]) -> TextEncoder:
    return _PieceEncoder(processor)


def encoder_from_pieces(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    unigram: bool,
    dummy_prefix: bool,
    texts: Sequence[str],
) -> TextEncoder:
    """Encoder for `texts` from pieces, scores and types; only pieces that can occur in the texts are kept."""
    import sentencepiece

    possible = Substrings([text.replace(" ", "\u2581") for text in texts])
    lowest = min(range(len(pieces)), key=lambda i: scores[i])
    occurring = possible.among(set(pieces))
    kept = [
        i
        for i, piece in enumerate(pieces)
        if types[i] in (_UNKNOWN, _CONTROL, _BYTE) or i == lowest or piece in occurring
    ]
    model = b"".join(_field(1, _piece(pieces[i], scores[i], types[i])) for i in kept)
    bytes_there = any(types[i] == _BYTE for i in kept)
    trainer = _number(3, _UNIGRAM if unigram else _BPE) + _number(35, int(bytes_there))
    # No clean-up: neither llama.cpp nor the model's own settings remove or fold white space.
    normalizer = _field(1, b"identity") + _number(3, int(dummy_prefix)) + _number(4, 0) + _number(5, 1)
    model += _field(2, trainer) + _field(3, normalizer)
    return _PieceEncoder(sentencepiece.SentencePieceProcessor(model_proto=model), kept)


def _types_of(processor: Any, ids: list[int]) -> list[int]:
    kinds = [_NORMAL] * len(ids)
    for kind, flags in ((_UNUSED, "unused"), (_BYTE, "byte"), (_CONTROL, "control"), (_UNKNOWN, "unknown")):
        flagged: Iterable[bool] = getattr(processor, f"is_{flags}")(ids)
        for token_id, is_kind in enumerate(flagged):
            if is_kind:
                kinds[token_id] = kind
    return kinds


def _piece(text: str, score: float, kind: int) -> bytes:
    return _field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind)


def _field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
