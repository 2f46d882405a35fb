"""Parts of a config.json that several writers share: taps, decoder layers, RoPE."""

from itertools import pairwise
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import AttentionShape


def read_taps(config: JsonConfig, key: str, lowest: int, shift: int = 1) -> tuple[int, ...]:
    """Tapped layers as HS indices: id + `shift`; 1 for layer-output ids (-1: the embedding output), 0 for HS ids."""
    ids = config.get(key, list)
    if not ids or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise SpecdoctorError(f"{config.path}: key {key} is {ids!r}, expected a list of layer numbers")
    if min(ids) < lowest or any(b <= a for a, b in pairwise(ids)):
        raise SpecdoctorError(f"{config.path}: key {key} is {ids}, expected rising layer numbers of {lowest} or more")
    return tuple(i + shift for i in ids)


def read_layers(
    config: JsonConfig, *, sliding_is_causal: bool = True, qk_norm: bool = True
) -> tuple[AttentionShape, ...]:
    """The decoder layers that a transformers config describes.

    `sliding_is_causal`: sliding layers are causal inside the block; a key `is_causal` overrides it for all layers.
    """
    count = config.count("num_hidden_layers")
    config.find("sliding_window")  # null, or of no use, where no layer slides
    kinds = config.get("layer_types", list, ["full_attention"] * count)
    if len(kinds) != count or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise SpecdoctorError(
            f"{config.path}: key layer_types is {kinds}, expected {count} of full_attention or sliding_attention"
        )
    heads = config.positive("num_attention_heads")
    kv_heads = config.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise SpecdoctorError(
            f"{config.path}: key num_key_value_heads is {kv_heads}, expected a divisor of num_attention_heads, {heads}"
        )
    act = config.get("hidden_act", str, "silu")
    if act not in ("silu", "swish"):
        raise SpecdoctorError(
            f"{config.path}: key hidden_act is {act!r}, expected 'silu'; this drafter cannot be run here"
        )
    forced = config.get("is_causal", bool, None)  # z-lab: overrides the rule for all layers
    return tuple(
        AttentionShape(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=config.positive("head_dim", config.positive("hidden_size") // heads),
            intermediate_size=config.positive("intermediate_size"),
            qk_norm=qk_norm,
            bias=config.get("attention_bias", bool, False),
            window=config.positive("sliding_window") if kind == "sliding_attention" else None,
            causal_in_block=(kind == "sliding_attention" and sliding_is_causal) if forced is None else forced,
        )
        for kind in kinds
    )


def read_rope(config: JsonConfig) -> dict[str, Any]:
    """RoPE settings under either writer's key: `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`."""
    new = config.get("rope_parameters", dict, None)
    old_theta = config.get("rope_theta", (int, float), None)
    if new is not None:
        theta = new.get("rope_theta", old_theta)
        if isinstance(theta, int | float) and old_theta is not None and float(theta) != float(old_theta):
            raise SpecdoctorError(
                f"{config.path}: rope_parameters.rope_theta is {theta} but rope_theta is {old_theta}; expected one "
                "value"
            )
        rope = dict(new)
    else:
        theta = old_theta
        rope = dict(config.get("rope_scaling", dict, None) or {})
        rope["rope_type"] = rope.pop("rope_type", rope.pop("type", "default"))
    if theta is not None and (isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0):
        raise SpecdoctorError(f"{config.path}: rope_theta is {theta!r}, expected a number above 0")
    if theta is None:
        raise SpecdoctorError(
            f"{config.path}: neither rope_parameters.rope_theta nor rope_theta is there; expected one"
        )
    rope["rope_theta"] = float(theta)
    rope.setdefault("rope_type", "default")
    if config.find("max_position_embeddings") is not None:
        rope.setdefault("max_position_embeddings", config.find("max_position_embeddings"))
    return rope
