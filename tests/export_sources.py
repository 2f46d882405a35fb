"""Tiny drafters to export, which formats can express them, and what it is for two of them to be the same."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from eagle_models import AUX, Case, specforge
from gguf_drafts import convert
from safetensors.torch import load_file, save_file
from tiny_models import write_drafter

from specdoctor.formats.drafts.checkpoint import DraftCheckpoint
from specdoctor.formats.drafts.export import Exported, export_draft, same_drafter
from specdoctor.formats.drafts.read import read_draft
from specdoctor.formats.drafts.target_facts import TargetFacts

V = 24


def in_bfloat16(folder: Path) -> Path:
    path = folder / "model.safetensors"
    save_file({name: t.bfloat16() if t.is_floating_point() else t for name, t in load_file(path).items()}, path)
    return folder


def write_speculators(folder: Path, vocab: int = V, rows: int = 10, **changes: Any) -> Path:
    """speculators dspark with a reduced vocabulary, HS indices as ids, offsets, windows from the anchor."""
    made = write_drafter(folder, vocab=vocab, own_embedding=False, block=5)
    config = json.loads((made / "config.json").read_text())
    ids = torch.arange(1, vocab, 2)[:rows]
    tensors = load_file(made / "model.safetensors")
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][ids]
    tensors["lm_head.weight"] = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))
    tensors |= {"d2t": ids - torch.arange(rows), "t2d": torch.zeros(vocab, dtype=torch.bool)}
    tensors["t2d"][ids] = True
    layer = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    layer += ("intermediate_size", "rms_norm_eps", "rope_parameters")
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "model_type": "qwen3"}
    own = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": {key: config[key] for key in layer} | kinds,
        "aux_hidden_state_layer_ids": [1, 2],
        "draft_vocab_size": rows,
        "block_size": 5,
        "mask_token_id": vocab - 1,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
    }
    save_file(tensors, made / "model.safetensors")
    (made / "config.json").write_text(json.dumps(own | changes))
    return made


SOURCES: dict[str, Callable[[Path], Path]] = {
    "deepspec dspark": lambda f: write_drafter(f, vocab=V, block=5),
    "deepspec dspark bfloat16": lambda f: in_bfloat16(write_drafter(f, vocab=V, block=5, own_embedding=False)),
    "deepspec gated": lambda f: write_drafter(f, vocab=V, head="gated"),
    "deepspec rnn": lambda f: write_drafter(f, vocab=V, head="rnn"),
    "deepspec dflash": lambda f: in_bfloat16(write_drafter(f, vocab=V, head=None)),
    "deepspec embedding tap": lambda f: write_drafter(f, vocab=V, taps=(-1, 0)),
    "zlab": lambda f: write_drafter(f, vocab=V, family="zlab"),
    "zlab windows": lambda f: write_drafter(
        f,
        vocab=V,
        family="zlab",
        config_changes={"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    ),
    "zlab causal": lambda f: write_drafter(
        f,
        vocab=V,
        family="zlab",
        config_changes={"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "is_causal": False},
    ),
    "zlab scales": lambda f: write_drafter(
        f,
        vocab=V,
        family="zlab",
        config_changes={
            "dflash_config": {
                "target_layer_ids": [0, 1],
                "mask_token_id": V - 1,
                "input_embedding_scale": 8.0,
                "output_multiplier": 0.3,
                "final_logit_softcapping": 1.5,
            }
        },
    ),
    "speculators": write_speculators,
    "speculators row 0": lambda f: write_speculators(f, sample_from_anchor=False, sliding_window_non_causal=True),
    "gguf": lambda f: convert(write_drafter(f, vocab=V, block=5), f / "draft.gguf"),
}
# The formats that can express each; the reasons for the others are tested by the table below.
CAN = {
    "deepspec dspark": "deepspec speculators gguf",
    "deepspec dspark bfloat16": "deepspec speculators gguf",
    "deepspec gated": "deepspec speculators",
    "deepspec rnn": "deepspec speculators",
    "deepspec dflash": "deepspec speculators gguf",
    "deepspec embedding tap": "deepspec speculators gguf",
    "zlab": "speculators zlab gguf",
    "zlab windows": "zlab",
    "zlab causal": "zlab gguf",
    "zlab scales": "zlab gguf",
    "speculators": "speculators",
    "speculators row 0": "speculators",
    "gguf": "deepspec speculators gguf",
}

EAGLE_CASES = {
    "llama": Case(specforge(**AUX), taps=(1, 4, 7)),
    "own embedding, full vocabulary": Case(
        specforge(**AUX, draft_vocab_size=40),
        taps=(1, 4, 7),
        tensors=("norm.weight", "lm_head.weight", "embed_tokens.weight"),
        draft_vocab=40,
    ),
    "normed residual": Case(specforge(**AUX, norm_before_residual=True), taps=(1, 4, 7)),
}


def made(source: str, folder: Path) -> DraftCheckpoint:
    path = SOURCES[source](folder)
    config = folder / "config.json"
    if config.is_file():
        values = json.loads(config.read_text())
        if "num_target_layers" in values:
            config.write_text(json.dumps(values | {"num_target_layers": 3}))
    return read_draft(path, 3)


def exported(checkpoint: DraftCheckpoint, format: str, facts: TargetFacts, folder: Path, **more: Any) -> Exported:
    return export_draft(checkpoint, format, facts, folder / ("out.gguf" if format == "gguf" else "out"), **more)


def check_same(before: DraftCheckpoint, after: DraftCheckpoint, copies: frozenset[str] = frozenset()) -> None:
    """The same drafter, but for `copies` of embedding and head, which the format puts in or leaves out."""
    sources = {"embed_tokens.weight": "embed_source", "head_source": "head_source", "lm_head.weight": "head_source"}
    moved = {sources[name]: getattr(after.spec, sources[name]) for name in copies}
    assert same_drafter(replace(before.spec, **moved), after.spec) == []  # type: ignore[arg-type]
    a, b = before.load(), after.load()
    assert set(a) ^ set(b) == copies
    for name in set(a) & set(b):
        assert a[name].dtype == b[name].dtype and a[name].equal(b[name]), name
