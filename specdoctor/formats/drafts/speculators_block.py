"""Readers of speculators' block drafters, dflash and dspark, versions 0.8 and 0.9 (formats page 1.7, 1.7.1, 1.7.2).

The layers are described in `transformer_layer_config`; layer ids are HS indices as they stand. Before 0.9.0 embedding
and head are always in the file, from then on only the head of a reduced vocabulary: the tensors tell.
"""

from itertools import pairwise

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.block_fields import read_block_common, read_heads
from specdoctor.formats.drafts.block_tensors import block_tensor_shapes
from specdoctor.formats.drafts.checkpoint import Reading, Remark, TargetNeededError, TensorSource, same_names
from specdoctor.formats.drafts.config_parts import read_taps
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.drafts.known_keys import COMMON_KEYS
from specdoctor.formats.drafts.vocabulary_map import vocabulary_map_tensors
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import BlockSpec

LAYERS = "transformer_layer_config"
TAPS = "aux_hidden_state_layer_ids"
IGNORED_KEYS = {
    "speculators_version": "of the writer",
    "speculators_config.": "of the proposal: how many tokens to draft is the user's choice here",
    "has_no_defaults_at_init": "of transformers",
    **{f"{LAYERS}.{key}": reason for key, reason in COMMON_KEYS.items()},
}
IGNORED_TENSORS = {"verifier_lm_head.": "of the training loss", "verifier_norm.": "of the training loss"}


def read_speculators_dflash(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """speculators dflash: row k predicts anchor + k, unless `sample_from_anchor`."""
    fields = Fields(config, "speculators dflash")
    remarks = _refuse_domino(config)
    remarks += read_speculators_common(fields, config, tensors, target_layers, causal_default=True)
    from_anchor = config.get("sample_from_anchor", bool, False)
    read_row_offset(fields, config, from_anchor)
    if from_anchor:
        remarks.append(
            Remark(
                "unverified",
                f"{config.path}",
                "sample_from_anchor is true for a plain dflash, which speculators itself says may not be supported",
                subject="sample_from_anchor",
            )
        )
    fields.put("algorithm", "dflash", "speculators_model_type")
    return speculators_reading(fields.build(BlockSpec), tensors, remarks)


def read_speculators_dspark(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """speculators dspark: dflash with Markov and confidence head; row k predicts anchor + k + 1 by default."""
    fields = Fields(config, "speculators dspark")
    remarks = read_speculators_common(fields, config, tensors, target_layers, causal_default=True)
    from_anchor = config.get("sample_from_anchor", bool, True)
    read_row_offset(fields, config, from_anchor)
    rank = read_heads(
        fields,
        config,
        rank=config.get("markov_rank", int, 256),
        enabled=config.get("enable_confidence_head", bool, True),
        default_type="vanilla",
        default_with_markov=True,
    )
    fields.key("algorithm", "dspark" if rank else "dflash", "markov_rank")
    if fields.values["markov"] == "rnn" and not from_anchor:
        remarks.append(
            Remark(
                "unknown-key",
                f"{config.path}",
                "markov_head_type is 'rnn' and sample_from_anchor is false: its training runs the state over row 0, "
                "which proposes nothing, and no engine does",
                "such a drafter cannot be run here",
                fatal=True,
                subject="markov_head_type",
            )
        )
    return speculators_reading(fields.build(BlockSpec), tensors, remarks)


def read_speculators_common(
    fields: Fields, config: JsonConfig, tensors: TensorSource, target_layers: int | None, *, causal_default: bool
) -> list[Remark]:
    """Layers, taps, block, vocabulary. `causal_default`: sliding layers are causal in the block by default."""
    layers = config.view(LAYERS)
    causal = not config.get("sliding_window_non_causal", bool, not causal_default)
    name = "layers.0.self_attn.q_norm.weight"
    qk_norm = name in tensors or layers.get("model_type", str, "qwen3").startswith("qwen3")
    read_block_common(fields, layers, tensors, sliding_is_causal=causal, qk_norm=qk_norm)
    slides = "sliding" if any(layer.window for layer in fields.values["layers"]) else "none slides"
    fields.put("window_anchor", "block", f"the format: a window begins at the anchor less W ({slides})")
    fields.put("family", "speculators", "speculators_model_type")
    fields.key("target_hidden_size", config.get("target_hidden_size", int, None), "target_hidden_size")
    fields.key("block_size", config.positive("block_size", 8), "block_size")
    fields.key("mask_id", config.get("mask_token_id", int), "mask_token_id")
    verifier = config.get("speculators_config.verifier.name_or_path", str, None)
    fields.key("target_name", verifier, "speculators_config.verifier.name_or_path")
    _vocabulary(fields, config, tensors)
    fields.key("taps", _taps(config, target_layers), TAPS)
    return []


def speculators_reading(spec: BlockSpec, tensors: TensorSource, remarks: list[Remark]) -> Reading:
    """Tensors under canonical names; `d2t` is stored as offsets."""
    mapped, ignored = vocabulary_map_tensors(tensors, spec.head_rows, spec.vocab_size)
    return Reading(
        spec,
        same_names(block_tensor_shapes(spec)) | mapped,
        ignored_tensors=IGNORED_TENSORS | ignored,
        ignored_keys=IGNORED_KEYS,
        remarks=remarks,
    )


def read_row_offset(fields: Fields, config: JsonConfig, from_anchor: bool) -> None:
    """Which token row k predicts; raises for a block of one row that proposes nothing."""
    fields.key("row_offset", int(from_anchor), "sample_from_anchor")
    if not from_anchor and fields.values["block_size"] < 2:
        raise SpecdoctorError(
            f"{config.path}: key block_size is {fields.values['block_size']}, expected 2 or more (row 0 proposes "
            "nothing where sample_from_anchor is false)"
        )


def _vocabulary(fields: Fields, config: JsonConfig, tensors: TensorSource) -> None:
    rows, vocab = config.positive("draft_vocab_size", 32000), fields.values["vocab_size"]
    if rows > vocab:
        raise SpecdoctorError(
            f"{config.path}: key draft_vocab_size is {rows}, expected at most {LAYERS}.vocab_size, {vocab}"
        )
    fields.key("draft_vocab_size", None if rows == vocab else rows, "draft_vocab_size")
    if rows != vocab and "lm_head.weight" not in tensors:
        raise SpecdoctorError(
            f"{config.path}: key draft_vocab_size is {rows} of {vocab}, but the file has no tensor lm_head.weight of "
            "that many rows; expected one, since the target has no such head"
        )


def _taps(config: JsonConfig, target_layers: int | None) -> tuple[int, ...]:
    """HS indices; by default 2, L // 2 and L - 3 of the target's depth L."""
    if config.find(TAPS) is not None:
        return read_taps(config, TAPS, lowest=0, shift=0)
    if target_layers is None:
        raise TargetNeededError(
            f"{config.path}: key {TAPS} is missing, and its default (2, L // 2, L - 3) depends on the target's depth; "
            "give the target as well"
        )
    taps = (2, target_layers // 2, target_layers - 3)
    if any(b <= a for a, b in pairwise(taps)):
        raise SpecdoctorError(
            f"{config.path}: key {TAPS} is missing, and its default {list(taps)} is no rising list for a target of "
            f"{target_layers} layers; expected the key"
        )
    return taps


def _refuse_domino(config: JsonConfig) -> list[Remark]:
    """A dflash whose head is Domino's is another drafter."""
    kind = config.get("projector_type", str, "dflash")
    if kind == "dflash" and not config.get("shift_label", bool, False):
        return []
    return [
        Remark(
            "unknown-key",
            f"{config.path}",
            f"projector_type is {kind!r}: rows behind a Domino head, which cannot be run here",
            fatal=True,
            subject="projector_type",
        )
    ]
