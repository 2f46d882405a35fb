"""Canonical names and shapes of an EAGLE-3 drafter's tensors (formats page 1.3, 1.7.4)."""

from specdoctor.formats.drafts.block_tensors import layer_tensor_shapes
from specdoctor.formats.spec import RecurrentSpec


def eagle3_tensor_shapes(spec: RecurrentSpec) -> dict[str, tuple[int, ...]]:
    """The first layer's attention reads [embedding ; feature], 2 H wide; `d2t` holds absolute target ids."""
    H, target = spec.hidden_size, spec.target_hidden_size or spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, len(spec.taps) * target), "norm.weight": (H,)}
    if spec.feature_norm == "before_fc":
        shapes["input_norm.weight"] = (len(spec.taps) * target,)
    if spec.feature_norm == "per_tap":
        shapes |= {f"fc_norm.{i}.weight": (target,) for i in range(len(spec.taps))}
    for i, layer in enumerate(spec.layers):
        own = layer_tensor_shapes(layer, H)
        if i == 0:
            own["hidden_norm.weight"] = (H,)
            for p in "qkv":
                rows, _ = own[f"self_attn.{p}_proj.weight"]
                own[f"self_attn.{p}_proj.weight"] = (rows, 2 * H)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in own.items()}
    if spec.embed_source == "checkpoint":
        shapes["embed_tokens.weight"] = (spec.vocab_size, H)
    if spec.head_source == "checkpoint":
        shapes["lm_head.weight"] = (spec.head_rows, H)
    if spec.has_vocabulary_map:
        shapes["d2t"] = (spec.head_rows,)
    return shapes
