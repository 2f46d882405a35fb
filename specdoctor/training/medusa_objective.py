"""Medusa-1 heads (Cai et al. 2024; formats page 1.11): head k predicts the token k + 2 behind the state that it reads.

The state is the target's last one, after its final norm; the target stays as it is. A head is ResBlocks that start as
the identity, and a projection to the vocabulary: the target's own, shared and frozen, or with `draft.own_heads` one a
head, which starts as a copy of it. Saved in vLLM's layout.
"""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdoctor.drafters.medusa import MedusaNetwork
from specdoctor.engine.target import FINAL_NORMED, Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.write_medusa import write_medusa
from specdoctor.formats.spec import MedusaSpec
from specdoctor.training.anchors import Blocks
from specdoctor.training.batch import TrainingBatch
from specdoctor.training.chains import draw_chains
from specdoctor.training.draft_start import read_start, refuse_foreign, write_whole
from specdoctor.training.drafted_rows import SharedHead, computing_in, losses_of, nothing_counts, row_weights
from specdoctor.training.head_loss import HeadLosses
from specdoctor.training.objective import Losses
from specdoctor.training.recipe import LossWeights, Recipe
from specdoctor.training.trained_head import TargetHead, TrainedHeadJob, trained_head_losses


class MedusaObjective:
    """See `Objective`. `draft.block_size` heads below at most `sampling.anchors` anchors of each sequence."""

    def __init__(self, recipe: Recipe, target: Target, spec: MedusaSpec, network: MedusaNetwork) -> None:
        self.module, self.spec, self.taps = network.to(target.device), spec, (FINAL_NORMED,)
        self.weights: LossWeights = recipe.losses
        self.sampling, self.device = recipe.sampling, target.device
        self.shared, self.target = SharedHead(recipe, target), TargetHead(target)

    def loss(self, batch: TrainingBatch, generator: torch.Generator) -> Losses:
        """See `Objective.loss`."""
        anchors = draw_chains(batch, self.sampling.anchors, self.spec.num_heads, generator)
        if not anchors.count:
            return nothing_counts(self.module)
        with computing_in(self.shared.dtype, self.device):
            hidden = self.scored(batch, anchors)
            if self.spec.shared_head:
                found = self.shared.losses(hidden, anchors, batch, self.weights, generator)
            else:
                found = self._own_losses(hidden, anchors, batch)
            return losses_of(found, anchors, self.weights)

    def scored(self, batch: TrainingBatch, anchors: Blocks) -> Tensor:
        """States [A, K, H] behind the ResBlocks: of the row before each anchor, by each head."""
        before = batch.last_hidden[anchors.anchors - 1].float()  # [A, H]
        return torch.stack([head(before) for head in self.module.heads], dim=1)

    def _own_losses(self, hidden: Tensor, anchors: Blocks, batch: TrainingBatch) -> HeadLosses:
        """By a projection of each head's own; rows are taken head by head, so that a chunk reads few of them."""
        valid, lm_heads = anchors.valid, cast(list[nn.Linear], list(self.module.lm_heads))
        head_of = torch.arange(valid.shape[1], device=valid.device).expand_as(valid)[valid]  # [M]
        order = head_of.argsort(stable=True)
        job = TrainedHeadJob(
            draft_logits=_by_head(lm_heads, head_of[order]),
            target=self.target,
            target_hidden=batch.last_hidden[anchors.states[valid][order]],
            labels=anchors.labels[valid][order],
            row_weights=row_weights(anchors, self.weights)[order],
            losses=self.weights,
            chunk=self.sampling.head_chunk,
        )
        found = trained_head_losses(hidden[valid][order], [head.weight for head in lm_heads], job)
        back = order.argsort()
        kl, l1 = (None if value is None else value[back] for value in (found.kl, found.l1))
        return HeadLosses(found.total, found.ce[back], found.match[back], kl, l1)

    def save(self, folder: Path) -> None:
        """See `Objective.save`; bfloat16 after training under autocast."""
        tensors = {
            name: value.detach().to("cpu", self.shared.dtype) for name, value in self.module.state_dict().items()
        }
        write_whole(folder, lambda partial: write_medusa(self.spec, tensors, partial))


def _by_head(lm_heads: list[nn.Linear], head_of: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Logits [n, V] of states [n, H] in rows that ascend by head."""

    def logits(states: Tensor, rows: Tensor) -> Tensor:
        heads, counts = head_of[rows].unique_consecutive(return_counts=True)
        parts = states.split(counts.tolist())
        return torch.cat([F.linear(part, lm_heads[k].weight) for k, part in zip(heads.tolist(), parts, strict=True)])

    return logits


def make_medusa(recipe: Recipe, target: Target, start: Path | None) -> MedusaObjective:
    """A Medusa objective: new, or from the heads in the folder `start`.

    Raises `SpecdoctorError` when the recipe asks for what the algorithm has not, or `start` cannot be trained further.
    """
    refuse_foreign(recipe, "block_size", "layers", "own_heads")
    draft = recipe.draft
    if start is not None:
        spec, network = _warm(recipe, target, start)
        return MedusaObjective(recipe, target, spec, network)
    spec = MedusaSpec(
        family="medusa",
        algorithm="medusa",
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        taps=(FINAL_NORMED,),
        tap_final_is_prenorm=False,
        num_heads=draft.block_size,
        res_layers=draft.layers if "layers" in draft.model_fields_set else 1,
        shared_head=not draft.own_heads,
        head_source="checkpoint" if draft.own_heads else "target",
        target_name=target.name,
    )
    network = MedusaNetwork(spec)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.startswith("lm_heads."):
                parameter.copy_(target.lm_head.weight)
            else:
                parameter.zero_()  # x + SiLU(0) = x
    return MedusaObjective(recipe, target, spec, network)


def _warm(recipe: Recipe, target: Target, start: Path) -> tuple[MedusaSpec, MedusaNetwork]:
    checkpoint = read_start(start, target, "medusa")
    spec, draft, tensors = checkpoint.spec, recipe.draft, checkpoint.load()
    assert isinstance(spec, MedusaSpec)
    if spec.has_vocabulary_map or spec.logit_scale != 1.0 or "lm_head.weight" in tensors:
        raise SpecdoctorError(
            f"{start}: Medusa heads with a truncated vocabulary, scaled logits or one head of their own cannot be "
            "trained further here; give draft.init: target-layers"
        )
    asked = {"block_size": spec.num_heads, "layers": spec.res_layers, "own_heads": not spec.shared_head}
    for key, found in asked.items():
        if key in draft.model_fields_set and getattr(draft, key) != found:
            raise SpecdoctorError(
                f"{start}: {key} is {found}, but the recipe's draft.{key} is {getattr(draft, key)}; leave it out"
            )
    network = MedusaNetwork(spec)
    network.load_state_dict({name: value.float() for name, value in tensors.items()})
    return spec, network
