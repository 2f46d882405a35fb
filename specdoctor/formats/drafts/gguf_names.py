"""Names of a drafter's tensors in llama.cpp's GGUF files, for reading and for writing (formats page 1.14).

Verified against the sources of build 11434. Three things differ from what a rename would give: EAGLE-3's norm before
fc is stored as `enc.output_norm`, arch `eagle3` rotates neighbouring rows of q and k (arch `dflash` rotates halves, as
Hugging Face does), and one-dimensional tensors are float32 whatever the rest is.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_TOP = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "d2t": "d2t",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
_LAYER = {
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
# Other names that public files and descriptions have for the same tensors.
OTHER_NAMES = {
    "input_norm.weight": ("enc.input_norm.weight",),
    "candidate_selector.predecessor_codebook": ("selector_predecessor",),
    "candidate_selector.successor_codebook": ("selector_successor",),
}


def gguf_name(canonical: str) -> str:
    """`layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`. Raises KeyError for a name that GGUF has not."""
    if not canonical.startswith("layers."):
        return _TOP[canonical]
    _, number, rest = canonical.split(".", 2)
    return f"blk.{number}.{_LAYER[rest]}"


def rotated_heads(canonical: str, heads: int, kv_heads: int) -> int:
    """Heads whose rows arch `eagle3` keeps in rotary pairs, 0 for a tensor that is stored as it is."""
    return {"q_proj": heads, "k_proj": kv_heads}.get(canonical.rsplit(".", 2)[-2], 0)


def rotary_pairs(weight: "Tensor", heads: int) -> "Tensor":
    """Rows of a q or k projection [heads * D, W]: from halves D / 2 apart (Hugging Face) to neighbours (llama.cpp)."""
    rows, columns = weight.shape
    halves = weight.view(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)
