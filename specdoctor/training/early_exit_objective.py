"""The early-exit head: trained layers behind a lower layer of the frozen target (docs/early-exit-format.md).

The states HS[exit] are constants of the batch, so no gradient reaches the trunk; the target's final norm and LM head
are constants too. In decoding a drafted token's exit state comes from the target's own lower layers, so the head never
sees states of its own making and one row an answer token is all there is to train.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from specdoctor.drafters.early_exit import ExitHead
from specdoctor.drafters.recurrent import StepContext
from specdoctor.drafters.rope import Rope
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.write_early_exit import write_early_exit
from specdoctor.formats.spec import EarlyExitSpec
from specdoctor.training.anchors import sample_blocks
from specdoctor.training.batch import TrainingBatch
from specdoctor.training.draft_start import read_start, refuse_foreign, write_whole
from specdoctor.training.drafted_rows import SharedHead, computing_in, losses_of, nothing_counts
from specdoctor.training.objective import Losses
from specdoctor.training.packed_attention import TrainingColumns, TrainingRows, attend
from specdoctor.training.recipe import LossWeights, Recipe
from specdoctor.training.target_layers import layer_shape, layer_values, rope_settings, start_values


class EarlyExitObjective:
    """See `Objective`. At most `sampling.anchors` rows of a sequence go through the LM head."""

    def __init__(self, recipe: Recipe, target: Target, spec: EarlyExitSpec, head: ExitHead) -> None:
        self.module, self.spec, self.taps = head.to(target.device), spec, spec.taps
        self.weights: LossWeights = recipe.losses
        self.sampling, self.target = recipe.sampling, target
        self.shared = SharedHead(recipe, target)
        self._norm = dict(target.final_norm.named_parameters())
        self._rope = Rope(spec.rope, spec.layers[0].head_dim, target.device, torch.float32)

    def loss(self, batch: TrainingBatch, generator: torch.Generator) -> Losses:
        """See `Objective.loss`."""
        rows = sample_blocks(batch, self.sampling.anchors, 1, 1, generator)
        if not rows.count:
            return nothing_counts(self.module)
        with computing_in(self.shared.dtype, self.target.device):
            hidden = self.scored(batch)[rows.anchors].unsqueeze(1)  # [A, 1, H]
            return losses_of(self.shared.losses(hidden, rows, batch, self.weights, generator), rows, self.weights)

    def scored(self, batch: TrainingBatch) -> Tensor:
        """States [N, H] that the LM head reads, of every row."""
        rows = TrainingRows(batch.starts, batch.ids.device)
        cos, sin = self._rope.at(rows.positions, rows.limit)
        context = StepContext(cast(Any, TrainingColumns()), attend, cast(Any, rows), cos, sin)
        states = self.module(batch.taps.float(), context)
        if self.spec.own_norm:
            return cast(Any, self.module).norm(states)
        constants = {name: value.detach() for name, value in self._norm.items()}
        return torch.func.functional_call(self.target.final_norm, constants, (states,))

    def save(self, folder: Path) -> None:
        """See `Objective.save`; bfloat16 after training under autocast."""
        tensors = {
            name: value.detach().to("cpu", self.shared.dtype) for name, value in self.module.state_dict().items()
        }
        write_whole(folder, lambda partial: write_early_exit(self.spec, tensors, partial))


def make_early_exit(recipe: Recipe, target: Target, start: Path | None) -> EarlyExitObjective:
    """An early-exit objective: new, from the target's layers behind the exit, or from the head in the folder `start`.

    Raises `SpecdoctorError` for an exit that the target has not, and for a `start` with another exit.
    """
    refuse_foreign(recipe, "exit_layer", "layers", "block_size", "intermediate_size")
    draft = recipe.draft
    if start is not None:
        spec, head = _warm(recipe, target, start)
        return EarlyExitObjective(recipe, target, spec, head)
    exit_layer, depth = draft.exit_layer or max(1, round(target.num_layers / 3)), target.num_layers
    if exit_layer >= depth:
        raise SpecdoctorError(
            f"draft.exit_layer is {exit_layer}, expected 1 to {depth - 1} ({target.name} has {depth})"
        )
    layers = draft.layers if "layers" in draft.model_fields_set else 1
    shape = layer_shape(target, intermediate_size=draft.intermediate_size)
    spec = EarlyExitSpec(
        family="specdoctor",
        algorithm="early-exit",
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        layers=(shape,) * layers,
        taps=(exit_layer,),
        rms_norm_eps=target.config.rms_norm_eps,
        rope=rope_settings(target),
        draft_tokens=draft.block_size if "block_size" in draft.model_fields_set else EarlyExitSpec.draft_tokens,
        num_target_layers=depth,
        target_name=target.name,
    )
    with torch.device("meta"):
        head = ExitHead(spec)
    start_values(head, torch.Generator().manual_seed(recipe.seed))
    if draft.init == "target-layers":
        if exit_layer + layers > depth:
            raise SpecdoctorError(
                f"draft.layers is {layers} behind exit_layer {exit_layer}, but {target.name} has {depth} layers; use "
                "fewer, an earlier exit, or draft.init: scratch"
            )
        for i in range(layers):
            values = layer_values(target, exit_layer + i, shape)
            head.load_state_dict({f"layers.{i}.{name}": value for name, value in values.items()}, strict=False)
    return EarlyExitObjective(recipe, target, spec, head)


def _warm(recipe: Recipe, target: Target, start: Path) -> tuple[EarlyExitSpec, ExitHead]:
    checkpoint = read_start(start, target, "early-exit")
    spec, draft = checkpoint.spec, recipe.draft
    assert isinstance(spec, EarlyExitSpec)
    if draft.exit_layer not in (None, spec.exit_layer):
        raise SpecdoctorError(
            f"{start}: exit_layer is {spec.exit_layer}, but the recipe's draft.exit_layer is {draft.exit_layer}; leave "
            "it out to take the drafter's"
        )
    with torch.device("meta"):
        head = ExitHead(spec)
    head.load_state_dict({name: value.float() for name, value in checkpoint.load().items()}, assign=True)
    head.requires_grad_(True)
    if "block_size" in draft.model_fields_set:
        spec = replace(spec, draft_tokens=draft.block_size)
    return spec, head
