"""Tiny drafters as llama.cpp's own converter would store them: the tensors of a folder under GGUF names.

Names and metadata are spelled out here from the formats page (1.14) and from llama.cpp's sources, not taken from the
code under test.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

TOP = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
BLOCK = {
    "input_layernorm.weight": "attn_norm.weight",
    "hidden_norm.weight": "attn_norm_2.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}


def llama_rows(weight: Tensor, heads: int) -> Tensor:
    """LlamaModel.permute of llama.cpp's converter."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, arch: str, entries: dict[str, Any], tensors: dict[str, Tensor], quantised: str = "") -> Path:
    """A GGUF with `entries` as metadata; two-dimensional tensors as `quantised` (a ggml type), if given."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    writer = GGUFWriter(path, arch)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in entries.items():
        (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)
    for name, value in tensors.items():
        array = np.ascontiguousarray(value.numpy())
        if quantised and value.dim() == 2 and value.shape[-1] % 32 == 0:
            kind = GGMLQuantizationType[quantised]
            writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(folder: Path, path: Path, arch: str = "dflash", quantised: str = "", drop: tuple = (), **more: Any) -> Path:
    """The drafter in `folder` (DeepSpec, z-lab or SpecForge EAGLE-3) as a GGUF; `more` replaces metadata of the arch.

    `drop` leaves out metadata.
    """
    config = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    eagle = arch == "eagle3"
    tensors = {}
    for name, value in stored.items():
        if name in ("d2t", "t2d"):
            continue
        plain = name.replace("midlayer.", "layers.0.")
        if plain.startswith("layers."):
            _, number, rest = plain.split(".", 2)
            heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}.get(
                rest.removeprefix("self_attn.")[0] if rest.endswith("_proj.weight") else "", 0
            )
            moved = llama_rows(value, heads) if eagle and heads else value
            tensors[f"blk.{number}.{BLOCK[rest]}"] = moved
        else:
            tensors[TOP[plain]] = value
    if "d2t" in stored:
        tensors["d2t"] = stored["d2t"] + torch.arange(len(stored["d2t"]))
    own = _eagle(config) if eagle else _block(config)
    own |= {
        "context_length": config.get("max_position_embeddings", 512),
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"]),
    }
    entries: dict[str, Any] = {f"{arch}.{key}": value for key, value in (own | more).items() if key not in drop}
    entries |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"<t{i}>" for i in range(config["vocab_size"])],
        "tokenizer.ggml.token_type": [1] * config["vocab_size"],
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_template.tools": "{{ tools }}",
    }
    mask = config.get("mask_token_id", config.get("dflash_config", {}).get("mask_token_id"))
    if mask is not None and "mask" not in drop:
        entries["tokenizer.ggml.mask_token_id"] = mask
    return write_gguf(path, arch, entries, tensors, quantised)


def _block(config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get("dflash_config", config)
    own: dict[str, Any] = {
        "block_size": nested.get("block_size", config.get("block_size")),
        "target_layers": [i + 1 for i in nested["target_layer_ids"]],
    }
    if config.get("markov_rank"):
        own |= {"sample_from_anchor": True, "has_confidence_head": config["enable_confidence_head"]}
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        if key in nested:
            own[key] = nested[key]
    for key, theirs in (("input_embedding_scale", "embedding_scale"), ("output_multiplier", "logit_scale")):
        if key in nested:
            own[theirs] = float(nested[key])
    if "final_logit_softcapping" in nested:
        own["final_logit_softcapping"] = float(nested["final_logit_softcapping"])
    if config.get("sliding_window"):
        own |= {"attention.sliding_window": config["sliding_window"]}
        own["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    if config.get("is_causal") is not None:
        own["attention.causal"] = config["is_causal"]
    return own


def _eagle(config: dict[str, Any]) -> dict[str, Any]:
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    return {
        "target_layers": [i + 1 for i in ids],
        "target_hidden_size": config.get("target_hidden_size", config["hidden_size"]),
        "norm_before_residual": config.get("norm_before_residual", False),
        "norm_before_fc": config.get("norm_before_fc", False),
    }
