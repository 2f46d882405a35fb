"""Drafted rows below many anchors: their weights, their losses by the target's own head, and what the log says.

For drafters that predict K tokens below each of A anchors, one state a token: [A, K, H], of which the rows that
`Blocks.valid` names count. The loss is the mean over these rows, step k weighing `LossWeights.position_weight(k)`.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.training.anchors import Blocks
from specdoctor.training.batch import TrainingBatch
from specdoctor.training.block_metrics import acceptance_parts
from specdoctor.training.head_loss import HeadJob, HeadLosses, head_losses
from specdoctor.training.objective import Losses
from specdoctor.training.recipe import LossWeights, Recipe, Sampling
from specdoctor.training.vocabulary import sample_columns


class SharedHead:
    """The target's own LM head on both sides."""

    def __init__(self, recipe: Recipe, target: Target) -> None:
        if target.lm_head.bias is not None:
            raise SpecdoctorError(
                f"{target.name}: its LM head has a bias, which a {recipe.algorithm} drafter cannot share"
            )
        self.dtype: torch.dtype = torch.bfloat16 if recipe.autocast else torch.float32
        self.weight: Tensor = target.lm_head.weight.detach().to(self.dtype)  # [V, H]
        self.softcap: float | None = getattr(target.config, "final_logit_softcapping", None)
        self.sampling: Sampling = recipe.sampling

    def losses(
        self, hidden: Tensor, blocks: Blocks, batch: TrainingBatch, weights: LossWeights, generator: torch.Generator
    ) -> HeadLosses:
        """Losses of `hidden` [A, K, H]; with `sampling.vocabulary`, over columns that `generator` draws."""
        head, labels, log_factor = self.weight, blocks.labels[blocks.valid], None
        size = self.sampling.vocabulary
        if size is not None and size < len(head):
            columns = sample_columns(len(head), size, labels, generator)
            head, labels, log_factor = head[columns.ids], columns.place_of(labels), columns.log_factor
        job = HeadJob(
            head=head,
            target_head=head,
            target_hidden=batch.last_hidden[blocks.states[blocks.valid]],
            labels=labels,
            row_weights=row_weights(blocks, weights),
            losses=weights,
            chunk=self.sampling.head_chunk,
            dtype=self.dtype,
            softcap=self.softcap,
            log_factor=log_factor,
        )
        return head_losses(hidden[blocks.valid], None, None, job)


def row_weights(blocks: Blocks, losses: LossWeights) -> Tensor:
    """Weights [M] of the rows that count, which sum to 1."""
    by_step = torch.tensor([losses.position_weight(k) for k in range(blocks.valid.shape[1])])
    weights = by_step.to(blocks.valid.device).expand(blocks.count, -1)[blocks.valid]
    return weights / weights.sum()


def losses_of(found: HeadLosses, blocks: Blocks, weights: LossWeights) -> Losses:
    """The total, and for the log the weighted mean of each term and acceptance by step (`block_metrics`)."""
    by_row = row_weights(blocks, weights)
    terms = {"ce": found.ce, "kl": found.kl, "l1": found.l1}
    parts = {name: (value * by_row).sum() for name, value in terms.items() if value is not None}
    return Losses(found.total, parts | acceptance_parts(blocks.valid, found))


def nothing_counts(module: nn.Module) -> Losses:
    """The losses of a batch without a row that counts: zero, with a zero gradient for every parameter.

    Processes that train together must all have one.
    """
    return Losses(sum((p.sum() for p in module.parameters()), torch.zeros(())) * 0.0)


def computing_in(dtype: torch.dtype, device: torch.device) -> torch.autocast | nullcontext[None]:
    """Autocast to a 16-bit dtype; nothing for float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
