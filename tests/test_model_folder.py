"""What is wrong with a model folder or a safetensors file is one clear line."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.model_folder import check_model_folder, check_safetensors_file


def make_folder(folder: Path) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({"w": np.ones((4, 4), dtype=np.float32)}, folder / "model.safetensors")
    return folder


def complaint(folder: Path) -> str:
    with pytest.raises(SpecdoctorError) as caught:
        check_model_folder(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestFolder:
    def test_without_config(self, tmp_path):
        assert "no config.json" in complaint(tmp_path)

    def test_without_weights(self, tmp_path):
        (make_folder(tmp_path) / "model.safetensors").unlink()
        (tmp_path / "training_args.bin").write_bytes(b"x")
        assert "config.json but no weights" in complaint(tmp_path)

    def test_broken_config(self, tmp_path):
        (make_folder(tmp_path) / "config.json").write_text("{")
        assert "not valid JSON" in complaint(tmp_path)

    def test_config_that_is_a_list(self, tmp_path):
        (make_folder(tmp_path) / "config.json").write_text("[]")
        assert "expected a JSON object" in complaint(tmp_path)

    def test_a_file_is_no_folder(self, tmp_path):
        (tmp_path / "m.gguf").write_bytes(b"GGUF")
        assert "expected a Hugging Face model folder" in complaint(tmp_path / "m.gguf")

    def test_absent_shards(self, tmp_path):
        (make_folder(tmp_path) / "model.safetensors").rename(tmp_path / "a.safetensors")
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}))
        said = complaint(tmp_path)
        assert "names 2 files, 1 missing (first: b.safetensors)" in said
        index.write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
        check_model_folder(tmp_path)

    @pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', '{"weight_map": {"w": 3}}'])
    def test_wrong_index(self, tmp_path, index):
        (make_folder(tmp_path) / "model.safetensors").unlink()
        (tmp_path / "model.safetensors.index.json").write_text(index)
        assert "key weight_map is missing or wrong" in complaint(tmp_path)

    def test_pickled_weights_count_as_weights(self, tmp_path):
        (make_folder(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
        check_model_folder(tmp_path)


class TestSafetensorsFile:
    @pytest.fixture
    def path(self, tmp_path):
        return make_folder(tmp_path) / "model.safetensors"

    def said(self, path: Path) -> str:
        with pytest.raises(SpecdoctorError) as caught:
            check_safetensors_file(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_a_whole_file_passes(self, path):
        check_safetensors_file(path)

    def test_cut_in_its_data(self, path):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        assert f"cut off: {len(whole) - 1} bytes, its header promises {len(whole)}" in self.said(path)

    def test_cut_in_its_header(self, path):
        path.write_bytes(path.read_bytes()[:30])
        assert "cut off in its header: 30 bytes" in self.said(path)

    @pytest.mark.parametrize("length", [1, 7, 8])
    def test_hardly_anything_left(self, path, length):
        path.write_bytes(path.read_bytes()[:length])
        assert "cut off in its header" in self.said(path)

    def test_empty(self, path):
        path.write_bytes(b"")
        assert "empty" in self.said(path)

    def test_too_long(self, path):
        path.write_bytes(path.read_bytes() + b"xx")
        assert "too long" in self.said(path)

    def test_a_web_page(self, path):
        path.write_bytes(b"<!DOCTYPE html><title>404</title>")
        assert "not a safetensors file" in self.said(path)

    def test_a_git_lfs_pointer(self, path):
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 538090408\n")
        assert "Git LFS pointer" in self.said(path)

    def test_header_that_is_no_json(self, path):
        path.write_bytes((4).to_bytes(8, "little") + b"{nix")
        assert "header cannot be read" in self.said(path)

    def test_header_that_contradicts_itself(self, path):
        header = json.dumps({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        assert "header is inconsistent" in self.said(path)
