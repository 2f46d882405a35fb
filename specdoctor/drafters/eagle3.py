"""The EAGLE-3 network: fused taps of several layers, and a first layer that reads [embedding ; feature].

Formats page 1.3, 1.7.4 and 1.8. Its attention reads both, normed apart; its residual is the feature.
"""

from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from specdoctor.drafters.backbone import MLP, Attention, Layer, RMSNorm
from specdoctor.drafters.binding import Binding
from specdoctor.drafters.draft_vocabulary import checked_map
from specdoctor.drafters.gemma4 import scaled_in
from specdoctor.drafters.gemma4_eagle3 import Gemma4Eagle3Network
from specdoctor.drafters.recurrent import RecurrentDrafter, StepContext
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.spec import AttentionShape, RecurrentSpec


class FirstLayer(nn.Module):
    """The layer that takes [embedding ; feature]."""

    def __init__(self, shape: AttentionShape, hidden: int, eps: float) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(hidden, eps)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(shape, 2 * hidden, eps, out=hidden)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(hidden, shape.intermediate_size)


class Eagle3Network(nn.Module):
    """fc over the taps, the layers and the final norm; tensors are named as on the formats page."""

    def __init__(self, spec: RecurrentSpec) -> None:
        super().__init__()
        H, eps = spec.hidden_size, spec.rms_norm_eps
        self.spec = spec
        target_width = spec.target_hidden_size or H
        width = len(spec.taps) * target_width
        self.input_norm = RMSNorm(width, eps) if spec.feature_norm == "before_fc" else None
        per_tap = [RMSNorm(target_width, eps) for _ in spec.taps] if spec.feature_norm == "per_tap" else []
        self.fc_norm = nn.ModuleList(per_tap)
        self.fc = nn.Linear(width, H, bias=False)
        self.layers = nn.ModuleList(
            [FirstLayer(spec.layers[0], H, eps), *(Layer(shape, H, eps) for shape in spec.layers[1:])]
        )
        self.norm = RMSNorm(H, eps)

    def features(self, taps: Tensor) -> Tensor:
        """Concatenated taps [N, n * Ht] to fused features [N, H]."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        elif len(self.fc_norm):
            parts = taps.chunk(len(self.spec.taps), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps)

    def step(self, embedded: Tensor, feature: Tensor, context: StepContext, index: int) -> tuple[Tensor, Tensor]:
        """See `RecurrentNetwork.step`."""
        first = cast(FirstLayer, self.layers[0])
        normed = first.hidden_norm(feature)
        both = torch.cat([first.input_layernorm(embedded), normed], dim=-1)
        x = normed if self.spec.residual_normed else feature
        x = x + context.attend(0, first.self_attn, both)
        x = x + first.mlp(first.post_attention_layernorm(x))
        for i, layer in enumerate(cast(list[Layer], list(self.layers)[1:]), 1):
            x = x + context.attend(i, layer.self_attn, layer.input_layernorm(x))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        normed = self.norm(x)
        return normed if self.spec.recurrent_normed else x, normed if self.spec.head_normed else x


Bound = TypeVar("Bound", bound=RecurrentDrafter)


def bind_eagle3(binding: Binding) -> RecurrentDrafter:
    """An EAGLE-3 drafter from its checkpoint."""
    return bound_eagle3(binding, RecurrentDrafter)


def bound_eagle3(binding: Binding, kind: type[Bound]) -> Bound:
    """A drafter of `kind` on an EAGLE-3 network. Raises `SpecdoctorError` when target and map do not go with it."""
    tensors = dict(binding.tensors)
    d2t = checked_map(tensors.pop("d2t", None), binding.spec)
    _check_widths(binding)
    gemma = binding.spec.backbone == "gemma4"
    spec = scaled_in(binding.spec, binding.dtype) if gemma else binding.spec
    with torch.device("meta"):
        network = Gemma4Eagle3Network(spec) if gemma else Eagle3Network(spec)
    binding.fill(network, tensors)
    drafter = kind(spec, binding.name, network, binding.embedding, binding.head, d2t)
    drafter.taps, drafter.runs_ahead = binding.taps, True
    drafter.prepare(binding.attention, binding.target.device)
    return drafter.eval()


def _check_widths(binding: Binding) -> None:
    """A drafter of another width than its target needs an embedding and a head of its own."""
    for what, tensor in (("embed_tokens.weight", binding.embedding), ("lm_head.weight", binding.head)):
        if tensor.shape[1] != binding.spec.hidden_size:
            raise SpecdoctorError(
                f"hidden_size is {binding.spec.hidden_size} and the checkpoint has no tensor {what}, but the target "
                f"{binding.target.name} has hidden size {tensor.shape[1]}; expected a drafter with its own {what}"
            )
