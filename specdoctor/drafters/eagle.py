"""The EAGLE-1 and EAGLE-2 network: one projection of [embedding ; feature], a decoder, no norm (formats page 1.10).

The feature is the target's last state after its final norm; the decoder's output is the next step's feature and goes to
the target's head as it is. Its first layer has no norm before the attention.
"""

from typing import cast

import torch
from torch import Tensor, nn

from specdoctor.drafters.backbone import Layer
from specdoctor.drafters.binding import Binding
from specdoctor.drafters.recurrent import RecurrentDrafter, StepContext
from specdoctor.formats.spec import AttentionShape, RecurrentSpec


class UnnormedLayer(Layer):
    """A decoder layer whose attention reads its input as it is."""

    def __init__(self, shape: AttentionShape, hidden: int, eps: float) -> None:
        super().__init__(shape, hidden, eps)
        self.input_layernorm = nn.Identity()  # type: ignore[assignment]


class EagleNetwork(nn.Module):
    """fc and the layers; tensors are named as on the formats page."""

    def __init__(self, spec: RecurrentSpec) -> None:
        super().__init__()
        H, eps = spec.hidden_size, spec.rms_norm_eps
        self.fc = nn.Linear(2 * H, H, bias=spec.fc_bias)
        self.layers = nn.ModuleList(
            Layer(shape, H, eps) if i else UnnormedLayer(shape, H, eps) for i, shape in enumerate(spec.layers)
        )

    def features(self, taps: Tensor) -> Tensor:
        """The target's last state [N, H], as it is."""
        return taps

    def step(self, embedded: Tensor, feature: Tensor, context: StepContext, index: int) -> tuple[Tensor, Tensor]:
        """See `RecurrentNetwork.step`."""
        x = self.fc(torch.cat([embedded, feature], dim=-1))
        for i, layer in enumerate(cast(list[Layer], list(self.layers))):
            x = x + context.attend(i, layer.self_attn, layer.input_layernorm(x))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x, x


def bind_eagle(binding: Binding) -> RecurrentDrafter:
    """An EAGLE-1 or EAGLE-2 drafter from its checkpoint."""
    with torch.device("meta"):
        network = EagleNetwork(binding.spec)
    binding.fill(network, binding.tensors)
    drafter = RecurrentDrafter(binding.spec, binding.name, network, binding.embedding, binding.head, None)
    drafter.taps, drafter.runs_ahead = binding.taps, True
    drafter.prepare(binding.attention, binding.target.device)
    return drafter.eval()
