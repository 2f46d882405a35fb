"""Readers of block-drafter checkpoints, DeepSpec (formats page 1.1) and z-lab DFlash (1.5): `DraftSpec` and tensors.

Contract: every tensor of the file is used or refused by name; a shape that contradicts the config is one clear line.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.detect import DEEPSPEC_BLOCK, ZLAB_DFLASH, detect
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import AttentionShape, DraftSpec
from specdoctor.formats.tensors import TensorFolder

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass
class DraftCheckpoint:
    """A draft checkpoint on disk: its canonical description, and its tensors under their DeepSpec names."""

    folder: Path
    spec: DraftSpec
    tensors: dict[str, Tensor]


def read_draft(folder: Path) -> DraftCheckpoint:
    """Recognise and read a block drafter. Raises `SpecdoctorError` for what is broken, foreign or not supported yet."""
    config = JsonConfig.read(folder)
    tensors = TensorFolder(folder)
    found = detect(config, tensors)
    readers = {DEEPSPEC_BLOCK: _deepspec, ZLAB_DFLASH: _zlab}
    if found.family not in readers:
        raise SpecdoctorError(
            f"{folder}: recognised as {found.title} (by {found.evidence}), which is not yet supported as a drafter; "
            f"supported now: DeepSpec DSpark and DFlash on Qwen3, z-lab DFlash"
        )
    spec = readers[found.family](config, tensors)
    expected = tensor_shapes(spec)
    _account(folder, tensors, expected)
    return DraftCheckpoint(folder, spec, tensors.load(sorted(expected)))


def _deepspec(config: JsonConfig, tensors: TensorFolder) -> DraftSpec:
    rank = config.get("markov_rank", int)
    if rank < 0:
        raise SpecdoctorError(f"{config.path}: key markov_rank is {rank}, expected 0 (no head) or more")
    head = config.get("markov_head_type", str) if rank > 0 else None
    if head is not None and head not in MARKOV_HEADS:
        raise SpecdoctorError(
            f"{config.path}: key markov_head_type is {head!r}, expected one of {', '.join(MARKOV_HEADS)}"
        )
    confidence = None
    if config.get("enable_confidence_head", bool):
        with_markov = config.get("confidence_head_with_markov", bool)
        confidence = "hidden+markov" if with_markov else "hidden"
        if with_markov and rank == 0:
            raise SpecdoctorError(
                f"{config.path}: confidence_head_with_markov is true but markov_rank is 0; expected a rank"
            )
    return DraftSpec(
        family=DEEPSPEC_BLOCK,
        algorithm="dspark" if rank > 0 else "dflash",
        layers=_layers(config, sliding_is_causal=False),
        taps=_taps(config, "target_layer_ids", lowest=-1),
        block_size=config.positive("block_size"),
        row_offset=1,
        mask_id=config.get("mask_token_id", int),
        markov=head,
        markov_rank=rank,
        confidence=confidence,
        **_common(config, tensors),
    )


def _zlab(config: JsonConfig, tensors: TensorFolder) -> DraftSpec:
    block = config.get("dflash_config.block_size", int, config.get("block_size", int, 16))
    if block < 2:
        raise SpecdoctorError(f"{config.path}: key block_size is {block}, expected 2 or more (row 0 proposes nothing)")
    if config.has("dflash_config.target_layer_ids"):
        taps = _taps(config, "dflash_config.target_layer_ids", lowest=0)
    else:
        taps = tuple(
            i + 1 for i in default_taps(config.positive("num_hidden_layers"), config.positive("num_target_layers"))
        )
    return DraftSpec(
        family=ZLAB_DFLASH,
        algorithm="dflash",
        layers=_layers(config, sliding_is_causal=True),
        taps=taps,
        block_size=block,
        row_offset=0,
        mask_id=config.get("dflash_config.mask_token_id", int),
        embed_scale=float(config.get("dflash_config.input_embedding_scale", (int, float), 1.0)),
        logit_scale=float(config.get("dflash_config.output_multiplier", (int, float), 1.0)),
        softcap=config.get("dflash_config.final_logit_softcapping", (int, float), None),
        **_common(config, tensors),
    )


def default_taps(draft_layers: int, target_layers: int) -> list[int]:
    """z-lab's layer ids when the config has none: evenly spaced 1..L-3, one a draft layer (formats page 1.5)."""
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]


def _common(config: JsonConfig, tensors: TensorFolder) -> dict[str, Any]:
    return {
        "hidden_size": config.positive("hidden_size"),
        "vocab_size": config.positive("vocab_size"),
        "rms_norm_eps": float(config.get("rms_norm_eps", (int, float))),
        "rope": _rope(config),
        "num_target_layers": config.get("num_target_layers", int, None),
        "embed_source": "checkpoint" if "embed_tokens.weight" in tensors else "target",
        "head_source": "checkpoint" if "lm_head.weight" in tensors else "target",
    }


def _taps(config: JsonConfig, key: str, lowest: int) -> tuple[int, ...]:
    """Layer-output ids of both writers, to HS indices: id + 1 (id -1 is the embedding output)."""
    ids = config.get(key, list)
    if not ids or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise SpecdoctorError(f"{config.path}: key {key} is {ids!r}, expected a list of layer numbers")
    if min(ids) < lowest or any(b <= a for a, b in pairwise(ids)):
        raise SpecdoctorError(f"{config.path}: key {key} is {ids}, expected rising layer numbers of {lowest} or more")
    return tuple(i + 1 for i in ids)


def _layers(config: JsonConfig, sliding_is_causal: bool) -> tuple[AttentionShape, ...]:
    count = config.positive("num_hidden_layers")
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
            bias=config.get("attention_bias", bool, False),
            window=config.positive("sliding_window") if kind == "sliding_attention" else None,
            causal_in_block=(kind == "sliding_attention" and sliding_is_causal) if forced is None else forced,
        )
        for kind in kinds
    )


def _rope(config: JsonConfig) -> dict[str, Any]:
    """RoPE settings under either writer's key: `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`."""
    new = config.get("rope_parameters", dict, None)
    old_theta = config.get("rope_theta", (int, float), None)
    if new is not None:
        theta = new.get("rope_theta", old_theta)
        if old_theta is not None and theta is not None and float(theta) != float(old_theta):
            raise SpecdoctorError(
                f"{config.path}: rope_parameters.rope_theta is {theta} but rope_theta is {old_theta}; expected one "
                "value"
            )
        rope = dict(new)
    else:
        theta = old_theta
        rope = dict(config.get("rope_scaling", dict, None) or {})
        rope["rope_type"] = rope.pop("rope_type", rope.pop("type", "default"))
    if theta is None:
        raise SpecdoctorError(
            f"{config.path}: neither rope_parameters.rope_theta nor rope_theta is there; expected one"
        )
    rope["rope_theta"] = float(theta)
    rope.setdefault("rope_type", "default")
    if "max_position_embeddings" in config.values:
        rope.setdefault("max_position_embeddings", config.values["max_position_embeddings"])
    return rope


def tensor_shapes(spec: DraftSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes [out, in] of the tensors that a block drafter has (formats page 1.1, 1.5)."""
    H, V, r = spec.hidden_size, spec.vocab_size, spec.markov_rank
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, len(spec.taps) * H),
        "hidden_norm.weight": (H,),
        "norm.weight": (H,),
    }
    if spec.embed_source == "checkpoint":
        shapes["embed_tokens.weight"] = (V, H)
    if spec.head_source == "checkpoint":
        shapes["lm_head.weight"] = (V, H)
    for i, layer in enumerate(spec.layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer_shapes(layer, H).items()}
    if spec.markov:
        shapes |= {"markov_head.markov_w1.weight": (V, r), "markov_head.markov_w2.weight": (V, r)}
    if spec.markov == "gated":
        shapes |= {"markov_head.gate_proj.weight": (r, H + r), "markov_head.gate_proj.bias": (r,)}
    if spec.markov == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * r, 2 * r + H), "markov_head.joint_proj.bias": (3 * r,)}
    if spec.confidence:
        width = H + r if spec.confidence == "hidden+markov" else H
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def _layer_shapes(layer: AttentionShape, H: int) -> dict[str, tuple[int, ...]]:
    q, kv, inner = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim, layer.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
        "self_attn.q_proj.weight": (q, H),
        "self_attn.k_proj.weight": (kv, H),
        "self_attn.v_proj.weight": (kv, H),
        "self_attn.o_proj.weight": (H, q),
        "mlp.gate_proj.weight": (inner, H),
        "mlp.up_proj.weight": (inner, H),
        "mlp.down_proj.weight": (H, inner),
    }
    if layer.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (layer.head_dim,), "self_attn.k_norm.weight": (layer.head_dim,)}
    if layer.bias:
        shapes |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", q), ("k", kv), ("v", kv), ("o", H))}
    return shapes


def _account(folder: Path, tensors: TensorFolder, expected: dict[str, tuple[int, ...]]) -> None:
    """Every tensor is there, in its shape, and none is left over: a silently dropped tensor is a silent fault."""
    missing = sorted(set(expected) - set(tensors.names()))
    if missing:
        raise SpecdoctorError(
            f"{folder}: tensor {missing[0]} is missing ({len(missing)} in all); its config.json promises it"
        )
    extra = sorted(set(tensors.names()) - set(expected))
    if extra:
        raise SpecdoctorError(
            f"{tensors.file_of(extra[0])}: tensor {extra[0]} is not used by this format ({len(extra)} such); the "
            "config.json and the weights disagree"
        )
    for name, shape in expected.items():
        if tensors.shape(name) != shape:
            raise SpecdoctorError(
                f"{tensors.file_of(name)}: {name} has shape {list(tensors.shape(name))}, expected {list(shape)} by its "
                "config.json"
            )
