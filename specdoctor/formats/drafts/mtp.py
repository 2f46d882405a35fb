"""Readers of MTP layers: speculators' own checkpoints (formats page 1.7.6) and those inside a target (1.12).

Canonical names, for layer i: `layers.{i}.token_norm.weight` and `hidden_norm.weight` [H], `input_proj.weight`
[H, 2H], `block.*` (the decoder block as its family names it), `final_norm.weight` [H]. Where a writer has one
projection for all its layers, the names of all layers point at the same stored tensor.

In a target's folder only the MTP tensors are described; all the rest is the target's own and is left alone.
"""

import re
from dataclasses import dataclass

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import Reading, Remark, Stored, TensorSource
from specdoctor.formats.drafts.config_parts import read_rope
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.drafts.mtp_tensors import BlockClass, attention_shape, block_class, block_shapes
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import RecurrentSpec

STEPS_OF_SPECULATORS = 3  # `num_speculative_steps` of its trainer where nothing says otherwise
TARGETS_OWN = "the target's own"
COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


@dataclass(frozen=True)
class Layout:
    """How a writer lays its MTP layers out; `{i}` is the layer's number in the names."""

    writer: str
    block: str  # prefix of the decoder block
    token_norm: str
    hidden_norm: str
    input_proj: str
    final_norm: str
    hidden_first: bool = False  # input_proj reads [hidden ; embedding]
    recurrent_normed: bool = True  # the vector fed back is after final_norm
    copies: tuple[tuple[str, str], ...] = ()  # canonical name and the writer's, of copies of embedding and head


QWEN = Layout(
    "Qwen3-Next and Qwen3.5",
    "mtp.layers.{i}.",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.fc.weight",
    "mtp.norm.weight",
)
DEEPSEEK = Layout(
    "DeepSeek-V3 and GLM-4.5",
    "{base}{i}.",
    "{base}{i}.enorm.weight",
    "{base}{i}.hnorm.weight",
    "{base}{i}.eh_proj.weight",
    "{base}{i}.shared_head.norm.weight",
    recurrent_normed=False,
    copies=(
        ("embed_tokens.weight", "{base}{i}.embed_tokens.weight"),
        ("lm_head.weight", "{base}{i}.shared_head.head.weight"),
    ),
)
SPECULATORS = Layout(
    "speculators",
    "mtp_layers.{i}.",
    "mtp_layers.{i}.token_layernorm.weight",
    "mtp_layers.{i}.hidden_layernorm.weight",
    "mtp_layers.{i}.input_proj.weight",
    "mtp_layers.{i}.final_layernorm.weight",
)
MIMO = Layout(
    "MiMo",
    "model.mtp_layers.{i}.",
    "model.mtp_layers.{i}.token_layernorm.weight",
    "model.mtp_layers.{i}.hidden_layernorm.weight",
    "model.mtp_layers.{i}.input_proj.weight",
    "model.mtp_layers.{i}.final_layernorm.weight",
    hidden_first=True,
)


def read_speculators_mtp(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """speculators mtp: one layer, re-applied `num_speculative_steps` times to the vector after its own final norm."""
    block = config.view("transformer_layer_config")
    fields = Fields(config, "speculators mtp")
    count = config.positive("num_nextn_predict_layers", 1)
    if count != 1:
        raise SpecdoctorError(f"{config.path}: key num_nextn_predict_layers is {count}, expected 1 for speculators mtp")
    fields.put("family", "speculators", "speculators_model_type")
    depth = block.positive("num_hidden_layers")  # the writer keeps the target's own config, depth included
    remarks = [_which_norm(config)]
    if target_layers not in (None, depth) and depth == 1:
        remarks.append(
            Remark(
                "unverified",
                f"{config.path}",
                f"transformer_layer_config.num_hidden_layers is 1, expected the target's {target_layers}; taken as the "
                "drafter's own depth, and the last layer of the target tapped",
                subject="transformer_layer_config.num_hidden_layers",
            )
        )
        fields.put("taps", (target_layers,), "the target's depth")
    else:
        fields.put("taps", (depth,), "transformer_layer_config.num_hidden_layers: the last layer, before its norm")
        fields.put("num_target_layers", depth, "config key transformer_layer_config.num_hidden_layers")
    fields.put("tap_final_is_prenorm", True, "the writer trains on the last hidden state before the final norm")
    _draft_tokens(config, fields)
    name = config.get("speculators_config.verifier.name_or_path", str, None)
    fields.key("target_name", name, "speculators_config.verifier.name_or_path")
    stored = _fill(fields, block, tensors, SPECULATORS, 1, "")
    ignored_keys = {
        "speculators_version": "of the writer",
        "speculators_config.": "serving defaults; the target is given by the user",
        "transformer_layer_config.": "of the decoder block, which is built from this object whole",
        "draft_vocab_size": "mtp has the target's vocabulary",
    }
    return Reading(fields.build(RecurrentSpec), stored, ignored_keys=ignored_keys, remarks=remarks)


def _which_norm(config: JsonConfig) -> Remark:
    """No key or tensor says which of the two last hidden states it is (formats page 1.12 and 3.22)."""
    return Remark(
        "unverified",
        f"{config.path}",
        "the last hidden state is read before the target's final norm, as this format's training does; vLLM feeds MTP "
        "layers the one after it",
        "expect other acceptance in vLLM than here; if it is much better there, the layers were made for the other one",
        subject="taps",
    )


def _draft_tokens(config: JsonConfig, fields: Fields) -> None:
    methods = config.get("speculators_config.proposal_methods", list, [])
    proposed = next((m["speculative_tokens"] for m in methods if isinstance(m, dict) and "speculative_tokens" in m), 0)
    if config.find("num_speculative_steps") is not None:
        fields.key("draft_tokens", config.positive("num_speculative_steps"), "num_speculative_steps")
    elif isinstance(proposed, int) and proposed > 0:
        fields.put("draft_tokens", proposed, "config key speculators_config.proposal_methods")
    else:
        fields.key("draft_tokens", STEPS_OF_SPECULATORS, "num_speculative_steps")


def read_native_mtp(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """MTP layers inside a target checkpoint: Qwen3-Next/3.5, DeepSeek-V3, GLM-4.5, MiMo.

    They read the target's last hidden state after its final norm (formats page 1.12).
    """
    block = config.view("text_config") if config.get("text_config", dict, None) else config
    layout, base, numbers = _find_layers(config, tensors)
    fields = Fields(config, layout.writer)
    fields.put("family", "native-mtp", "tensor names")
    depth = block.positive("num_hidden_layers")
    fields.put("taps", (depth,), "the format: the last hidden state")
    fields.put("tap_final_is_prenorm", False, "the format: after the final norm")
    fields.put("num_target_layers", depth, f"config key {block.prefix}num_hidden_layers")
    fields.put("draft_tokens", len(numbers), "number of MTP layers")
    if layout is DEEPSEEK and numbers[0] != depth:
        raise SpecdoctorError(
            f"{config.path}: key num_hidden_layers is {depth}, but the first MTP layer is {base}{numbers[0]}; expected "
            f"{base}{depth}"
        )
    stored = _fill(fields, block, tensors, layout, len(numbers), base, numbers[0])
    mine = {s.name for s in stored.values()}
    roots = _roots(layout, base, numbers)
    ignored = {name: TARGETS_OWN for name in tensors.names() if name not in mine and not name.startswith(roots)}
    for i in numbers[1:]:
        ignored |= {named.format(base=base, i=i): "a copy, as in the first MTP layer" for _, named in layout.copies}
    remarks = [*_count_remarks(config, block, len(numbers)), *_quantised(tensors, mine)]
    return Reading(fields.build(RecurrentSpec), stored, ignored, {"*": TARGETS_OWN}, remarks)


def _find_layers(config: JsonConfig, tensors: TensorSource) -> tuple[Layout, str, list[int]]:
    """The layout by the tensors, the base of DeepSeek's layer names, and the layers' numbers."""
    patterns = (
        (QWEN, r"()mtp\.layers\.(\d+)\."),
        (MIMO, r"()model\.mtp_layers\.(\d+)\."),
        (DEEPSEEK, r"(.*layers\.)(\d+)\.eh_proj\.weight"),
    )
    found = []
    for layout, pattern in patterns:
        hits = [match for name in tensors.names() if (match := re.match(pattern, name))]
        if hits:
            found.append((layout, hits[0][1], sorted({int(hit[2]) for hit in hits})))
    if not found:
        key = next((k for k in COUNT_KEYS if config.find(k) or config.find(f"text_config.{k}")), "(none)")
        raise SpecdoctorError(
            f"{config.path}: key {key} promises MTP layers, but the folder holds no mtp.*, model.mtp_layers.* or "
            "*.eh_proj.weight; saving with transformers drops them, so take the folder as its maker published it"
        )
    if len(found) > 1:
        writers = " and ".join(layout.writer for layout, _, _ in found)
        raise SpecdoctorError(f"{config.path}: the folder holds MTP layers of {writers}; expected those of one")
    layout, base, numbers = found[0]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise SpecdoctorError(f"{config.path}: the MTP layers are {numbers}; expected one after the other")
    return layout, base, numbers


def _fill(
    fields: Fields,
    block: JsonConfig,
    tensors: TensorSource,
    layout: Layout,
    count: int,
    base: str,
    first: int = 0,
) -> dict[str, Stored]:
    """What all MTP formats share: sizes, norms and the place of every tensor."""
    kind, known = block_class(block)
    H = block.positive("hidden_size")
    prefix = block.prefix
    fields.put("algorithm", "mtp", "tensor names")
    fields.put("block_class", kind, f"config key {prefix}model_type")
    fields.put("hidden_size", H, f"config key {prefix}hidden_size")
    fields.put("vocab_size", block.positive("vocab_size"), f"config key {prefix}vocab_size")
    fields.put("rms_norm_eps", float(block.get("rms_norm_eps", (int, float))), f"config key {prefix}rms_norm_eps")
    has_rope = block.has("rope_parameters") or block.has("rope_theta")
    fields.put("rope", read_rope(block) if has_rope else {}, f"config key {prefix}rope_parameters or rope_theta")
    fields.put("norm_offset", known.norm_offset, f"RMSNorm of {kind}")
    fields.put("hidden_first", layout.hidden_first, f"order of {layout.writer}; no tensor or key tells it")
    fields.put("recurrent_normed", layout.recurrent_normed, f"default of {layout.writer}; no tensor or key tells it")
    stored: dict[str, Stored] = {}
    shapes = []
    for i in range(count):
        at = {"base": base, "i": first + i}
        for own in ("token_norm", "hidden_norm", "final_norm"):
            stored[f"layers.{i}.{own}.weight"] = Stored(getattr(layout, own).format(**at), (H,))
        stored[f"layers.{i}.input_proj.weight"] = Stored(layout.input_proj.format(**at), (H, 2 * H))
        where = layout.block.format(**at)
        experts = _experts(tensors, where, known)
        shapes.append(attention_shape(block, known, dense=experts is None))
        for name, shape in block_shapes(block, known, experts).items():
            stored[f"layers.{i}.block.{name}"] = Stored(where + name, shape)
    fields.put("layers", tuple(shapes), "tensor names")
    copies = {canonical: named.format(base=base, i=first) for canonical, named in layout.copies}
    for canonical, source in (("embed_tokens.weight", "embed_source"), ("lm_head.weight", "head_source")):
        named = copies.get(canonical, canonical)
        there = canonical in copies and named in tensors
        fields.source(source, named, there)
        if there:
            stored[canonical] = Stored(named, (fields.values["vocab_size"], H))
    return stored


def _experts(tensors: TensorSource, where: str, known: BlockClass) -> str | None:
    """How the block's experts are stored; None: it has none."""
    if known.experts_key is None:
        return None
    if f"{where}mlp.experts.gate_up_proj" in tensors:
        return "fused"
    return "separate" if f"{where}mlp.gate.weight" in tensors else None


def _roots(layout: Layout, base: str, numbers: list[int]) -> tuple[str, ...]:
    if layout is DEEPSEEK:
        return tuple(f"{base}{i}." for i in numbers)
    return ("mtp.",) if layout is QWEN else ("model.mtp_layers.",)


def _count_remarks(config: JsonConfig, block: JsonConfig, count: int) -> list[Remark]:
    """A config that promises another number of layers than there are tensors of."""
    return [
        Remark(
            "contradiction",
            f"{config.path}",
            f"key {source.prefix}{key} is {source.find(key)}, but the folder holds the tensors of {count} MTP layers",
            "take the folder as its maker published it",
            fatal=True,
            subject=key,
        )
        for source in ([config] if block is config else [config, block])
        for key in COUNT_KEYS
        if source.find(key) not in (None, 0, count)
    ]


def _quantised(tensors: TensorSource, mine: set[str]) -> list[Remark]:
    odd = next((n for n in sorted(mine) if n in tensors and tensors.dtype(n).startswith(("F8", "float8", "int"))), None)
    if odd is None:
        return []
    return [
        Remark(
            "contradiction",
            f"{tensors.file_of(odd)}",
            f"tensor {odd} is stored as {tensors.dtype(odd)}; MTP layers can be run from bfloat16, float16 or float32",
            "take a folder whose MTP layers are not quantised, or convert them",
            fatal=True,
            subject=odd,
        )
    ]
