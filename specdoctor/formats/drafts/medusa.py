"""Reader of Medusa-1 checkpoints (formats page 1.11): the original `medusa_lm_head.pt`, its copies, vLLM's layout.

Canonical names, for head i and its ResBlock j: `heads.{i}.blocks.{j}.weight` [H, H] and `.bias` [H] (x + SiLU(Wx + b)),
`lm_heads.{i}.weight` [rows, H], or one `lm_head.weight` where all heads share it; `d2t` (vLLM's `token_map`).

Config and file often disagree, and then the tensors decide: the number of heads, and biases, which vLLM's loader drops
without a word unless its own key asks for them (formats page, item 28). Where ResBlocks are one module saved under
several names, a copy that drops repeated tensors keeps the first; the place of the head still tells how many they are.
"""

import re
from dataclasses import dataclass, field

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import Reading, Remark, Stored, TensorSource
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import FINAL_NORMED, MedusaSpec

PREFIX = r"^(?:medusa_heads?\.)?"
ORIGINAL_BLOCK = re.compile(PREFIX + r"(\d+)\.(\d+)\.linear\.(weight|bias)$")
ORIGINAL_HEAD = re.compile(PREFIX + r"(\d+)\.(\d+)\.weight$")
VLLM_BLOCK = re.compile(PREFIX + r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
VLLM_HEAD = re.compile(PREFIX + r"lm_heads\.(\d+)\.weight$")
VLLM_SHARED_HEAD = re.compile(PREFIX + r"lm_head\.weight$")
TOKEN_MAP = re.compile(PREFIX + r"token_map$")
IGNORED_KEYS = {
    "medusa_choices": "a tree of the writer's engine",
    "max_paths": "a tree of the writer's engine",
    "topk": "a tree of the writer's engine",
    "max_seq_len": "of the writer's engine",
    "num_lookahead_tokens": "of the writer's engine",
}


@dataclass
class Found:
    """Stored names by place."""

    blocks: dict[tuple[int, int, str], str] = field(default_factory=dict)  # (head, ResBlock, "weight" or "bias")
    heads: dict[int, str] = field(default_factory=dict)
    shared_head: str | None = None
    token_map: str | None = None
    layers: int = 0  # ResBlocks of a head
    vllm: bool = False


def read_medusa(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """A Medusa-1 checkpoint in any of its layouts."""
    found = _find(config, tensors)
    writer = "vLLM's Medusa" if found.vllm else "Medusa"
    fields = Fields(config, writer)
    remarks: list[Remark] = []
    fields.put("family", "medusa", "tensor names")
    fields.put("algorithm", "medusa", "tensor names")
    fields.put("taps", (FINAL_NORMED,), "the format: the last state after the final norm")
    fields.put("tap_final_is_prenorm", False, "the format: the last state after the final norm")
    count = _counts(fields, config, found, remarks)
    H = _sizes(fields, config, tensors, found)
    fields.put("fc_bias", any(kind == "bias" for *_, kind in found.blocks), "tensors")
    _bias_remark(config, found, fields.values["fc_bias"], remarks)
    fields.key("logit_scale", float(config.get("logit_scale", (int, float), 1.0)), "logit_scale")
    fields.key("target_name", config.get("base_model_name_or_path", str, None), "base_model_name_or_path")
    stored, ignored = _heads(fields, config, tensors, found, count, H)
    for i in range(count):
        for j in range(found.layers):
            for kind, shape in (("weight", (H, H)), ("bias", (H,)))[: 1 + fields.values["fc_bias"]]:
                stored[f"heads.{i}.blocks.{j}.{kind}"] = Stored(_block_name(found, i, j, kind), shape)
    return Reading(fields.build(MedusaSpec), stored, ignored, IGNORED_KEYS, remarks)


def _find(config: JsonConfig, tensors: TensorSource) -> Found:
    found = Found()
    for name in tensors.names():
        if match := ORIGINAL_BLOCK.match(name) or VLLM_BLOCK.match(name):
            found.blocks[int(match[1]), int(match[2]), match[3]] = name
            found.vllm |= match.re is VLLM_BLOCK
            if match.re is VLLM_BLOCK:
                found.layers = max(found.layers, int(match[2]) + 1)
        elif match := VLLM_HEAD.match(name):
            found.heads[int(match[1])], found.vllm = name, True
        elif VLLM_SHARED_HEAD.match(name):
            found.shared_head, found.vllm = name, True
        elif TOKEN_MAP.match(name):
            found.token_map = name
        elif match := ORIGINAL_HEAD.match(name):
            found.heads[int(match[1])] = name
            found.layers = max(found.layers, int(match[2]))  # the head stands behind its ResBlocks
    if not found.blocks:
        raise SpecdoctorError(
            f"{config.path}: no Medusa heads found; expected tensors such as 0.0.linear.weight or "
            "blocks.0.layers.0.weight beside it"
        )
    return found


def _counts(fields: Fields, config: JsonConfig, found: Found, remarks: list[Remark]) -> int:
    """Heads and ResBlocks, by the tensors; the config's numbers are compared with them."""
    count = 1 + max(head for head, *_ in found.blocks)
    fields.put("num_heads", count, "tensors")
    fields.put("res_layers", found.layers, "tensors")
    for keys, there in ((("medusa_num_heads", "num_heads"), count), (("medusa_num_layers", "num_hidden_layers"), None)):
        for key in keys:
            wanted, held = config.get(key, int, None), found.layers if there is None else there
            if wanted is not None and wanted != held:
                remarks.append(
                    Remark(
                        "contradiction",
                        f"{config.path}",
                        f"key {key} is {wanted}, but the file holds {held}; all that is in the file is used",
                        "correct the key: engines that go by it leave trained heads out, or do not load",
                        fatal=wanted > held,
                        subject=key,
                    )
                )
    return count


def _sizes(fields: Fields, config: JsonConfig, tensors: TensorSource, found: Found) -> int:
    """Hidden size and vocabulary: config keys where they are there, else the tensors' shapes."""
    first = min(found.blocks)
    H = config.positive("hidden_size", tensors.shape(found.blocks[first])[0])
    fields.put("hidden_size", H, "config key hidden_size" if config.has("hidden_size") else "tensor shapes")
    heads = [*found.heads.values(), *([found.shared_head] if found.shared_head else [])]
    rows = tensors.shape(heads[0])[0] if heads else None
    if not config.has("vocab_size") and (rows is None or found.token_map):
        raise SpecdoctorError(f"{config.path}: key vocab_size is missing, expected the target's number of ids")
    vocab = config.positive("vocab_size", rows)
    fields.put("vocab_size", vocab, "config key vocab_size" if config.has("vocab_size") else "tensor shapes")
    return H


def _bias_remark(config: JsonConfig, found: Found, there: bool, remarks: list[Remark]) -> None:
    asked = config.get("medusa_fc_bias", bool, False)
    if found.vllm and asked != there:
        said = f"is {str(asked).lower()}" if config.has("medusa_fc_bias") else "is absent (vLLM's default is false)"
        held = "has biases, which vLLM would drop" if there else "has no biases, which vLLM would leave at random"
        remarks.append(
            Remark(
                "contradiction",
                f"{config.path}",
                f"key medusa_fc_bias {said}, but the file {held}; the tensors decide here",
                f"set medusa_fc_bias to {str(there).lower()}",
                subject="medusa_fc_bias",
            )
        )


def _heads(
    fields: Fields, config: JsonConfig, tensors: TensorSource, found: Found, count: int, H: int
) -> tuple[dict[str, Stored], dict[str, str]]:
    """The projections to the vocabulary, the map of a truncated one, and which tensors are set aside."""
    vocab = fields.values["vocab_size"]
    stored: dict[str, Stored] = {}
    ignored: dict[str, str] = {}
    shared = config.get("original_lm_head", bool, False)
    fields.key("shared_head", shared, "original_lm_head")
    named = {i: found.heads.get(i) or _expected_head(found, i) for i in range(count)}
    if shared:
        one = found.shared_head or found.heads.get(0)
        ignored |= {name: "original_lm_head: all heads share one" for name in found.heads.values() if name != one}
        named = {} if one is None else {-1: one}
    fields.put("head_source", "checkpoint" if named else "target", "tensors lm_heads" if named else "original_lm_head")
    there = [name for name in named.values() if name in tensors]
    rows = tensors.shape(there[0])[0] if there else vocab
    truncated = config.get("truncated_vocab_size", int, None)
    if found.token_map and ((truncated or vocab) < vocab or rows < vocab):
        mapped = tensors.shape(found.token_map)
        fields.put("draft_vocab_size", mapped[0], "tensor token_map")
        stored["d2t"] = Stored(found.token_map, mapped, lambda ids: ids.long())
        rows = vocab if rows == vocab else mapped[0]  # vLLM takes whole heads too, and cuts them by the map
    elif found.token_map:
        ignored[found.token_map] = "truncated_vocab_size is not below vocab_size, so there is nothing to map"
    elif truncated is not None and truncated < vocab:
        raise SpecdoctorError(
            f"{config.path}: key truncated_vocab_size is {truncated}, but there is no tensor token_map; expected the "
            "target ids of the heads' rows"
        )
    else:
        rows = vocab
    for i, name in named.items():
        stored["lm_head.weight" if i < 0 else f"lm_heads.{i}.weight"] = Stored(name, (rows, H))
    return stored, ignored


def _block_name(found: Found, i: int, j: int, kind: str) -> str:
    """The ResBlock's stored name; in the original, one that is not there is the head's first again."""
    if found.vllm:
        return found.blocks.get((i, j, kind), f"blocks.{i}.layers.{j}.{kind}")
    return found.blocks.get((i, j, kind)) or found.blocks.get((i, 0, kind), f"{i}.{j}.linear.{kind}")


def _expected_head(found: Found, i: int) -> str:
    return f"lm_heads.{i}.weight" if found.vllm else f"{i}.{found.layers}.weight"
