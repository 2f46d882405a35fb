"""What a checkpoint's tensors are for, how many parameters each part has and how many bytes, from headers alone."""

import re
from dataclasses import dataclass, field
from math import prod

from specdoctor.formats.drafts.checkpoint import DraftCheckpoint, TensorSource

# Part -> canonical names that belong to it; the first that matches counts.
_PARTS = (
    ("embedding", r"(embed_tokens|wte|wpe|token_embd|embeddings?)\."),
    ("head", r"(lm_heads?|output|embed_out)\."),
    ("vocabulary map", r"(d2t|t2d|token_map)$"),
    ("Markov head", r"(markov_head\.|markov_w[12]\.)"),
    ("confidence head", r"(confidence_head|conf_proj)\."),
    ("candidate selector", r"(candidate_selector\.|selector_)"),
    ("convolutions", r"(attention|mlp|attn|ffn)_conv(\.|_)"),
    ("Medusa heads", r"(heads|medusa_heads?)\.\d+\."),
    ("mask feature", r"mask_(hidden|embedding)"),
    ("fc", r"(fc|input_proj|eh_proj)\."),
    ("backbone layers", r"(layers|h|blk|midlayer|mtp_layers|mtp)\."),
    ("norms", r"\w*(norm|ln_f)\w*\."),
)
NOT_USED, UNEXPLAINED = "known, not used", "not accounted for"
_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}
_BYTES |= {"int8": 1, "uint8": 1, "bool": 1, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass
class Part:
    """Some of a checkpoint's tensors."""

    name: str
    tensors: int = 0
    parameters: int = 0
    bytes: int | None = 0  # None: a dtype whose size is not known
    dtypes: set[str] = field(default_factory=set)

    def add(self, source: TensorSource, name: str) -> None:
        dtype, count = source.dtype(name), prod(source.shape(name))
        size = stored_bytes(dtype, count)
        self.tensors += 1
        self.parameters += count
        self.bytes = None if self.bytes is None or size is None else self.bytes + size
        self.dtypes.add(dtype)


def parts_of(source: TensorSource, checkpoint: DraftCheckpoint | None) -> list[Part]:
    """The parts of all tensors in `source`, the drafter's own first; by stored name where there is no description."""
    used = {stored.name: name for name, stored in checkpoint.tensors.items()} if checkpoint else {}
    parts: dict[str, Part] = {}
    for name in source.names():
        if name in used or checkpoint is None:
            part = part_name(used.get(name, name))
        else:
            part = NOT_USED if name in checkpoint.ignored else UNEXPLAINED
        parts.setdefault(part, Part(part)).add(source, name)
    order = [*(name for name, _ in _PARTS), "other", NOT_USED, UNEXPLAINED]
    return sorted(parts.values(), key=lambda part: order.index(part.name))


def part_name(canonical: str) -> str:
    """The part that a canonical tensor name belongs to; "other" where none is known."""
    return next((part for part, pattern in _PARTS if re.search(rf"(^|\.){pattern}", canonical)), "other")


def stored_bytes(dtype: str, count: int) -> int | None:
    """Bytes of `count` values, quantised GGUF types included; None for a dtype whose size is not known."""
    if dtype in _BYTES:
        return _BYTES[dtype] * count
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if dtype.upper() not in GGMLQuantizationType.__members__:
        return None
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[dtype.upper()]]
    return count // block * size
