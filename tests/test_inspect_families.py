"""`inspect` names the family of every layout that the format tests write, and finds no fault with a healthy one."""

import re
from collections.abc import Callable
from pathlib import Path

import eagle_models as eagle
import gguf
import numpy as np
import pytest
import test_draft_formats_block as block
import test_draft_formats_dflash2 as dflash2
import test_draft_formats_gemma4 as gemma4
import test_draft_formats_medusa as medusa
import tiny_mtp as mtp
import torch
from test_early_exit import write_head

from specdoctor.checks.draft_examination import examine_draft
from specdoctor.drafters.load import BINDERS
from specdoctor.formats.drafts.not_runnable import NOT_RUNNABLE
from specdoctor.formats.drafts.read import READERS, open_draft

Write = Callable[[Path], object]


def _eagle(name: str) -> Write:
    return lambda folder: eagle.write_eagle(folder, eagle.CASES[name])


def _eagle_family(name: str) -> str:
    family = "speculators-" if name.startswith("speculators") else "specforge-" if name == "specforge peagle" else ""
    return family + ("peagle" if "peagle" in name and family else "eagle" if name.startswith("eagle") else "eagle3")


def _native_mtp(case: str) -> Write:
    return lambda folder: mtp.write_native(folder, case)


def _medusa(tensors: dict, config: dict, pickled: bool = False) -> Write:
    return lambda folder: medusa.write(folder, tensors, config, pickled)


def _gguf(arch: str) -> Write:
    """A GGUF by the formats page, section 1.14: DSpark (arch dflash with a Markov head) or EAGLE-3."""

    def write(folder: Path) -> None:
        folder.mkdir()
        writer = gguf.GGUFWriter(folder / "draft.gguf", arch)
        for key, value in GGUF_SIZES.items():
            writer.add_uint32(f"{arch}.{key}", value)
        writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
        writer.add_float32(f"{arch}.rope.freq_base", 10000.0)
        writer.add_array(f"{arch}.target_layers", [2, 4, 5])
        writer.add_token_list([f"t{i}" for i in range(V)])
        if arch == "eagle3":
            writer.add_uint32("eagle3.target_hidden_size", H)
        else:
            writer.add_uint32("dflash.block_size", 5)
            writer.add_bool("dflash.has_confidence_head", True)
            writer.add_uint32("tokenizer.ggml.mask_token_id", V - 1)
        for name, shape in _gguf_shapes(arch).items():
            writer.add_tensor(name, np.ones(shape, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return write


def _gguf_shapes(arch: str) -> dict[str, tuple[int, ...]]:
    width = 2 * H if arch == "eagle3" else H
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 3 * H), "output_norm.weight": (H,)}
    shapes |= {f"blk.0.{norm}.weight": (H,) for norm in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.attn_{p}.weight": (rows, width) for p, rows in (("q", 64), ("k", 32), ("v", 32))}
    shapes |= {"blk.0.attn_output.weight": (H, 64), "blk.0.ffn_down.weight": (H, 96)}
    shapes |= {"blk.0.ffn_gate.weight": (96, H), "blk.0.ffn_up.weight": (96, H)}
    if arch == "eagle3":
        return shapes | {"blk.0.attn_norm_2.weight": (H,), "output.weight": (V, H)}
    shapes |= {"enc.output_norm.weight": (H,), "blk.0.attn_q_norm.weight": (16,), "blk.0.attn_k_norm.weight": (16,)}
    shapes |= {"markov_w1.weight": (V, 8), "markov_w2.weight": (V, 8)}
    return shapes | {"conf_proj.weight": (1, H + 8), "conf_proj.bias": (1,)}


V, H = 40, 64
GGUF_SIZES = {
    "context_length": 512,
    "embedding_length": H,
    "block_count": 1,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "rope.dimension_count": 16,
}
BLOCK = {
    "dflash": "speculators-dflash",
    "dspark": "speculators-dspark",
    "specforge": "specforge-dspark",
    "zlab": "zlab",
}

# Name -> (what writes it, family).
LAYOUTS: dict[str, tuple[Write, str]] = {
    **{layout.__name__: (layout, BLOCK[layout.__name__.partition("_")[0]]) for layout in block.LAYOUTS},
    "gemma4": (lambda folder: gemma4.write_block(folder, k_eq_v=True), "deepspec-gemma4"),
    "gemma4 eagle3": (lambda folder: gemma4.write_eagle3(folder, k_eq_v=True), "deepspec-gemma4-eagle3"),
    **{f"eagle: {name}": (_eagle(name), _eagle_family(name)) for name in eagle.CASES},
    **{f"dflash2: {name}": (write, f"{name.partition(' ')[0]}-dflash2") for name, write in dflash2.CASES.items()},
    **{f"mtp: {case}": (_native_mtp(case), "mtp") for case in ("qwen3-next", "qwen3.5", "deepseek-v3", "mimo")},
    "mtp: speculators": (
        lambda folder: mtp.write_speculators(folder, mtp.settings("speculators")),
        "speculators-mtp",
    ),
    "gguf dspark": (_gguf("dflash"), "gguf-dflash"),
    "gguf eagle3": (_gguf("eagle3"), "gguf-eagle3"),
    "early exit": (write_head, "early-exit"),
    "medusa: original": (_medusa(*medusa.original(), pickled=True), "medusa"),
    "medusa: safetensors": (_medusa(*medusa.original(prefix="medusa_head.")), "medusa"),
    "medusa: vLLM": (_medusa(*medusa.vllm(bias=True, medusa_fc_bias=True)), "medusa"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_named_and_healthy(tmp_path: Path, name: str) -> None:
    write, family = LAYOUTS[name]
    folder = tmp_path / "draft"
    write(folder)
    document = examine_draft(str(folder))
    assert document["family"] == family
    assert [f for f in document["findings"] if f["severity"] != "info"] == []
    assert document["runs_here"] and document["algorithm"] in BINDERS
    source = open_draft(folder)[1]
    assert document["parameters"] == sum(torch.Size(source.shape(stored)).numel() for stored in source.names())
    assert sum(part["tensors"] for part in document["parts"]) == len(source.names())
    weights = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pt", ".gguf")]
    assert 0 < document["bytes"] <= sum(path.stat().st_size for path in weights)
    assert "other" not in {part["name"] for part in document["parts"]}
    assert 1 <= document["drafts_per_round"] <= document["legal_k"]["most"]


def test_every_reader_is_covered_here_or_by_the_golden_set() -> None:
    golden = {"deepspec", "deepspec-eagle3", "zlab", "causal-lm"}
    assert {family for _, family in LAYOUTS.values()} | golden == set(READERS)
    assert not set(READERS) & set(NOT_RUNNABLE)


def test_the_documentation_has_a_row_for_every_family() -> None:
    page = (Path(__file__).parents[1] / "docs" / "draft-formats.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` .*\| (yes|by name only) \|$", page, re.M)
    assert {family for family, runs in rows if runs == "yes"} == set(READERS)
    assert {family for family, runs in rows if runs == "by name only"} == set(NOT_RUNNABLE)


EXPORTS = {
    "dspark_vanilla_reduced": {"speculators", "gguf"},
    "zlab_scaled": {"zlab"},  # windows begin at each row, and only one layer is causal
    "eagle: specforge": {"speculators", "gguf"},
    "eagle: speculators peagle": {"speculators"},
    "gemma4": set(),
    "medusa: vLLM": set(),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_what_a_layout_can_become(tmp_path: Path, name: str) -> None:
    LAYOUTS[name][0](tmp_path / "draft")
    exports = examine_draft(str(tmp_path / "draft"))["exports"]
    assert {format for format, reason in exports.items() if reason is None} == EXPORTS[name]
