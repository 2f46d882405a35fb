"""Reader of SpecForge DSpark checkpoints: a DFlash backbone with heads (formats page 1.9).

SpecForge's DFlash is read by `zlab`: it writes the same files. Early files have the heads under `logit_head.`.
"""

from specdoctor.formats.drafts.block_fields import read_block_common, read_heads
from specdoctor.formats.drafts.block_tensors import block_tensor_shapes
from specdoctor.formats.drafts.checkpoint import Reading, Stored, TensorSource
from specdoctor.formats.drafts.dflash_attention import read_derived_attention, refuse_derived
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.drafts.zlab import read_dflash_taps
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import BlockSpec

HEAD_PREFIX = "logit_head."


def read_specforge_dspark(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """SpecForge DSpark: row k predicts anchor + k + 1; embedding and head are the target's."""
    fields = Fields(config, "SpecForge DSpark")
    remarks = refuse_derived(config, tensors)
    remarks += read_dflash_taps(fields, config, target_layers)
    read_block_common(fields, config, tensors, sliding_is_causal=True)
    remarks += read_derived_attention(fields, config, tensors)
    enabled, origin = _confident(config, tensors)
    rank = read_heads(
        fields,
        config,
        rank=config.get("dflash_config.markov_rank", int, 0),
        enabled=enabled,
        prefix="dflash_config.",
        default_type="vanilla",
        default_with_markov=False,
    )
    fields.put("confidence", fields.values["confidence"], origin)
    fields.put("family", "specforge", "dflash_config.projector_type or architectures")
    fields.key("algorithm", "dspark" if rank else "dflash", "dflash_config.markov_rank")
    fields.key("block_size", config.positive("block_size"), "block_size")
    fields.put("row_offset", 1, "the format: row k predicts anchor + k + 1")
    fields.key("mask_id", config.get("dflash_config.mask_token_id", int), "dflash_config.mask_token_id")
    spec = fields.build(BlockSpec)
    stored = {name: Stored(_stored_name(name, tensors), shape) for name, shape in block_tensor_shapes(spec).items()}
    ignored = {"dflash_config.confidence_head_alpha": "weight of a training loss"}
    return Reading(spec, stored, ignored_keys=ignored, remarks=remarks)


def _confident(config: JsonConfig, tensors: TensorSource) -> tuple[bool, str]:
    """Whether there is a confidence head, and what says so: the key, else the weight of its loss, else the tensor."""
    key, weight = "dflash_config.enable_confidence_head", "dflash_config.confidence_head_alpha"
    enabled = config.get(key, bool, None)
    if enabled is not None:
        return enabled, f"config key {key}"
    alpha = config.get(weight, (int, float), None)
    if alpha is not None:
        return alpha > 0, f"default of SpecForge DSpark: {weight} is {alpha} (no key {key})"
    name = "confidence_head.proj.weight"
    return _stored_name(name, tensors) in tensors, f"tensor {name} (neither {key} nor {weight})"


def _stored_name(name: str, tensors: TensorSource) -> str:
    return name if name in tensors or HEAD_PREFIX + name not in tensors else HEAD_PREFIX + name
