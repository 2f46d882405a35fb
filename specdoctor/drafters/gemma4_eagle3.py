"""DeepSpec's EAGLE-3 on a Gemma4 layer: formats page 1.3, with the layer of 1.2 around an attention that reads both.

As DeepSpec's own class has it: the attention reads [input_layernorm(embedding) ; hidden_norm(feature)], the residual is
the feature as it is, and norms behind attention and MLP and the layer's scalar are those of the block drafters.
"""

from typing import cast

import torch
from torch import Tensor, nn

from specdoctor.drafters.gemma4 import Gemma4Layer, Gemma4RMSNorm
from specdoctor.drafters.recurrent import StepContext
from specdoctor.formats.spec import AttentionShape, RecurrentSpec


class Gemma4FirstLayer(Gemma4Layer):
    """A Gemma4 layer that takes [embedding ; feature]."""

    def __init__(self, shape: AttentionShape, hidden: int, eps: float, v_from_k: bool) -> None:
        super().__init__(shape, hidden, eps, v_from_k, attention_in=2 * hidden)
        self.hidden_norm = Gemma4RMSNorm(hidden, eps)


class Gemma4Eagle3Network(nn.Module):
    """fc over the taps, one layer and the final norm."""

    def __init__(self, spec: RecurrentSpec) -> None:
        super().__init__()
        H, eps = spec.hidden_size, spec.rms_norm_eps
        self.fc = nn.Linear(len(spec.taps) * H, H, bias=False)
        self.layers = nn.ModuleList(Gemma4FirstLayer(shape, H, eps, spec.v_from_k) for shape in spec.layers)
        self.norm = Gemma4RMSNorm(H, eps)

    def features(self, taps: Tensor) -> Tensor:
        """Concatenated taps [N, n * H] to fused features [N, H]."""
        return self.fc(taps)

    def step(self, embedded: Tensor, feature: Tensor, context: StepContext, index: int) -> tuple[Tensor, Tensor]:
        """See `RecurrentNetwork.step`."""
        layer = cast(Gemma4FirstLayer, self.layers[0])
        both = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(feature)], dim=-1)
        x = layer.behind_attention(feature, context.attend(0, layer.self_attn, both))
        return x, self.norm(x)
