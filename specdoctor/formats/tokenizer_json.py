"""Hugging Face `tokenizer.json`, and the older pair vocab.json + merges.txt, to a canonical `Vocabulary`.

Read as plain JSON: the `tokenizers` library takes over a second for 260k entries and gives no more than is needed here.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.json_file import load_json
from specdoctor.formats.text_encoder import encoder_from_tokenizer_json
from specdoctor.formats.vocabulary import (
    FLAG_NAMES,
    AddedToken,
    Segmentation,
    Vocabulary,
    bytes_of_byte_level,
    bytes_of_sentencepiece,
    table_of,
)

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_SHOWN_ONLY = {"trim_offsets"}  # keys of a pre-tokenizer that move offsets, never ids


def read_vocab_and_merges(vocab_path: Path, added_path: Path | None, pattern: str | None) -> Vocabulary:
    """Vocabulary of vocab.json + merges.txt (+ added_tokens.json), as slow byte-level tokenizers store it.

    `pattern` is the split expression of the tokenizer class, `None` for GPT-2's own.
    """
    vocab = load_json(vocab_path)
    if not isinstance(vocab, dict) or not all(isinstance(i, int) for i in vocab.values()):
        raise SpecdoctorError(f"{vocab_path}: expected an object of token -> id; found {type(vocab).__name__}.")
    merges_path = vocab_path.with_name("merges.txt")
    merges = _read_merges(merges_path) if merges_path.is_file() else None
    added = load_json(added_path) if added_path else {}
    data = {
        "normalizer": None,
        "pre_tokenizer": byte_level_pre_tokenizer(pattern),
        "decoder": BYTE_LEVEL,
        "added_tokens": [_added_entry(token_id, text, special=True) for text, token_id in added.items()],
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    vocabulary = vocabulary_from_data(data, vocab_path, "vocab.json")
    if merges is None:
        vocabulary.encoder_for = None
    return vocabulary


def byte_level_pre_tokenizer(pattern: str | None) -> dict[str, Any]:
    """Pre-tokenizer that splits by `pattern` (None: GPT-2's) and maps bytes to the printable alphabet."""
    if pattern is None:
        return BYTE_LEVEL
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**BYTE_LEVEL, "use_regex": False}]}


def vocabulary_from_data(data: Any, path: Path, kind: str) -> Vocabulary:
    """Canonical vocabulary from a parsed tokenizer.json. Raises SpecdoctorError on a wrong structure."""
    model = data.get("model") if isinstance(data, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), (dict, list)):
        found = ", ".join(sorted(data)[:5]) if isinstance(data, dict) else type(data).__name__
        raise SpecdoctorError(
            f"{path}: key 'model.vocab' is missing, so this is not a tokenizer.json (found: {found or 'nothing'})."
        )
    try:
        return _vocabulary(data, model, path, kind)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise SpecdoctorError(f"{path}: not laid out as a tokenizer.json ({type(error).__name__}: {error}).") from None


def _vocabulary(data: dict[str, Any], model: dict[str, Any], path: Path, kind: str) -> Vocabulary:
    pipeline = json.dumps([data.get("normalizer"), data.get("pre_tokenizer"), data.get("decoder")])
    byte_level = '"ByteLevel"' in pipeline
    spaces = "\\u2581" in pipeline or '"Metaspace"' in pipeline or bool(model.get("byte_fallback"))
    to_bytes = bytes_of_byte_level if byte_level else bytes_of_sentencepiece if spaces else str.encode
    pieces = model["vocab"]
    listed = pieces.items() if isinstance(pieces, dict) else ((piece, i) for i, (piece, _) in enumerate(pieces))
    table = {token_id: to_bytes(piece) for piece, token_id in listed}

    added, conflicts = {}, []
    for entry in data.get("added_tokens") or []:
        token = added_token(entry["id"], entry)
        added[token.id] = token
        own_id = pieces.get(token.text) if isinstance(pieces, dict) else None
        if own_id is not None and own_id != token.id:
            conflicts.append(
                f"{path.name}: {token.text!r} has id {own_id} in model.vocab and {token.id} in added_tokens"
            )
        plain_space = spaces and not byte_level and not token.special
        table[token.id] = bytes_of_sentencepiece(token.text) if plain_space else token.text.encode()
    return Vocabulary(
        kind=kind,
        file=path.name,
        family=_family(model, byte_level, spaces),
        tokens=table_of(table, path),
        added=added,
        segmentation=_segmentation(data, model),
        encoder_for=partial(encoder_from_tokenizer_json, data),
        prefix_ids=_prefix_ids(data.get("post_processor")),
        conflicts=conflicts,
    )


def added_token(token_id: int, entry: Mapping[str, Any]) -> AddedToken:
    """AddedToken from an entry of `added_tokens` or `added_tokens_decoder`."""
    flags = frozenset(name for name in FLAG_NAMES if entry.get(name))
    return AddedToken(token_id, entry["content"], bool(entry.get("special")), flags)


def _added_entry(token_id: int, text: str, special: bool) -> dict[str, Any]:
    return {"id": token_id, "content": text, "special": special, **dict.fromkeys(FLAG_NAMES, False)}


def added_entries(added: Mapping[int, AddedToken]) -> list[dict[str, Any]]:
    """`added_tokens` entries, as `tokenizers` wants them."""
    return [_added_entry(token.id, token.text, token.special) for token in added.values()]


def _family(model: Mapping[str, Any], byte_level: bool, spaces: bool) -> str:
    kind = model.get("type") or (
        "Unigram" if isinstance(model["vocab"], list) else "BPE" if "merges" in model else "WordPiece"
    )
    if kind == "BPE" and byte_level:
        return "byte-level BPE"
    if kind in ("BPE", "Unigram") and spaces:
        return f"SentencePiece {'BPE' if kind == 'BPE' else 'unigram'}"
    return str(kind)


def _segmentation(data: Mapping[str, Any], model: Mapping[str, Any]) -> Segmentation:
    options = {
        k: v for k, v in model.items() if k not in ("vocab", "merges", "dropout", "type") and v not in (None, "", False)
    }
    merges = model.get("merges")
    if merges is None:  # no merges in unigram and word models: the table with its scores decides
        merges = model["vocab"]
    return Segmentation(
        normalizer=_stripped(data.get("normalizer")),
        pre_tokenizer=_stripped(data.get("pre_tokenizer")),
        merges=merges,
        options=options,
    )


def _stripped(component: Any) -> Any:
    if isinstance(component, dict):
        return {key: _stripped(value) for key, value in component.items() if key not in _SHOWN_ONLY}
    return [_stripped(part) for part in component] if isinstance(component, list) else component


def _prefix_ids(post_processor: Any) -> tuple[int, ...]:
    """Ids that a template post-processor puts before a single text."""
    if not isinstance(post_processor, dict):
        return ()
    if post_processor.get("type") == "Sequence":
        return tuple(i for part in post_processor["processors"] for i in _prefix_ids(part))
    prefix: list[int] = []
    for part in post_processor.get("single") or []:
        if "SpecialToken" not in part:
            break
        prefix += post_processor["special_tokens"][part["SpecialToken"]["id"]]["ids"]
    return tuple(prefix)


def _read_merges(path: Path) -> list[str]:
    lines = path.read_text("utf-8").splitlines()
    return [line for line in lines if line and not re.match(r"#version", line)]
