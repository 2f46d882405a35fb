"""Reader of DeepSpec block drafters, DSpark and DFlash on a Qwen3 backbone (formats page 1.1)."""

from specdoctor.formats.drafts.block_fields import read_block_common, read_heads
from specdoctor.formats.drafts.block_tensors import block_tensor_shapes
from specdoctor.formats.drafts.checkpoint import Reading, TensorSource, same_names
from specdoctor.formats.drafts.config_parts import read_taps
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import BlockSpec


def read_deepspec_block(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """DeepSpec DSpark, and its DFlash (the same class without Markov head): row k predicts anchor + k + 1."""
    fields = Fields(config, "DeepSpec")
    read_block_common(fields, config, tensors, sliding_is_causal=False)
    rank = read_heads(
        fields, config, rank=config.get("markov_rank", int), enabled=config.get("enable_confidence_head", bool)
    )
    fields.put("family", "deepspec", "architectures")
    fields.key("algorithm", "dspark" if rank > 0 else "dflash", "markov_rank")
    fields.key("taps", read_taps(config, "target_layer_ids", lowest=-1), "target_layer_ids")
    fields.key("block_size", config.positive("block_size"), "block_size")
    fields.put("row_offset", 1, "the format: row k predicts anchor + k + 1")
    fields.key("mask_id", config.get("mask_token_id", int), "mask_token_id")
    spec = fields.build(BlockSpec)
    return Reading(spec, same_names(block_tensor_shapes(spec)))
