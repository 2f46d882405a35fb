"""Reader of speculators' EAGLE-3 and P-EAGLE checkpoints (formats page 1.7, 1.7.4, 1.7.5)."""

from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import Reading, Remark, TensorSource
from specdoctor.formats.drafts.eagle3_tensors import rotary_buffers, stored_eagle3
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
from specdoctor.formats.drafts.known_keys import COMMON_KEYS
from specdoctor.formats.drafts.vocabulary_map import vocabulary_map_tensors
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import RecurrentSpec

LAYERS = "transformer_layer_config"
DRAFT_VOCABULARY = 32000  # rows where the config has none
MASK_KEYS = ("mask_token_id", "ptd_token_id")  # the latter until 0.8
# Flags without a trace in the weights: key -> the spec's field. Writer and training command default differently.
INVISIBLE = {"norm_before_residual": "residual_normed", "norm_output": "recurrent_normed"}
IGNORED = {
    "speculators_version": "of the writer",
    "speculators_config.": "how the writer's engine drafts and verifies",
    "has_no_defaults_at_init": "of transformers",
    "embed_requires_grad": "training",
    "enable_sp_ulysses": "training",
    "para_depths": "training",
    "down_sample_ratio": "training",
    "down_sample_ratio_min": "training",
    "max_seq_len": "training",
    "prediction_loss_weight": "training",
}


def read_speculators_eagle3(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """speculators eagle3 and peagle: HS indices as aux ids, offsets in `d2t`, the layers in a nested config.

    `norm_output` says here that the vector fed back is the normed one; the norm always stands before the head.
    """
    fields = Fields(config, "speculators")
    kind = config.get("speculators_model_type", str)
    layers = config.view(LAYERS)
    fields.put("family", "speculators", "speculators_model_type")
    fields.key("algorithm", kind, "speculators_model_type")
    read_draft_layers(fields, layers, qk_norm=_qk_norm(layers, tensors))
    vocab = layers.positive("vocab_size")
    rows = config.positive("draft_vocab_size", DRAFT_VOCABULARY)
    told = config.find("draft_vocab_size") is not None
    origin = "config key draft_vocab_size" if told else "default of speculators (no key draft_vocab_size)"
    put_head(fields, tensors, rows, vocab, origin)
    fields.key("target_hidden_size", config.get("target_hidden_size", int, None), "target_hidden_size")
    read_eagle_taps(fields, config, "eagle_aux_hidden_state_layer_ids", shift=0, target_layers=target_layers)
    read_feature_norm(fields, config, tensors, ["before_fc", "per_tap"])
    remarks = [remark for key, field in INVISIBLE.items() if (remark := _invisible(fields, config, key, field))]
    fields.put("head_normed", True, "the format: the norm stands before the head")
    read_draft_tokens(fields, config)
    name = config.get("speculators_config.verifier.name_or_path", str, None)
    fields.key("target_name", name, "speculators_config.verifier.name_or_path")
    if kind == "peagle" and not read_mask_id(fields, config, MASK_KEYS):
        raise SpecdoctorError(
            f"{config.path}: key mask_token_id is missing, expected the token of P-EAGLE's parallel depths"
        )
    spec = fields.build(RecurrentSpec)
    mapped, ignored = vocabulary_map_tensors(tensors, rows, vocab)
    nested = {f"{LAYERS}.{key}": reason for key, reason in (COMMON_KEYS | NEVER_OF_USE).items()}
    return Reading(
        spec,
        stored_eagle3(spec, tensors) | mapped,
        ignored | rotary_buffers(tensors),
        IGNORED | NEVER_OF_USE | nested,
        remarks,
    )


def read_draft_tokens(fields: Fields, config: JsonConfig) -> None:
    """`draft_tokens`: what the checkpoint's default proposal method drafts in a round."""
    methods: list[Any] = config.get("speculators_config.proposal_methods", list, [])
    default = config.get("speculators_config.default_proposal_method", str, None)
    for method in methods:
        if isinstance(method, dict) and default in (None, method.get("proposal_type")):
            tokens = method.get("speculative_tokens")
            if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0:
                fields.put("draft_tokens", tokens, "config key speculators_config.proposal_methods.speculative_tokens")
                return
            raise SpecdoctorError(
                f"{config.path}: key speculators_config.proposal_methods has speculative_tokens {tokens!r}, expected a "
                "whole number of 1 or more"
            )
    fields.put("draft_tokens", DRAFT_TOKENS, "chosen here (no key speculators_config.proposal_methods)")


def _qk_norm(layers: JsonConfig, tensors: TensorSource) -> bool:
    """Qwen3 layers have norms on queries and keys, Llama's have none; without a model_type the tensors tell."""
    kind = layers.get("model_type", str, None)
    if kind is None:
        return any(name.endswith(".self_attn.q_norm.weight") for name in tensors.names())
    if kind not in ("llama", "qwen3"):
        raise SpecdoctorError(
            f"{layers.path}: key {LAYERS}.model_type is {kind!r}, expected llama or qwen3; drafters of other layers "
            "cannot be run here"
        )
    return bool(kind == "qwen3")


def _invisible(fields: Fields, config: JsonConfig, key: str, field: str) -> Remark | None:
    """A flag whose absence the weights cannot settle: the config class's default, and a word about the other one."""
    value = config.get(key, bool, None)
    if value is not None or (key == "norm_output" and fields.values["algorithm"] == "peagle"):  # nothing is fed back
        fields.key(field, bool(value), key)
        return None
    origin = f"default of speculators' config class (no key {key}); its training command's default is true"
    fields.put(field, False, origin)
    return Remark(
        "unverified",
        f"{config.path}",
        f"key {key} is missing: speculators' config class takes false, its training command true, and the weights do "
        "not tell; false is used",
        "compare the acceptance of the second and later drafts under both",
        subject=key,
    )
