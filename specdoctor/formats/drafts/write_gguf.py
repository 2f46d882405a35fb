"""Writer of drafters as GGUF for llama.cpp: arch `dflash` (DFlash, DSpark, DFlash2) and `eagle3` (formats page 1.14).

llama.cpp's draft-dflash takes row k for anchor + k. A DFlash whose row k predicts anchor + k + 1 (DeepSpec's) therefore
gets a Markov head of zeros, and runs as draft-dspark, which reads rows so and adds nothing; the key
`specdoctor.zero_markov_head` says that it is none.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdoctor.formats.drafts.gguf_names import gguf_name, rotary_pairs, rotated_heads
from specdoctor.formats.drafts.gguf_rope import FACTORS, llama3_factors, rope_entries
from specdoctor.formats.drafts.gguf_tokenizer import tokenizer_entries
from specdoctor.formats.spec import BlockSpec, DraftSpec, RecurrentSpec

if TYPE_CHECKING:
    from torch import Tensor

    from specdoctor.formats.drafts.target_facts import TargetFacts

FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}  # general.file_type


def needs_zero_markov_head(spec: DraftSpec) -> bool:
    """Whether only draft-dspark reads this DFlash's rows as they were trained."""
    return isinstance(spec, BlockSpec) and spec.row_offset == 1 and spec.markov is None


def spec_type(spec: DraftSpec) -> str:
    """llama-server's `--spec-type` for the file."""
    if isinstance(spec, RecurrentSpec):
        return "draft-eagle3"
    return "draft-dspark" if needs_zero_markov_head(spec) or getattr(spec, "markov", None) else "draft-dflash"


def write_gguf(spec: DraftSpec, tensors: "dict[str, Tensor]", path: Path, target: "TargetFacts") -> None:
    """Write the file. Raises OSError when it cannot, `SpecdoctorError` for a tokenizer that cannot be taken over."""
    from gguf import GGMLQuantizationType, GGUFWriter

    stored, widened = stored_tensors(spec, tensors)
    arch = "eagle3" if isinstance(spec, RecurrentSpec) else "dflash"
    entries = _entries(spec, arch, target) | {f"specdoctor.widened.{dtype}": names for dtype, names in widened.items()}
    kind = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    writer = GGUFWriter(path, arch)
    try:
        writer.add_file_type(FILE_TYPES[kind])
        for key, value in entries.items():
            _add(writer, key, value)
        for name, value in stored.items():
            raw = {"bfloat16": GGMLQuantizationType.BF16}.get(str(value.dtype).removeprefix("torch."))
            array = value.contiguous()
            writer.add_tensor(name, (array if raw is None else _bytes(array)).numpy(), raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def stored_tensors(spec: DraftSpec, tensors: "dict[str, Tensor]") -> "tuple[dict[str, Tensor], dict[str, list[str]]]":
    """Tensors by their GGUF names, and by dtype the names of those that llama.cpp wants in float32 instead."""
    import torch

    stored: dict[str, Tensor] = {}
    widened: dict[str, list[str]] = {}
    for canonical, value in tensors.items():
        name = gguf_name(canonical)
        heads = 0
        if isinstance(spec, RecurrentSpec) and canonical.startswith("layers."):
            heads = rotated_heads(canonical, spec.layers[0].heads, spec.layers[0].kv_heads)
        stored[name] = rotary_pairs(value, heads) if heads else value
        if value.dim() != 2 and value.dtype in (torch.bfloat16, torch.float16):
            stored[name] = stored[name].float()
            widened.setdefault(str(value.dtype).removeprefix("torch."), []).append(name)
    if needs_zero_markov_head(spec):
        stored["markov_w1.weight"] = torch.zeros(spec.vocab_size, 1)
        stored["markov_w2.weight"] = torch.zeros(spec.head_rows, 1)
    if spec.rope["rope_type"] == "llama3":
        factors = llama3_factors(spec.rope["rope_theta"], spec.rope, spec.layers[0].head_dim)
        stored[FACTORS] = torch.tensor(factors, dtype=torch.float32)
    return stored, widened


def _entries(spec: DraftSpec, arch: str, target: "TargetFacts") -> dict[str, Any]:
    """Metadata: an int is written as u32, a float as f32, a list by its first element."""
    first = spec.layers[0]
    own: dict[str, Any] = {
        "embedding_length": spec.hidden_size,
        "block_count": len(spec.layers),
        "feed_forward_length": first.intermediate_size,
        "vocab_size": spec.vocab_size,
        "attention.head_count": first.heads,
        "attention.head_count_kv": first.kv_heads,
        "attention.key_length": first.head_dim,
        "attention.value_length": first.head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.rms_norm_eps),
        "target_layers": list(spec.taps),
    }
    own |= _block(spec) if isinstance(spec, BlockSpec) else _eagle3(spec)
    entries: dict[str, Any] = {
        "general.type": "model",
        "general.name": f"{spec.algorithm} drafter for {spec.target_name or target.name}",
        **{f"{arch}.{key}": value for key, value in own.items()},
        **rope_entries(arch, spec.rope, target.context_length, first.head_dim),
        **tokenizer_entries(target, spec.vocab_size, getattr(spec, "mask_id", None)),
    }
    if spec.num_target_layers is not None:
        entries["specdoctor.num_target_layers"] = spec.num_target_layers
    if spec.target_name is not None:
        entries["specdoctor.target_name"] = spec.target_name
    if needs_zero_markov_head(spec):
        entries["specdoctor.zero_markov_head"] = True
    if isinstance(spec, RecurrentSpec):
        entries["specdoctor.draft_tokens"] = spec.draft_tokens
    return entries


def _block(spec: BlockSpec) -> dict[str, Any]:
    keys: dict[str, Any] = {"block_size": spec.block_size}
    if spec.markov or needs_zero_markov_head(spec):
        keys |= {"sample_from_anchor": spec.row_offset == 1, "has_confidence_head": spec.confidence is not None}
    if any(layer.causal_in_block for layer in spec.layers):
        keys["attention.causal"] = True
    if windows := {layer.window for layer in spec.layers if layer.window}:
        keys["attention.sliding_window"] = min(windows)
        keys["attention.sliding_window_pattern"] = [bool(layer.window) for layer in spec.layers]
    if spec.selector_rank:
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        keys |= {name: getattr(spec, name) for name in names}
    scales = (
        ("embedding_scale", spec.embed_scale, 1.0),
        ("logit_scale", spec.logit_scale, 1.0),
        ("final_logit_softcapping", spec.softcap, None),
    )
    return keys | {key: float(value) for key, value, usual in scales if value != usual and value is not None}


def _eagle3(spec: DraftSpec) -> dict[str, Any]:
    assert isinstance(spec, RecurrentSpec)
    return {
        "target_hidden_size": spec.target_hidden_size or spec.hidden_size,
        "norm_before_residual": spec.residual_normed,
        "norm_before_fc": spec.feature_norm == "before_fc",
    }


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds[list] = writer.add_array
    kinds[type(value)](key, value)


def _bytes(value: "Tensor") -> "Tensor":
    """A bfloat16 tensor as bytes, which numpy can hold."""
    import torch

    return value.view(torch.uint8)
