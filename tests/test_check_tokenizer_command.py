"""The command `check-tokenizer`: what it prints and writes, one line for bad input, what it does not import."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers as tiny
from test_check_tokenizer import swapped
from typer.testing import CliRunner

from specdoctor.checks.tokenizer_examination import examine_tokenizers
from specdoctor.cli.app import app


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny.model_folder(tmp_path / "target")


def test_human_report_when_piped(target: Path, tmp_path: Path) -> None:
    drafter = tiny.model_folder(tmp_path / "drafter", swapped(tiny.tokenizer_json(), "<|im_start|>", "<|im_end|>"))
    result = CliRunner().invoke(app, ["check-tokenizer", str(target), str(drafter)])
    assert result.exit_code == 1
    assert re.search(r"^verdict  2 ids differ of \d+", result.stdout, re.M)
    assert "SD101 error" in result.stdout and "'<|im_start|>'" in result.stdout and "  fix  " in result.stdout
    assert not re.search("[\x1b\u2500-\u257f]", result.stdout)  # neither colour nor boxes


def test_json_file_is_written_whole(target: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result = CliRunner().invoke(app, ["check-tokenizer", str(target), str(target), "--json", str(path)])
    assert result.exit_code == 0 and "verdict" in result.stdout
    document = json.loads(path.read_text())
    assert document["schema_version"] == 1 and list(tmp_path.glob(".result*")) == []


BAD_INPUT: dict[str, Callable[[Path], Any]] = {
    "missing": lambda p: None,
    "no tokenizer files": lambda p: p.mkdir(),
    "target without tokenizer": lambda p: tiny.block_drafter(p),
    "empty file": lambda p: p.touch(),
    "broken JSON": lambda p: p.write_text('{"model": {"vocab": {'),
    "other JSON": lambda p: p.write_text('{"a": []}'),
    "absurd id": lambda p: tiny.write(p, {"model": {"vocab": {"a": 10**9}}}),
    "cut GGUF": lambda p: p.write_bytes(tiny.gguf_file(p.with_suffix(".x")).read_bytes()[:3000]),
    "huge counts in GGUF": lambda p: p.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 16),
    "cut ranks": lambda p: p.write_bytes(tiny.tiktoken_file(p.with_suffix(".x")).read_bytes()[:1000]),
    "noise": lambda p: p.write_bytes(bytes(range(7, 250)) * 9),
    "broken folder": lambda p: tiny.write(p / "tokenizer.json", "{"),
    "broken config": lambda p: tiny.write(tiny.model_folder(p) / "config.json", "{"),
    "wrong type in config": lambda p: tiny.model_folder(p, config={"vocab_size": "many"}),
    "cut safetensors": lambda p: (tiny.model_folder(p) / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(target: Path, tmp_path: Path, case: str) -> None:
    bad = tmp_path / "bad"
    BAD_INPUT[case](bad)
    result = CliRunner().invoke(app, ["check-tokenizer", str(bad), str(target)])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("specdoctor: ") and "bad" in line and "Traceback" not in line


def test_neither_torch_nor_transformers_is_imported(target: Path, tmp_path: Path) -> None:
    drafter = tiny.model_folder(tmp_path / "drafter", swapped(tiny.tokenizer_json(), "<|im_start|>", "<|im_end|>"))
    code = (
        "import sys\nfrom specdoctor.cli.app import app\n"
        f"try: app(['check-tokenizer', {str(target)!r}, {str(drafter)!r}])\nexcept SystemExit: pass\n"
        "print('LOADED', sorted({'torch', 'transformers', 'pandas', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("LOADED []")


def test_examination_is_the_same_twice(target: Path, tmp_path: Path) -> None:
    drafter = tiny.model_folder(tmp_path / "drafter", swapped(tiny.tokenizer_json(), "<think>", "</think>"))
    first, second = (examine_tokenizers(target, drafter) for _ in range(2))
    for document in (first, second):
        del document["seconds"]
    assert first == second
