"""Settings and files that no writer makes: one line each, from `inspect`, `bench` and `check-mask`, and no hang."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from specdoctor.cli.app import app
from specdoctor.engine.trees import parse_tree
from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.formats.drafts.read import read_draft
from specdoctor.formats.mask_dump import read_mask_dump, read_parents_text
from specdoctor.reports.output import write_json

GOLDEN = Path(__file__).parent / "data" / "golden"


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "deepspec-eagle3", tmp_path / "drafter"))


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "NaN": ({"rms_norm_eps": float("nan")}, "NaN is no number of JSON"),
    "no epsilon": ({"rms_norm_eps": 0.0}, "key rms_norm_eps is 0.0, expected a number above 0"),
    "negative epsilon": ({"rms_norm_eps": -1.0}, "key rms_norm_eps is -1.0"),
    "many layers": ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers is 1000000000, expected at"),
    "more than a machine word": ({"num_hidden_layers": 10**30, "layer_types": None}, "at most 2147483647"),
    "a list for a number": ({"rope_parameters": {"rope_theta": [1]}}, "rope_theta is [1], expected a number above 0"),
    "a zero period": ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0, expected a number above 0"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_cannot_be(drafter: Path, name: str) -> None:
    values, line = SETTINGS[name]
    change(drafter, **values)
    with pytest.raises(SpecdoctorError) as error:
        read_draft(drafter)
    assert line in str(error.value) and str(drafter) in str(error.value) and "\n" not in str(error.value)


def test_a_number_too_large_for_a_float_and_a_bottomless_list(drafter: Path) -> None:
    path = drafter / "config.json"
    text = path.read_text()
    path.write_text(text.replace('"hidden_size"', '"far": 1e999, "hidden_size"', 1))
    with pytest.raises(SpecdoctorError, match="1e999 is too large a number"):
        read_draft(drafter)
    path.write_text("[" * 200_000 + "]" * 200_000)
    with pytest.raises(SpecdoctorError, match="nested too deep"):
        read_draft(drafter)


def test_files_that_are_none(drafter: Path) -> None:
    (drafter / "model.safetensors").unlink()
    os.mkfifo(drafter / "model.safetensors")
    with pytest.raises(SpecdoctorError, match=r"no \*.safetensors"):
        read_draft(drafter)
    for shard in (1, "../model.safetensors"):
        (drafter / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
        with pytest.raises(SpecdoctorError, match="expected the name of a file beside it"):
            read_draft(drafter)


def test_masks_of_unusual_kinds(tmp_path: Path) -> None:
    path = tmp_path / "mask.pt"
    for tensor in (torch.eye(3).to_sparse_csr(), torch.zeros(1, 1).expand(10**5, 10**5)):
        torch.save(tensor, path)
        with pytest.raises(SpecdoctorError, match=r"expected (plain numbers|at most 67108864 entries)"):
            read_mask_dump(path)
    right = np.tril(np.ones((3, 3)))
    for kind in (np.longdouble, np.uint64):
        np.save(tmp_path / "mask.npy", right.astype(kind))
        assert read_mask_dump(tmp_path / "mask.npy").values.tolist() == right.tolist()
    np.save(tmp_path / "wide.npy", np.where(right > 0, 2**64 - 1, 0).astype(np.uint64))
    assert (read_mask_dump(tmp_path / "wide.npy").values >= 0).all()  # not wrapped round


@pytest.mark.parametrize("text", ["[-1,0", "-1,0]", "[-1,0,0]\n[1]"])
def test_half_a_list_is_no_list(text: str) -> None:
    with pytest.raises(SpecdoctorError) as error:
        read_parents_text(text)
    assert "\n" not in str(error.value)
    with pytest.raises(SpecdoctorError):
        parse_tree(text)


@pytest.mark.parametrize("parents", ["[-1,-1,0]", "[-1,-1,-1,0]", "[-1,0,0,1]"])
def test_a_tree_that_narrows_has_a_name(parents: str) -> None:
    assert parse_tree(parents).label.endswith("nodes") or "x" in parse_tree(parents).label


def test_json_goes_into_a_device_and_never_in_its_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_json({"a": 1}, str(pipe))
    assert json.loads(os.read(reader, 100)) == {"a": 1} and pipe.is_fifo()
    os.close(reader)
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_json({"a": 1}, str(tmp_path / "link.json"))
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "real.json").is_file()


def test_a_path_into_a_folder_that_is_here_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drafters").mkdir()
    done = CliRunner().invoke(app, ["inspect", "drafters/nope"])
    assert done.exit_code == ExitCode.USAGE and "no such folder" in done.output + done.stderr


def test_a_negative_seed_is_refused_before_anything_runs() -> None:
    arguments = ["--target", str(GOLDEN / "target"), "--template", "bytes", "--seed", "-1"]
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == ExitCode.USAGE and "--seed -1" in done.stderr


def test_a_closed_pipe_is_no_finding() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "specdoctor", "inspect", str(GOLDEN / "deepspec-eagle3")]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, timeout=120)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"")
