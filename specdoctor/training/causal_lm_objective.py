"""Distillation of a small causal LM onto the target's distribution (DistillSpec, Zhou et al. 2024).

The student is any Hugging Face causal LM with the target's vocabulary: an existing model, or the target itself with
fewer of its layers. It reads the packed text by its own layers through the engine's attention interface and is compared
with the target on answer tokens. Unlike the other drafters it has an embedding and a head of its own, which are trained
with it.
"""

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from specdoctor.engine.target import FINAL_NORMED, AttentionRun, Target
from specdoctor.errors import SpecdoctorError
from specdoctor.training.anchors import sample_blocks
from specdoctor.training.batch import TrainingBatch
from specdoctor.training.draft_start import refuse_foreign, write_whole
from specdoctor.training.drafted_rows import computing_in, losses_of, nothing_counts, row_weights
from specdoctor.training.objective import Losses
from specdoctor.training.packed_attention import TrainingColumns, TrainingRows, attend
from specdoctor.training.recipe import LossWeights, Recipe
from specdoctor.training.trained_head import TargetHead, TrainedHeadJob, trained_head_losses

# Whatever of these lies beside the weights makes the folder a whole model with a tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass
class _Student:
    """The student as the engine sees a model: its decoder, its windows, its head."""

    model: Target
    tokenizer: Path | None  # folder whose tokenizer files are its own


class CausalLMObjective:
    """See `Objective`. At most `sampling.anchors` rows of a sequence go through the heads."""

    taps: tuple[int, ...] = (FINAL_NORMED,)

    def __init__(self, recipe: Recipe, target: Target, student: _Student) -> None:
        self.student, self.module = student.model, cast(nn.Module, student.model.model)
        self.tokenizer = student.tokenizer
        self.weights: LossWeights = recipe.losses
        self.sampling, self.dtype = recipe.sampling, torch.bfloat16 if recipe.autocast else torch.float32
        self.target, self.own = TargetHead(target), TargetHead(student.model)
        self._no_mask = torch.zeros(1, 1, 1, 1, device=target.device)
        self.module.requires_grad_(True)

    def loss(self, batch: TrainingBatch, generator: torch.Generator) -> Losses:
        """See `Objective.loss`."""
        rows = sample_blocks(batch, self.sampling.anchors, 1, 1, generator)
        if not rows.count:
            return nothing_counts(self.module)
        head = self.student.lm_head
        trained = [head.weight] if head.bias is None else [head.weight, head.bias]
        with computing_in(self.dtype, self.student.device):
            valid = rows.valid
            job = TrainedHeadJob(
                draft_logits=lambda states, _: self.own.shaped(F.linear(states, head.weight, head.bias)),
                target=self.target,
                target_hidden=batch.last_hidden[rows.states[valid]],
                labels=rows.labels[valid],
                row_weights=row_weights(rows, self.weights),
                losses=self.weights,
                chunk=self.sampling.head_chunk,
            )
            states = self.scored(batch)[rows.anchors].unsqueeze(1)[valid]
            return losses_of(trained_head_losses(states, trained, job), rows, self.weights)

    def scored(self, batch: TrainingBatch) -> Tensor:
        """States [N, H] that the student's head reads, of every row."""
        rows = TrainingRows(batch.starts, batch.ids.device)
        run = AttentionRun(cast(Any, rows), cast(Any, TrainingColumns()), self.student.windows, attend, self._no_mask)
        output = self.student.decoder(
            input_ids=batch.ids.unsqueeze(0),
            position_ids=rows.positions.unsqueeze(0),
            attention_mask=self._no_mask,
            use_cache=False,
            specdoctor_run=run,
        )
        return output[0][0]

    def save(self, folder: Path) -> None:
        """See `Objective.save`: a Hugging Face folder, bfloat16 after training under autocast."""
        write_whole(folder, self._write)

    def _write(self, folder: Path) -> None:
        model = cast(PreTrainedModel, self.module)
        held = {name: value.detach().to("cpu", self.dtype) for name, value in model.state_dict().items()}
        kept, model.config.dtype = model.config.dtype, self.dtype
        shown = is_progress_bar_enabled()
        disable_progress_bar()
        try:
            model.save_pretrained(folder, state_dict=held)
        finally:
            model.config.dtype = kept
            if shown:
                enable_progress_bar()
        for name in TOKENIZER_FILES:
            if self.tokenizer is not None and (self.tokenizer / name).is_file():
                shutil.copyfile(self.tokenizer / name, folder / name)


def make_causal_lm(recipe: Recipe, target: Target, start: Path | None) -> CausalLMObjective:
    """A distillation objective: of the model in the folder `start`, or of a shallow copy of the target.

    Raises `SpecdoctorError` when the student's vocabulary has another size than the target's.
    """
    refuse_foreign(recipe, "layers")
    if start is not None:
        student = Target.load(start, str(target.device), "float32")
        if student.vocab_size != target.vocab_size:
            raise SpecdoctorError(
                f"{start}: its head has {student.vocab_size} rows, expected the {target.vocab_size} of {target.name}: "
                "distillation compares the two token by token; take a student with the same tokenizer"
            )
        return CausalLMObjective(recipe, target, _Student(student, start))
    model = _shallow(target, recipe.draft.layers, recipe.draft.init, recipe.seed)
    return CausalLMObjective(recipe, target, _Student(Target(model), target.folder))


def _shallow(target: Target, layers: int, init: str, seed: int) -> PreTrainedModel:
    """A model of the target's class with `layers` layers: evenly spaced ones of the target's, or random ones."""
    depth = target.num_layers
    if layers >= depth:
        raise SpecdoctorError(
            f"draft.layers is {layers}, expected less than the {depth} of {target.name}: a drafter as deep as its "
            "target gains nothing"
        )
    if target.model.config is not target.config:
        raise SpecdoctorError(
            f"{target.name}: a model of several parts, of which no shallow copy is made; give the folder of a small "
            "model as draft.init"
        )
    picked = [depth - 1] if layers == 1 else [round(i * (depth - 1) / (layers - 1)) for i in range(layers)]
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in picked]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if init == "target-layers":
        places = {str(index): str(i) for i, index in enumerate(picked)}
        model.load_state_dict(_picked(target, places))
    return model.to(target.device)


def _picked(target: Target, places: dict[str, str]) -> dict[str, Tensor]:
    """The target's values without the layers that are not in `places`, which says the new number of the others."""
    prefix = next(name for name, module in target.model.named_modules() if module is target.layers) + "."
    values = {}
    for name, value in target.model.state_dict().items():
        if name.startswith(prefix):
            index, rest = name.removeprefix(prefix).split(".", 1)
            if index not in places:
                continue
            name = f"{prefix}{places[index]}.{rest}"
        values[name] = value.detach().float()
    return values
