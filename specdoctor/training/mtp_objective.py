"""One MTP layer, re-applied to its own output: speculators' form (formats page 1.7.6; DeepSeek-V3 report, section 2.2).

It reads the target's last state before the final norm beside the next token's embedding, runs a decoder layer of the
target's own family, and feeds the vector after its own final norm to the next step. Embedding and head are the
target's.
"""

from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from specdoctor.drafters.mtp import MTPNetwork
from specdoctor.drafters.mtp_blocks import DecoderBlocks
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.mtp_tensors import BLOCK_CLASSES
from specdoctor.formats.drafts.write_mtp import write_mtp
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import RecurrentSpec
from specdoctor.training.draft_start import read_start, refuse_foreign
from specdoctor.training.packed_attention import TrainingColumns, TrainingRows, attend
from specdoctor.training.recipe import Recipe
from specdoctor.training.recurrent_objective import RecurrentObjective
from specdoctor.training.target_layers import final_norm_value, layer_shape, rope_settings, start_values

OF_THE_RUN = ("architectures", "_name_or_path", "dtype", "torch_dtype", "transformers_version", "quantization_config")


def make_mtp(recipe: Recipe, target: Target, start: Path | None) -> RecurrentObjective:
    """An MTP objective for `target`: new, or from the speculators folder `start`.

    Raises `SpecdoctorError` when the recipe asks for what the algorithm has not, or the target's layers are of a family
    whose MTP layers cannot be run.
    """
    refuse_foreign(recipe, "layers", "block_size")
    if "layers" in recipe.draft.model_fields_set and recipe.draft.layers != 1:
        raise SpecdoctorError(f"draft.layers is {recipe.draft.layers}, expected 1: the one MTP layer is re-applied")
    settings = _settings(target)
    spec = _spec(recipe, target)
    with torch.device("meta"):
        blocks = DecoderBlocks(settings, 1, sparse=False)
        network = MTPNetwork(spec, blocks)
    start_values(network, torch.Generator().manual_seed(recipe.seed))
    blocks.place(target.device)
    if start is not None:
        _warm(network, target, start)
    elif recipe.draft.init == "target-layers":
        _from_target(network, spec, target)
    network.to(target.device)
    step = partial(_step, network, target.embedding.weight.detach())
    architecture = type(target.model).__name__
    writer = partial(_write, spec, settings, architecture)
    return RecurrentObjective(recipe, target, spec, network, step, network.features, writer)


def _step(
    network: MTPNetwork,
    embedding: Tensor,
    tokens: Tensor,
    features: Tensor,
    rows: TrainingRows,
    columns: TrainingColumns,
    index: int,
) -> tuple[Tensor, Tensor]:
    """One application of the layer over training rows."""
    embedded = embedding[tokens].float()
    return network.step(embedded, features.float(), cast(Any, rows), cast(Any, columns), attend, index)


def _settings(target: Target) -> dict[str, Any]:
    """The target's own text config, as speculators keeps it."""
    kind = target.config.model_type
    if kind not in BLOCK_CLASSES or BLOCK_CLASSES[kind].experts_key or BLOCK_CLASSES[kind].attention != "plain":
        plain = [name for name, known in BLOCK_CLASSES.items() if not known.experts_key and known.attention == "plain"]
        raise SpecdoctorError(
            f"{target.name}: its layers are of {kind}; MTP layers can be trained for {', '.join(sorted(plain))}"
        )
    return {k: v for k, v in target.config.to_dict().items() if v is not None and k not in OF_THE_RUN}


def _spec(recipe: Recipe, target: Target) -> RecurrentSpec:
    return RecurrentSpec(
        family="speculators",
        algorithm="mtp",
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        layers=(layer_shape(target),),
        taps=(target.num_layers,),
        rms_norm_eps=target.config.rms_norm_eps,
        rope=rope_settings(target),
        recurrent_normed=True,
        block_class=target.config.model_type,
        draft_tokens=recipe.draft.block_size,
        num_target_layers=target.num_layers,
        target_name=target.name,
    )


@torch.no_grad()
def _from_target(network: MTPNetwork, spec: RecurrentSpec, target: Target) -> None:
    """The target's last layer on the hidden half of the projection, and its final norm."""
    H, own = spec.hidden_size, dict(network.named_parameters())
    for name, value in target.layers[-1].state_dict().items():
        own[f"layers.0.block.{name}"].copy_(value)
    own["layers.0.final_norm.weight"].copy_(final_norm_value(target))
    own["layers.0.input_proj.weight"][:, H:] += torch.eye(H)


def _warm(network: MTPNetwork, target: Target, start: Path) -> None:
    checkpoint = read_start(start, target, "mtp")
    if checkpoint.spec.family != "speculators":
        raise SpecdoctorError(f"{start}: {checkpoint.title}, expected speculators mtp to go on from")
    block = JsonConfig.read(start).view("transformer_layer_config").get("model_type", str)
    wanted = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    tensors = checkpoint.load()
    if block != target.config.model_type or {name: tuple(value.shape) for name, value in tensors.items()} != wanted:
        raise SpecdoctorError(
            f"{start}: its {block} layer differs from those of {target.name} ({target.config.model_type}); expected an "
            "MTP layer of the target's own family and sizes"
        )
    network.load_state_dict({name: value.float() for name, value in tensors.items()})


def _write(
    spec: RecurrentSpec, settings: dict[str, Any], architecture: str, tensors: dict[str, Tensor], folder: Path
) -> None:
    write_mtp(spec, settings, tensors, folder, architecture)
