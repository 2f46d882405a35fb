"""Writer of SpecForge's EAGLE-3 folders, which SGLang, vLLM and llama.cpp's converter read (formats page 1.8)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.write_config import layer_keys, write_folder
from specdoctor.formats.drafts.write_speculators import with_offsets
from specdoctor.formats.spec import RecurrentSpec

if TYPE_CHECKING:
    from torch import Tensor


def write_specforge(spec: RecurrentSpec, tensors: "dict[str, Tensor]", folder: Path) -> None:
    """Make `folder`. A reduced vocabulary is stored as offsets `d2t` and marks `t2d`.

    Raises `SpecdoctorError` for what the format has no key for.
    """
    stored = {_midlayer(name): value for name, value in with_offsets(spec, tensors).items()}
    write_folder(folder, specforge_config(spec), stored)


def specforge_config(spec: RecurrentSpec) -> dict[str, Any]:
    """The config.json: layer ids are layer outputs."""
    refused = {
        "more than one layer": len(spec.layers) != 1,
        "norms on queries and keys": any(layer.qk_norm for layer in spec.layers),
        "a norm over all taps": spec.feature_norm == "before_fc",
        "a normed vector fed back": spec.recurrent_normed,
        "the target's embedding output as a tap": 0 in spec.taps,
    }
    for what, there in refused.items():
        if there:
            raise SpecdoctorError(f"a SpecForge EAGLE-3 folder cannot hold a drafter with {what}")
    config = {
        **layer_keys(spec, "llama"),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": spec.head_rows,
        "target_hidden_size": spec.target_hidden_size or spec.hidden_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in spec.taps],
            "use_aux_hidden_state": True,
        },
        "fc_norm": spec.feature_norm == "per_tap",
        "norm_output": spec.head_normed,
    }
    return config | ({"norm_before_residual": True} if spec.residual_normed else {})


def _midlayer(name: str) -> str:
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name
