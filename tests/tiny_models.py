"""Tiny models made on the spot: a target and drafters in the public layouts, no weights from anywhere."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from specdoctor.formats.block_checkpoint import tensor_shapes
from specdoctor.formats.spec import AttentionShape, DraftSpec


def tiny_target(vocab: int = 5, hidden: int = 64, layers: int = 2, seed: int = 0, **more: object) -> PreTrainedModel:
    """A random Qwen3 with peaked, context-dependent predictions."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.25,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        **more,
    )
    return Qwen3ForCausalLM(config).eval()


def tiny_llama(vocab: int = 64, **more: object) -> PreTrainedModel:
    """A random Llama with tied embeddings."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        tie_word_embeddings=True,
        **more,
    )
    return LlamaForCausalLM(config).eval()


def write_drafter(
    folder: Path,
    *,
    family: str = "deepspec",
    head: str | None = "vanilla",
    vocab: int = 5,
    hidden: int = 64,
    block: int = 4,
    taps: tuple[int, ...] = (0, 1),
    target_layers: int = 2,
    seed: int = 7,
    config_changes: dict | None = None,
    drop: tuple[str, ...] = (),
    own_embedding: bool = True,
) -> Path:
    """A random block drafter in DeepSpec's or z-lab's layout; `taps` are layer-output ids."""
    torch.manual_seed(seed)
    deepspec = family == "deepspec"
    rank = 8 if deepspec and head else 0
    config: dict = {
        "architectures": ["Qwen3DSparkModel" if deepspec else "DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["full_attention"] * 2,
        "num_target_layers": target_layers,
        "block_size": block,
    }
    if deepspec:
        config |= {
            "target_layer_ids": list(taps),
            "mask_token_id": vocab - 1,
            "num_anchors": 8,
            "markov_rank": rank,
            "enable_confidence_head": rank > 0,
            "confidence_head_with_markov": rank > 0,
        }
        if rank:
            config["markov_head_type"] = head
    else:
        config["dflash_config"] = {"target_layer_ids": list(taps), "mask_token_id": vocab - 1}
    config |= config_changes or {}
    source = "checkpoint" if deepspec and own_embedding else "target"
    shape = AttentionShape(heads=4, kv_heads=2, head_dim=16, intermediate_size=96)
    spec = DraftSpec(
        family=family,
        algorithm="dspark" if rank else "dflash",
        hidden_size=hidden,
        vocab_size=vocab,
        layers=(shape, shape),
        taps=tuple(i + 1 for i in taps),
        block_size=block,
        row_offset=1 if deepspec else 0,
        mask_id=vocab - 1,
        rms_norm_eps=1e-6,
        rope={},
        markov=head if rank else None,
        markov_rank=rank,
        confidence="hidden+markov" if rank else None,
        embed_source=source,
        head_source=source,
    )
    tensors = {}
    for name, size in tensor_shapes(spec).items():
        norm = name.endswith("norm.weight")
        tensors[name] = 1 + 0.1 * torch.randn(size) if norm else torch.randn(size) * (0.8 if "markov" in name else 0.15)
    for name in drop:
        del tensors[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
