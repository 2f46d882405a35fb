"""Writer of Medusa heads in vLLM's layout (formats page 1.11)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdoctor.formats.drafts.write_config import write_folder
from specdoctor.formats.spec import MedusaSpec

if TYPE_CHECKING:
    from torch import Tensor


def write_medusa(spec: MedusaSpec, tensors: "dict[str, Tensor]", folder: Path) -> None:
    """Make `folder` from canonical tensors; `d2t` [rows] holds absolute target ids, as the format's token_map does."""
    write_folder(folder, medusa_config(spec), {_stored(name): value for name, value in tensors.items()})


def medusa_config(spec: MedusaSpec) -> dict[str, Any]:
    """The config.json. `medusa_fc_bias` is always there: vLLM takes its absence for no biases."""
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "truncated_vocab_size": spec.head_rows,
        "num_heads": spec.num_heads,
        "num_hidden_layers": spec.res_layers,
        "medusa_fc_bias": spec.fc_bias,
        "original_lm_head": spec.shared_head,
    }
    if spec.target_name is not None:
        config["base_model_name_or_path"] = spec.target_name
    return config | ({"logit_scale": spec.logit_scale} if spec.logit_scale != 1.0 else {})


def _stored(name: str) -> str:
    """heads.{i}.blocks.{j}.weight -> blocks.{i}.layers.{j}.weight."""
    if name == "d2t":
        return "token_map"
    parts = name.split(".")
    return ".".join(["blocks", parts[1], "layers", *parts[3:]]) if parts[0] == "heads" else name
