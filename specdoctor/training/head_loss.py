"""The LM head and every loss on its logits, a chunk of rows at a time.

Contract: logits exist for `chunk` rows only, whatever the vocabulary: draft and target logits, [chunk, V] each in the
products' dtype (the gradient takes the place of the former), and float32 forms of a few rows of them. Instead of
keeping logits for the backward pass, or making them again there, the gradient with respect to the rows is taken while
a chunk's logits are there (all losses are sums over rows with known weights), so the head is applied once forward and
once backward. The head itself is frozen and gets no gradient. With z = draft logits, q = softmax(z), p = softmax(target
logits) and y the text's token:

    ce = -log q[y]        d/dz = q - onehot(y)
    kl = KL(p || q)       d/dz = q - p
    l1 = ||p - q||_1      d/dz = q * (s - <q, s>),  s = sign(q - p)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdoctor.training.recipe import LossWeights

STRIP_BYTES = 1 << 20  # of one float32 form, on a CPU


@dataclass(slots=True)
class HeadJob:
    """What the rows [M] are compared with. S columns: the vocabulary, or the sample of it that a step looks at."""

    head: Tensor  # [S, H] of the drafter, frozen
    target_head: Tensor  # [S, Ht]; the same tensor where the drafter has none of its own
    target_hidden: Tensor  # [M, Ht] after the target's final norm
    labels: Tensor  # [M] column of the text's token
    row_weights: Tensor  # [M] float32, already over their sum
    losses: LossWeights
    chunk: int
    dtype: torch.dtype  # of the matrix products
    softcap: float | None = None  # of the target's logits
    log_factor: Tensor | None = None  # [S] float32 on both logits: how many columns each one stands for


@dataclass(slots=True)
class HeadLosses:
    """`total` has the graph; the rest are detached values of each row [M], None where the target was not asked."""

    total: Tensor
    ce: Tensor
    match: Tensor  # bool: no draft token is likelier than the text's
    kl: Tensor | None
    l1: Tensor | None


def head_losses(hidden: Tensor, code: Tensor | None, w2: Tensor | None, job: HeadJob) -> HeadLosses:
    """Losses of rows `hidden` [M, H], whose logits are head(hidden) + code W2^T; `code` [M, r], `w2` [S, r]."""
    total, ce, match, kl, l1 = _HeadLoss.apply(hidden, code, w2, job)
    reads = job.losses.reads_target
    return HeadLosses(total, ce, match, kl if reads else None, l1 if reads else None)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, code: Tensor | None, w2: Tensor | None, job: HeadJob) -> tuple[Tensor, ...]:
        with torch.autocast(hidden.device.type, enabled=False):
            return _forward(ctx, hidden, code, w2, job)

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        grads = [None if grad is None else grad * grad_total for grad in ctx.grads]
        return (*grads, None)


def _forward(ctx: Any, hidden: Tensor, code: Tensor | None, w2: Tensor | None, job: HeadJob) -> tuple[Tensor, ...]:
    wanted = ctx.needs_input_grad[0]
    rows = hidden.to(job.dtype)
    codes = None if code is None else code.to(job.dtype)
    table = None if w2 is None else w2.to(job.dtype)
    grads: list[Any] = [torch.empty_like(hidden) if wanted else None, None, None]
    if wanted and code is not None and w2 is not None:
        grads[1:] = torch.empty_like(code), torch.zeros_like(w2, dtype=torch.float32)
    values = []
    for first in range(0, len(hidden), job.chunk):
        part = slice(first, first + job.chunk)
        z = rows[part] @ job.head.T  # [n, S]
        if codes is not None and table is not None:
            z.addmm_(codes[part], table.T)
        zt = _target_logits(part, job) if job.losses.reads_target else None
        values += _strips(z, zt, job.labels[part], job, wanted)
        if not wanted:
            continue
        weight = job.row_weights[part, None]
        grads[0][part] = (z @ job.head).float() * weight
        if codes is not None and table is not None:
            grads[1][part] = (z @ table).float() * weight
            grads[2] += z.T @ (codes[part].float() * weight).to(job.dtype)
    if grads[2] is not None and w2 is not None:
        grads[2] = grads[2].to(w2.dtype)
    ctx.grads = grads
    ce, match, kl, l1 = (torch.cat(column) for column in zip(*values, strict=True))
    losses = job.losses
    total = (job.row_weights * (losses.ce * ce + losses.kl * kl + losses.l1 * l1)).sum()
    ctx.mark_non_differentiable(ce, match, kl, l1)
    return total, ce, match, kl, l1


def _strips(z: Tensor, zt: Tensor | None, labels: Tensor, job: HeadJob, wanted: bool) -> list[list[Tensor]]:
    """ce, match, kl and l1 of a chunk's rows, in pieces; if `wanted`, `z` becomes the gradient for row weight 1.

    On a CPU the float32 work goes by as few rows as stay in the cache: ten passes over memory would cost more than
    the matrix products.
    """
    rows = max(1, STRIP_BYTES // (4 * z.shape[1])) if z.device.type == "cpu" else len(z)
    values = []
    for first in range(0, len(z), rows):
        part = slice(first, first + rows)
        grad, *row_values = _strip(z[part], None if zt is None else zt[part], labels[part], job, wanted)
        values.append(row_values)
        if grad is not None:
            z[part] = grad
    return values


def _strip(
    z: Tensor, zt: Tensor | None, labels: Tensor, job: HeadJob, wanted: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """The gradient [n, S] with respect to logits `z` [n, S] (for row weight 1), and ce, match, kl, l1 [n]."""
    losses = job.losses
    match = z.gather(1, labels[:, None]).squeeze(1) >= z.amax(-1)
    z = z.float()
    if job.log_factor is not None:
        z = z + job.log_factor
    q = z.softmax(-1)
    normaliser = z.amax(-1) - q.amax(-1).log()  # log-sum-exp, from the term that cannot vanish
    ce = normaliser - z.gather(1, labels[:, None]).squeeze(1)
    kl = l1 = torch.zeros_like(ce)
    slope = losses.ce + losses.kl  # of q itself in the gradient
    grad = None
    if zt is None:
        grad = q.mul_(slope) if wanted else None
    else:
        zt = zt.float()
        p = zt.softmax(-1)
        if losses.kl:
            kl = _dot(p, zt - z) - zt.logsumexp(-1) + normaliser
        gap = q - p
        l1 = torch.linalg.vector_norm(gap, 1, dim=-1)
        if wanted and losses.l1:
            sign = gap.sign_()
            shift = slope - losses.l1 * _dot(q, sign)  # [n]
            grad = sign.mul_(losses.l1).add_(shift[:, None]).mul_(q)
        elif wanted:
            grad = q.mul_(slope)
        if grad is not None and losses.kl:
            grad.sub_(p, alpha=losses.kl)
    if grad is not None and losses.ce:
        grad.scatter_add_(1, labels[:, None], grad.new_full((len(labels), 1), -losses.ce))
    return grad, ce, match, kl, l1


def _target_logits(part: slice, job: HeadJob) -> Tensor:
    zt = job.target_hidden[part].to(job.dtype) @ job.target_head.T
    if job.softcap:
        zt = torch.tanh(zt / job.softcap) * job.softcap
    return zt if job.log_factor is None else zt + job.log_factor


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Row-wise inner product [n], without a temporary of their size."""
    return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).view(-1)
