"""What DeepSpec's Gemma4 drafters share, read from the raw config.json (formats page 1.2).

The config is a copy of the target's text config with the draft's own keys. transformers' class is no help: from 5.24 on
it turns `global_head_dim` and `num_global_key_value_heads` into something else.
"""

from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import TensorSource
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import AttentionShape

GLOBAL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}

IGNORED_KEYS = {
    "head_dim": "of Gemma4's sliding layers; a draft has global ones only",
    "num_key_value_heads": "of Gemma4's sliding layers, where attention_k_eq_v is true",
    "num_global_key_value_heads": "of no use where attention_k_eq_v is false",
    "sliding_window": "a draft has global layers only",
    "target_model_type": "of the target",
    "target_text_model_type": "of the target",
    "target_model_name_or_path": "the target is given by the user",
    "num_kv_shared_layers": "of the target; each draft layer has its own keys",
    "vocab_size_per_layer_input": "of no use without per-layer inputs",
    "num_experts": "of no use without enable_moe_block",
    "top_k_experts": "of no use without enable_moe_block",
    "moe_intermediate_size": "of no use without enable_moe_block",
    "expert_intermediate_size": "of no use without enable_moe_block",
    "use_bidirectional_attention": "of the target's images",
    "rope_parameters.sliding_attention": "a draft has global layers only",
}


def read_gemma4_common(fields: Fields, config: JsonConfig, tensors: TensorSource) -> None:
    """Sizes, global layers, RoPE, scale, soft-cap and sources; raises for what the draft classes refuse."""
    _refuse_foreign_parts(config)
    hidden = fields.key("hidden_size", config.positive("hidden_size"), "hidden_size")
    fields.key("vocab_size", config.positive("vocab_size"), "vocab_size")
    fields.key("rms_norm_eps", float(config.get("rms_norm_eps", (int, float), 1e-6)), "rms_norm_eps")
    fields.key("num_target_layers", config.get("num_target_layers", int, None), "num_target_layers")
    fields.key("layers", _layers(config, tensors), "num_hidden_layers")
    fields.key("rope", _rope(config), "rope_parameters.full_attention")
    fields.put("backbone", "gemma4", "architectures")
    fields.key("v_from_k", config.get("attention_k_eq_v", bool), "attention_k_eq_v")
    fields.put("layer_scalar", True, "the format: tensor layers.{i}.layer_scalar")
    fields.put("embed_scale", float(hidden) ** 0.5, "the format: square root of hidden_size")
    softcap = config.get("final_logit_softcapping", (int, float), None)
    if softcap is not None and softcap <= 0:
        raise SpecdoctorError(
            f"{config.path}: key final_logit_softcapping is {softcap}, expected a number above 0, or null"
        )
    fields.key("softcap", None if softcap is None else float(softcap), "final_logit_softcapping")
    fields.source("embed_source", "embed_tokens.weight", "embed_tokens.weight" in tensors)
    fields.source("head_source", "lm_head.weight", "lm_head.weight" in tensors)


def _refuse_foreign_parts(config: JsonConfig) -> None:
    if config.get("enable_moe_block", bool, False):
        raise SpecdoctorError(
            f"{config.path}: key enable_moe_block is true, expected false; a Gemma4 draft with mixture-of-experts "
            "blocks cannot be run here"
        )
    per_layer = config.get("hidden_size_per_layer_input", int, 0)
    if per_layer != 0:
        raise SpecdoctorError(
            f"{config.path}: key hidden_size_per_layer_input is {per_layer}, expected 0; a Gemma4 draft with per-layer "
            "inputs cannot be run here"
        )
    activation = config.get("hidden_activation", str, "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise SpecdoctorError(
            f"{config.path}: key hidden_activation is {activation!r}, expected 'gelu_pytorch_tanh'; this drafter "
            "cannot be run here"
        )
    if config.has("per_layer_config") and not config.has("global_head_dim"):
        raise SpecdoctorError(
            f"{config.path}: key per_layer_config stands in place of global_head_dim and num_global_key_value_heads, "
            "as transformers 5.24 rewrites a Gemma4 config; expected the config.json that the trainer wrote"
        )


def _layers(config: JsonConfig, tensors: TensorSource) -> tuple[AttentionShape, ...]:
    count = config.positive("num_hidden_layers")
    kinds = config.get("layer_types", list, ["full_attention"] * count)
    if kinds != ["full_attention"] * count:
        raise SpecdoctorError(
            f"{config.path}: key layer_types is {kinds}, expected {count} times full_attention: a Gemma4 draft has "
            "global layers only"
        )
    heads = config.positive("num_attention_heads")
    key = "num_global_key_value_heads" if config.get("attention_k_eq_v", bool) else "num_key_value_heads"
    kv_heads = config.positive(key)
    if heads % kv_heads:
        raise SpecdoctorError(
            f"{config.path}: key {key} is {kv_heads}, expected a divisor of num_attention_heads, {heads}"
        )
    inner, double = config.positive("intermediate_size"), config.get("use_double_wide_mlp", bool, False)
    return tuple(
        AttentionShape(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=config.positive("global_head_dim"),
            intermediate_size=2 * inner if double and _rows(tensors, i) == 2 * inner else inner,
            bias=config.get("attention_bias", bool, False),
        )
        for i in range(count)
    )


def _rows(tensors: TensorSource, layer: int) -> int:
    """Rows of a layer's gate projection: which layers are double-wide differs between releases of transformers."""
    name = f"layers.{layer}.mlp.gate_proj.weight"
    return tensors.shape(name)[0] if name in tensors else 0


def _rope(config: JsonConfig) -> dict[str, Any]:
    """RoPE of the global layers; without any, Gemma4's own."""
    longest = config.find("max_position_embeddings")
    if config.get("rope_parameters", dict, None) is None:
        return dict(GLOBAL_ROPE)
    by_kind = config.view("rope_parameters")
    rope = by_kind.get("full_attention", dict, None)
    if rope is None:
        there = ", ".join(config.values["rope_parameters"]) or "nothing"
        raise SpecdoctorError(
            f"{config.path}: key rope_parameters has {there}, expected full_attention: Gemma4's RoPE is told apart by "
            "kind of layer"
        )
    theta = by_kind.get("full_attention.rope_theta", (int, float))
    out = {"rope_type": "default", **rope, "rope_theta": float(theta)}
    if out["rope_type"] == "proportional":
        out.setdefault("partial_rotary_factor", 1.0)  # of the type itself; Gemma4's 0.25 is a default of the whole
    elif longest is not None:
        out.setdefault("max_position_embeddings", longest)  # some types need it
    return out
