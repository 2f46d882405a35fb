"""DFlash2: causal convolutions around each sublayer of the block, and a selector among the K best candidates of a row.

Formats page 1.6. Tensors are named as stored: `layers.{i}.attention_conv.*`, `layers.{i}.mlp_conv.*` and
`candidate_selector.*`, whose two codebooks have no suffix `.weight`. The convolutions run over the block alone: its
first row sees zeros before it, the context is not convolved, and nothing is carried from round to round.
"""

import torch
from torch import Tensor, nn

from specdoctor.drafters.backbone import Attend, Backbone, Layer
from specdoctor.formats.spec import AttentionShape, BlockSpec


class GroupedDynamicConvolution(nn.Module):
    """Two causal convolutions of k taps, before and after a sublayer, with kernels made from the sublayer's input.

    A kernel is a fixed one for each channel plus one for each group of channels that depends on the row.
    """

    def __init__(self, hidden: int, taps: int, group: int, block: int) -> None:
        """`group` channels share a dynamic kernel; a forward holds whole blocks of `block` rows."""
        super().__init__()
        self.taps, self.group, self.block = taps, group, block
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group), bias=False)

    def kernels(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """The sublayer's normed input [N, H] to the kernels [N, k, H / g, g] of its input and of its output."""
        groups = u.shape[-1] // self.group
        fixed = self.base_kernel.view(2, self.taps, groups, self.group)
        dynamic = self.kernel_projection(u).view(-1, 2, self.taps, groups, 1)
        before, after = (fixed + dynamic).unbind(1)
        return before, after

    def convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        """y_t = sum over o of kernel_t[o] * x_(t - o) in each block of `x` [N, H]; rows before the block are zeros."""
        rows = x.view(-1, self.block, *kernel.shape[2:])  # [blocks, B, H / g, g]
        kernel = kernel.view(-1, self.block, *kernel.shape[1:])  # [blocks, B, k, H / g, g]
        out = kernel[:, :, 0] * rows
        for o in range(1, min(self.taps, self.block)):
            out[:, o:] += kernel[:, o:, o] * rows[:, :-o]
        return out.view_as(x)


class ConvolvedLayer(Layer):
    """A decoder layer whose attention and MLP each stand between two convolutions."""

    def __init__(self, spec: BlockSpec, shape: AttentionShape) -> None:
        super().__init__(shape, spec.hidden_size, spec.rms_norm_eps)
        sizes = spec.hidden_size, spec.conv_kernel_size, spec.conv_group_size, spec.block_size
        self.attention_conv = GroupedDynamicConvolution(*sizes)
        self.mlp_conv = GroupedDynamicConvolution(*sizes)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        x = x + _between(self.attention_conv, self.input_layernorm(x), attend)
        return x + _between(self.mlp_conv, self.post_attention_layernorm(x), self.mlp)


def _between(convolution: GroupedDynamicConvolution, u: Tensor, sublayer: Attend) -> Tensor:
    """Both kernels come from `u` as it is before the first convolution."""
    before, after = convolution.kernels(u)
    return convolution.convolve(sublayer(convolution.convolve(u, before)), after)


class ConvolvedBackbone(Backbone):
    """The parallel backbone with convolutions around its sublayers."""

    def make_layer(self, spec: BlockSpec, shape: AttentionShape) -> nn.Module:
        return ConvolvedLayer(spec, shape)


class CandidateSelector(nn.Module):
    """A sequential head that leaves a row its K best tokens and scores each with the token before it.

    score(c) = logit(c) + (predecessor[prev] * P h) . successor[c]; all other tokens have probability 0, so top-k and
    top-p are not applied on top of it.
    """

    def __init__(self, vocab: int, hidden: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def start(self, rows: int) -> Tensor:
        """Nothing is carried but the previous token: zeros [R, 1]."""
        return self.predecessor_codebook.new_zeros(rows, 1)

    def step(self, state: Tensor, prev: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """predecessor[prev] * P h [R, r], and the state unchanged."""
        return self.predecessor_codebook[prev] * self.hidden_projection(hidden), state

    def corrected(self, base: Tensor, code: Tensor) -> Tensor:
        """Scores [R, V] from the row's own logits [R, V]: -inf but for the K best of them."""
        unary, candidates = base.topk(self.top_k, dim=-1)  # [R, K]
        scores = unary + torch.einsum("rd,rkd->rk", code, self.successor_codebook[candidates])
        return torch.full_like(base, -torch.inf).scatter_(-1, candidates, scores)
