"""Canonical names and shapes of a Gemma4 draft layer (formats page 1.2)."""

from specdoctor.formats.spec import AttentionShape


def gemma4_layer_shapes(layer: AttentionShape, H: int, v_from_k: bool, attention_in: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a layer of width `H` whose attention reads `attention_in`; values may come from the key projection."""
    q, kv, inner = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim, layer.intermediate_size
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    shapes: dict[str, tuple[int, ...]] = {f"{name}_layernorm.weight": (H,) for name in norms}
    shapes |= {
        "layer_scalar": (1,),
        "self_attn.q_norm.weight": (layer.head_dim,),
        "self_attn.k_norm.weight": (layer.head_dim,),
        "mlp.gate_proj.weight": (inner, H),
        "mlp.up_proj.weight": (inner, H),
        "mlp.down_proj.weight": (H, inner),
    }
    projections = {"q": (q, attention_in), "k": (kv, attention_in), "v": (kv, attention_in), "o": (H, q)}
    if v_from_k:
        del projections["v"]
    for name, (rows, columns) in projections.items():
        shapes[f"self_attn.{name}_proj.weight"] = (rows, columns)
        if layer.bias:
            shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    return shapes
