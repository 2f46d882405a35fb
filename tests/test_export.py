"""Export: round trips field for field and bit for bit, files as other tools write them, and nothing half-written."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import dflash2_drafts
import pytest
import torch
from eagle_models import TARGET_LAYERS, write_eagle
from export_sources import CAN, EAGLE_CASES, V, check_same, exported, made
from gguf_drafts import convert
from gguf_targets import write_target_gguf
from safetensors.torch import load_file, save_file
from tiny_models import tiny_llama, tiny_target, write_drafter
from typer.testing import CliRunner

from specdoctor.cli.app import app
from specdoctor.drafters.load import load_drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.formats.drafts import export as exporter
from specdoctor.formats.drafts.export import export_draft
from specdoctor.formats.drafts.expressible import FORMATS, expressible
from specdoctor.formats.drafts.read import read_draft
from specdoctor.formats.drafts.target_facts import TargetFacts, read_target_facts
from specdoctor.formats.gguf_header import GgufHeader
from specdoctor.formats.gguf_tensors import GgufTensors

GOLDEN = Path(__file__).parent / "data" / "golden"


@pytest.fixture(scope="module")
def wide_target(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    """V = 40 and 8 layers, for EAGLE-3."""
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    return read_target_facts(write_target_gguf(tiny_target(40, layers=TARGET_LAYERS), path))


PAIRS = [(source, format) for source, formats in CAN.items() for format in formats.split()]


@pytest.fixture(scope="module")
def deep_target(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    """A folder with the target's own GGUF in it, as fetched ones have.

    The tiny drafters tap layers 0 and 1; engines differ in what the last tap is, so the target has three layers.
    """
    folder = tmp_path_factory.mktemp("deep")
    model = tiny_target(V, layers=3)
    model.save_pretrained(folder)
    write_target_gguf(model, folder / "target.gguf")
    return read_target_facts(folder)


@pytest.mark.parametrize(("source", "format"), PAIRS, ids=[f"{s} to {f}" for s, f in PAIRS])
def test_round_trip(deep_target: TargetFacts, tmp_path: Path, source: str, format: str) -> None:
    before = made(source, tmp_path / "in")
    done = exported(before, format, deep_target, tmp_path)
    after = read_draft(done.path, 3)
    assert [remark.line() for remark in after.remarks if remark.kind != "unverified"] == []
    copies = set(before.tensors) ^ set(after.tensors)
    assert copies <= {"embed_tokens.weight", "lm_head.weight"}
    check_same(before, after, frozenset(copies))
    if format in ("deepspec", "gguf"):
        assert after.spec.num_target_layers == (before.spec.num_target_layers or (3 if format == "deepspec" else None))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"in", done.path.name})
    own = {name: t for name, t in after.load().items() if name in copies}
    assert all(t.equal(_target_tensor(deep_target, name).to(t.dtype)) for name, t in own.items())
    for note in copies & set(after.tensors):
        assert any("copied from the target" in line for line in done.notes), note


def _target_tensor(target: TargetFacts, name: str) -> torch.Tensor:
    return target.embedding() if name == "embed_tokens.weight" else target.head()


@pytest.mark.parametrize("source", CAN)
def test_the_others_are_refused_with_a_reason(deep_target: TargetFacts, tmp_path: Path, source: str) -> None:
    checkpoint = made(source, tmp_path / "in")
    for format in set(FORMATS) - set(CAN[source].split()):
        reason = expressible(replace(checkpoint.spec, num_target_layers=3), format)
        assert reason
        with pytest.raises(SpecdoctorError) as refused:
            exported(checkpoint, format, deep_target, tmp_path)
        assert f"cannot be exported as {format}: {reason}" in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("format", ["speculators", "gguf"])
@pytest.mark.parametrize("name", EAGLE_CASES)
def test_eagle3_round_trip(wide_target: TargetFacts, tmp_path: Path, name: str, format: str) -> None:
    before = read_draft(write_eagle(tmp_path / "in", EAGLE_CASES[name]), TARGET_LAYERS)
    done = exported(before, format, wide_target, tmp_path)
    after = read_draft(done.path, TARGET_LAYERS)
    copies = set(before.tensors) ^ set(after.tensors)
    assert copies <= ({"embed_tokens.weight"} if format == "speculators" else set())
    check_same(before, after, frozenset(copies))
    assert after.spec.default_draft == before.spec.default_draft


def test_deepspec_eagle3_round_trip(tmp_path: Path) -> None:
    target = read_target_facts(GOLDEN / "target")
    before = read_draft(GOLDEN / "deepspec-eagle3")
    check_same(before, read_draft(exported(before, "deepspec", target, tmp_path).path))
    again = export_draft(before, "speculators", target, tmp_path / "speculators")
    check_same(before, read_draft(again.path, 6))
    with pytest.raises(SpecdoctorError, match="cannot be exported as gguf: it has norms on queries and keys"):
        export_draft(before, "gguf", target, tmp_path / "x.gguf")


@pytest.mark.parametrize("format", ["zlab", "gguf", "speculators"])
def test_dflash2_round_trip(tmp_path: Path, format: str) -> None:
    model = tiny_target(dflash2_drafts.V, layers=dflash2_drafts.LAYERS)
    target = read_target_facts(write_target_gguf(model, tmp_path / "target.gguf"))
    before = read_draft(dflash2_drafts.write_zlab(tmp_path / "in", ["full_attention"] * 2), dflash2_drafts.LAYERS)
    check_same(before, read_draft(exported(before, format, target, tmp_path).path, dflash2_drafts.LAYERS))


# What is in the files ------------------------------------------------------------------------------------------------


def test_gguf_is_what_another_converter_writes(deep_target: TargetFacts, tmp_path: Path) -> None:
    """Every tensor and setting against the conversion spelled out in `gguf_drafts`."""
    checkpoint = made("deepspec dspark", tmp_path / "in")
    mine = exported(checkpoint, "gguf", deep_target, tmp_path).path
    check_same_gguf(mine, convert(tmp_path / "in", tmp_path / "theirs.gguf"), "dflash")


def test_eagle3_gguf_is_what_another_converter_writes(wide_target: TargetFacts, tmp_path: Path) -> None:
    """Rows of q and k in llama.cpp's order, absolute ids."""
    folder = write_eagle(tmp_path / "in", EAGLE_CASES["llama"])
    mine = exported(read_draft(folder, TARGET_LAYERS), "gguf", wide_target, tmp_path).path
    check_same_gguf(mine, convert(folder, tmp_path / "theirs.gguf", "eagle3"), "eagle3")


def check_same_gguf(mine: Path, theirs: Path, arch: str) -> None:
    a, b = GgufHeader(mine), GgufHeader(theirs)
    assert {k: v for k, v in b.metadata.items() if k.startswith(f"{arch}.")}.items() <= a.metadata.items()
    ours, other = GgufTensors(a), GgufTensors(b)
    assert set(ours.names()) == set(other.names())
    for name in ours.names():
        assert ours.load([name])[name].equal(other.load([name])[name]), name
    assert a.metadata["tokenizer.ggml.tokens"] == b.metadata["tokenizer.ggml.tokens"]
    assert a.metadata.get("tokenizer.ggml.mask_token_id") == b.metadata.get("tokenizer.ggml.mask_token_id")


def test_gguf_keeps_norms_in_float32_and_the_rest_as_it_is(deep_target: TargetFacts, tmp_path: Path) -> None:
    done = exported(made("deepspec dspark bfloat16", tmp_path / "in"), "gguf", deep_target, tmp_path)
    tensors = GgufTensors(GgufHeader(done.path))
    for name in tensors.names():
        assert tensors.dtype(name) == ("bfloat16" if len(tensors.shape(name)) == 2 else "float32"), name


def test_dflash_of_deepspec_gets_a_head_of_zeros(deep_target: TargetFacts, tmp_path: Path) -> None:
    checkpoint = made("deepspec dflash", tmp_path / "in")
    done = exported(checkpoint, "gguf", deep_target, tmp_path)
    tensors = GgufTensors(GgufHeader(done.path))
    assert (
        tensors.shape("markov_w1.weight") == (V, 1) and not tensors.load(["markov_w1.weight"])["markov_w1.weight"].any()
    )
    assert any("--spec-type draft-dspark" in note for note in done.notes)
    assert read_draft(done.path).spec.markov is None and read_draft(done.path).spec.row_offset == 1


def test_speculators_writes_hs_indices_offsets_and_marks(deep_target: TargetFacts, tmp_path: Path) -> None:
    done = exported(made("speculators", tmp_path / "in"), "speculators", deep_target, tmp_path)
    config = json.loads((done.path / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [1, 2] and config["speculators_version"] == "0.9.0"
    assert config["transformer_layer_config"]["sliding_window"] == 6 and not config["sliding_window_non_causal"]
    before, after = load_file(tmp_path / "in" / "model.safetensors"), load_file(done.path / "model.safetensors")
    assert after["d2t"].equal(before["d2t"]) and after["t2d"].equal(before["t2d"])


def test_deepspec_and_zlab_write_layer_outputs(deep_target: TargetFacts, tmp_path: Path) -> None:
    one = export_draft(made("deepspec embedding tap", tmp_path / "a"), "deepspec", deep_target, tmp_path / "one")
    config = json.loads((one.path / "config.json").read_text())
    assert config["target_layer_ids"] == [-1, 0] and config["num_anchors"] and config["num_target_layers"] == 3
    two = export_draft(made("zlab", tmp_path / "b"), "zlab", deep_target, tmp_path / "two")
    config = json.loads((two.path / "config.json").read_text())
    assert config["dflash_config"] == {"block_size": 4, "mask_token_id": V - 1, "target_layer_ids": [0, 1]}
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(load_file(two.path / "model.safetensors"))


def test_copies_equal_to_the_targets_can_be_left_out(deep_target: TargetFacts, tmp_path: Path) -> None:
    checkpoint = made("deepspec dspark", tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors |= {"embed_tokens.weight": deep_target.embedding(), "lm_head.weight": deep_target.head()}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    kept = export_draft(checkpoint, "gguf", deep_target, tmp_path / "kept.gguf")
    done = export_draft(checkpoint, "gguf", deep_target, tmp_path / "dropped.gguf", drop_equal=True)
    assert (
        read_draft(kept.path).spec.embed_source == "checkpoint" and read_draft(done.path).spec.embed_source == "target"
    )
    assert done.notes[:2] == tuple(f"{part} left out: bit-equal to the target's" for part in ("embedding", "head"))
    assert done.bytes < kept.bytes


def test_zlab_refuses_an_embedding_of_its_own(deep_target: TargetFacts, tmp_path: Path) -> None:
    before = read_draft(write_drafter(tmp_path / "in", vocab=V, family="zlab", own_embedding=True, target_layers=3))
    with pytest.raises(SpecdoctorError, match="its own embedding differs from the target's"):
        exported(before, "zlab", deep_target, tmp_path)


@pytest.mark.parametrize("format", ["deepspec", "speculators", "gguf"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype(deep_target: TargetFacts, tmp_path: Path, format: str, dtype: str) -> None:
    before = made("deepspec dspark", tmp_path / "in")
    after = read_draft(exported(before, format, deep_target, tmp_path, dtype=dtype).path, 3).load()
    for name, value in before.load().items():
        assert after[name].equal(value.to(getattr(torch, dtype))), name


@pytest.mark.parametrize("kind", ["llama3", "yarn", "linear"])
def test_rope_settings_survive_gguf(deep_target: TargetFacts, tmp_path: Path, kind: str) -> None:
    more = {"factor": 4.0, "original_max_position_embeddings": 64}
    more |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    rope = {"rope_type": kind, "rope_theta": 10000.0, **more}
    folder = write_drafter(tmp_path / "in", vocab=V, target_layers=3, config_changes={"rope_parameters": rope})
    before = read_draft(folder)
    done = exported(before, "gguf", deep_target, tmp_path)
    assert read_draft(done.path).spec.rope == before.spec.rope
    header = GgufHeader(done.path)
    assert ("rope_freqs.weight" in header.tensors) == (kind == "llama3")
    if kind != "llama3":
        assert header.metadata["dflash.rope.scaling.type"] == kind
        assert header.metadata["dflash.rope.scaling.factor"] == 4.0


def test_an_exported_drafter_drafts_the_same(tmp_path: Path) -> None:
    """The golden DSpark through GGUF and speculators, run by the engine."""
    facts, model = read_target_facts(GOLDEN / "target"), Target.load(GOLDEN / "target", "cpu", "float32")
    prompt = json.loads((GOLDEN / "deepspec-dspark-vanilla" / "expected_greedy.json").read_text())["prompts"][1]
    tokens = read_target_facts(write_target_gguf(tiny_target(256, layers=6), tmp_path / "tokens.gguf"))
    before = read_draft(GOLDEN / "deepspec-dspark-vanilla")
    made = [
        export_draft(before, "speculators", facts, tmp_path / "speculators").path,
        export_draft(before, "gguf", replace(facts, gguf=tokens.gguf), tmp_path / "draft.gguf").path,
    ]
    for path in made:
        sequence = Sequence(prompt["prompt_ids"], max_new_tokens=48)
        Engine(model, load_drafter(path, model)).generate([sequence])
        assert sequence.ids == prompt["output_ids"]
        assert [r.accepted + 1 for r in sequence.records] == prompt["acceptance_lengths_with_bonus"]


# The target -----------------------------------------------------------------------------------------------------------


def test_a_tokenizer_json_becomes_gguf_entries(tmp_path: Path) -> None:
    """Without a GGUF of the target: tokens, merges and special ids through the gguf library, padded to the rows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path / "target"
    tiny_target(V, layers=3).save_pretrained(folder)
    vocab = {token: i for i, token in enumerate(["a", "b", "c", "ab", "abc"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "c")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    done = exported(made("deepspec dspark", tmp_path / "in"), "gguf", read_target_facts(folder), tmp_path)
    metadata = GgufHeader(done.path).metadata
    assert metadata["tokenizer.ggml.tokens"][:6] == ["a", "b", "c", "ab", "abc", "<end>"]
    assert len(metadata["tokenizer.ggml.tokens"]) == V and metadata["tokenizer.ggml.token_type"][4:8] == [1, 3, 5, 5]
    assert metadata["tokenizer.ggml.merges"] == ["a b", "ab c"]
    assert metadata["tokenizer.ggml.eos_token_id"] == 5 and metadata["tokenizer.ggml.mask_token_id"] == V - 1
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SpecdoctorError, match="the gguf library cannot read its tokenizer"):
        export_draft(made("deepspec dspark", tmp_path / "b"), "gguf", read_target_facts(folder), tmp_path / "b.gguf")


def test_tied_targets_give_their_embedding_as_the_head(tmp_path: Path) -> None:
    model = tiny_llama(V)
    facts = read_target_facts(write_target_gguf(model, tmp_path / "tied.gguf"))
    before = read_draft(write_drafter(tmp_path / "in", vocab=V, own_embedding=False, taps=(0,)))
    with pytest.raises(SpecdoctorError, match="exists already"):
        export_draft(before, "deepspec", facts, tmp_path / "in")
    after = read_draft(export_draft(before, "deepspec", facts, tmp_path / "out").path).load()
    assert after["lm_head.weight"].equal(after["embed_tokens.weight"])
    assert after["lm_head.weight"].equal(model.lm_head.weight.detach())


def test_a_foreign_target_is_refused(wide_target: TargetFacts, tmp_path: Path) -> None:
    with pytest.raises(SpecdoctorError, match=r"key num_target_layers is 3, but the target wide.gguf has 8 layers"):
        exported(made("deepspec dspark", tmp_path / "in"), "gguf", wide_target, tmp_path)


# Nothing half-written ------------------------------------------------------------------------------------------------

FULL_DISK = """
import resource, sys
from pathlib import Path
from specdoctor.formats.drafts.export import export_draft
from specdoctor.formats.drafts.read import read_draft
from specdoctor.formats.drafts.target_facts import read_target_facts
from specdoctor.errors import EnvironmentMissingError
draft, target, output, format = sys.argv[1:]
checkpoint, facts = read_draft(Path(draft), 3), read_target_facts(Path(target))
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    export_draft(checkpoint, format, facts, Path(output))
except EnvironmentMissingError as error:
    print(error)
    sys.exit(4)
"""


@pytest.mark.parametrize("format", ["deepspec", "speculators", "gguf"])
def test_a_full_disk_leaves_nothing(deep_target: TargetFacts, tmp_path: Path, format: str) -> None:
    """The largest file that this process may write is smaller than the drafter."""
    made("deepspec dspark", tmp_path / "in")
    place = tmp_path / "place"
    place.mkdir()
    output = place / ("out.gguf" if format == "gguf" else "out")
    arguments = [str(tmp_path / "in"), str(deep_target.path), str(output), format]
    done = subprocess.run([sys.executable, "-c", FULL_DISK, *arguments], capture_output=True, text=True)
    assert done.returncode == 4, done.stderr
    assert f"{output}: cannot be written" in done.stdout and "nothing was left behind" in done.stdout
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("format", ["deepspec", "gguf"])
def test_what_reads_back_otherwise_is_not_kept(
    deep_target: TargetFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    """Negative control of the read-back: a writer that loses a bit."""
    write = exporter._write

    def losing(spec: Any, tensors: dict[str, torch.Tensor], *rest: Any) -> None:
        write(spec, tensors | {"fc.weight": tensors["fc.weight"].bfloat16().float()}, *rest)

    monkeypatch.setattr(exporter, "_write", losing)
    with pytest.raises(SpecdoctorError, match=r"reading it back gave another drafter \(fc.weight\)") as refused:
        exported(made("deepspec dspark", tmp_path / "in"), format, deep_target, tmp_path)
    assert refused.value.exit_code == ExitCode.INTERNAL
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_what_stays_behind_is_said(deep_target: TargetFacts, tmp_path: Path) -> None:
    checkpoint = made("deepspec dspark", tmp_path / "in")
    (tmp_path / "in" / "calibration.json").write_text("{}")
    notes = exported(checkpoint, "speculators", replace(deep_target, name="target"), tmp_path).notes
    assert "calibration.json is not exported: run `specdoctor calibrate` on what was written" in notes
    assert any("write a hub id or an absolute path there" in note for note in notes)
    assert not any("calibration" in path.name for path in (tmp_path / "out").glob("*"))


def test_outputs_that_cannot_be_are_refused(deep_target: TargetFacts, tmp_path: Path) -> None:
    checkpoint = made("deepspec dspark", tmp_path / "in")
    for output, format, said in (
        (tmp_path / "no" / "out", "deepspec", "no such folder for the output out"),
        (tmp_path / "in", "deepspec", "exists already"),
        (tmp_path / "out", "gguf", "expected a file name that ends in .gguf"),
        (tmp_path / "out", "onnx", "format 'onnx'"),
    ):
        with pytest.raises(SpecdoctorError, match=said):
            export_draft(checkpoint, format, deep_target, output)
    with pytest.raises(SpecdoctorError, match="dtype 'int8'"):
        export_draft(checkpoint, "gguf", deep_target, tmp_path / "x.gguf", dtype="int8")


def test_the_command(deep_target: TargetFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made("deepspec dspark", tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    options = ["--target", str(deep_target.path)]
    done = CliRunner().invoke(app, ["export", "tiny", "--format", "gguf", *options])
    assert done.exit_code == ExitCode.OK, done.output
    assert "tiny.gguf: DeepSpec DSpark or DFlash, Qwen3 backbone as gguf" in done.stdout
    assert (
        "serve with llama-server -m TARGET.gguf -md THIS.gguf --spec-type draft-dspark --spec-draft-n-max 5"
        in done.stdout
    )
    done = CliRunner().invoke(app, ["export", "tiny", "--format", "speculators", *options, "--json", "-"])
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1 and document["output"] == "tiny-speculators"
    assert read_draft(tmp_path / "tiny-speculators", 3).spec.family == "speculators"
    done = CliRunner().invoke(app, ["export", "tiny", "--format", "zlab", *options])
    assert done.exit_code == ExitCode.USAGE and "cannot be exported as zlab: it has a Markov head" in done.output
