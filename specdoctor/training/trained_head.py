"""Losses where the drafter's head is not the target's: trained itself, or over some of the target's ids.

Beside `head_loss`, which knows one frozen head for both sides. The same terms, a chunk of rows at a time, each chunk
through the heads once: its gradient, by the states and by the trained parameters, is taken while its logits are there.
With a reduced draft vocabulary CE and KL are those of the target's law cut to it and normed again (a row whose token
has no draft id has no CE); L1 is always over the whole vocabulary, so 1 - L1 / 2 stays the probability of acceptance.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdoctor.engine.target import Target
from specdoctor.training.head_loss import HeadLosses
from specdoctor.training.recipe import LossWeights


class TargetHead:
    """The target's LM head, frozen, with whatever its family does to the logits."""

    def __init__(self, target: Target) -> None:
        head, config = target.lm_head, target.config
        self.weight = head.weight.detach()  # [V, Ht]
        self.bias = None if head.bias is None else head.bias.detach()
        self.softcap = getattr(config, "final_logit_softcapping", None)
        multiplied = getattr(config, "logit_scale", None) or 1.0  # Cohere
        divided = getattr(config, "logits_scaling", None) or 1.0  # Granite
        self.scale = float(multiplied) / float(divided)

    def logits(self, last_hidden: Tensor) -> Tensor:
        """[n, Ht] after the final norm -> [n, V], float32."""
        return self.shaped(F.linear(last_hidden.to(self.weight), self.weight, self.bias))

    def shaped(self, logits: Tensor) -> Tensor:
        """What the family does to raw logits, in float32."""
        logits = logits.float() if self.scale == 1.0 else logits.float() * self.scale
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits


@dataclass(frozen=True)
class DraftVocabulary:
    """A draft head over some of the target's ids."""

    ids: Tensor  # [dV] target id of each draft id
    own: Tensor  # [V] draft id of each target id, -1 where it has none

    @classmethod
    def of(cls, ids: Tensor, vocab: int) -> "DraftVocabulary":
        own = torch.full((vocab,), -1, dtype=torch.long, device=ids.device)
        own[ids] = torch.arange(len(ids), device=ids.device)
        return cls(ids, own)


@dataclass(slots=True)
class TrainedHeadJob:
    """What the rows [M] are compared with, and by which weights."""

    draft_logits: Callable[[Tensor, Tensor], Tensor]  # states [n, H] and their row numbers [n] -> [n, dV]
    target: TargetHead
    target_hidden: Tensor  # [M, Ht] after the target's final norm
    labels: Tensor  # [M] target id of the text's token
    row_weights: Tensor  # [M] float32, already over their sum
    losses: LossWeights
    chunk: int
    vocabulary: DraftVocabulary | None = None


def trained_head_losses(states: Tensor, trained: Seq[Tensor], job: TrainedHeadJob) -> HeadLosses:
    """Losses of `states` [M, H]. `trained` are the parameters that `job.draft_logits` reads and that learn."""
    values = _TrainedHead.apply(job, torch.is_grad_enabled(), states, *trained)
    return HeadLosses(*values)


class _TrainedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: TrainedHeadJob, graph: bool, states: Tensor, *trained: Tensor) -> tuple[Tensor, ...]:
        inputs = (states, *trained)
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed and graph]
        gradients = {i: torch.zeros_like(inputs[i]) for i in wanted}
        total = torch.zeros((), device=states.device)
        rows_of = []
        for rows in torch.arange(len(states), device=states.device).split(job.chunk):
            with torch.set_grad_enabled(graph):
                part = states.detach()[rows].requires_grad_(0 in gradients)
                loss, values = _chunk(part, rows, job)
                sources = [part if i == 0 else inputs[i] for i in wanted]
                found = torch.autograd.grad(loss, sources, allow_unused=True) if sources else ()
            total += loss.detach()
            rows_of.append(values)
            for i, gradient in zip(wanted, found, strict=True):
                if i == 0:
                    gradients[0][rows] = gradient
                elif gradient is not None:  # a chunk need not read every head
                    gradients[i] += gradient
        ctx.gradients = [gradients.get(i) for i in range(len(inputs))]
        ce, match, kl, l1 = (torch.cat(column) for column in zip(*rows_of, strict=True))
        ctx.mark_non_differentiable(ce, match, kl, l1)
        return total, ce, match, kl, l1

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return (None, None, *(None if gradient is None else gradient * outer[0] for gradient in ctx.gradients))


def _chunk(states: Tensor, rows: Tensor, job: TrainedHeadJob) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The weighted loss of some rows, and ce, match, kl, l1 of each, detached."""
    with torch.no_grad():
        p = job.target.logits(job.target_hidden[rows]).softmax(-1)  # [n, V]
    log_q = F.log_softmax(job.draft_logits(states, rows).float(), dim=-1)  # [n, dV]
    labels, best = job.labels[rows], log_q.argmax(-1)
    normed, own, known = p, labels, torch.ones_like(labels, dtype=torch.bool)
    if job.vocabulary is not None:
        p, own, best = p[:, job.vocabulary.ids], job.vocabulary.own[labels], job.vocabulary.ids[best]
        normed, known = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny), own >= 0
    ce = torch.where(known, -log_q.gather(-1, own.clamp(min=0)[:, None])[:, 0], 0.0)
    kl = (torch.xlogy(normed, normed) - normed * log_q).sum(-1)
    l1 = 2.0 * (1.0 - torch.minimum(p, log_q.exp()).sum(-1))
    losses, loss = job.losses, log_q.new_zeros(())
    for weight, value in ((losses.ce, ce), (losses.kl, kl), (losses.l1, l1)):
        loss = loss + weight * (job.row_weights[rows] * value).sum() if weight else loss
    return loss, (ce.detach(), best == labels, kl.detach(), l1.detach())
