"""Tiny targets with MTP layers, in the layouts of their makers: one folder that is target and drafter at once."""

import json
from pathlib import Path
from typing import Any

import torch
from dense_mtp import DenseMTP
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from specdoctor.formats.drafts.mtp_tensors import BLOCK_CLASSES, block_shapes
from specdoctor.formats.json_config import JsonConfig

V, HIDDEN = 40, 64
COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "vocab_size": V,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
QWEN_MOE = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
ROUTED = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
# By case: the family of the config, and its own keys. `layers` and `writer` are the test's.
CASES: dict[str, dict[str, Any]] = {
    "qwen3-next": {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "layer_types": ["full_attention"] * 2,
        "partial_rotary_factor": 0.25,
        **QWEN_MOE,
    },
    "qwen3.5": {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": ["full_attention"] * 2,
        "partial_rotary_factor": 0.25,
        "mtp_num_hidden_layers": 1,
    },
    "qwen3.5-moe": {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "layer_types": ["full_attention"] * 2,
        "partial_rotary_factor": 0.25,
        "mtp_num_hidden_layers": 1,
        **QWEN_MOE,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "rope_interleave": True,
        **ROUTED,
    },
    "glm-4.5": {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        **ROUTED,
    },
    "mimo": {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
    "speculators": {"model_type": "qwen3"},
    "speculators-moe": {
        "model_type": "qwen3_next",
        "layer_types": ["full_attention"] * 2,
        "partial_rotary_factor": 0.25,
        **QWEN_MOE,
    },
}


def settings(case: str, **more: Any) -> dict[str, Any]:
    """The object of a config.json that describes the decoder layers."""
    config = COMMON | CASES[case] | more
    if case == "deepseek-v3":  # has no such key; a head is nope + rope wide
        del config["head_dim"]
    return config


def write_target(folder: Path, config: dict[str, Any], seed: int = 3) -> None:
    """A random target of the config's family in `folder`, as transformers saves it (MiMo's as the Qwen2 it is)."""
    torch.manual_seed(seed)
    values = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    kind = "qwen2" if config["model_type"] == "mimo" else config["model_type"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                scale = 0.1 if tensor.dim() == 1 else 0.25
                tensor.copy_(torch.randn(tensor.shape) * scale + (1.0 if name.endswith("norm.weight") else 0.0))
    model.save_pretrained(folder)


def mtp_tensors(case: str, config: dict[str, Any], count: int = 1, seed: int = 5) -> dict[str, Tensor]:
    """Random MTP layers under their maker's names."""
    block = JsonConfig(Path("config.json"), config)
    known = BLOCK_CLASSES[config["model_type"]]
    sparse = known.experts_key is not None
    H = config["hidden_size"]
    fused = case in ("qwen3.5-moe", "speculators-moe")
    inner = block_shapes(block, known, ("fused" if fused else "separate") if sparse else None)
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(count):
        if case.startswith("qwen3"):
            shapes |= {"mtp.fc.weight": (H, 2 * H), "mtp.norm.weight": (H,)}
            shapes |= {"mtp.pre_fc_norm_embedding.weight": (H,), "mtp.pre_fc_norm_hidden.weight": (H,)}
            prefix = f"mtp.layers.{i}."
        elif case in ("deepseek-v3", "glm-4.5"):
            prefix = f"model.layers.{config['num_hidden_layers'] + i}."
            shapes |= {f"{prefix}enorm.weight": (H,), f"{prefix}hnorm.weight": (H,)}
            shapes |= {f"{prefix}eh_proj.weight": (H, 2 * H), f"{prefix}shared_head.norm.weight": (H,)}
        else:
            prefix = f"{'model.' if case == 'mimo' else ''}mtp_layers.{i}."
            shapes |= {f"{prefix}{n}_layernorm.weight": (H,) for n in ("token", "hidden", "final")}
            shapes[f"{prefix}input_proj.weight"] = (H, 2 * H)
        shapes |= {prefix + name: shape for name, shape in inner.items()}
    torch.manual_seed(seed)
    centred = 0.0 if known.norm_offset else 1.0
    out = {}
    for name, shape in shapes.items():
        norm = "norm" in name
        out[name] = torch.randn(shape) * (0.1 if len(shape) == 1 else 0.2) + (centred if norm else 0.0)
    return out


def write_native(folder: Path, case: str, count: int = 1, **more: Any) -> Path:
    """Target and MTP layers in one folder."""
    config = settings(case, **more)
    write_target(folder, config)
    held = load_file(folder / "model.safetensors")
    own = mtp_tensors(case, config, count)
    if case in ("deepseek-v3", "glm-4.5"):
        for i in range(count):
            prefix = f"model.layers.{config['num_hidden_layers'] + i}."
            own[f"{prefix}embed_tokens.weight"] = held["model.embed_tokens.weight"].clone()
            own[f"{prefix}shared_head.head.weight"] = held["lm_head.weight"].clone()
    save_file(held | own, folder / "model.safetensors", metadata={"format": "pt"})
    if case == "mimo":  # as its maker has it; transformers knows the target as a Qwen2
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_speculators(folder: Path, config: dict[str, Any], case: str = "speculators", **more: Any) -> Path:
    """speculators mtp: no embedding, no head, the target's config nested."""
    folder.mkdir(parents=True, exist_ok=True)
    outer = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": "0.9.0",
        "num_nextn_predict_layers": 1,
        "num_speculative_steps": 4,
        "transformer_layer_config": config,
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": "someone/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "dtype": "float32",
        "transformers_version": "5.10.2",
    }
    (folder / "config.json").write_text(json.dumps(outer | more))
    save_file(mtp_tensors(case, config), folder / "model.safetensors")
    return folder


def dense(case: str, config: dict[str, Any], folder: Path, model: Any) -> DenseMTP:
    """The independent computation beside a target's own embedding and head."""
    tensors = load_file(folder / "model.safetensors")
    embedding, head = model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()
    return DenseMTP(config, tensors, config["model_type"], embedding, head)
