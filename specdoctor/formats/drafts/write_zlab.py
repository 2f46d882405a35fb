"""Writer of z-lab DFlash and DFlash2 folders (formats page 1.5, 1.6)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdoctor.formats.drafts.write_config import layer_keys, write_folder
from specdoctor.formats.spec import BlockSpec

if TYPE_CHECKING:
    from torch import Tensor


def write_zlab(spec: BlockSpec, tensors: "dict[str, Tensor]", folder: Path) -> None:
    """Make `folder`; canonical names are z-lab's. `spec` must be expressible and bring neither embedding nor head."""
    write_folder(folder, zlab_config(spec), tensors)


def zlab_config(spec: BlockSpec) -> dict[str, Any]:
    """The config.json: layer ids are layer outputs; scales stand only where they are not 1."""
    second = spec.algorithm == "dflash2"
    nested: dict[str, Any] = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_id,
        "target_layer_ids": [tap - 1 for tap in spec.taps],
    }
    scales = (("input_embedding_scale", spec.embed_scale, 1.0), ("output_multiplier", spec.logit_scale, 1.0))
    nested |= {
        key: value for key, value, usual in (*scales, ("final_logit_softcapping", spec.softcap, None)) if value != usual
    }
    if second:
        nested |= {
            "conv_kernel_size": spec.conv_kernel_size,
            "conv_group_size": spec.conv_group_size,
            "selector_rank": spec.selector_rank,
            "selector_top_k": spec.selector_top_k,
        }
    config = {
        **layer_keys(spec),
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "block_size": spec.block_size,
        "dflash_config": nested,
    }
    if spec.num_target_layers is not None:
        config["num_target_layers"] = spec.num_target_layers
    if any(layer.causal_in_block != bool(layer.window) for layer in spec.layers):
        config["is_causal"] = spec.layers[0].causal_in_block
    return config
