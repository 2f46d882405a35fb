"""Reader of z-lab DFlash checkpoints, and of SpecForge's, which are the same (formats page 1.5, 1.9)."""

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.block_fields import read_block_common
from specdoctor.formats.drafts.block_tensors import block_tensor_shapes
from specdoctor.formats.drafts.checkpoint import Reading, Remark, TargetNeededError, TensorSource, same_names
from specdoctor.formats.drafts.config_parts import read_taps
from specdoctor.formats.drafts.dflash_attention import read_derived_attention, refuse_derived
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import BlockSpec


def read_zlab(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """z-lab DFlash: row k predicts anchor + k; embedding and head are the target's."""
    fields = Fields(config, "z-lab DFlash")
    remarks = read_zlab_common(fields, config, tensors, target_layers)
    fields.put("family", "zlab", "architectures")
    fields.put("algorithm", "dflash", "architectures")
    spec = fields.build(BlockSpec)
    ignored = {"dflash_config.projector_type": "dflash: no head behind the backbone"}
    return Reading(spec, same_names(block_tensor_shapes(spec)), ignored_keys=ignored, remarks=remarks)


def read_zlab_common(
    fields: Fields, config: JsonConfig, tensors: TensorSource, target_layers: int | None
) -> list[Remark]:
    """What DFlash and DFlash2 share: block, taps, layers, mask, scales."""
    remarks = refuse_derived(config, tensors)
    block_key = "dflash_config.block_size" if config.has("dflash_config.block_size") else "block_size"
    block = config.get(block_key, int, 16)
    if block < 2:
        raise SpecdoctorError(f"{config.path}: key {block_key} is {block}, expected 2 or more (row 0 proposes nothing)")
    fields.key("block_size", block, block_key)
    if block_key != "block_size" and config.find("block_size") not in (None, block):
        remarks.append(_two_blocks(config, block))
    remarks += read_dflash_taps(fields, config, target_layers)
    read_block_common(fields, config, tensors, sliding_is_causal=True)
    remarks += read_derived_attention(fields, config, tensors)
    fields.put("row_offset", 0, "the format: row k predicts anchor + k")
    fields.key("mask_id", config.get("dflash_config.mask_token_id", int), "dflash_config.mask_token_id")
    for field, key, default in (
        ("embed_scale", "input_embedding_scale", 1.0),
        ("logit_scale", "output_multiplier", 1.0),
        ("softcap", "final_logit_softcapping", None),
    ):
        value = config.get(f"dflash_config.{key}", (int, float), default)
        fields.key(field, None if value is None else float(value), f"dflash_config.{key}")
    return remarks


def read_dflash_taps(fields: Fields, config: JsonConfig, target_layers: int | None) -> list[Remark]:
    """`dflash_config.target_layer_ids` (layer outputs) or z-lab's default; a tap on the last layer is a remark."""
    key = "dflash_config.target_layer_ids"
    depth = config.get("num_target_layers", int, target_layers)
    if config.find(key) is not None:
        taps = read_taps(config, key, lowest=0)
    else:
        if depth is None:
            raise TargetNeededError(
                f"{config.path}: neither {key} nor num_target_layers is there, and the default taps depend on the "
                "target's depth; expected one of them, or a target"
            )
        taps = tuple(i + 1 for i in default_taps(config.positive("num_hidden_layers"), depth))
    fields.key("taps", taps, key)
    if depth is None or max(taps) != depth:
        return []
    fields.put("tap_final_is_prenorm", False, "the reference code reads transformers' last hidden state, normed")
    return [
        Remark(
            "unverified",
            f"{config.path}",
            f"{key} ends with the target's last layer, {depth - 1}; its state is taken after the final norm, as the "
            "reference code does in transformers",
            "engines that tap the raw layer output feed another state; compare acceptance",
            subject=key,
        )
    ]


def default_taps(draft_layers: int, target_layers: int) -> list[int]:
    """z-lab's layer ids when the config has none: evenly spaced 1..L-3, one a draft layer (formats page 1.5)."""
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]


def _two_blocks(config: JsonConfig, block: int) -> Remark:
    return Remark(
        "ignored",
        f"{config.path}",
        f"key block_size is {config.find('block_size')}, but dflash_config.block_size is {block}, which is read first",
        subject="block_size",
    )
