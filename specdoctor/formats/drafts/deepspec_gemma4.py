"""Readers of DeepSpec's drafters on a Gemma4 backbone: DSpark and DFlash (formats page 1.2), EAGLE-3 (1.3)."""

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.block_fields import read_heads
from specdoctor.formats.drafts.block_tensors import block_tensor_shapes
from specdoctor.formats.drafts.checkpoint import Reading, TensorSource, same_names
from specdoctor.formats.drafts.config_parts import read_taps
from specdoctor.formats.drafts.eagle3_tensors import eagle3_tensor_shapes
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.drafts.gemma4_fields import IGNORED_KEYS, read_gemma4_common
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import BlockSpec, RecurrentSpec


def read_deepspec_gemma4_block(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """DSpark, and DFlash (the same class without Markov head), on Gemma4 layers: row k predicts anchor + k + 1."""
    fields = Fields(config, "DeepSpec")
    read_gemma4_common(fields, config, tensors)
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
    return Reading(spec, same_names(block_tensor_shapes(spec)), ignored_keys=IGNORED_KEYS)


def read_deepspec_gemma4_eagle3(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """EAGLE-3 whose one layer is Gemma4's: its attention reads [embedding ; feature], its residual is the feature."""
    fields = Fields(config, "DeepSpec EAGLE-3")
    read_gemma4_common(fields, config, tensors)
    depth = config.positive("num_hidden_layers")
    if depth != 1:
        raise SpecdoctorError(f"{config.path}: key num_hidden_layers is {depth}, expected 1 for DeepSpec's EAGLE-3")
    fields.put("family", "deepspec", "architectures")
    fields.put("algorithm", "eagle3", "architectures")
    fields.key("taps", read_taps(config, "target_layer_ids", lowest=0), "target_layer_ids")
    fields.key("draft_tokens", config.positive("ttt_length"), "ttt_length")
    spec = fields.build(RecurrentSpec)
    ignored = IGNORED_KEYS | {
        "step_loss_decay": "training",
        "draft_num_hidden_layers": "equal to num_hidden_layers",
    }
    return Reading(spec, same_names(eagle3_tensor_shapes(spec)), ignored_keys=ignored)
