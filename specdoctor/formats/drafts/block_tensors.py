"""Canonical names and shapes of a block drafter's tensors (formats page 1.1)."""

from specdoctor.formats.drafts.dflash2_tensors import dflash2_shapes
from specdoctor.formats.drafts.gemma4_tensors import gemma4_layer_shapes
from specdoctor.formats.spec import AttentionShape, BlockSpec


def block_tensor_shapes(spec: BlockSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes [out, in] of the tensors that a block drafter has (formats page 1.1, 1.5, 1.7.2).

    With a reduced draft vocabulary the head and W2 have its rows, and `d2t` holds absolute target ids.
    """
    H, V, dV, r = spec.hidden_size, spec.vocab_size, spec.head_rows, spec.markov_rank
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, len(spec.taps) * (spec.target_hidden_size or H)),
        "hidden_norm.weight": (H,),
        "norm.weight": (H,),
    }
    if spec.embed_source == "checkpoint":
        shapes["embed_tokens.weight"] = (V, H)
    if spec.head_source == "checkpoint":
        shapes["lm_head.weight"] = (dV, H)
    if spec.has_vocabulary_map:
        shapes["d2t"] = (dV,)
    for i, layer in enumerate(spec.layers):
        gemma = spec.backbone == "gemma4"
        own = gemma4_layer_shapes(layer, H, spec.v_from_k, H) if gemma else layer_tensor_shapes(layer, H)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in own.items()}
    shapes |= dflash2_shapes(spec)
    if spec.markov:
        shapes |= {"markov_head.markov_w1.weight": (V, r), "markov_head.markov_w2.weight": (dV, r)}
    if spec.markov == "gated":
        shapes |= {"markov_head.gate_proj.weight": (r, H + r), "markov_head.gate_proj.bias": (r,)}
    if spec.markov == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * r, 2 * r + H), "markov_head.joint_proj.bias": (3 * r,)}
    if spec.confidence:
        width = H + r if spec.confidence == "hidden+markov" else H
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def layer_tensor_shapes(layer: AttentionShape, H: int) -> dict[str, tuple[int, ...]]:
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
