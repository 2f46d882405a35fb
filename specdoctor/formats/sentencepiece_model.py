"""SentencePiece models (`tokenizer.model`) to a canonical `Vocabulary`, and an encoder from bare pieces and scores.

GGUF keeps the pieces, scores and types of such a model but not the model itself, so a model is put together again
in its wire format: the library then cuts text exactly as it would with the original.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.protobuf_wire import bytes_field, fields, float_field, number_field
from specdoctor.formats.text_encoder import Substrings
from specdoctor.formats.vocabulary import AddedToken, Segmentation, TextEncoder, Vocabulary, bytes_of_sentencepiece

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # as in GGUF's token types
UNIGRAM, BPE = 1, 2
# Field numbers of sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK = 3, 35
_ROLE_FIELDS = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}  # role -> field, default
_NAME, _DUMMY_PREFIX, _FOLD_SPACES, _ESCAPE_SPACES = 1, 3, 4, 5


@dataclass(frozen=True)
class _Model:
    pieces: list[str]
    scores: list[float]
    types: list[int]
    trainer: dict[int, Any]
    normalizer: dict[int, Any]


def read_sentencepiece(path: Path) -> Vocabulary:
    """Vocabulary of a SentencePiece model file. Raises SpecdoctorError when the file is something else."""
    model = _parse(path)
    unigram = model.trainer.get(_MODEL_TYPE, UNIGRAM) == UNIGRAM
    tokens = [_token_bytes(piece, kind) for piece, kind in zip(model.pieces, model.types, strict=True)]
    return Vocabulary(
        kind="sentencepiece",
        file=path.name,
        family=f"SentencePiece {'unigram' if unigram else 'BPE'}",
        tokens=tokens,
        added={
            i: AddedToken(i, model.pieces[i], special=kind != USER_DEFINED)
            for i, kind in enumerate(model.types)
            if kind in (CONTROL, UNKNOWN, USER_DEFINED)
        },
        segmentation=Segmentation(
            normalizer={n: v for n, v in model.normalizer.items() if n != _NAME},
            merges=list(zip(model.pieces, model.scores, strict=True)),
            options={"unigram": unigram},
        ),
        encoder_for=partial(_whole_encoder, str(path)),
    )


def sentencepiece_roles(path: Path) -> dict[str, int]:
    """Role -> id as the model file declares them (-1, not used, is left out)."""
    trainer = _parse(path).trainer
    found = {role: trainer.get(number, default) for role, (number, default) in _ROLE_FIELDS.items()}
    return {role: token_id for role, token_id in found.items() if 0 <= token_id < 1 << 31}


def _token_bytes(piece: str, kind: int) -> bytes | None:
    if kind == UNUSED:
        return None
    return piece.encode() if kind in (UNKNOWN, CONTROL) else bytes_of_sentencepiece(piece)


def _parse(path: Path) -> _Model:
    model = _Model([], [], [], {}, {})
    try:
        for number, value in fields(path.read_bytes()):
            if number == _PIECES:
                entry = dict(fields(value))
                model.pieces.append(entry[_PIECE].decode())
                model.scores.append(struct.unpack("<f", entry[_SCORE])[0] if _SCORE in entry else 0.0)
                model.types.append(entry.get(_TYPE, NORMAL))
            elif number in (_TRAINER, _NORMALIZER):
                (model.trainer if number == _TRAINER else model.normalizer).update(fields(value))
    except (ValueError, KeyError, AttributeError, TypeError, struct.error):
        model.pieces.clear()
    if not model.pieces:
        raise SpecdoctorError(
            f"{path}: no GGUF, JSON or tiktoken file, and no whole SentencePiece model: another kind, or cut off."
        )
    return model


class _PieceEncoder:
    def __init__(self, processor: Any, true_ids: Sequence[int] | None = None) -> None:
        self._processor, self._true_ids = processor, true_ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        rows = [self._processor.encode(text) for text in texts]
        return rows if self._true_ids is None else [[self._true_ids[i] for i in row] for row in rows]


def _whole_encoder(model_file: str, texts: Sequence[str]) -> TextEncoder:
    import sentencepiece

    return _PieceEncoder(sentencepiece.SentencePieceProcessor(model_file=model_file))


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

    occurring = Substrings(text.replace(" ", "\u2581") for text in texts).among(set(pieces), ["\u2581"])
    lowest = min(range(len(pieces)), key=lambda i: scores[i])
    always = (UNKNOWN, CONTROL, BYTE)
    kept = [i for i, piece in enumerate(pieces) if types[i] in always or i == lowest or piece in occurring]
    model = b"".join(bytes_field(_PIECES, _piece(pieces[i], scores[i], types[i])) for i in kept)
    trainer = number_field(_MODEL_TYPE, UNIGRAM if unigram else BPE)
    trainer += number_field(_BYTE_FALLBACK, int(any(types[i] == BYTE for i in kept)))
    # No clean-up: neither llama.cpp nor the model's own settings remove or fold white space.
    normalizer = bytes_field(_NAME, b"identity") + number_field(_DUMMY_PREFIX, int(dummy_prefix))
    normalizer += number_field(_FOLD_SPACES, 0) + number_field(_ESCAPE_SPACES, 1)
    model += bytes_field(_TRAINER, trainer) + bytes_field(_NORMALIZER, normalizer)
    return _PieceEncoder(sentencepiece.SentencePieceProcessor(model_proto=model), kept)


def _piece(text: str, score: float, kind: int) -> bytes:
    return bytes_field(_PIECE, text.encode()) + float_field(_SCORE, score) + number_field(_TYPE, kind)
