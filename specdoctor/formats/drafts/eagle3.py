"""Readers of EAGLE-3 checkpoints: DeepSpec (formats page 1.3), SpecForge and yuhuili with P-EAGLE (1.8)."""

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import Reading, Remark, TensorSource, same_names
from specdoctor.formats.drafts.config_parts import read_layers, read_rope, read_taps
from specdoctor.formats.drafts.eagle3_tensors import (
    eagle3_tensor_shapes,
    has_midlayer,
    rotary_buffers,
    stored_eagle3,
)
from specdoctor.formats.drafts.eagle_parts import (
    DRAFT_TOKENS,
    NEVER_OF_USE,
    put_head,
    read_draft_layers,
    read_eagle_taps,
    read_feature_norm,
    read_mask_id,
)
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.drafts.vocabulary_map import vocabulary_map_tensors
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import RecurrentSpec

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # the latter two: what vLLM reads
AUX_KEY = "eagle_config.eagle_aux_hidden_state_layer_ids"


def read_deepspec_eagle3(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """DeepSpec's Qwen3 EAGLE-3: full vocabulary, own embedding and head, q/k norms, `ttt_length` drafts a round."""
    fields = Fields(config, "DeepSpec EAGLE-3")
    layers = read_layers(config)
    if len(layers) != 1:
        raise SpecdoctorError(
            f"{config.path}: key num_hidden_layers is {len(layers)}, expected 1 for DeepSpec's EAGLE-3"
        )
    fields.put("family", "deepspec", "architectures")
    fields.put("algorithm", "eagle3", "architectures")
    fields.key("layers", layers, "num_hidden_layers")
    fields.key("hidden_size", config.positive("hidden_size"), "hidden_size")
    fields.key("vocab_size", config.positive("vocab_size"), "vocab_size")
    fields.key("taps", read_taps(config, "target_layer_ids", lowest=0), "target_layer_ids")
    fields.key("draft_tokens", config.positive("ttt_length"), "ttt_length")
    fields.key("rms_norm_eps", float(config.get("rms_norm_eps", (int, float))), "rms_norm_eps")
    fields.key("rope", read_rope(config), "rope_parameters" if config.has("rope_parameters") else "rope_theta")
    fields.key("num_target_layers", config.get("num_target_layers", int, None), "num_target_layers")
    fields.source("embed_source", "embed_tokens.weight", "embed_tokens.weight" in tensors)
    fields.source("head_source", "lm_head.weight", "lm_head.weight" in tensors)
    spec = fields.build(RecurrentSpec)
    ignored = {
        "step_loss_decay": "training",
        "draft_num_hidden_layers": "equal to num_hidden_layers",
        "target_model_name_or_path": "the target is given by the user",
    }
    return Reading(spec, same_names(eagle3_tensor_shapes(spec)), ignored_keys=ignored)


def read_eagle3(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """SpecForge's and yuhuili's EAGLE-3, and P-EAGLE: the same with a `mask_hidden` for the parallel depths.

    Aux ids are layer outputs; the vector fed back is always the one before the norm, and `norm_output` says whether the
    norm stands before the head (contrast speculators).
    """
    architecture = str((config.get("architectures", list, [""]) or [""])[0])
    specforge = architecture.endswith("Eagle3") or architecture == "PEagleDraftModel"
    writer = "SpecForge" if specforge else "SafeAILab EAGLE-3"
    parallel = architecture == "PEagleDraftModel" or "mask_hidden" in tensors
    fields = Fields(config, writer)
    fields.put("family", "specforge" if specforge else "yuhuili", "architectures")
    fields.put("algorithm", "peagle" if parallel else "eagle3", "tensor mask_hidden" if parallel else "architectures")
    if config.get("eagle_config.use_aux_hidden_state", bool, True) is False:
        raise SpecdoctorError(
            f"{config.path}: key eagle_config.use_aux_hidden_state is false, expected true; EAGLE-3 that reads the "
            "last hidden state alone has no engine here"
        )
    _head(fields, config, tensors)
    remarks: list[Remark] = []
    normed = f"{'midlayer' if has_midlayer(tensors) else 'layers.0'}.self_attn.q_norm.weight"
    read_draft_layers(fields, config, qk_norm=normed in tensors)
    if normed in tensors:
        remarks.append(
            Remark("unverified", f"{tensors.file_of(normed)}", f"tensor {normed}: {writer} has no q/k norm, it is used")
        )
    fields.key("target_hidden_size", config.get("target_hidden_size", int, None), "target_hidden_size")
    read_eagle_taps(fields, config, AUX_KEY, shift=1, target_layers=target_layers)
    read_feature_norm(fields, config, tensors, ["per_tap"])
    fields.key("head_normed", config.get("norm_output", bool, True), "norm_output")
    fields.put("recurrent_normed", False, "the format: the vector fed back is always before the norm")
    fields.key("residual_normed", config.get("norm_before_residual", bool, False), "norm_before_residual")
    fields.put("draft_tokens", DRAFT_TOKENS, "chosen here; the format leaves it to the run")
    if parallel and not read_mask_id(fields, config, MASK_KEYS):
        remarks.append(_no_mask_id(config))
    spec = fields.build(RecurrentSpec)
    stored, ignored = _with_map(spec, tensors)
    keys = NEVER_OF_USE | {"parallel_drafting": "told by mask_hidden"}
    return Reading(spec, stored, ignored | rotary_buffers(tensors), keys, remarks)


def _head(fields: Fields, config: JsonConfig, tensors: TensorSource) -> None:
    """Rows of the draft head, by its key or its tensor, and who supplies embedding and head."""
    vocab = config.positive("vocab_size")
    rows, origin = vocab, "neither key draft_vocab_size nor tensor lm_head.weight"
    if config.get("draft_vocab_size", int, None) is not None:
        rows, origin = config.positive("draft_vocab_size"), "config key draft_vocab_size"
    elif "lm_head.weight" in tensors:
        rows, origin = tensors.shape("lm_head.weight")[0], "rows of tensor lm_head.weight (no key draft_vocab_size)"
    put_head(fields, tensors, rows, vocab, origin)


def _with_map(spec: RecurrentSpec, tensors: TensorSource) -> tuple[dict, dict[str, str]]:
    """The canonical tensors with the vocabulary map among them, and what of the map is set aside."""
    mapped, ignored = vocabulary_map_tensors(tensors, spec.head_rows, spec.vocab_size)
    return stored_eagle3(spec, tensors) | mapped, ignored


def _no_mask_id(config: JsonConfig) -> Remark:
    return Remark(
        "unverified",
        f"{config.path}",
        f"none of the keys {', '.join(MASK_KEYS)} is there, and P-EAGLE needs the token of its parallel depths",
        "SpecForge does not save its --mask-token-id: add it as mask_token_id",
        fatal=True,
        subject="mask_token_id",
    )
