"""The target's tokenizer as GGUF metadata, for a drafter's file: ids must mean the same tokens on both sides.

From the target's own GGUF all `tokenizer.*` entries are taken over as they are. From a Hugging Face folder the gguf
library reads tokens and merges; the drafter never splits text, so the pre-tokenizer is named "default".
"""

from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.target_facts import TargetFacts
from specdoctor.formats.gguf_header import GgufHeader

NORMAL, UNUSED = 1, 5  # tokenizer.ggml.token_type


def tokenizer_entries(target: TargetFacts, rows: int, mask_id: int | None) -> dict[str, Any]:
    """Metadata `tokenizer.*` with `rows` tokens, one for each row of the drafter's tables.

    Raises `SpecdoctorError` when the target has more tokens than the drafter rows, or no tokenizer that can be read.
    """
    entries = _of_gguf(target.gguf) if target.gguf else _of_folder(target.path)
    tokens, types = list(entries["tokenizer.ggml.tokens"]), list(entries.get("tokenizer.ggml.token_type") or [])
    types = types or [NORMAL] * len(tokens)
    if len(tokens) > rows:
        raise SpecdoctorError(
            f"{target.gguf or target.path}: {len(tokens)} tokens, but the drafter's tables have {rows} rows; llama.cpp "
            "needs a row a token"
        )
    padding = range(len(tokens), rows)  # embeddings are padded beyond the tokenizer, as llama.cpp's converter names it
    entries["tokenizer.ggml.tokens"] = tokens + [f"[PAD{i}]" for i in padding]
    entries["tokenizer.ggml.token_type"] = types + [UNUSED] * len(padding)
    if (scores := entries.get("tokenizer.ggml.scores")) is not None:
        entries["tokenizer.ggml.scores"] = [float(s) for s in scores] + [-1000.0] * len(padding)
    if mask_id is not None:
        entries["tokenizer.ggml.mask_token_id"] = mask_id
    return entries


def _of_gguf(path: Path) -> dict[str, Any]:
    header = GgufHeader(path)
    entries = {key: value for key, value in header.metadata.items() if key.startswith("tokenizer.") and value != []}
    if "tokenizer.ggml.tokens" not in entries:
        raise SpecdoctorError(f"{path}: no tokenizer.ggml.tokens; expected the GGUF of a target with its tokenizer")
    return entries


def _of_folder(folder: Path) -> dict[str, Any]:
    from gguf.vocab import BpeVocab, LlamaHfVocab, SpecialVocab

    vocab: Any
    try:
        vocab = BpeVocab(folder)
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        try:
            vocab = LlamaHfVocab(folder)
        except (OSError, TypeError, ValueError, KeyError) as error:
            raise SpecdoctorError(
                f"{folder}: the gguf library cannot read its tokenizer ({error}); give the target as a GGUF file, or "
                "put one into its folder"
            ) from None
    listed = [(_text(token), float(score), int(kind)) for token, score, kind in vocab.all_tokens()]
    entries: dict[str, Any] = {
        "tokenizer.ggml.model": vocab.tokenizer_model,
        "tokenizer.ggml.tokens": [token for token, _, _ in listed],
        "tokenizer.ggml.scores": [score for _, score, _ in listed],
        "tokenizer.ggml.token_type": [kind for _, _, kind in listed],
    }
    if vocab.tokenizer_model == "gpt2":
        entries["tokenizer.ggml.pre"] = "default"
    special = SpecialVocab(folder, load_merges=vocab.tokenizer_model == "gpt2", n_vocab=len(listed))
    if special.merges:
        entries["tokenizer.ggml.merges"] = special.merges
    names = {"pad": "padding", "unk": "unknown", "sep": "seperator"}  # llama.cpp's spelling
    entries |= {f"tokenizer.ggml.{names.get(k, k)}_token_id": i for k, i in special.special_token_ids.items()}
    return entries | {f"tokenizer.ggml.add_{k}_token": on for k, on in special.add_special_token.items()}


def _text(token: bytes | str) -> str:
    return token if isinstance(token, str) else token.decode("utf-8", "replace")
