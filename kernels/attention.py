"""Attention of a few new rows over a cache: the torch reference forms, and the table that picks one.

Contract: `q` [R, h, n, D], `k` [R, hkv, L, D], `v` [R, hkv, L, Dv], `mask` additive float32 [R or 1, 1, n, L], finite
everywhere (a hidden column holds the most negative finite number of the score's type, never -inf: a row of -inf is NaN
after softmax, and NaN only shows as low acceptance). Returns [R, h, n, Dv] in q's dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdoctor.errors import SpecdoctorError

HIDDEN = -1e30  # as float32; far below any score, far above the overflow of float32


def matmul_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Plain matmul attention; grouped queries share their key head without copying it. `sinks` [h] (gpt-oss)."""
    R, h, n, _ = q.shape
    hkv, L = k.shape[1], k.shape[2]
    group = h // hkv
    scores = torch.matmul(q.reshape(R, hkv, group * n, -1), k.transpose(-1, -2))  # [R, hkv, group*n, L]
    scores = scores.float().mul_(scale).view(R, hkv, group, n, L)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores += mask.unsqueeze(2)
    if sinks is not None:
        column = sinks.float().view(1, hkv, group, 1, 1).expand(R, hkv, group, n, 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out = torch.matmul(weights.to(v.dtype).view(R, hkv, group * n, L), v)
    return out.view(R, h, n, v.shape[-1])


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """torch's fused attention; soft-capped scores and sinks fall back to plain matmul, which can express them."""
    if softcap or sinks is not None:
        return matmul_attention(q, k, v, mask, scale, softcap, sinks)
    lowest = torch.finfo(q.dtype).min
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask.clamp_min(lowest).to(q.dtype), scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


@dataclass(frozen=True)
class AttentionPath:
    """A way to compute attention, and why it was taken on this device and dtype."""

    name: str
    reason: str
    compute: Callable[..., Tensor]


def choose_attention(device: torch.device, dtype: torch.dtype, wanted: str = "auto") -> AttentionPath:
    """The attention path for a device and dtype; `wanted` is auto, matmul or sdpa.

    The table is from measurement: on a CPU, torch's SDPA in 16-bit plans anew for each new KV length (0.6 to 2 s a
    token for a 135M model whose context grows by one, against 40 ms for matmul).
    """
    if wanted == "matmul":
        return AttentionPath("matmul", "asked for", matmul_attention)
    if wanted == "sdpa":
        return AttentionPath("sdpa", "asked for", sdpa_attention)
    if wanted != "auto":
        raise SpecdoctorError(f"--attention {wanted}: expected auto, matmul or sdpa")
    if device.type == "cpu":
        reason = (
            "CPU: torch's SDPA in 16-bit plans anew for each KV length"
            if dtype != torch.float32
            else "CPU: plain matmul is as fast as SDPA here, and rows do not depend on how many are verified together"
        )
        return AttentionPath("matmul", reason, matmul_attention)
    return AttentionPath("sdpa", f"{device.type}: torch's fused kernels", sdpa_attention)
