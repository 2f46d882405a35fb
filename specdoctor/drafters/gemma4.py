"""The Gemma4 backbone of DeepSpec's block drafters, and its decoder layer in the form that EAGLE-3 reads.

Formats page 1.2 and 1.3. All layers are Gemma4's global ones: no window, the global head width, attention scale 1,
values normed without a weight (and, where keys are values, taken from the key projection before its norm), norms on
both sides of each sublayer, and the layer's output times a stored scalar. transformers' own class is not used: from
5.24 on it can no longer be built from these configs.
"""

from dataclasses import replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdoctor.drafters.backbone import MLP, Attend, Attention, Backbone
from specdoctor.drafters.rope import rotate
from specdoctor.formats.spec import AttentionShape, BlockSpec, DraftSpec

Spec = TypeVar("Spec", bound=DraftSpec)


class Gemma4RMSNorm(nn.Module):
    """x / rms(x) * w, all of it in float32; w is used as it is, not as 1 + w."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (_unit_rms(x.float(), self.eps) * self.weight.float()).to(x.dtype)


class Gemma4Attention(Attention):
    """Global attention; `out` is the width it writes where it reads another one."""

    def __init__(self, shape: AttentionShape, hidden: int, eps: float, v_from_k: bool, out: int | None = None) -> None:
        super().__init__(shape, hidden, eps, out)
        self.q_norm, self.k_norm = Gemma4RMSNorm(shape.head_dim, eps), Gemma4RMSNorm(shape.head_dim, eps)
        self.eps, self.scale, self.v_from_k = eps, 1.0, v_from_k
        if v_from_k:
            del self.v_proj

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[N, H] -> keys (normed, rotated) and values (normed), each [hkv, N, D]."""
        k = self._heads(self.k_proj(x))
        v = k if self.v_from_k else self._heads(self.v_proj(x))
        return rotate(self.k_norm(k), cos, sin), _unit_rms(v.float(), self.eps).to(v.dtype)


class Gemma4MLP(MLP):
    """A gated MLP with GELU in its tanh form."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Gemma4Layer(nn.Module):
    """A Gemma4 decoder layer around its attention; `out` as of `Gemma4Attention`."""

    def __init__(
        self, shape: AttentionShape, hidden: int, eps: float, v_from_k: bool, attention_in: int | None = None
    ) -> None:
        """`attention_in` is the width that the attention reads where it is not `hidden`."""
        super().__init__()
        self.input_layernorm = Gemma4RMSNorm(hidden, eps)
        self.self_attn = Gemma4Attention(shape, attention_in or hidden, eps, v_from_k, out=hidden)
        self.post_attention_layernorm = Gemma4RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = Gemma4RMSNorm(hidden, eps)
        self.mlp = Gemma4MLP(hidden, shape.intermediate_size)
        self.post_feedforward_layernorm = Gemma4RMSNorm(hidden, eps)
        self.register_buffer("layer_scalar", torch.ones(1))
        self.layer_scalar: Tensor

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        return self.behind_attention(x, attend(self.input_layernorm(x)))

    def behind_attention(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [N, H] from its residual and its attention's output."""
        x = residual + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class Gemma4Backbone(Backbone):
    """The parallel backbone with Gemma4's layers and norms."""

    def make_norm(self, width: int, eps: float) -> nn.Module:
        return Gemma4RMSNorm(width, eps)

    def make_layer(self, spec: BlockSpec, shape: AttentionShape) -> nn.Module:
        return Gemma4Layer(shape, spec.hidden_size, spec.rms_norm_eps, spec.v_from_k)


def scaled_in(spec: Spec, dtype: torch.dtype) -> Spec:
    """The spec with the embedding scale as Gemma applies it: rounded to the model's dtype first."""
    return replace(spec, embed_scale=float(torch.tensor(spec.embed_scale, dtype=dtype)))


def _unit_rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
