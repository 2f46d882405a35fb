"""Attention of isolated training blocks over their sequences' features, with gradients.

Contract: both paths compute the same thing. Row i of block j sees the features of its own sequence before the block's
anchor and the rows of its own block, as `AnchorBlocks` has it in measuring. `blockwise` works per sequence: the blocks
share that sequence's keys and values, with one additive mask, and scores [h, blocks * B, columns + B] exist for
`SCORE_BYTES` at a time; a sequence that needs more than that has them made again in the backward pass. `flex` is one
call over all rows with token-level indices, where torch compiles it.
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specdoctor.formats.spec import AttentionShape
from specdoctor.kernels.attention import HIDDEN
from specdoctor.training.anchors import Blocks

SCORE_BYTES = 64 << 20

# (queries [h, A * B, D], context keys and values [hkv, N, D], the blocks' own keys and values [hkv, A * B, D], scale)
# -> [A * B, h * D]
BlockAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]


def block_attention(
    blocks: Blocks, starts: list[int], shape: AttentionShape, from_anchor: bool, path: str
) -> BlockAttention:
    """The attention of layers of one `shape` in one step; `path` is blockwise or flex, see `choose_path`."""
    make = _flex if path == "flex" else _blockwise
    return make(blocks, starts, shape, from_anchor)


@cache
def choose_path(device: torch.device) -> str:
    """flex where it compiles, which is tried once with a small case, else blockwise."""
    if device.type != "cuda":
        return "blockwise"  # on a CPU torch has no backward pass of flex attention
    try:
        q = torch.zeros(1, 2, 128, 16, device=device, requires_grad=True)
        _compiled()(q, q, q).sum().backward()
    except Exception:  # whatever a missing compiler or an unknown device makes of it
        return "blockwise"
    return "flex"


def _blockwise(blocks: Blocks, starts: list[int], shape: AttentionShape, from_anchor: bool) -> BlockAttention:
    B, groups = blocks.block, shape.heads // shape.kv_heads
    own_mask = _own_mask(blocks, shape, from_anchor).repeat(groups, 1)  # [g * B, B]
    pieces: list[tuple[int, int, int, int, Tensor]] = []  # first and last block, first and last column, mask
    for s, (low, high) in enumerate(pairwise(blocks.bounds)):
        if low == high:
            continue
        longest = int(blocks.offsets[high - 1])  # anchors of a sequence are in order
        each = max(1, SCORE_BYTES // (4 * shape.heads * B * (longest + B)))
        for first in range(low, high, each):
            last = min(first + each, high)
            mask = _context_mask(blocks, first, last, longest, shape, from_anchor, groups)
            pieces.append((first, last, starts[s], starts[s] + longest, mask))
    again = len(pieces) > len(starts) - 1

    def attend(q: Tensor, ck: Tensor, cv: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = []
        for first, last, begin, end, mask in pieces:
            rows = slice(first * B, last * B)
            given = (q[:, rows], ck[:, begin:end], cv[:, begin:end], k[:, rows], v[:, rows], scale, mask, own_mask, B)
            out.append(checkpoint(_one_sequence, *given, use_reentrant=False) if again else _one_sequence(*given))
        return torch.cat(out)

    return attend


def _one_sequence(
    q: Tensor, ck: Tensor, cv: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor, own_mask: Tensor, B: int
) -> Tensor:
    """q [h, A * B, D], ck and cv [hkv, C, D], k and v [hkv, A * B, D] of one sequence -> [A * B, h * D]."""
    h, n, D = q.shape
    hkv, C, A = ck.shape[0], ck.shape[1], n // B
    g = h // hkv
    q = q.view(hkv, g, A, B, D).transpose(1, 2).reshape(hkv, A, g * B, D)
    k, v = k.view(hkv, A, B, D), v.view(hkv, A, B, D)
    context = (q.reshape(hkv, A * g * B, D) @ ck.transpose(-1, -2)).view(hkv, A, g * B, C)
    own = q @ k.transpose(-1, -2)  # [hkv, A, g * B, B]
    scores = torch.cat([context.float() * scale + mask, own.float() * scale + own_mask], dim=-1)
    weights = scores.softmax(-1).to(v.dtype)
    out = (weights[..., :C].reshape(hkv, A * g * B, C) @ cv).view(hkv, A, g * B, D) + weights[..., C:] @ v
    return out.view(hkv, A, g, B, D).permute(1, 3, 0, 2, 4).reshape(n, h * D)


def _context_mask(
    blocks: Blocks, first: int, last: int, columns: int, shape: AttentionShape, from_anchor: bool, groups: int
) -> Tensor:
    """Additive float32 mask [A, 1 or g * B, C] over a sequence's features."""
    anchors = blocks.offsets[first:last, None, None]
    column = torch.arange(columns, device=anchors.device)
    visible = column < anchors
    if shape.window and from_anchor:
        visible = visible & (column >= anchors - shape.window)
    elif shape.window:
        rows = anchors + torch.arange(blocks.block, device=anchors.device)[None, :, None]
        visible = (visible & (rows - column < shape.window)).repeat(1, groups, 1)
    return torch.where(visible, torch.zeros((), device=anchors.device), HIDDEN)


def _own_mask(blocks: Blocks, shape: AttentionShape, from_anchor: bool) -> Tensor:
    """Additive float32 mask [B, B] among the rows of a block."""
    row = torch.arange(blocks.block, device=blocks.anchors.device)
    distance = row[:, None] - row
    visible = distance >= 0 if shape.causal_in_block else torch.ones_like(distance, dtype=torch.bool)
    if shape.window and not from_anchor:
        visible = visible & (distance.abs() < shape.window)
    return torch.where(visible, torch.zeros((), device=row.device), HIDDEN)


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def _flex(blocks: Blocks, starts: list[int], shape: AttentionShape, from_anchor: bool) -> BlockAttention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    N, B, window = starts[-1], blocks.block, shape.window
    anchor = blocks.anchors.repeat_interleave(B)  # [A * B] by query row, as packed indices
    first = blocks.firsts.repeat_interleave(B)
    rows = len(anchor)

    def visible(b: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        inside = kv - N  # place among the blocks' rows
        own = (kv >= N) & (inside // B == q // B)
        context = (kv < anchor[q]) & (kv >= first[q]) & (kv < N)
        if shape.causal_in_block:
            own = own & (inside <= q)
        if window and from_anchor:
            context = context & (kv >= anchor[q] - window)
        elif window:
            context = context & (anchor[q] + q % B - kv < window)
            own = own & (inside - q < window) & (q - inside < window)
        return own | context

    device = blocks.anchors.device
    mask = create_block_mask(visible, None, None, rows, N + rows, device=device.type)
    attention = _compiled() if device.type == "cuda" else flex_attention

    def attend(q: Tensor, ck: Tensor, cv: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys, values = torch.cat([ck, k], dim=1), torch.cat([cv, v], dim=1)
        out = attention(q[None], keys[None], values[None], block_mask=mask, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(rows, -1)

    return attend
