"""What the readers of the EAGLE family share: draft layers with Llama's defaults, default taps, draft length."""

from collections.abc import Iterable
from itertools import pairwise

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import TensorSource
from specdoctor.formats.drafts.config_parts import read_layers, read_rope, read_taps
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.json_config import JsonConfig

DRAFT_TOKENS = 5  # of formats that leave the length to the run
LLAMA_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA_EPS = 1e-6
FEATURE_NORMS = {  # RecurrentSpec.feature_norm -> config key, a tensor that it has
    "before_fc": ("norm_before_fc", "input_norm.weight"),
    "per_tap": ("fc_norm", "fc_norm.0.weight"),
}
NEVER_OF_USE = {
    "mlp_bias": "the tensors tell whether there are biases",
    "target_model_type": "the target is given by the user",
    "target_model_name_or_path": "the target is given by the user",
}


def read_draft_layers(fields: Fields, config: JsonConfig, *, qk_norm: bool) -> None:
    """Sizes, layers, epsilon and RoPE from `config`, the object that describes the draft layers.

    RoPE and epsilon default to those of transformers' Llama: published EAGLE configs leave them out.
    """
    prefix = config.prefix
    fields.key("hidden_size", config.positive("hidden_size"), f"{prefix}hidden_size")
    fields.key("vocab_size", config.positive("vocab_size"), f"{prefix}vocab_size")
    fields.key("layers", read_layers(config, qk_norm=qk_norm), f"{prefix}num_hidden_layers")
    fields.key("rms_norm_eps", float(config.get("rms_norm_eps", (int, float), LLAMA_EPS)), f"{prefix}rms_norm_eps")
    keys = [key for key in ("rope_parameters", "rope_theta", "rope_scaling") if config.find(key) is not None]
    config.find("max_position_embeddings")  # a bound of the writer's tables, of no use to unscaled RoPE
    rope = read_rope(config) if keys else dict(LLAMA_ROPE)
    fields.key("rope", rope, f"{prefix}{keys[0] if keys else 'rope_theta'}")


def read_eagle_taps(fields: Fields, config: JsonConfig, key: str, *, shift: int, target_layers: int | None) -> None:
    """Taps from `key`, or HS[2], HS[L//2], HS[L-3]: SafeAILab's choice, which the other writers took over.

    `shift` is 1 where the key holds layer outputs, 0 where it holds HS indices. Without key and without the target's
    depth L the taps stay empty.
    """
    if config.get(key, list, None) is not None:
        fields.key("taps", read_taps(config, key, lowest=0, shift=shift), key)
    elif target_layers is None:
        fields.put("taps", (), f"2, L//2, L-3 of a target with L layers, unknown without the target (no key {key})")
    else:
        taps = (2, target_layers // 2, target_layers - 3)
        if any(b <= a for a, b in pairwise(taps)):
            raise SpecdoctorError(
                f"{config.path}: key {key} is missing, and its default (2, L//2, L-3) needs a target of 7 layers or "
                f"more, but this one has {target_layers}; add the key"
            )
        fields.put("taps", taps, f"default of {fields.writer} for {target_layers} target layers (no key {key})")


def read_feature_norm(fields: Fields, config: JsonConfig, tensors: TensorSource, kinds: Iterable[str]) -> None:
    """The norm before `fc`, one of `kinds`: by its key, or where that is absent by its tensor."""
    found = []
    for kind in kinds:
        key, tensor = FEATURE_NORMS[kind]
        told = config.get(key, bool, None)
        if told or (told is None and tensor in tensors):
            found.append((kind, f"config key {key}" if told else f"tensor {tensor} (no key {key})"))
    if len(found) > 1:
        raise SpecdoctorError(
            f"{config.path}: {found[0][1]} and {found[1][1]} say two norms before fc, expected at most one"
        )
    nothing: tuple[str | None, str] = (None, "neither key nor tensor of a norm before fc")
    fields.put("feature_norm", *(found[0] if found else nothing))


def put_head(fields: Fields, tensors: TensorSource, rows: int, vocab: int, origin: str) -> None:
    """A head of `rows` for a target of `vocab` ids (`origin`: where the rows come from), and the embedding."""
    if rows > vocab:
        raise SpecdoctorError(
            f"{fields.config.path}: the draft vocabulary has {rows} rows ({origin}), expected at most vocab_size, "
            f"{vocab}"
        )
    fields.put("draft_vocab_size", None if rows == vocab else rows, origin)
    fields.source("embed_source", "embed_tokens.weight", "embed_tokens.weight" in tensors)
    if rows != vocab and "lm_head.weight" not in tensors:
        raise SpecdoctorError(
            f"{fields.config.path}: the draft vocabulary has {rows} of {vocab} rows ({origin}), but there is no tensor "
            "lm_head.weight; expected one of that many rows, since the target has no such head"
        )
    fields.source("head_source", "lm_head.weight", "lm_head.weight" in tensors)


def read_mask_id(fields: Fields, config: JsonConfig, keys: tuple[str, ...]) -> bool:
    """P-EAGLE's token of the parallel depths, under the first of `keys` that is there; whether there is one."""
    for key in keys:
        value = config.get(key, int, None)
        if value is not None:
            fields.key("mask_id", value, key)
            return True
    fields.put("mask_id", None, f"none of the keys {', '.join(keys)}")
    return False
