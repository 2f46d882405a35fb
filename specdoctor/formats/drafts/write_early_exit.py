"""Writer of early-exit heads (docs/early-exit-format.md)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdoctor.formats.drafts.early_exit import ARCHITECTURE
from specdoctor.formats.drafts.write_config import layer_keys, write_folder
from specdoctor.formats.spec import EarlyExitSpec

if TYPE_CHECKING:
    from torch import Tensor

NOT_OF_THE_FORMAT = ("model_type", "tie_word_embeddings", "use_sliding_window", "max_window_layers")


def write_early_exit(spec: EarlyExitSpec, tensors: "dict[str, Tensor]", folder: Path) -> None:
    """Make `folder` of the head's layers, and its final norm if it has one of its own."""
    write_folder(folder, early_exit_config(spec), tensors)


def early_exit_config(spec: EarlyExitSpec) -> dict[str, Any]:
    """The config.json. `spec` must name the target's depth."""
    assert spec.num_target_layers is not None
    layers = {key: value for key, value in layer_keys(spec).items() if key not in NOT_OF_THE_FORMAT}
    return {
        **layers,
        "architectures": [ARCHITECTURE],
        "exit_layer": spec.exit_layer,
        "num_target_layers": spec.num_target_layers,
        "draft_tokens": spec.draft_tokens,
        "target_name": spec.target_name,
    }
