"""Writer of DeepSpec folders: DSpark and DFlash (formats page 1.1), EAGLE-3 (1.3)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdoctor.formats.drafts.write_config import layer_keys, write_folder
from specdoctor.formats.spec import BlockSpec, DraftSpec

if TYPE_CHECKING:
    from torch import Tensor

ANCHORS = 512  # num_anchors, of training only: DeepSpec's value; without the key it refuses the checkpoint
STEP_LOSS_DECAY = 0.8  # of training only


def write_deepspec(spec: DraftSpec, tensors: "dict[str, Tensor]", folder: Path) -> None:
    """Make `folder`; canonical names are DeepSpec's. `spec` must be expressible and bring embedding and head."""
    write_folder(folder, deepspec_config(spec), tensors)


def deepspec_config(spec: DraftSpec) -> dict[str, Any]:
    """The config.json: layer ids are layer outputs, -1 the embedding output."""
    config = {**layer_keys(spec), "target_layer_ids": [tap - 1 for tap in spec.taps]}
    if spec.num_target_layers is not None:
        config["num_target_layers"] = spec.num_target_layers
    if not isinstance(spec, BlockSpec):
        return config | {
            "architectures": ["Qwen3Eagle3Model"],
            "ttt_length": spec.default_draft,
            "step_loss_decay": STEP_LOSS_DECAY,
            "draft_num_hidden_layers": len(spec.layers),
            "target_model_name_or_path": spec.target_name,
        }
    config |= {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_id,
        "num_anchors": ANCHORS,
        "markov_rank": spec.markov_rank,
        "enable_confidence_head": spec.confidence is not None,
        "confidence_head_with_markov": spec.confidence == "hidden+markov",
    }
    return config | ({"markov_head_type": spec.markov} if spec.markov else {})
