"""Loading or inspecting a checkpoint never runs code from it: planted pickles are refused and plant nothing."""

import ast
import io
import json
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import tiny_target, write_drafter
from typer.testing import CliRunner

from specdoctor.cli.app import app
from specdoctor.drafters.load import load_drafter
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.read import read_draft
from specdoctor.formats.pickled_tensors import unpickle_tensors
from specdoctor.formats.tensors import RefusedPickleError, TensorFolder

PACKAGE = Path(__file__).parents[1]
SOURCES = [p for root in ("specdoctor", "checks", "kernels") for p in (PACKAGE / root).rglob("*.py")]


class Plants:
    """Unpickling it would create `marker`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def payload(marker: Path) -> dict[str, Any]:
    return {"fc.weight": torch.ones(2, 2), "norm.weight": Plants(marker)}


def zip_file(path: Path, marker: Path) -> None:
    """torch's format since 1.6."""
    torch.save(payload(marker), path)


def legacy_file(path: Path, marker: Path) -> None:
    """torch's format before 1.6: several pickles in a row."""
    torch.save(payload(marker), path, _use_new_zipfile_serialization=False)


def bare_pickle(path: Path, marker: Path) -> None:
    path.write_bytes(pickle.dumps({"fc.weight": Plants(marker)}))


def doctored_zip(path: Path, marker: Path) -> None:
    """A healthy torch file whose data.pkl was exchanged."""
    whole = io.BytesIO()
    torch.save({"fc.weight": torch.ones(2, 2)}, whole)
    with zipfile.ZipFile(whole) as healthy, zipfile.ZipFile(path, "w") as changed:
        for name in healthy.namelist():
            data = healthy.read(name)
            changed.writestr(name, pickle.dumps(Plants(marker)) if name.endswith("data.pkl") else data)


def nested_state_dict(path: Path, marker: Path) -> None:
    torch.save({"state_dict": {"fc.weight": torch.ones(2)}, "optimizer": Plants(marker)}, path)


PLANTED: list[Callable[[Path, Path], None]] = [zip_file, legacy_file, bare_pickle, doctored_zip, nested_state_dict]
FILES = ("pytorch_model.bin", "model.pt", "medusa_lm_head.pt", "weights.pth")


def with_pickle(folder: Path, plant: Callable[[Path, Path], None], name: str) -> Path:
    """A DeepSpec drafter whose weights are the planted file; returns the marker that must not appear."""
    write_drafter(folder)
    (folder / "model.safetensors").unlink()
    marker = folder.parent / "planted"
    plant(folder / name, marker)
    return marker


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_the_fixture_is_dangerous_without_the_restriction(tmp_path: Path, plant: Callable[[Path, Path], None]) -> None:
    # The control: a careless loader does create the marker, so its absence below means something.
    marker = with_pickle(tmp_path / "draft", plant, "model.pt")
    if plant is bare_pickle:
        pickle.loads((tmp_path / "draft" / "model.pt").read_bytes())
    else:
        torch.load(tmp_path / "draft" / "model.pt", weights_only=False)
    assert marker.exists()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_pickle_is_refused_in_one_line(
    tmp_path: Path, plant: Callable[[Path, Path], None], name: str
) -> None:
    folder = tmp_path / "draft"
    marker = with_pickle(folder, plant, name)
    for read in (lambda: unpickle_tensors(folder / name), lambda: TensorFolder(folder), lambda: read_draft(folder)):
        with pytest.raises(RefusedPickleError) as refusal:
            read()
        assert f"{folder / name}: " in str(refusal.value) and "refused" in str(refusal.value)
        assert "\n" not in str(refusal.value)
    assert not marker.exists()


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_inspect_names_the_family_and_refuses_the_file(tmp_path: Path, plant: Callable[[Path, Path], None]) -> None:
    marker = with_pickle(tmp_path / "draft", plant, "pytorch_model.bin")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "draft"), "--json", "-"])
    document = json.loads(result.stdout)
    assert result.exit_code == 1 and document["family"] == "deepspec" and not document["runs_here"]
    (finding,) = document["findings"]
    assert finding["code"] == "SD303" and finding["where"] == {"file": "pytorch_model.bin"}
    assert not marker.exists()


def test_load_drafter_and_bench_refuse_it_too(tmp_path: Path) -> None:
    marker = with_pickle(tmp_path / "draft", zip_file, "pytorch_model.bin")
    with pytest.raises(SpecdoctorError, match="which could run code when loaded"):
        load_drafter(tmp_path / "draft", Target(tiny_target()))
    assert not marker.exists()


def test_safetensors_beside_a_planted_pickle_are_what_is_read(tmp_path: Path) -> None:
    write_drafter(tmp_path / "draft")
    zip_file(tmp_path / "draft" / "pytorch_model.bin", tmp_path / "planted")
    drafter = load_drafter(tmp_path / "draft", Target(tiny_target()))
    assert drafter is not None and not (tmp_path / "planted").exists()


@pytest.mark.parametrize("broken", [b"", b"\x80\x04.", b"PK\x03\x04 cut", b"\x80\x02]q\x00.", bytes(range(256))])
def test_a_broken_pickle_is_one_line_as_well(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(broken)
    with pytest.raises(SpecdoctorError) as refusal:
        unpickle_tensors(path)
    assert str(refusal.value).startswith(f"{path}: ") and "\n" not in str(refusal.value)


def test_what_holds_other_things_than_tensors_is_named(tmp_path: Path) -> None:
    torch.save({"fc.weight": torch.ones(2), "epoch": 3}, tmp_path / "model.pt")
    with pytest.raises(SpecdoctorError, match=r"entry 'epoch' is of type int, expected a mapping of names to tensors"):
        unpickle_tensors(tmp_path / "model.pt")


def test_a_healthy_pickle_loads(tmp_path: Path) -> None:
    for legacy in (False, True):
        torch.save({"a": torch.arange(3.0)}, tmp_path / "model.pt", _use_new_zipfile_serialization=not legacy)
        assert torch.equal(unpickle_tensors(tmp_path / "model.pt")["a"], torch.arange(3.0))


def test_the_code_that_auto_map_points_at_is_not_imported(tmp_path: Path) -> None:
    folder, marker = tmp_path / "draft", tmp_path / "planted"
    target = Target(tiny_target())
    write_drafter(folder, config_changes={"auto_map": {"AutoModel": "planted_code.DFlashDraftModel"}}, family="zlab")
    (folder / "planted_code.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
    load_drafter(folder, target)
    result = CliRunner().invoke(app, ["inspect", str(folder), "--verbose"])
    assert result.exit_code == 0 and "key auto_map not used: points at code, which is never run" in result.stdout
    assert not marker.exists() and "planted_code" not in sys.modules


def test_a_causal_lm_with_auto_map_does_not_run_it_either(tmp_path: Path) -> None:
    folder, marker = tmp_path / "draft", tmp_path / "planted"
    tiny_target().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "planted_code.Config", "AutoModelForCausalLM": "planted_code.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "planted_code.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
    assert read_draft(folder).spec.algorithm == "causal-lm"
    Target.load(folder)
    assert not marker.exists()


def test_no_source_trusts_remote_code_or_loads_a_pickle_whole() -> None:
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            words = {keyword.arg: keyword.value for keyword in call.keywords}
            if "trust_remote_code" in words:
                value = words["trust_remote_code"]
                assert isinstance(value, ast.Constant) and value.value is False, f"{path}:{call.lineno}"
            called = ast.unparse(call.func)
            if called == "torch.load":
                only = words.get("weights_only")
                assert isinstance(only, ast.Constant) and only.value is True, f"{path}:{call.lineno}"
            assert called not in ("pickle.load", "pickle.loads", "eval", "exec"), f"{path}:{call.lineno}"
            assert "Unpickler" not in called, f"{path}:{call.lineno}"


def test_safetensors_metadata_is_only_data(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors", metadata={"format": "__import__('os')"})
    assert TensorFolder(tmp_path).names() == ["fc.weight"]
