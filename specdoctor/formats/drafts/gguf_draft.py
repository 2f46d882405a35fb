"""Readers of drafters in llama.cpp's GGUF files: arch `dflash` (DFlash, DSpark, DFlash2) and `eagle3`.

Formats page 1.14, cross-checked with the sources of build 11434. `target_layers` are layer inputs, so HS indices as
they are; `d2t` holds absolute ids as it is. Keys under `specdoctor.` come from our exporter and hold what the format
has no key for.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.block_tensors import block_tensor_shapes
from specdoctor.formats.drafts.checkpoint import Reading, Remark, Stored, TensorSource
from specdoctor.formats.drafts.config_parts import read_taps
from specdoctor.formats.drafts.eagle3_tensors import eagle3_tensor_shapes
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.drafts.gguf_names import OTHER_NAMES, gguf_name, rotated_heads
from specdoctor.formats.drafts.gguf_rope import FACTORS, float32, read_gguf_rope
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import AttentionShape, BlockSpec, DraftSpec, RecurrentSpec

if TYPE_CHECKING:
    from torch import Tensor

EARLY_ARCHITECTURES = ("dspark", "dflash-draft")  # an earlier design of llama.cpp's, and forks
IGNORED_KEYS = {
    "general.": "names the model",
    "tokenizer.": "the target's own tokenizer, whose ids the drafter shares",
    "split.": "of a file in parts",
    "quantize.": "of the quantiser",
    "specdoctor.": "of the exporter",
}
IGNORED_TENSORS = {FACTORS: "read as the RoPE's Llama-3 scaling"}
DEFAULT_DRAFT = 3  # llama.cpp's --spec-draft-n-max


def gguf_architecture(config: JsonConfig) -> str | None:
    """`general.architecture` of a GGUF; None for a config.json."""
    name = config.find("general.architecture")
    return name if isinstance(name, str) else None


def read_gguf_dflash(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """DFlash, DSpark (a tensor `markov_w1.weight`) and DFlash2 (a candidate selector).

    Row k predicts anchor + k, as llama.cpp's draft-dflash reads them; with a Markov head draft-dspark reads anchor +
    k + 1 unless `sample_from_anchor` is false.
    """
    arch = gguf_architecture(config) or "dflash"
    fields = Fields(config, "llama.cpp")
    remarks = _early(config, arch)
    if config.find(f"{arch}.hyper_connection.count"):
        raise SpecdoctorError(
            f"{config.path}: key {arch}.hyper_connection.count: a DSpark of DeepSeek-V4, which cannot be run here"
        )
    _refuse_other_arithmetic(config, arch)
    _common(fields, config, arch, tensors, qk_norm=True)
    fields.put("family", "gguf", "general.architecture")
    _heads(fields, config, arch, tensors)
    block = config.positive(f"{arch}.block_size", 16)
    fields.key("block_size", block, f"{arch}.block_size")
    fields.key("mask_id", config.get("tokenizer.ggml.mask_token_id", int), "tokenizer.ggml.mask_token_id")
    for field, key in (("embed_scale", "embedding_scale"), ("logit_scale", "logit_scale")):
        fields.key(field, float32(config.get(f"{arch}.{key}", (int, float), 1.0) or 1.0), f"{arch}.{key}")
    softcap = config.get(f"{arch}.final_logit_softcapping", (int, float), None)
    fields.key("softcap", float32(softcap) if softcap else None, f"{arch}.final_logit_softcapping")
    if fields.values["algorithm"] == "dflash2":
        for field in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            fields.key(field, config.positive(f"{arch}.{field}"), f"{arch}.{field}")
    spec = fields.build(BlockSpec)
    return _reading(config, spec, block_tensor_shapes(spec), tensors, remarks)


def read_gguf_eagle3(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """EAGLE-3: one layer, three taps, no q/k norm; the recurrent vector is before the final norm."""
    arch = "eagle3"
    fields = Fields(config, "llama.cpp")
    _common(fields, config, arch, tensors, qk_norm=False)
    if len(fields.values["layers"]) != 1 or len(fields.values["taps"]) != 3:
        raise SpecdoctorError(
            f"{config.path}: {arch}.block_count is {len(fields.values['layers'])} and {arch}.target_layers has "
            f"{len(fields.values['taps'])} entries, expected 1 and 3"
        )
    fields.put("family", "gguf", "general.architecture")
    fields.put("algorithm", "eagle3", "general.architecture")
    width = config.positive(f"{arch}.target_hidden_size")
    fields.key(
        "target_hidden_size", None if width == fields.values["hidden_size"] else width, f"{arch}.target_hidden_size"
    )
    flags = {name: config.get(f"{arch}.{name}", bool, False) for name in ("norm_before_residual", "norm_before_fc")}
    fields.key("residual_normed", flags["norm_before_residual"], f"{arch}.norm_before_residual")
    fields.key("feature_norm", "before_fc" if flags["norm_before_fc"] else None, f"{arch}.norm_before_fc")
    drafts = config.positive("specdoctor.draft_tokens", DEFAULT_DRAFT)
    fields.key("draft_tokens", drafts, "specdoctor.draft_tokens")
    spec = fields.build(RecurrentSpec)
    return _reading(config, spec, eagle3_tensor_shapes(spec), tensors, [])


def _common(fields: Fields, config: JsonConfig, arch: str, tensors: TensorSource, *, qk_norm: bool) -> None:
    fields.key("hidden_size", config.positive(f"{arch}.embedding_length"), f"{arch}.embedding_length")
    tokens = config.find("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        fields.put("vocab_size", len(tokens), "config key tokenizer.ggml.tokens, its length")
    else:
        fields.key("vocab_size", config.positive(f"{arch}.vocab_size"), f"{arch}.vocab_size")
    if "d2t" in tensors:
        fields.put("draft_vocab_size", tensors.shape("d2t")[0], "tensor d2t")
    eps = config.get(f"{arch}.attention.layer_norm_rms_epsilon", (int, float))
    fields.key("rms_norm_eps", float32(eps), f"{arch}.attention.layer_norm_rms_epsilon")
    layers = _layers(config, arch, fields.values["hidden_size"], qk_norm=qk_norm)
    fields.key("layers", layers, f"{arch}.block_count")
    fields.put("rope", *read_gguf_rope(config, arch, tensors, layers[0].head_dim))
    key = f"{arch}.target_layers"
    fields.key("taps", read_taps(config, key, lowest=0, shift=0), key)
    fields.source("embed_source", "token_embd.weight", "token_embd.weight" in tensors)
    fields.source("head_source", "output.weight", "output.weight" in tensors)
    fields.key(
        "num_target_layers", config.get("specdoctor.num_target_layers", int, None), "specdoctor.num_target_layers"
    )
    fields.key("target_name", config.get("specdoctor.target_name", str, None), "specdoctor.target_name")


def _layers(config: JsonConfig, arch: str, hidden: int, *, qk_norm: bool) -> tuple[AttentionShape, ...]:
    count, heads = config.count(f"{arch}.block_count"), config.positive(f"{arch}.attention.head_count")
    head_dim = config.positive(f"{arch}.attention.key_length", hidden // heads)
    if config.get(f"{arch}.attention.value_length", int, head_dim) != head_dim:
        raise SpecdoctorError(f"{config.path}: {arch}.attention.value_length differs from key_length, {head_dim}")
    kv_heads = config.positive(f"{arch}.attention.head_count_kv", heads)
    window = config.get(f"{arch}.attention.sliding_window", int, 0)
    pattern = config.get(f"{arch}.attention.sliding_window_pattern", list, [False] * count) if window else []
    causal = config.get(f"{arch}.attention.causal", bool, False)
    if heads % kv_heads or (window and len(pattern) != count):
        raise SpecdoctorError(
            f"{config.path}: {heads} heads on {kv_heads} key heads, {len(pattern)} entries in "
            f"{arch}.attention.sliding_window_pattern for {count} layers; expected a divisor and one a layer"
        )
    return tuple(
        AttentionShape(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=config.positive(f"{arch}.feed_forward_length"),
            qk_norm=qk_norm,
            window=window if window and pattern[i] else None,
            causal_in_block=causal and arch != "eagle3",
        )
        for i in range(count)
    )


def _heads(fields: Fields, config: JsonConfig, arch: str, tensors: TensorSource) -> None:
    """Markov, confidence and selector, told by the tensors; the row offset goes with the Markov head."""
    key = f"{arch}.sample_from_anchor"
    from_anchor = config.get(key, bool, True)
    config.find(f"{arch}.has_confidence_head")  # the tensors tell; it is looked at by llama.cpp only
    config.find(f"{arch}.markov_rank")
    if "selector_hidden.weight" in tensors:
        fields.put("algorithm", "dflash2", "tensor selector_hidden.weight")
        fields.put("row_offset", 0, "the format: row k predicts anchor + k")
    elif config.get("specdoctor.zero_markov_head", bool, False):
        fields.put("algorithm", "dflash", "config key specdoctor.zero_markov_head")
        fields.put("row_offset", 1, "config key specdoctor.zero_markov_head: draft-dspark with a Markov head of zeros")
    elif "markov_w1.weight" in tensors:
        fields.put("algorithm", "dspark", "tensor markov_w1.weight")
        fields.key("row_offset", 1 if from_anchor else 0, key)
        fields.put("markov", "vanilla", "tensor markov_w1.weight")
        fields.put("markov_rank", tensors.shape("markov_w1.weight")[-1], "tensor markov_w1.weight")
    else:
        fields.put("algorithm", "dflash", "no tensor markov_w1.weight")
        fields.put("row_offset", 0, "the format: row k predicts anchor + k")
    if "conf_proj.weight" in tensors:
        wide = tensors.shape("conf_proj.weight")[-1] > fields.values["hidden_size"]
        fields.put("confidence", "hidden+markov" if wide else "hidden", "tensor conf_proj.weight, its width")
    if "token_embd.weight" in tensors and "output.weight" not in tensors:
        fields.put("head_source", "checkpoint", "tensor token_embd.weight, which llama.cpp then takes as the head")


def _refuse_other_arithmetic(config: JsonConfig, arch: str) -> None:
    for key, harmless in (
        ("attention.scale", (None, 0.0)),
        ("attention.value_scale", (None, 0.0, 1.0)),
        ("hidden_act", (None, "silu")),
    ):
        value = config.find(f"{arch}.{key}")
        if value not in harmless:
            raise SpecdoctorError(f"{config.path}: key {arch}.{key} is {value!r}, which cannot be run here")


def _early(config: JsonConfig, arch: str) -> list[Remark]:
    if arch not in EARLY_ARCHITECTURES:
        return []
    return [
        Remark(
            "unverified",
            f"{config.path}",
            f"general.architecture is {arch!r}, of an early design or a fork of llama.cpp; read as 'dflash', whose "
            "layer ids are layer inputs",
            "current llama.cpp does not load it: convert the drafter again, or export it from its own checkpoint",
            subject="general.architecture",
        )
    ]


def _reading(
    config: JsonConfig,
    spec: DraftSpec,
    shapes: dict[str, tuple[int, ...]],
    tensors: TensorSource,
    remarks: list[Remark],
) -> Reading:
    """Where each canonical tensor is, and what makes it the canonical one: row order, dtype, tied head."""
    narrowed = {
        name: dtype for dtype in ("bfloat16", "float16") for name in config.get(f"specdoctor.widened.{dtype}", list, [])
    }
    stored: dict[str, Stored] = {}
    for canonical, shape in shapes.items():
        name = next((n for n in (gguf_name(canonical), *OTHER_NAMES.get(canonical, ())) if n in tensors), None)
        if name is None and canonical == "lm_head.weight" and isinstance(spec, BlockSpec):
            name = "token_embd.weight"
        name = name or gguf_name(canonical)
        heads = 0
        if spec.algorithm == "eagle3" and canonical.startswith("layers."):
            heads = rotated_heads(canonical, spec.layers[0].heads, spec.layers[0].kv_heads)
        stored[canonical] = Stored(name, shape, _change(heads, narrowed.get(name)))
    ignored = dict(IGNORED_TENSORS)
    if config.find("specdoctor.zero_markov_head"):
        ignored |= dict.fromkeys(("markov_w1.weight", "markov_w2.weight"), "zeros, so that draft-dspark runs a DFlash")
    arch = gguf_architecture(config)
    keys = {**IGNORED_KEYS, f"{arch}.vocab_size": "the length of the token list"}
    return Reading(spec, stored, ignored, keys, remarks)


def _change(heads: int, dtype: str | None) -> "Callable[[Tensor], Tensor] | None":
    if not heads and dtype is None:
        return None
    return partial(_changed, heads=heads, dtype=dtype)


def _changed(value: "Tensor", heads: int, dtype: str | None) -> "Tensor":
    import torch

    from specdoctor.formats.gguf_llama import rotary_halves

    value = rotary_halves(value, heads) if heads else value
    return value if dtype is None else value.to(getattr(torch, dtype))
