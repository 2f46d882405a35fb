"""What a DSpark or DFlash drafter is before its first step: its spec, its network, and the values that it starts from.

Contract: `block_spec` and `DraftNetwork` give a drafter of the recipe's shape on the target's widths; `start_network`
fills it from scratch, from layers of the target, or from an existing drafter. Parameters are float32 and named as the
tensors of DeepSpec (formats page 1.1) but for the prefix of the part that they are in.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from specdoctor.drafters.backbone import Backbone
from specdoctor.drafters.heads import HEADS, ConfidenceHead, VanillaHead
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import DraftCheckpoint
from specdoctor.formats.spec import BlockSpec
from specdoctor.training.recipe import Recipe
from specdoctor.training.target_layers import (
    final_norm_value,
    layer_shape,
    layer_values,
    rope_settings,
    start_values,
)

PREFIXES = (("markov.", "markov_head."), ("confidence.", "confidence_head."), ("backbone.", ""))  # of ours, of DeepSpec


OF_OTHERS = ("exit_layer", "qk_norm", "vocabulary", "own_heads")  # keys of draft that no block drafter has


class DraftNetwork(nn.Module):
    """Everything of a block drafter that is trained."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.backbone = Backbone(spec)
        self.markov: VanillaHead | None = None
        if spec.markov:
            self.markov = HEADS[spec.markov](spec.vocab_size, spec.hidden_size, spec.markov_rank, spec.head_rows)
        width = spec.hidden_size + (spec.markov_rank if spec.confidence == "hidden+markov" else 0)
        self.confidence = ConfidenceHead(width) if spec.confidence else None

    def tensors(self) -> dict[str, Tensor]:
        """Values under canonical names."""
        return {canonical(name): value.detach() for name, value in self.state_dict().items()}

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Take values under canonical names; what is not named stays."""
        own = {canonical(name): parameter for name, parameter in self.named_parameters()}
        with torch.no_grad():
            for name, value in tensors.items():
                own[name].copy_(value)


def canonical(name: str) -> str:
    """Name of a parameter of `DraftNetwork` in a checkpoint."""
    ours, theirs = next(pair for pair in PREFIXES if name.startswith(pair[0]))
    return theirs + name.removeprefix(ours)


def block_spec(recipe: Recipe, target: Target) -> BlockSpec:
    """The spec of a new drafter. Raises `SpecdoctorError` where the recipe asks for what cannot be."""
    draft, L = recipe.draft, target.num_layers
    if recipe.algorithm == "dspark" and (draft.markov is None or not draft.markov_rank):
        raise SpecdoctorError(
            f"draft.markov is {draft.markov}, draft.markov_rank {draft.markov_rank}: a DSpark drafter has a head "
            "(vanilla, gated or rnn) of rank 1 or more; set both, or train algorithm: dflash"
        )
    if recipe.algorithm == "dflash" and (draft.markov or draft.markov_rank or draft.confidence):
        raise SpecdoctorError(
            "draft.markov, markov_rank and confidence are of DSpark, but algorithm is dflash; leave them out, or train "
            "algorithm: dspark"
        )
    shape = layer_shape(target, qk_norm=True, intermediate_size=draft.intermediate_size)
    return BlockSpec(
        family="deepspec",
        algorithm=recipe.algorithm,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        layers=(shape,) * draft.layers,
        taps=_taps(draft.taps, L),
        rms_norm_eps=target.config.rms_norm_eps,
        rope=rope_settings(target),
        num_target_layers=L,
        target_name=target.name,
        block_size=draft.block_size,
        row_offset=1,
        mask_id=_mask_id(draft.mask_id, target),
        markov=draft.markov,
        markov_rank=draft.markov_rank,
        confidence=draft.confidence,
    )


def warm_spec(recipe: Recipe, checkpoint: DraftCheckpoint) -> BlockSpec:
    """The spec of an existing drafter, with the heads that the recipe adds; block size and mask id may be others.

    Raises `SpecdoctorError` for a drafter that cannot be trained here, or that is not what the recipe says.
    """
    spec, draft, where = checkpoint.spec, recipe.draft, checkpoint.where
    if not isinstance(spec, BlockSpec) or (spec.backbone, spec.conv_kernel_size, spec.selector_rank) != ("qwen3", 0, 0):
        raise SpecdoctorError(f"{where}: {checkpoint.title} cannot be trained as {recipe.algorithm}; give another init")
    for key, usual in (("embed_scale", 1.0), ("logit_scale", 1.0), ("softcap", None), ("has_vocabulary_map", False)):
        found = getattr(spec, key)
        if found != usual:
            raise SpecdoctorError(f"{where}: {key} is {found}, which cannot be trained here; give another init")
    asked = {"layers": len(spec.layers), "taps": list(spec.taps), "intermediate_size": spec.layers[0].intermediate_size}
    asked |= {"markov": spec.markov, "markov_rank": spec.markov_rank} if spec.markov else {}
    asked |= {"confidence": spec.confidence} if spec.confidence else {}
    for key, found in asked.items():
        wanted = getattr(draft, key)
        if key in draft.model_fields_set and wanted is not None and wanted != found:
            raise SpecdoctorError(
                f"{where}: {key} is {found}, but the recipe's draft.{key} is {wanted}; leave it out to take the "
                "drafter's"
            )
    markov = spec.markov or draft.markov
    spec = replace(
        spec,
        algorithm="dspark" if markov else "dflash",
        markov=markov,
        markov_rank=spec.markov_rank or (draft.markov_rank if markov else 0),
        confidence=spec.confidence or draft.confidence,
        block_size=draft.block_size if "block_size" in draft.model_fields_set else spec.block_size,
        mask_id=spec.mask_id if draft.mask_id is None else draft.mask_id,
    )
    if spec.algorithm != recipe.algorithm:
        raise SpecdoctorError(f"{where}: a {spec.algorithm} drafter, but the recipe's algorithm is {recipe.algorithm}")
    return spec


def start_network(spec: BlockSpec, target: Target, init: str, seed: int) -> DraftNetwork:
    """A network with its first values: `init` is scratch or target-layers."""
    with torch.device("meta"):
        network = DraftNetwork(spec)
    generator = torch.Generator().manual_seed(seed)
    start_values(network, generator)
    with torch.no_grad():
        if network.markov is not None:  # the head starts silent; its codes have length 1
            network.markov.markov_w1.weight.normal_(0.0, spec.markov_rank**-0.5, generator=generator)
            network.markov.markov_w2.weight.zero_()
        if network.confidence is not None:
            network.confidence.proj.weight.zero_()
        if init == "target-layers":
            _from_target(network, spec, target)
    return network


def _from_target(network: DraftNetwork, spec: BlockSpec, target: Target) -> None:
    """Evenly spaced layers of the target from its first to its last, its final norm, and the mean of the taps.

    The draft layers' keys and values of the context read hidden_norm(fc(taps)) where the target's read their own
    normed input, so hidden_norm starts as the mean of those norms.
    """
    n, L = len(spec.layers), target.num_layers
    picked = [L - 1] if n == 1 else [round(i * (L - 1) / (n - 1)) for i in range(n)]
    norms = []
    for i, index in enumerate(picked):
        values = layer_values(target, index, spec.layers[i])
        norms.append(values["input_layernorm.weight"])
        for part in ("q", "k"):  # a target without these norms: the length that its queries and keys would have
            if f"self_attn.{part}_norm.weight" not in values:
                scaled = values[f"self_attn.{part}_proj.weight"] * norms[-1]
                length = scaled.square().sum(1).mean().sqrt()
                values[f"self_attn.{part}_norm.weight"] = length.expand(spec.layers[i].head_dim)
        network.fill({f"layers.{i}.{name}": value for name, value in values.items()})
    H, taps = spec.hidden_size, len(spec.taps)
    network.fill(
        {
            "norm.weight": final_norm_value(target),
            "hidden_norm.weight": torch.stack(norms).mean(0),
            "fc.weight": torch.eye(H).repeat(1, taps) / taps,
        }
    )


def refuse_foreign_keys(recipe: Recipe) -> None:
    """Raise for a key of `draft` that means something to other algorithms only."""
    for key in OF_OTHERS:
        if getattr(recipe.draft, key):
            raise SpecdoctorError(f"draft.{key} has no meaning for algorithm {recipe.algorithm}; leave it out")


def _taps(wanted: list[int] | None, L: int) -> tuple[int, ...]:
    """HS indices; by default outputs of layers from the second to the third from the end, five of a deep target."""
    if wanted is None:
        count = 5 if L >= 20 else 3
        low = min(2, max(L - 1, 0))
        high = max(L - 2, low)
        return tuple(sorted({round(low + (high - low) * i / (count - 1)) for i in range(count)}))
    if not wanted or wanted != sorted(set(wanted)) or wanted[-1] >= L:
        raise SpecdoctorError(
            f"draft.taps is {wanted}, expected rising numbers of 0 (embedding) to {L - 1}: DeepSpec's format cannot "
            f"hold a tap of the last layer ({L})"
        )
    return tuple(wanted)


def _mask_id(wanted: int | None, target: Target) -> int:
    rows = target.embedding.weight.shape[0]
    if wanted is not None:
        if wanted >= rows:
            raise SpecdoctorError(
                f"draft.mask_id is {wanted}, expected 0 to {rows - 1} ({target.name} has {rows} rows)"
            )
        return wanted
    config = target.config
    for name in ("pad_token_id", "bos_token_id", "unk_token_id"):  # one that the target does not write
        found = getattr(config, name, None)
        if isinstance(found, int) and 0 <= found < rows and found not in target.stop_ids:
            return found
    return 0
