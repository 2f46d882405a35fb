"""Tiny models made on the spot: a target and drafters in the public layouts, no weights from anywhere."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specdoctor.formats.drafts.block_tensors import block_tensor_shapes
from specdoctor.formats.spec import AttentionShape, BlockSpec


def tiny_target(
    vocab: int = 5, hidden: int = 64, layers: int = 2, seed: int = 0, heads: int = 4, inner: int = 96, **more: object
) -> PreTrainedModel:
    """A random Qwen3 with peaked, context-dependent predictions."""
    torch.manual_seed(seed)
    settings: dict = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.25,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    config = Qwen3Config(**settings | more)
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


WINDOW = 8  # of the sliding layers below: shorter than the prompts of the tests

# Families that differ in what reaches the attention function: windows, soft caps, sinks, scales, tied embeddings.
FAMILIES: dict[str, dict] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 16},
    "Qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "Mistral": {"head_dim": 16, "sliding_window": WINDOW},
    "Gemma2": {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24},
    "Gemma3Text": {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24},
    "GptOss": {"head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Cohere2": {"sliding_window": WINDOW},
    "Granite": {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "GPT2": {},
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}


def tiny_family(name: str, seed: int = 0, **more: object) -> PreTrainedModel:
    """A random four-layer model of a transformers family, vocabulary 64, hidden size 64."""
    torch.manual_seed(seed)
    settings: dict = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = getattr(transformers, f"{name}Config")(**settings | FAMILIES.get(name, {}) | more)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model.eval()


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
    own_embedding: bool | None = None,
    heads: int = 4,
    inner: int = 96,
) -> Path:
    """A random block drafter in DeepSpec's or z-lab's layout; `taps` are layer-output ids.

    `own_embedding` puts embedding and head into the file (None: as the family does); `config_changes` may switch the
    confidence head to the hidden state alone, add biases or change what has no tensor.
    """
    torch.manual_seed(seed)
    deepspec = family == "deepspec"
    rank = 8 if deepspec and head else 0
    config: dict = {
        "architectures": ["Qwen3DSparkModel" if deepspec else "DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 16,
        "intermediate_size": inner,
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
    source = "checkpoint" if (deepspec if own_embedding is None else own_embedding) else "target"
    confidence = "hidden+markov" if config.get("confidence_head_with_markov") else "hidden"
    shape = AttentionShape(
        heads=heads,
        kv_heads=heads // 2,
        head_dim=16,
        intermediate_size=inner,
        bias=config.get("attention_bias", False),
    )
    spec = BlockSpec(
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
        confidence=confidence if config.get("enable_confidence_head") else None,
        embed_source=source,
        head_source=source,
    )
    tensors = {}
    for name, size in block_tensor_shapes(spec).items():
        norm = name.endswith("norm.weight")
        tensors[name] = 1 + 0.1 * torch.randn(size) if norm else torch.randn(size) * (0.8 if "markov" in name else 0.15)
    for name in drop:
        del tensors[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
