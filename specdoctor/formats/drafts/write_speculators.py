"""Writer of speculators folders: dflash, dspark, dflash2, eagle3 and peagle (formats page 1.7)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdoctor.formats.drafts.write_config import layer_keys, write_folder
from specdoctor.formats.spec import BlockSpec, DraftSpec, RecurrentSpec

if TYPE_CHECKING:
    from torch import Tensor

    from specdoctor.formats.drafts.target_facts import TargetFacts

# Whether embedding and a full head are in the file: always before 0.9, never from then on.
WITH_EMBEDDING, WITHOUT_EMBEDDING = "0.8.0", "0.9.0"
_CLASSES = {
    "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
    "dflash2": "DFlash2DraftModel",
    "eagle3": "Eagle3Speculator",
    "peagle": "PEagleSpeculator",
}


def write_speculators(spec: DraftSpec, tensors: "dict[str, Tensor]", folder: Path, target: "TargetFacts") -> None:
    """Make `folder`. A reduced vocabulary is stored as offsets `d2t` and marks `t2d`."""
    write_folder(folder, speculators_config(spec, target), with_offsets(spec, tensors))


def speculators_config(spec: DraftSpec, target: "TargetFacts") -> dict[str, Any]:
    """The config.json: layer ids are HS indices; the layers stand in `transformer_layer_config`."""
    own = _block(spec) if isinstance(spec, BlockSpec) else _eagle(spec)
    kind = own["speculators_model_type"]
    layers = layer_keys(spec, "qwen3" if spec.layers[0].qk_norm else "llama")
    if spec.num_target_layers is not None and isinstance(spec, BlockSpec):
        layers["num_target_layers"] = spec.num_target_layers  # no place of the format's own; read back here
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": spec.default_draft,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        **own,
        "architectures": [_CLASSES[kind]],
        "speculators_version": WITH_EMBEDDING if spec.embed_source == "checkpoint" else WITHOUT_EMBEDDING,
        "draft_vocab_size": spec.head_rows,
        "target_hidden_size": spec.target_hidden_size,
        "transformer_layer_config": layers,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": spec.target_name or target.name,
                "architectures": [target.architecture] if target.path.is_dir() else [],
            },
        },
    }


def _block(spec: BlockSpec) -> dict[str, Any]:
    headed = bool(spec.markov or spec.confidence)
    sliding = [layer.causal_in_block for layer in spec.layers if layer.window]
    config: dict[str, Any] = {
        "speculators_model_type": "dflash2" if spec.selector_rank else "dspark" if headed else "dflash",
        "aux_hidden_state_layer_ids": list(spec.taps),
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_id,
        "sample_from_anchor": spec.row_offset == 1,
        "sliding_window_non_causal": not sliding[0] if sliding else bool(spec.selector_rank),
    }
    if spec.selector_rank:
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        config |= {name: getattr(spec, name) for name in names}
    if headed:
        config |= {
            "markov_rank": spec.markov_rank,
            "markov_head_type": spec.markov or "vanilla",
            "enable_confidence_head": spec.confidence is not None,
            "confidence_head_with_markov": spec.confidence == "hidden+markov",
        }
    return config


def _eagle(spec: DraftSpec) -> dict[str, Any]:
    assert isinstance(spec, RecurrentSpec)
    config: dict[str, Any] = {
        "speculators_model_type": spec.algorithm,
        "eagle_aux_hidden_state_layer_ids": list(spec.taps),
        "norm_before_residual": spec.residual_normed,
        "norm_before_fc": spec.feature_norm == "before_fc",
        "fc_norm": spec.feature_norm == "per_tap",
        "norm_output": spec.recurrent_normed,
    }
    return config | ({"mask_token_id": spec.mask_id} if spec.mask_id is not None else {})


def with_offsets(spec: DraftSpec, tensors: "dict[str, Tensor]") -> "dict[str, Tensor]":
    """`d2t` [dV] as offsets from the draft id, and `t2d` [V], true for ids that have a draft row."""
    import torch

    if "d2t" not in tensors:
        return tensors
    ids = tensors["d2t"]
    marks = torch.zeros(spec.vocab_size, dtype=torch.bool)
    marks[ids] = True
    return {**tensors, "d2t": ids - torch.arange(len(ids)), "t2d": marks}
