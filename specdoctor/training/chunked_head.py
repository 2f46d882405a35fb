"""Losses between draft logits and the target's, with both LM heads applied to a chunk of rows at a time.

For all objectives: `head_losses` takes the states that a drafter's head reads and the target's last states, and gives a
scalar with its gradient. Contract: logits exist for one chunk of rows, whose size falls with the vocabulary
(`CHUNK_ELEMENTS`), so a step's memory does not grow with it; each chunk goes through the heads once, because its
gradient is taken on the way forward (the weights of the rows are known), and a target row that several drafted rows
are compared with goes through the target's head once in a chunk. Nothing here gives the target a gradient.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdoctor.engine.target import Target

CHUNK_ELEMENTS = 2**23  # logits of one chunk: 32 MiB in float32, and a few arrays of that size are alive at a time
LEAST_ROWS = 16


@dataclass(frozen=True)
class LossTerms:
    """Weights of the terms of a row's loss; a term of weight 0 costs nothing.

    CE is against the token of the text. KL is KL(p || q); with a reduced vocabulary p is cut to it and normed again. TV
    is 1 - sum min(p, q), the probability that the draft is rejected, over the whole vocabulary.
    """

    ce: float = 0.0
    kl: float = 0.0
    tv: float = 0.0


class TargetHead:
    """The target's LM head, frozen, with whatever its family does to the logits."""

    def __init__(self, target: Target) -> None:
        head, config = target.lm_head, target.config
        self.weight = head.weight.detach()  # [V, Ht]
        self.bias = None if head.bias is None else head.bias.detach()
        self.softcap = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies by one, Granite divides by the other.
        self.scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )

    def logits(self, last_hidden: Tensor) -> Tensor:
        """[n, Ht] after the final norm -> [n, V], float32."""
        logits = F.linear(last_hidden.to(self.weight), self.weight, self.bias).float()
        logits = logits if self.scale == 1.0 else logits * self.scale
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits


@dataclass
class HeadLosses:
    """`total` carries the gradient; what is by row [n] does not."""

    total: Tensor  # sum over rows of weight * (ce * CE + kl * KL + tv * TV)
    terms: dict[str, Tensor]  # [n] of each term in use, unweighted
    agrees: Tensor  # [n] bool: the likeliest draft is the target's likeliest token
    overlap: Tensor  # [n] sum min(p, q): the probability that a sampled draft is accepted


@dataclass
class DraftVocabulary:
    """A draft head over some of the target's ids."""

    ids: Tensor  # [dV] target id of each draft id
    own: Tensor  # [V] draft id of each target id, -1 where it has none

    @classmethod
    def of(cls, ids: Tensor, vocab: int) -> "DraftVocabulary":
        own = torch.full((vocab,), -1, dtype=torch.long, device=ids.device)
        own[ids] = torch.arange(len(ids), device=ids.device)
        return cls(ids, own)


def head_losses(
    states: Tensor,
    draft_logits: Callable[[Tensor], Tensor],
    head: TargetHead,
    last_hidden: Tensor,
    target_rows: Tensor,
    labels: Tensor,
    weights: Tensor,
    terms: LossTerms,
    *,
    trained: Seq[Tensor] = (),
    vocabulary: DraftVocabulary | None = None,
) -> HeadLosses:
    """Compare drafted rows [n] with the target's predictions.

    `states` [n, H] go through `draft_logits` to [n, dV]; row i is compared with the target's row `target_rows[i]` of
    `last_hidden` [N, Ht] and with the token `labels[i]`. `trained` are the parameters that `draft_logits` reads, which
    get gradients too; all else in it must be frozen. A row of weight 0 counts for nothing but is computed.
    """
    by_target = target_rows.argsort(stable=True)  # neighbours then share target rows
    context = _Context(
        draft_logits, head, last_hidden, target_rows, labels, weights, terms, vocabulary, by_target, list(trained)
    )
    total = _ChunkedLoss.apply(context, states, *trained)
    return HeadLosses(total, context.by_row, context.agrees, context.overlap)


class _Context:
    """One call of `head_losses`; filled while `_ChunkedLoss` goes through the chunks."""

    def __init__(
        self,
        draft_logits: Callable[[Tensor], Tensor],
        head: TargetHead,
        last_hidden: Tensor,
        target_rows: Tensor,
        labels: Tensor,
        weights: Tensor,
        terms: LossTerms,
        vocabulary: DraftVocabulary | None,
        order: Tensor,
        trained: list[Tensor],
    ) -> None:
        self.draft_logits, self.head, self.last_hidden = draft_logits, head, last_hidden
        self.target_rows, self.labels, self.weights = target_rows, labels, weights
        self.terms, self.vocabulary, self.order, self.trained = terms, vocabulary, order, trained
        n, device = len(order), labels.device
        names = [name for name in ("ce", "kl", "tv") if getattr(terms, name)]
        self.by_row = {name: torch.zeros(n, device=device) for name in names}
        self.agrees = torch.zeros(n, dtype=torch.bool, device=device)
        self.overlap = torch.zeros(n, device=device)

    def chunks(self) -> Iterator[Tensor]:
        rows = max(LEAST_ROWS, CHUNK_ELEMENTS // self.head.weight.shape[0])
        yield from self.order.split(rows)

    def loss(self, states: Tensor, rows: Tensor) -> Tensor:
        """The weighted loss of some rows, and what is known of them by row."""
        unique, back = self.target_rows[rows].unique_consecutive(return_inverse=True)
        with torch.no_grad():
            p = self.head.logits(self.last_hidden[unique]).softmax(-1)[back]  # [m, V]
        logits = self.draft_logits(states).float()  # [m, dV]
        found, best, weights = row_terms(logits, p, self.labels[rows], self.terms, self.vocabulary)
        loss = logits.new_zeros(())
        for name, value in found.items():
            loss = loss + getattr(self.terms, name) * (self.weights[rows] * value * weights[name]).sum()
            self.by_row[name][rows] = value.detach()
        self.agrees[rows] = best == p.argmax(-1)
        with torch.no_grad():
            here = p if self.vocabulary is None else p[:, self.vocabulary.ids]
            self.overlap[rows] = torch.minimum(here, logits.softmax(-1)).sum(-1)
        return loss


def row_terms(
    logits: Tensor, p: Tensor, labels: Tensor, terms: LossTerms, vocabulary: DraftVocabulary | None = None
) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """Terms in use [m] of draft logits [m, dV] against p [m, V], the likeliest drafts [m] (target ids), and factors.

    The factors are 0 where a row has no such term: CE of a token, or KL to a p, outside a reduced vocabulary.
    """
    log_q = F.log_softmax(logits, dim=-1)
    best, found, factors = logits.argmax(-1), {}, dict.fromkeys(("ce", "kl", "tv"), 1.0)
    here, own = p, labels
    if vocabulary is not None:
        here, own, best = p[:, vocabulary.ids], vocabulary.own[labels], vocabulary.ids[best]
        factors["ce"] = (own >= 0).float()
    if terms.ce:
        found["ce"] = -log_q.gather(-1, own.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    if terms.kl:
        mass = here.sum(-1, keepdim=True)
        normed = here / mass.clamp(min=torch.finfo(here.dtype).tiny)
        found["kl"] = (torch.xlogy(normed, normed) - normed * log_q).sum(-1)
        factors["kl"] = (mass.squeeze(-1) > 0).float() if vocabulary is not None else 1.0
    if terms.tv:
        found["tv"] = 1.0 - torch.minimum(here, log_q.exp()).sum(-1)
    return found, best, factors


class _ChunkedLoss(torch.autograd.Function):
    """The sum over chunks, and its gradient by the states and the trained parameters, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, context: _Context, states: Tensor, *trained: Tensor) -> Tensor:
        total = states.new_zeros((), dtype=torch.float32)
        wanted = [states.requires_grad, *(parameter.requires_grad for parameter in trained)]
        gradients = [torch.zeros_like(t) if needed else None for t, needed in zip((states, *trained), wanted, strict=True)]
        for rows in context.chunks():
            with torch.enable_grad():
                part = states.detach()[rows].requires_grad_(wanted[0])
                loss = context.loss(part, rows)
                sources = [t for t, needed in zip((part, *trained), wanted, strict=True) if needed]
                found = torch.autograd.grad(loss, sources) if sources else ()
            total += loss.detach()
            for i, gradient in zip((i for i, needed in enumerate(wanted) if needed), found, strict=True):
                held = gradients[i]
                assert held is not None
                if i:
                    held += gradient
                else:
                    held[rows] = gradient
        ctx.gradients = gradients
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        scaled = [None if gradient is None else gradient * outer[0] for gradient in ctx.gradients]
        return (None, *scaled)
