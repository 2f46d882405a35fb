"""The objective of feature-recurrent drafters, EAGLE-3 and MTP: training-time test by the drafter's own network."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdoctor.engine.target import Target
from specdoctor.formats.spec import RecurrentSpec
from specdoctor.training.anchors import Blocks
from specdoctor.training.batch import TrainingBatch
from specdoctor.training.chains import StepFunction, draw_chains, walk_chains
from specdoctor.training.draft_start import write_whole
from specdoctor.training.drafted_rows import SharedHead, computing_in, losses_of, nothing_counts, row_weights
from specdoctor.training.head_loss import HeadLosses
from specdoctor.training.objective import Losses
from specdoctor.training.recipe import LossWeights, Recipe
from specdoctor.training.trained_head import DraftVocabulary, TargetHead, TrainedHeadJob, trained_head_losses

# Writes the trained tensors, under the module's names, into a folder that it makes.
Writer = Callable[[dict[str, Tensor], Path], None]


class RecurrentObjective:
    """`draft_tokens` steps below at most `sampling.anchors` anchors of each sequence."""

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        spec: RecurrentSpec,
        module: nn.Module,
        step: StepFunction,
        features: Callable[[Tensor], Tensor],
        writer: Writer,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        """`step` and `features` are of the drafter's network; `vocabulary` of a reduced draft head."""
        self.module, self.spec, self.taps = module, spec, spec.taps
        self.weights: LossWeights = recipe.losses
        self.sampling, self.device = recipe.sampling, target.device
        self.shared, self.target, self.vocabulary = SharedHead(recipe, target), TargetHead(target), vocabulary
        self._step, self._features, self._writer = step, features, writer

    def loss(self, batch: TrainingBatch, generator: torch.Generator) -> Losses:
        """See `Objective.loss`; chains are drawn with `generator`."""
        chains = draw_chains(batch, self.sampling.anchors, self.spec.draft_tokens, generator)
        if not chains.count:
            return nothing_counts(self.module)
        with computing_in(self.shared.dtype, self.device):
            found = self._compare(self.scored(batch, chains), chains, batch, generator)
            return losses_of(found, chains, self.weights)

    def scored(self, batch: TrainingBatch, chains: Blocks) -> Tensor:
        """States [A, K, H] that the head reads, of every step of every chain."""
        features = self._features(batch.taps.to(self.shared.dtype))
        return torch.stack(list(walk_chains(self._step, features, batch, chains)), dim=1)

    def _compare(self, hidden: Tensor, chains: Blocks, batch: TrainingBatch, generator: torch.Generator) -> HeadLosses:
        if self.vocabulary is None:
            return self.shared.losses(hidden, chains, batch, self.weights, generator)
        head, valid = self.shared.weight[self.vocabulary.ids], chains.valid  # [dV, H]
        job = TrainedHeadJob(
            draft_logits=lambda states, rows: F.linear(states.to(head.dtype), head),
            target=self.target,
            target_hidden=batch.last_hidden[chains.states[valid]],
            labels=chains.labels[valid],
            row_weights=row_weights(chains, self.weights),
            losses=self.weights,
            chunk=self.sampling.head_chunk,
            vocabulary=self.vocabulary,
        )
        return trained_head_losses(hidden[valid], (), job)

    def save(self, folder: Path) -> None:
        """See `Objective.save`; bfloat16 after training under autocast."""
        tensors = {
            name: value.detach().to("cpu", self.shared.dtype) for name, value in self.module.state_dict().items()
        }
        write_whole(folder, lambda partial: self._writer(tensors, partial))
