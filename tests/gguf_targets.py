"""Tiny targets as GGUF files, written with the gguf library for tests that need llama.cpp's side."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_target_gguf(model: PreTrainedModel, path: Path, tokens: list[str] | None = None) -> Path:
    """A Llama or Qwen3 in float32, with one made-up token an id; llama.cpp needs a tokenizer, the tests send ids."""
    from gguf import GGUFWriter

    config: Any = model.config
    arch = config.model_type
    writer = GGUFWriter(path, arch)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens or [f"<t{i}>" for i in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["< t"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        writer.add_tensor(_gguf_name(name), _rows(name, value, config).float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, number, rest = name.removesuffix(".weight").split(".", 3)
    return f"blk.{number}.{_LAYER_NAMES[rest]}.weight"


def _rows(name: str, value: torch.Tensor, config: Any) -> torch.Tensor:
    """llama.cpp turns neighbouring rows in a Llama, and halves in a Qwen3, as Hugging Face does in both."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2], 0)
    if config.model_type != "llama" or not heads:
        return value
    return value.reshape(heads, 2, len(value) // heads // 2, -1).swapaxes(1, 2).reshape(value.shape)
