"""The parallel backbone of DSpark and DFlash: a few layers whose keys and values begin with the target's features.

Formats page 1.1: the features c = hidden_norm(fc(taps)) of the tokens before the anchor enter every layer's own K and V
projection without a norm; the block [anchor, mask, ...] is normed, sees all features and, as a rule, all of itself.
The features' keys and values are computed once, when their tokens are committed, and stay; the block's own keys and
values are written behind them for one forward and never kept.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdoctor.drafters.rope import Rope, rotate
from specdoctor.engine.kv import KVCache
from specdoctor.engine.rows import PackedRows
from specdoctor.formats.spec import AttentionShape, BlockSpec

Attend = Callable[[Tensor], Tensor]  # a layer's attention: its normed input [N, H] to its projected output [N, H]


class RMSNorm(nn.Module):
    """x / rms(x) * w, the mean taken in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    """Projections, norms and rotation of one layer; `out` is the width it writes where it reads another one."""

    def __init__(self, shape: AttentionShape, hidden: int, eps: float, out: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.scale = shape.head_dim**-0.5
        self.q_proj = nn.Linear(hidden, shape.heads * shape.head_dim, bias=shape.bias)
        self.k_proj = nn.Linear(hidden, shape.kv_heads * shape.head_dim, bias=shape.bias)
        self.v_proj = nn.Linear(hidden, shape.kv_heads * shape.head_dim, bias=shape.bias)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, out or hidden, bias=shape.bias)
        self.q_norm: nn.Module = RMSNorm(shape.head_dim, eps) if shape.qk_norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(shape.head_dim, eps) if shape.qk_norm else nn.Identity()

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[N, H] -> keys (normed, rotated) and values, each [hkv, N, D]."""
        k = self.k_norm(self._heads(self.k_proj(x)))
        return rotate(k, cos, sin), self._heads(self.v_proj(x))

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[N, H] -> [h, N, D]."""
        return rotate(self.q_norm(self._heads(self.q_proj(x))), cos, sin)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.shape.head_dim).transpose(0, 1)


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: AttentionShape, hidden: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(shape, hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(hidden, shape.intermediate_size)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """The block's states [N, H] through attention and MLP."""
        x = x + attend(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """fc, hidden_norm, the layers and the final norm, with the KV cache of the context features."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        H, eps = spec.hidden_size, spec.rms_norm_eps
        self.fc = nn.Linear(len(spec.taps) * (spec.target_hidden_size or H), H, bias=False)
        self.hidden_norm = self.make_norm(H, eps)
        self.layers = nn.ModuleList(self.make_layer(spec, shape) for shape in spec.layers)
        self.norm = self.make_norm(H, eps)

    def make_norm(self, width: int, eps: float) -> nn.Module:
        """The norm of this backbone's family."""
        return RMSNorm(width, eps)

    def make_layer(self, spec: BlockSpec, shape: AttentionShape) -> nn.Module:
        """A decoder layer of this backbone's family: has `self_attn`, and maps (x, attend) to the next x."""
        return Layer(shape, spec.hidden_size, spec.rms_norm_eps)

    def prepare(self, spec: BlockSpec, attention: Any) -> None:
        """Attach what depends on device and dtype: the RoPE table, the cache, the attention path."""
        weight = self.fc.weight
        self.window_from_anchor = spec.window_anchor == "block"
        self.rope = Rope(spec.rope, spec.layers[0].head_dim, weight.device, weight.dtype)
        self.cache = KVCache(weight.device)
        self.attention = attention

    def add_context(self, taps: Tensor, rows: PackedRows) -> None:
        """Write the keys and values of newly committed tokens' features [N, taps * Ht]. The caller commits them."""
        context = self.hidden_norm(self.fc(taps))  # [N, H]
        cos, sin = self.rope.at(rows.positions, rows.limit)
        for i, layer in enumerate(cast(list[Layer], self.layers)):
            self.cache.write(i, *layer.self_attn.keys_values(context, cos, sin), rows)

    def forward(self, x: Tensor, rows: PackedRows) -> Tensor:
        """The block's embeddings [R*B, H] to its final normed hidden states [R*B, H]."""
        cos, sin = self.rope.at(rows.positions, rows.limit)
        for i, layer in enumerate(cast(list[Layer], self.layers)):
            x = layer(x, partial(self._attend, i, layer.self_attn, rows, cos, sin))
        return self.norm(x)

    def _attend(self, i: int, attention: Attention, rows: PackedRows, cos: Tensor, sin: Tensor, x: Tensor) -> Tensor:
        """Layer i's attention of the block [R*B, H] over its context and itself."""
        k, v = self.cache.write(i, *attention.keys_values(x, cos, sin), rows)
        q = rows.spread(attention.queries(x, cos, sin))
        mask = rows.mask(attention.shape.window, attention.shape.causal_in_block, self.window_from_anchor)
        out = rows.gather(self.attention(q, k, v, mask, attention.scale))
        return attention.o_proj(out.reshape(x.shape[0], -1))
