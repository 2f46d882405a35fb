"""Attention over packed training rows, with gradients, in the place of a drafter's cache, rows and attention path.

Contract: `TrainingColumns`, `TrainingRows` and `attend` stand where a drafter's layers expect a `KVCache`, `PackedRows`
and an attention path (`StepContext`, `AttentionRun`), so the networks that draft are the networks that are trained.
Step 0 writes the columns of all N packed rows, causal within each sequence. Each further step adds one row a chain: it
sees the step-0 columns up to its chain's first row and the chain's own columns, as a drafter's own steps do. No row is
padding. Scores exist for `QUERY_CHUNK` rows of one sequence at a time and are computed again in the backward pass.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specdoctor.kernels.attention import HIDDEN
from specdoctor.training.anchors import Blocks

QUERY_CHUNK = 256


class TrainingRows:
    """Rows of one step: all packed rows (step 0), or one a chain, whose first row stands before its anchor."""

    def __init__(self, starts: Seq[int], device: torch.device, step: int = 0, chains: Blocks | None = None) -> None:
        self.starts, self.step = list(starts), step
        longest = max(end - start for start, end in pairwise(self.starts))
        if step == 0:
            sizes = torch.tensor([end - start for start, end in pairwise(self.starts)], device=device)
            first = torch.tensor(self.starts[:-1], device=device).repeat_interleave(sizes)
            self.bases = self.positions = torch.arange(self.starts[-1], device=device) - first  # [N]
            self.bounds = self.starts
        else:
            assert chains is not None
            self.bases = chains.offsets - 1  # [A] last column of the text that each row sees
            self.positions, self.bounds = self.bases + step, chains.bounds
        self.limit = longest + step

    def spread(self, x: Tensor) -> Tensor:
        """[h, n, D] -> [1, h, n, D], as an attention path takes it."""
        return x.unsqueeze(0)

    def gather(self, x: Tensor) -> Tensor:
        """[1, h, n, D] -> [n, h, D]."""
        return x[0].transpose(0, 1)

    def mask(self, window: int | None = None, causal: bool = False, from_anchor: bool = False) -> int | None:
        """What `attend` gets as its mask: the window; the rest follows from the rows."""
        return window


@dataclass
class LayerColumns:
    """Keys and values of one layer: of all rows [hkv, N, D], and of each own step so far [hkv, A, D]."""

    keys: Tensor
    values: Tensor
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class TrainingColumns:
    """The columns of all layers of one forward."""

    def __init__(self) -> None:
        self._layers: dict[int, LayerColumns] = {}

    def write(self, layer: int, k: Tensor, v: Tensor, rows: TrainingRows) -> tuple[Any, Any]:
        """Take the columns of `rows`; what `attend` reads as keys and as values."""
        k = k.to(v.dtype)  # under autocast keys come out of their rotation in float32
        if rows.step == 0:
            self._layers[layer] = LayerColumns(k, v)
        else:
            self._layers[layer].own.append((k, v))
        return self._layers[layer], rows


def attend(
    q: Tensor,
    columns: LayerColumns,
    rows: TrainingRows,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of `q` [1, h, n, D] over what `TrainingColumns.write` returned, to [1, h, n, Dv]."""
    shape, q = _Shape(scale, window, softcap), q.to(columns.values.dtype)
    parts = []
    for s, (first, last) in enumerate(pairwise(rows.bounds)):
        start, end = rows.starts[s], rows.starts[s + 1]
        k, v = columns.keys[:, start:end], columns.values[:, start:end]
        if rows.step == 0 and window is None and softcap is None and sinks is None:
            parts.append(_causal(q[:, :, first:last], k, v, scale))
            continue
        for a in range(first, last, QUERY_CHUNK):
            b = min(a + QUERY_CHUNK, last)
            own = [part[:, a:b] for pair in columns.own[: rows.step] for part in pair]
            seen = int(rows.bases[b - 1]) + 1  # bases ascend
            given = (shape, q[0, :, a:b], rows.bases[a:b], k[:, :seen], v[:, :seen], sinks, *own)
            parts.append(checkpoint(_scored, *given, use_reentrant=False))
    return torch.cat(parts, dim=2)


@dataclass(frozen=True)
class _Shape:
    scale: float
    window: int | None
    softcap: float | None


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Plain causal attention of one sequence: [1, h, n, D] over [hkv, n, D]."""
    group = q.shape[1] != k.shape[0]
    return F.scaled_dot_product_attention(
        q, k.unsqueeze(0), v.unsqueeze(0), is_causal=True, scale=scale, enable_gqa=group
    )


def _scored(shape: _Shape, q: Tensor, base: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *own: Tensor) -> Tensor:
    """Queries [h, n, D] over columns [hkv, L, D] up to `base` [n] and their `own` [hkv, n, D], to [1, h, n, Dv].

    `own` holds keys and values in turn; the query stands at `base` + the number of own columns.
    """
    (h, n, D), hkv = q.shape, k.shape[0]
    group, steps = h // hkv, len(own) // 2
    grouped = q.view(hkv, group, n, D)
    column = torch.arange(k.shape[1], device=q.device)
    seen = column <= base[:, None]  # [n, L]
    if shape.window:
        seen = seen & (base[:, None] + steps - column < shape.window)
    scores = [torch.matmul(grouped.reshape(hkv, group * n, D), k.transpose(1, 2)).view(hkv, group, n, -1)]
    scores += [(grouped * own[2 * j].unsqueeze(1)).sum(-1, keepdim=True) for j in range(steps)]
    joined = torch.cat([part.float() for part in scores], dim=-1) * shape.scale  # [hkv, group, n, L + steps]
    if shape.softcap:
        joined = torch.tanh(joined / shape.softcap) * shape.softcap
    if steps:
        distance = torch.arange(steps - 1, -1, -1, device=q.device)  # of the query from its own columns
        near = distance < shape.window if shape.window else torch.ones_like(distance, dtype=torch.bool)
        seen = torch.cat([seen, near.expand(n, -1)], dim=-1)
    joined = joined.masked_fill(~seen, HIDDEN)
    if sinks is not None:
        column_of_sinks = sinks.float().view(hkv, group, 1, 1).expand(-1, -1, n, 1)
        weights = torch.cat([joined, column_of_sinks], dim=-1).softmax(-1)[..., :-1].to(v.dtype)
    else:
        weights = joined.softmax(-1).to(v.dtype)
    L = k.shape[1]
    out = torch.matmul(weights[..., :L].reshape(hkv, group * n, L), v).view(hkv, group, n, -1)
    for j in range(steps):
        out = out + weights[..., L + j : L + j + 1] * own[2 * j + 1].unsqueeze(1)
    return out.reshape(1, h, n, -1)
