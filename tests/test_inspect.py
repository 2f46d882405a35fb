"""`specdoctor inspect`: families by name, values with their origins, parts, remote ids, and headers only."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import block_layouts
import pytest
import torch
from safetensors.torch import save_file
from tiny_models import tiny_target, write_drafter
from typer.testing import CliRunner

from specdoctor.checks.draft_examination import examine_draft
from specdoctor.cli.app import app
from specdoctor.errors import EnvironmentMissingError, SpecdoctorError
from specdoctor.formats.drafts.not_runnable import NOT_RUNNABLE
from specdoctor.formats.drafts.parts import part_name, stored_bytes
from specdoctor.formats.drafts.read import READERS, read_draft
from specdoctor.formats.tensors import TensorFolder
from specdoctor.measure.inspect import OF_THE_FORMAT

GOLDEN = Path(__file__).parent / "data" / "golden"
GOLDEN_FAMILIES = {
    "deepspec-dflash": ("deepspec", "dflash"),
    "deepspec-dspark-gated": ("deepspec", "dspark"),
    "deepspec-dspark-rnn": ("deepspec", "dspark"),
    "deepspec-dspark-vanilla": ("deepspec", "dspark"),
    "deepspec-eagle3": ("deepspec-eagle3", "eagle3"),
    "target": ("causal-lm", "causal-lm"),
    "zlab-dflash": ("zlab", "dflash"),
}


def inspected(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    return result.exit_code, result.stdout + result.stderr


# Families


@pytest.mark.parametrize("name", [folder.name for folder in sorted(GOLDEN.iterdir()) if folder.is_dir()])
def test_every_golden_checkpoint_is_named_and_clean(name: str) -> None:
    document = examine_draft(str(GOLDEN / name), str(GOLDEN / "target"))
    assert (document["family"], document["algorithm"]) == GOLDEN_FAMILIES[name]
    assert document["findings"] == [] and document["runs_here"] and document["why_not"] is None
    code, text = inspected(GOLDEN / name)
    assert code == 0 and f"family    {document['family']}: " in text and "runs here yes" in text
    assert len(text.splitlines()) <= 45  # one screen


def only_names(folder: Path, config: dict[str, Any], *names: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: torch.ones(2, 2) for name in names}, folder / "model.safetensors")
    return folder


NAMED_ONLY = {
    "specforge-domino": (
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}},
        ("prefix_gru.weight_ih_l0", "embed_proj.0.weight"),
    ),
    "speculators-xpress": ({"speculators_model_type": "xpress", "architectures": ["XPressSpeculator"]}, ("mix_l",)),
    "deepseek-v4-dspark": (
        {"architectures": ["DeepseekV4ForCausalLM"], "dspark_block_size": 5, "num_nextn_predict_layers": 3},
        ("mtp.0.main_proj.weight", "mtp.0.markov_head.markov_w1.weight"),
    ),
    "nemotron-dspark": (
        {"architectures": ["DFlashDraftModel"], "dspark_bonus_anchor": True, "dflash_config": {"causal": True}},
        ("fc.weight", "markov_head.markov_w1.weight"),
    ),
}


@pytest.mark.parametrize("family", NAMED_ONLY)
def test_families_without_an_engine_are_named_and_no_fault(tmp_path: Path, family: str) -> None:
    folder = only_names(tmp_path / "draft", NAMED_ONLY[family][0], *NAMED_ONLY[family][1])
    code, text = inspected(folder)
    assert code == 0 and f"family    {family}: " in text and f"runs here no: {NOT_RUNNABLE[family]}" in text
    assert "nothing found" in text
    document = examine_draft(str(folder))
    assert document["spec"] is None and document["parameters"] == 4 * len(NAMED_ONLY[family][1])
    with pytest.raises(SpecdoctorError, match=r"recognised as .* cannot be run as a drafter here: ") as refusal:
        read_draft(folder)
    assert NOT_RUNNABLE[family] in str(refusal.value)


def test_no_family_is_both_readable_and_not_runnable() -> None:
    assert not set(READERS) & set(NOT_RUNNABLE)


# What is shown


def test_values_come_with_their_origins(tmp_path: Path) -> None:
    write_drafter(tmp_path / "draft", family="zlab")
    spec = examine_draft(str(tmp_path / "draft"))["spec"]
    assert spec["block_size"] == {"value": 4, "origin": "config key block_size"}
    assert spec["taps"] == {"value": [1, 2], "origin": "config key dflash_config.target_layer_ids"}
    assert spec["embed_source"] == {"value": "target", "origin": "no tensor embed_tokens.weight in the file"}
    assert spec["logit_scale"]["origin"] == "default of z-lab DFlash (no key dflash_config.output_multiplier)"
    assert spec["backbone"] == {"value": "qwen3", "origin": OF_THE_FORMAT}
    assert spec["layers"]["value"][0]["heads"] == 4


def test_parts_are_counted_by_what_they_are_for(tmp_path: Path) -> None:
    write_drafter(tmp_path / "draft", vocab=5, hidden=64)
    document = examine_draft(str(tmp_path / "draft"))
    parts = {part["name"]: (part["tensors"], part["parameters"], part["bytes"]) for part in document["parts"]}
    assert parts["embedding"] == parts["head"] == (1, 5 * 64, 5 * 64 * 4)
    assert parts["fc"] == (1, 64 * 128, 64 * 128 * 4)
    assert parts["Markov head"] == (2, 2 * 5 * 8, 2 * 5 * 8 * 4)
    assert parts["confidence head"] == (2, 73, 73 * 4)
    assert parts["norms"] == (2, 128, 512) and parts["backbone layers"][0] == 22
    assert document["embedding"] == document["head"] == "checkpoint"


def test_a_screen_folds_what_is_not_used_and_verbose_lists_it(tmp_path: Path) -> None:
    write_drafter(tmp_path / "draft", config_changes={"num_anchors": 8, "initializer_range": 0.02})
    _, short = inspected(tmp_path / "draft")
    _, long = inspected(tmp_path / "draft", "--verbose")
    assert "keys known and not used: 2 training" in short and "key num_anchors not used" not in short
    assert "key num_anchors not used: training" in long
    assert "selector_rank" not in short and "selector_rank" in long


def test_exports_are_told_with_the_reason_why_not() -> None:
    document = examine_draft(str(GOLDEN / "deepspec-dspark-gated"))
    assert document["exports"]["deepspec"] is None
    assert document["exports"]["gguf"] and document["exports"]["zlab"]
    _, text = inspected(GOLDEN / "deepspec-dspark-gated")
    assert f"gguf ({document['exports']['gguf']})" in text


def test_json_is_the_whole_document(tmp_path: Path) -> None:
    code, text = inspected(GOLDEN / "zlab-dflash", "--json", "-")
    document = json.loads(text)
    assert code == 0 and document["schema_version"] == 1 and document["command"] == "inspect"
    assert document["findings"] == [] and len(document["checks"]) == 9
    code, text = inspected(GOLDEN / "zlab-dflash", "--json", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["family"] == "zlab" and "runs here yes" in text
    assert inspected(GOLDEN / "zlab-dflash", "--json", tmp_path / "no" / "out.json")[0] == 2


def test_a_target_that_does_not_fit_is_a_finding_with_exit_1(tmp_path: Path) -> None:
    write_drafter(tmp_path / "draft", hidden=32)
    tiny_target().save_pretrained(tmp_path / "target")
    code, text = inspected(tmp_path / "draft", "--target", tmp_path / "target")
    assert code == 1 and "SD203 error  key hidden_size is 32, but the target target has 64" in text
    assert "target    target (hidden 64, 2 layers, vocabulary 5)" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere/at/all"], "nowhere/at/all: no such folder"),
        (["nowhere"], "'nowhere': no such folder and no known model; known names: smollm2-135m"),
        ([GOLDEN / "zlab-dflash", "--target", "./nowhere"], "nowhere: no such folder"),
    ],
)
def test_what_is_not_there_is_a_usage_error(arguments: list[object], words: str) -> None:
    code, text = inspected(*arguments)
    assert code == 2 and words in text


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("layers.3.mlp.up_proj.weight", "backbone layers"),
        ("midlayer.self_attn.q_proj.weight", "backbone layers"),
        ("model.layers.61.eh_proj.weight", "fc"),
        ("layers.0.attention_conv.base_kernel", "convolutions"),
        ("lm_heads.2.weight", "head"),
        ("heads.0.blocks.0.weight", "Medusa heads"),
        ("enc.output_norm.weight", "norms"),
        ("fc_norm.2.weight", "norms"),
        ("d2t", "vocabulary map"),
        ("mask_hidden", "mask feature"),
        ("something.else", "other"),
    ],
)
def test_part_names(name: str, part: str) -> None:
    assert part_name(name) == part


def test_bytes_of_dtypes() -> None:
    assert stored_bytes("bfloat16", 10) == 20 and stored_bytes("bool", 3) == 3
    assert stored_bytes("q8_0", 64) == 2 * 34 and stored_bytes("F8_UNHEARD", 3) is None


# Headers only


def sparse_drafter(folder: Path) -> int:
    """A DSpark drafter of 16 GB in DeepSpec's layout: a true header, and a hole where the values would be."""
    H, V, inner, layers, taps, rank = 4096, 151936, 12288, 34, 5, 256
    shapes: dict[str, list[int]] = {
        "embed_tokens.weight": [V, H],
        "lm_head.weight": [V, H],
        "fc.weight": [H, taps * H],
        "hidden_norm.weight": [H],
        "norm.weight": [H],
        "markov_head.markov_w1.weight": [V, rank],
        "markov_head.markov_w2.weight": [V, rank],
        "confidence_head.proj.weight": [1, H + rank],
        "confidence_head.proj.bias": [1],
    }
    for i in range(layers):
        own = {"input_layernorm": [H], "post_attention_layernorm": [H], "self_attn.q_norm": [128]}
        own |= {"self_attn.k_norm": [128], "self_attn.q_proj": [4096, H], "self_attn.o_proj": [H, 4096]}
        own |= {"self_attn.k_proj": [1024, H], "self_attn.v_proj": [1024, H]}
        own |= {"mlp.gate_proj": [inner, H], "mlp.up_proj": [inner, H], "mlp.down_proj": [H, inner]}
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in own.items()}
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": H,
        "vocab_size": V,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": inner,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "num_target_layers": 36,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "block_size": 7,
        "mask_token_id": 151669,
        "num_anchors": 512,
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return at


def test_only_headers_of_a_16_gb_folder_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sparse_drafter(tmp_path / "draft")
    weights = tmp_path / "draft" / "model.safetensors"
    assert size > 15e9 and weights.stat().st_blocks * 512 < 10e6  # a hole: nothing was written there
    monkeypatch.setattr(TensorFolder, "load", lambda *_: pytest.fail("tensor values were read"))
    document = examine_draft(str(tmp_path / "draft"))
    assert document["findings"] == [] and document["bytes"] == size


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the peak memory is read from /proc")
def test_a_process_that_inspects_16_gb_stays_small_and_needs_no_torch(tmp_path: Path) -> None:
    sparse_drafter(tmp_path / "draft")
    code = (
        "import sys\nfrom specdoctor.cli.app import app\n"
        f"try: app(['inspect', {str(tmp_path / 'draft')!r}])\nexcept SystemExit as stop: print('EXIT', stop.code)\n"
        "print('LOADED', sorted({'torch', 'transformers', 'scipy', 'pandas'} & set(sys.modules)))\n"
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "family    deepspec: " in done.stdout and "\nEXIT 0\nLOADED []\n" in done.stdout
    peak = int(done.stdout.split()[-2])  # kB
    assert 1_000 < peak < 200_000, "values pass through the memory of a process that reads headers only"


# Remote ids


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that knows `owner/draft` and notes what is asked of it; the folder is a z-lab drafter."""
    import huggingface_hub
    from huggingface_hub import errors

    folder = write_drafter(tmp_path / "draft", family="zlab")
    asked: list[str] = []

    def download(repo_id: str, filename: str, **_: object) -> str:
        asked.append(filename)
        if repo_id != "owner/draft":
            raise errors.LocalEntryNotFoundError("no connection")
        return str(folder / filename)

    def metadata(repo_id: str, **_: object) -> object:
        asked.append("headers")
        if (folder / "pickled").exists():
            raise errors.NotASafetensorsRepoError("no model.safetensors")
        source = TensorFolder(folder)
        tensors = {n: SimpleNamespace(shape=list(source.shape(n)), dtype="F32") for n in source.names()}
        return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors)})

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", metadata)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("weights were fetched"))
    for name in ("HF_HUB_OFFLINE", "SPECDOCTOR_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return asked


def test_a_hub_id_is_inspected_by_config_and_headers_alone(hub: list[str], tmp_path: Path) -> None:
    document = examine_draft("owner/draft")
    local = examine_draft(str(tmp_path / "draft"))
    assert sorted(hub) == ["config.json", "headers"]
    for key in ("family", "spec", "parts", "bytes", "findings", "ignored_keys", "exports"):
        assert document[key] == local[key]
    assert document["path"] == "owner/draft"


def test_findings_of_a_hub_id_name_the_file(hub: list[str], tmp_path: Path) -> None:
    block_layouts.changed(tmp_path / "draft", unheard_of=1)
    (finding,) = [f for f in examine_draft("owner/draft")["findings"] if f["severity"] != "info"]
    assert finding["code"] == "SD202" and finding["where"] == {"file": "config.json", "key": "unheard_of"}


def test_a_hub_target_needs_its_config_only(hub: list[str], tmp_path: Path) -> None:
    write_drafter(tmp_path / "mine", hidden=32)
    document = examine_draft(str(tmp_path / "mine"), "owner/draft")
    assert hub == ["config.json"] and [f["code"] for f in document["findings"]] == ["SD203"]


def test_a_misfit_of_a_hub_id_is_placed_in_its_config(hub: list[str], tmp_path: Path) -> None:
    tiny_target(hidden=32, heads=2).save_pretrained(tmp_path / "target")
    findings = examine_draft("owner/draft", str(tmp_path / "target"))["findings"]
    assert [f["where"] for f in findings if f["code"] == "SD203"] == [{"file": "config.json", "key": "hidden_size"}]


def test_pickles_are_not_read_from_the_hub(hub: list[str], tmp_path: Path) -> None:
    (tmp_path / "draft" / "pickled").touch()
    with pytest.raises(EnvironmentMissingError, match="pickled files are not read from there"):
        examine_draft("owner/draft")


def test_a_hub_that_cannot_be_asked_is_the_environments_fault(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = inspected("owner/unknown")
    assert code == 4 and "owner/unknown: no such folder here" in text and "the hub cannot be reached" in text


def test_offline_a_hub_id_comes_from_the_cache_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_drafter(tmp_path / "draft")
    monkeypatch.setenv("SPECDOCTOR_OFFLINE", "1")
    monkeypatch.setattr("specdoctor.measure.inspect.resolve_model", lambda name: folder)
    assert examine_draft("owner/draft")["family"] == "deepspec"
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    code, text = inspected("owner/draft-that-nobody-has", "--offline")
    assert code == 4 and "not in the local Hugging Face cache, and downloads are off" in text
