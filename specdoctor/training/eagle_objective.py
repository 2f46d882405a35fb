"""EAGLE-3 with training-time test (Li et al. 2025, section 3; formats page 1.3 and 1.8).

One layer on the fused features of several taps. With norms on queries and keys it is saved as DeepSpec's EAGLE-3, which
holds copies of embedding and head; without them as SpecForge's, which SGLang, vLLM and llama.cpp know. Embedding and
head are the target's own and stay as they are; a reduced draft vocabulary takes the head's rows of its ids.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from specdoctor.drafters.draft_vocabulary import read_vocabulary
from specdoctor.drafters.eagle3 import Eagle3Network
from specdoctor.drafters.recurrent import StepContext
from specdoctor.drafters.rope import Rope
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.write_deepspec import write_deepspec
from specdoctor.formats.drafts.write_specforge import specforge_config, write_specforge
from specdoctor.formats.spec import RecurrentSpec
from specdoctor.training.draft_start import drop_copies, read_start, refuse_foreign
from specdoctor.training.packed_attention import TrainingColumns, TrainingRows, attend
from specdoctor.training.recipe import Recipe
from specdoctor.training.recurrent_objective import RecurrentObjective
from specdoctor.training.target_layers import (
    final_norm_value,
    layer_shape,
    layer_values,
    rope_settings,
    start_values,
)
from specdoctor.training.trained_head import DraftVocabulary


def make_eagle3(recipe: Recipe, target: Target, start: Path | None) -> RecurrentObjective:
    """An EAGLE-3 objective for `target`: new, or from the drafter in the folder `start`.

    Raises `SpecdoctorError` when the recipe asks for what the algorithm has not, or `start` is another kind of drafter.
    """
    refuse_foreign(recipe, "taps", "layers", "block_size", "qk_norm", "intermediate_size", "vocabulary")
    if "layers" in recipe.draft.model_fields_set and recipe.draft.layers != 1:
        raise SpecdoctorError(f"draft.layers is {recipe.draft.layers}, expected 1: the EAGLE-3 formats hold one layer")
    spec, network, ids = _new(recipe, target) if start is None else _warm(recipe, target, start)
    network.to(target.device)
    vocabulary = None if ids is None else DraftVocabulary.of(ids.to(target.device), target.vocab_size)
    rope = Rope(spec.rope, spec.layers[0].head_dim, target.device, torch.float32)
    step = partial(_step, network, target.embedding.weight.detach(), rope)
    return RecurrentObjective(
        recipe, target, spec, network, step, network.features, partial(_write, spec, target, ids), vocabulary
    )


def eagle3_taps(wanted: list[int] | None, layers: int) -> tuple[int, ...]:
    """HS indices of a new drafter; by default SafeAILab's 2, L // 2, L - 3, or what a shallow target has of them."""
    if wanted is None:
        return tuple(sorted({min(max(tap, 1), layers - 1) for tap in (2, layers // 2, layers - 3)}))
    if not wanted or wanted != sorted(set(wanted)) or wanted[0] < 1 or wanted[-1] > layers:
        raise SpecdoctorError(
            f"draft.taps is {wanted}, expected rising numbers of 1 (output of layer 0) to {layers} (of the last layer)"
        )
    return tuple(wanted)


def _step(
    network: Eagle3Network,
    embedding: Tensor,
    rope: Rope,
    tokens: Tensor,
    features: Tensor,
    rows: TrainingRows,
    columns: TrainingColumns,
    index: int,
) -> tuple[Tensor, Tensor]:
    """One step of the drafter's network over training rows; its residual stream is float32 under autocast too."""
    cos, sin = rope.at(rows.positions, rows.limit)
    context = StepContext(cast(Any, columns), attend, cast(Any, rows), cos, sin)
    return network.step(embedding[tokens].float(), features.float(), context, index)


def _new(recipe: Recipe, target: Target) -> tuple[RecurrentSpec, Eagle3Network, Tensor | None]:
    draft = recipe.draft
    ids = None if draft.vocabulary is None else read_vocabulary(draft.vocabulary, target.vocab_size)
    if ids is not None and draft.qk_norm:
        raise SpecdoctorError(
            "draft.vocabulary with draft.qk_norm: DeepSpec's EAGLE-3 has the whole vocabulary; drop one"
        )
    shape = layer_shape(target, qk_norm=draft.qk_norm, intermediate_size=draft.intermediate_size)
    spec = RecurrentSpec(
        family="deepspec" if shape.qk_norm else "specforge",
        algorithm="eagle3",
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=None if ids is None else len(ids),
        layers=(replace(shape, bias=False),),
        taps=eagle3_taps(draft.taps, target.num_layers),
        rms_norm_eps=target.config.rms_norm_eps,
        rope=rope_settings(target),
        draft_tokens=draft.block_size,
        num_target_layers=target.num_layers,
        target_name=target.name,
    )
    with torch.device("meta"):
        network = Eagle3Network(spec)
    start_values(network, torch.Generator().manual_seed(recipe.seed))
    if draft.init == "target-layers":
        _from_target(network, spec, target)
    return spec, network, ids


@torch.no_grad()
def _from_target(network: Eagle3Network, spec: RecurrentSpec, target: Target) -> None:
    """The target's layer behind the last tap, on that tap's state: an early exit that also sees the next token."""
    H, own = spec.hidden_size, dict(network.named_parameters())
    values = layer_values(target, min(spec.taps[-1], target.num_layers - 1), spec.layers[0])
    values["hidden_norm.weight"] = values.pop("input_layernorm.weight")  # that of the embedding starts as 1
    for name, value in values.items():
        parameter = own[f"layers.0.{name}"]
        reads_both = parameter.dim() == 2 and parameter.shape[1] == 2 * H and value.shape[1] == H
        (parameter[:, H:] if reads_both else parameter).copy_(value)
    own["norm.weight"].copy_(final_norm_value(target))
    # Nothing of the other taps at first: their largest values are of another order, and would drown the last one's.
    own["fc.weight"].zero_()
    own["fc.weight"][:, -H:] = torch.eye(H)


def _warm(recipe: Recipe, target: Target, start: Path) -> tuple[RecurrentSpec, Eagle3Network, Tensor | None]:
    checkpoint = read_start(start, target, "eagle3")
    spec = checkpoint.spec
    assert isinstance(spec, RecurrentSpec)
    if spec.backbone is not None or len(spec.layers) != 1:
        raise SpecdoctorError(
            f"{start}: {checkpoint.title}, expected an EAGLE-3 of one layer of the Llama or Qwen3 form"
        )
    tensors = checkpoint.load()
    ids = tensors.pop("d2t", None)
    drop_copies(start, tensors, target, ids)
    with torch.device("meta"):
        network = Eagle3Network(spec)
    network.load_state_dict({name: value.float() for name, value in tensors.items()}, assign=True)
    network.requires_grad_(True)
    steps = recipe.draft.block_size if "block_size" in recipe.draft.model_fields_set else spec.draft_tokens
    spec = replace(
        spec, draft_tokens=steps, num_target_layers=target.num_layers, embed_source="target", head_source="target"
    )
    if not _as_deepspec(spec):
        specforge_config(spec)  # refuses what that format has no key for
    return spec, network, ids


def _as_deepspec(spec: RecurrentSpec) -> bool:
    return spec.layers[0].qk_norm


def _write(spec: RecurrentSpec, target: Target, ids: Tensor | None, tensors: dict[str, Tensor], folder: Path) -> None:
    kind = tensors["fc.weight"].dtype
    head, embedding = (t.weight.detach().to("cpu", kind) for t in (target.lm_head, target.embedding))
    if _as_deepspec(spec):
        write_deepspec(
            spec, tensors | {"embed_tokens.weight": embedding.clone(), "lm_head.weight": head.clone()}, folder
        )
    elif ids is None:
        write_specforge(spec, tensors, folder)
    else:
        write_specforge(spec, tensors | {"lm_head.weight": head[ids], "d2t": ids}, folder)
