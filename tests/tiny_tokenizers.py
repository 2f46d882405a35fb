"""Tiny tokenizers and checkpoints, made on the spot: a byte-level BPE of some 300 tokens in every kind of file."""

import base64
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from specdoctor.formats.vocabulary import BYTE_ALPHABET

MERGES = (
    ("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("Ġ", "a"), ("e", "r"), ("o", "n"), ("r", "e"), ("Ġ", "s"),
    ("in", "g"), ("Ġa", "n"), ("Ġan", "d"), ("o", "u"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("r", "et"), ("e", "t"), ("u", "rn"),
    ("r", "n"), ("Ġ", "the"), ("t", "he"), ("s", "t"), ("l", "l"), ("Ġ", "w"), ("Ã", "©"), ("ð", "Ł"),
)  # fmt: skip
BASE = 256 + len({left + right for left, right in MERGES})
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|fim|>",
    "<|extra_0|>",
    "<|extra_1|>",
    "<think>",
    "</think>",
)
ENDOFTEXT, IM_START, IM_END, FIM, EXTRA_0 = range(BASE, BASE + 5)
TOKENS = BASE + len(SPECIALS)
ROWS = 320  # padded to a multiple of 64
TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def added_entry(token_id: int, text: str, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, **flags, "special": special}


def base_vocab() -> dict[str, int]:
    pieces = sorted(BYTE_ALPHABET, key=BYTE_ALPHABET.__getitem__)
    pieces += dict.fromkeys(left + right for left, right in MERGES)
    return {piece: i for i, piece in enumerate(pieces)}


def tokenizer_json(specials: tuple[str, ...] = SPECIALS, **changes: Any) -> dict[str, Any]:
    """A parsed tokenizer.json; `changes` replace whole top-level entries."""
    vocab = base_vocab()
    merges = [pair for pair in MERGES if pair[0] in vocab and pair[1] in vocab]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_entry(len(vocab) + i, text) for i, text in enumerate(specials)],
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": vocab, "merges": [" ".join(pair) for pair in merges], "unk_token": None},
        **changes,
    }


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False), "utf-8")
    return path


def embedding(rows: int = ROWS) -> np.ndarray[Any, Any]:
    return np.random.default_rng(7).standard_normal((rows, 8)).astype("f4")


def model_folder(
    folder: Path,
    tokenizer: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
    template: str | None = TEMPLATE,
) -> Path:
    """A causal LM's folder: tokenizer, configuration and a small embedding."""
    write(folder / "tokenizer.json", tokenizer if tokenizer is not None else tokenizer_json())
    write(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    write(
        folder / "config.json",
        {"architectures": ["LlamaForCausalLM"], "vocab_size": ROWS, "eos_token_id": IM_END, **(config or {})},
    )
    if template is not None:
        write(folder / "chat_template.jinja", template)
    save_file(dict(tensors or {"model.embed_tokens.weight": embedding()}), folder / "model.safetensors")
    return folder


def block_drafter(
    folder: Path, config: Mapping[str, Any] | None = None, tensors: Mapping[str, np.ndarray[Any, Any]] | None = None
) -> Path:
    """A DSpark drafter without a tokenizer, as DeepSpec and z-lab publish them; "absent" leaves a key out."""
    values = {
        "architectures": ["Qwen3DSparkModel"],
        "vocab_size": ROWS,
        "eos_token_id": IM_END,
        "mask_token_id": TOKENS + 2,
    }
    write(
        folder / "config.json", {key: value for key, value in {**values, **(config or {})}.items() if value != "absent"}
    )
    save_file(dict(tensors or {"fc.weight": np.ones((8, 24), "f4")}), folder / "model.safetensors")
    return folder


def tiktoken_file(path: Path) -> Path:
    lines = [
        f"{base64.b64encode(piece.translate(str.maketrans(BYTE_ALPHABET)).encode('latin-1')).decode()} {i}"
        for piece, i in base_vocab().items()
    ]
    return write(path, "\n".join(lines) + "\n")


def gguf_file(path: Path, rows: int = ROWS, **extra: Any) -> Path:
    """The same vocabulary as GGUF. `extra`: tokens, types, mask, pre, architecture, tensors (name -> array)."""
    import gguf

    data = tokenizer_json()
    tokens = [*data["model"]["vocab"], *SPECIALS]
    types = [1] * BASE + [3] * len(SPECIALS)
    tokens += [f"[PAD{i}]" for i in range(len(tokens), rows)]
    types += [5] * (rows - len(types))
    writer = gguf.GGUFWriter(str(path), extra.get("architecture", "llama"))
    writer.add_vocab_size(rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(extra.get("pre", "gpt-2"))
    writer.add_token_list(extra.get("tokens", tokens))
    writer.add_token_types(extra.get("types", types))
    writer.add_token_merges(data["model"]["merges"])
    writer.add_eos_token_id(IM_END)
    writer.add_pad_token_id(ENDOFTEXT)
    if "mask" in extra:
        writer.add_mask_token_id(extra["mask"])
    writer.add_chat_template(TEMPLATE)
    for name, array in extra.get("tensors", {"token_embd.weight": embedding(rows)}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def large_pair(folder: Path, size: int) -> tuple[Path, Path]:
    """Two byte-level BPE of `size` tokens with twice as many merges, as large as the largest public ones.

    They differ in two ids and in the normaliser: the slowest case, both are parsed whole and both encode.
    """
    chooser, vocab = random.Random(1), base_vocab()
    while len(vocab) < size:
        word = "".join(chooser.choices("etaoinshrdlucmfwypvbgkjqxz", k=chooser.randrange(4, 11)))
        vocab.setdefault("Ġ" * chooser.randrange(2) + word, len(vocab))
    merges = [" ".join(pair) for pair in MERGES if {*pair, "".join(pair)} <= vocab.keys()]
    merges += [f"{piece[:half]} {piece[half:]}" for piece in list(vocab)[BASE:] for half in (2, 3)]
    data = tokenizer_json((), model={"type": "BPE", "vocab": vocab, "merges": merges})
    target = write(folder / "target" / "tokenizer.json", data)
    vocab["Ġthe"], vocab["ing"] = vocab["ing"], vocab["Ġthe"]
    return target, write(folder / "drafter" / "tokenizer.json", {**data, "normalizer": {"type": "NFC"}})
