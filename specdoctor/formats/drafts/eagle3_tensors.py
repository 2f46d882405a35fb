"""Canonical names and shapes of an EAGLE-3 or P-EAGLE drafter's tensors (formats page 1.3, 1.7.4, 1.7.5, 1.8).

`mask_hidden` [1, 1, n * Ht] stands in for the taps at the parallel depths of P-EAGLE; `d2t` [dV] holds absolute ids.
"""

from specdoctor.formats.drafts.block_tensors import layer_tensor_shapes
from specdoctor.formats.drafts.checkpoint import Stored, TensorSource
from specdoctor.formats.drafts.gemma4_tensors import gemma4_layer_shapes
from specdoctor.formats.spec import RecurrentSpec

USUAL_TAPS = 3  # of the formats whose taps may be unknown: their default depends on the target's depth
ROTARY = "computed from the config's RoPE settings"


def eagle3_tensor_shapes(spec: RecurrentSpec) -> dict[str, tuple[int, ...]]:
    """The first layer's attention reads [embedding ; feature], 2 H wide."""
    H, target = spec.hidden_size, spec.target_hidden_size or spec.hidden_size
    taps = len(spec.taps) or USUAL_TAPS
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, taps * target), "norm.weight": (H,)}
    if spec.feature_norm == "before_fc":
        shapes["input_norm.weight"] = (taps * target,)
    if spec.feature_norm == "per_tap":
        shapes |= {f"fc_norm.{i}.weight": (target,) for i in range(taps)}
    if spec.algorithm == "peagle":
        shapes["mask_hidden"] = (1, 1, taps * target)
    for i, layer in enumerate(spec.layers):
        if spec.backbone == "gemma4":
            own = gemma4_layer_shapes(layer, H, spec.v_from_k, 2 * H if i == 0 else H)
        else:
            own = layer_tensor_shapes(layer, H)
            if i == 0:
                own |= {name: (own[name][0], 2 * H) for name in (f"self_attn.{p}_proj.weight" for p in "qkv")}
        if i == 0:
            own["hidden_norm.weight"] = (H,)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in own.items()}
    if spec.embed_source == "checkpoint":
        shapes["embed_tokens.weight"] = (spec.vocab_size, H)
    if spec.head_source == "checkpoint":
        shapes["lm_head.weight"] = (spec.head_rows, H)
    if spec.has_vocabulary_map:
        shapes["d2t"] = (spec.head_rows,)
    return shapes


def stored_eagle3(spec: RecurrentSpec, tensors: TensorSource) -> dict[str, Stored]:
    """Where the canonical tensors are: the first layer may be called `midlayer.`, `mask_hidden` may have two axes."""
    midlayer = has_midlayer(tensors)
    stored = {}
    for name, shape in eagle3_tensor_shapes(spec).items():
        own = "midlayer." + name.removeprefix("layers.0.") if midlayer and name.startswith("layers.0.") else name
        stored[name] = Stored(own, shape)
    if "mask_hidden" in stored and "mask_hidden" in tensors and len(tensors.shape("mask_hidden")) == 2:
        flat = stored["mask_hidden"].shape[1:]
        stored["mask_hidden"] = Stored("mask_hidden", flat, lambda mask: mask.unsqueeze(0))
    return stored


def has_midlayer(tensors: TensorSource) -> bool:
    return any(name.startswith("midlayer.") for name in tensors.names())


def rotary_buffers(tensors: TensorSource) -> dict[str, str]:
    """RoPE tables that old transformers versions saved beside the weights, to be ignored."""
    return {name: ROTARY for name in tensors.names() if ".rotary_emb." in f".{name}"}
