"""Attention of the DFlash family as checkpoints of several makers describe it (formats page 1.5, 3.5).

Beside transformers' `layer_types` and `sliding_window` there are keys that z-lab's own code does not know and vLLM
does: `use_swa` (every layer slides), `swa_window_size` (their window), `causal`. Precedence of causality, as in vLLM:
`is_causal`, then `dflash_config.causal`, then sliding layers are causal. What no key here can express is refused.
"""

from dataclasses import replace

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import Remark, TensorSource
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import AttentionShape

# Key -> the values that change nothing, and what another one would mean.
_REFUSED = {
    "dflash_config.attention_sink_bias": ((False, None), "attention sinks"),
    "attention_sink_bias": ((False, None), "attention sinks"),
    "dflash_config.use_aux_hidden_state": ((True, None), "a context other than tapped hidden states"),
    "is_neox_style": ((True, None), "a RoPE of interleaved pairs"),
    "dflash_config.is_neox_style": ((True, None), "a RoPE of interleaved pairs"),
    "dflash_config.shift_label": ((False, None), "rows that predict one token further"),
    "dflash_config.layer_ids": ((None,), "another list of taps than target_layer_ids"),
}
# Tensor prefix -> what it means.
_REFUSED_TENSORS = {
    "mask_embedding": "a mask row of its own instead of the embedding's (MiMo)",
    "encoder.": "a context encoder of its own (Muse-Glimmer)",
}


def refuse_derived(config: JsonConfig, tensors: TensorSource) -> list[Remark]:
    """Fatal remarks for what derived checkpoints have and no engine here computes."""
    remarks = []
    for key, (harmless, meaning) in _REFUSED.items():
        value = config.find(key)
        if all(value is not one for one in harmless):
            evidence = f"key {key} is {value!r}: {meaning}, which cannot be run here"
            remarks.append(Remark("unknown-key", f"{config.path}", evidence, fatal=True, subject=key))
    for prefix, meaning in _REFUSED_TENSORS.items():
        name = next((n for n in tensors.names() if n.startswith(prefix)), None)
        if name is not None:
            raise SpecdoctorError(f"{tensors.file_of(name)}: tensor {name} is {meaning}, which cannot be run here")
    return remarks


def read_derived_attention(fields: Fields, config: JsonConfig, tensors: TensorSource) -> list[Remark]:
    """Apply `use_swa`, `swa_window_size`, `causal` and `attention_mode` to the layers already in `fields`."""
    remarks = _windows(fields, config)
    causal = config.get("dflash_config.causal", bool, None)
    if causal is not None and config.find("is_causal") is None:
        _change(fields, f"config key dflash_config.causal is {str(causal).lower()}", causal_in_block=causal)
    return remarks + _mode(fields, config, tensors)


def _windows(fields: Fields, config: JsonConfig) -> list[Remark]:
    everywhere = config.get("dflash_config.use_swa", bool, None)
    size = config.get("dflash_config.swa_window_size", int, None)
    layers: tuple[AttentionShape, ...] = fields.values["layers"]
    if everywhere is None and size is None:
        return []
    sliding = everywhere or any(layer.window for layer in layers)
    if not sliding:
        return []
    window = size if size is not None else config.positive("sliding_window")
    if window < 1:
        raise SpecdoctorError(f"{config.path}: key dflash_config.swa_window_size is {window}, expected 1 or more")
    causal = config.find("is_causal") is None
    fields.put(
        "layers",
        tuple(
            replace(layer, window=window, causal_in_block=True if causal else layer.causal_in_block)
            if everywhere or layer.window
            else layer
            for layer in layers
        ),
        "config keys num_hidden_layers and dflash_config.use_swa, swa_window_size",
    )
    return [
        Remark(
            "unverified",
            f"{config.path}",
            f"dflash_config.use_swa is {everywhere}, swa_window_size is {size}: read as vLLM does, a causal window of "
            f"{window} in {'every layer' if everywhere else 'the sliding layers'}; z-lab's own code has no such keys",
            subject="dflash_config.use_swa",
        )
    ]


def _mode(fields: Fields, config: JsonConfig, tensors: TensorSource) -> list[Remark]:
    """SpecForge's `attention_mode`: "mha" gives every head its own keys, whatever num_key_value_heads says."""
    mode = config.get("dflash_config.attention_mode", str, "gqa")
    if mode not in ("gqa", "mha"):
        raise SpecdoctorError(f"{config.path}: key dflash_config.attention_mode is {mode!r}, expected 'gqa' or 'mha'")
    first: AttentionShape = fields.values["layers"][0]
    name = "layers.0.self_attn.k_proj.weight"
    if mode == "gqa" or name not in tensors or first.kv_heads == first.heads:
        return []
    stored = tensors.shape(name)[0] // first.head_dim
    if stored == first.heads:
        _change(fields, "config key dflash_config.attention_mode, by the rows of k_proj", kv_heads=first.heads)
    return [
        Remark(
            "unverified",
            f"{config.path}",
            f"dflash_config.attention_mode is 'mha' and num_key_value_heads is {first.kv_heads}; k_proj has "
            f"{stored} heads, which decides",
            subject="dflash_config.attention_mode",
        )
    ]


def _change(fields: Fields, origin: str, **values: object) -> None:
    layers = tuple(replace(layer, **values) for layer in fields.values["layers"])
    fields.put("layers", layers, f"{fields.origin['layers']}; {origin}")
