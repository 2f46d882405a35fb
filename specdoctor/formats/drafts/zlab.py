"""Reader of z-lab DFlash checkpoints (formats page 1.5)."""

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.block_fields import read_block_common
from specdoctor.formats.drafts.block_tensors import block_tensor_shapes
from specdoctor.formats.drafts.checkpoint import Reading, TensorSource, same_names
from specdoctor.formats.drafts.config_parts import read_taps
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import BlockSpec


def read_zlab(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """z-lab DFlash: row k predicts anchor + k; embedding and head are the target's."""
    fields = Fields(config, "z-lab DFlash")
    block_key = "dflash_config.block_size" if config.has("dflash_config.block_size") else "block_size"
    block = config.get(block_key, int, 16)
    if block < 2:
        raise SpecdoctorError(f"{config.path}: key {block_key} is {block}, expected 2 or more (row 0 proposes nothing)")
    fields.key("block_size", block, block_key)
    count = config.positive("num_hidden_layers")
    if config.has("dflash_config.target_layer_ids"):
        taps = read_taps(config, "dflash_config.target_layer_ids", lowest=0)
    else:
        taps = tuple(i + 1 for i in default_taps(count, config.positive("num_target_layers")))
    fields.key("taps", taps, "dflash_config.target_layer_ids")
    read_block_common(fields, config, tensors, sliding_is_causal=True)
    fields.put("family", "zlab", "architectures")
    fields.put("algorithm", "dflash", "architectures")
    fields.put("row_offset", 0, "the format: row k predicts anchor + k")
    fields.key("mask_id", config.get("dflash_config.mask_token_id", int), "dflash_config.mask_token_id")
    for field, key, default in (
        ("embed_scale", "input_embedding_scale", 1.0),
        ("logit_scale", "output_multiplier", 1.0),
        ("softcap", "final_logit_softcapping", None),
    ):
        value = config.get(f"dflash_config.{key}", (int, float), default)
        fields.key(field, None if value is None else float(value), f"dflash_config.{key}")
    spec = fields.build(BlockSpec)
    return Reading(spec, same_names(block_tensor_shapes(spec)))


def default_taps(draft_layers: int, target_layers: int) -> list[int]:
    """z-lab's layer ids when the config has none: evenly spaced 1..L-3, one a draft layer (formats page 1.5)."""
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]
