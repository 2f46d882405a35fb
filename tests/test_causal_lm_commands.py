"""The commands that run a causal LM drafter or a look-up, and the options that only these can follow."""

import json
from pathlib import Path

import pytest
from causal_lm_models import near_copy, save
from tiny_models import tiny_target
from tiny_tokenizers import ROWS, tokenizer_json, write
from typer.testing import CliRunner

from specdoctor.cli.app import app


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft folder with one tokenizer."""
    folders = []
    root, model = tmp_path_factory.mktemp("pair"), tiny_target(ROWS)
    for name, weights in (("target", model), ("small", near_copy(model))):
        folder = save(root / name, weights)
        write(folder / "tokenizer.json", tokenizer_json())
        write(
            folder / "tokenizer_config.json", {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
        )
        folders.append(folder)
    return folders[0], folders[1]


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_generate_with_a_causal_lm(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = map(str, pair)
    common = ["generate", "hello there", "--target", target, "--template", "none", "--max-new-tokens", "12"]
    texts = []
    for more in ([], ["--draft", draft], ["--draft", draft, "-K", "3", "--dynamic-k", "adaptive"]):
        path = tmp_path / f"{len(texts)}.json"
        code, _, err = invoke(*common, *more, "--json", str(path))
        assert code == 0, err
        texts.append(json.loads(path.read_text()))
    assert texts[0]["completion_ids"] == texts[1]["completion_ids"] == texts[2]["completion_ids"]
    assert texts[1]["tau_step"] > 1 and texts[1]["vocabulary"] == {"mode": "equal", "shared": ROWS, "note": None}


def test_bench_with_a_causal_lm_and_a_look_up(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = map(str, pair)
    prompts = write(
        tmp_path / "prompts.jsonl", '{"id": "a", "prompt": "a b a b a b"}\n{"id": "b", "prompt": "the sea"}'
    )
    out = tmp_path / "bench.json"
    arms = ["--draft", draft, "--draft", "ngram", "--draft", "five=ngram:5"]
    code, shown, err = invoke(
        *("bench", "--target", target, *arms, "--prompts", str(prompts), "--template", "none"),
        *("--max-new-tokens", "16", "--dynamic-k", "adaptive", "--json", str(out)),
    )
    assert code == 0, err
    result = json.loads(out.read_text())
    rows = {row["name"]: row for row in result["arms"]}
    assert set(rows) == {"ar", "small", "ngram", "five"}
    assert rows["small"]["draft"]["algorithm"] == "causal-lm" and rows["five"]["draft"]["algorithm"] == "prompt-lookup"
    assert all(row["greedy_mismatches"] == 0 for row in rows.values())
    assert result["settings"]["drafts"]["five"] == "ngram:5" and result["settings"]["dynamic_k"] == "adaptive"
    assert rows["small"]["expected_speedup"]["value"] is not None
    assert "small" in shown


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--confidence-threshold", "0.5"], "--confidence-threshold 0.5: no drafter to apply it to"),
        (["--dynamic-k", "adaptive"], "--dynamic-k adaptive: no drafter to apply it to"),
        (["--dynamic-k", "sometimes"], "--dynamic-k sometimes: expected one of constant, threshold, adaptive"),
        (["--vocabulary", "retokenize"], "--vocabulary retokenize: no drafter to apply it to"),
        (["--vocabulary", "some"], "--vocabulary some: expected one of auto, intersection, retokenize"),
        (["--draft-quantize", "int8"], "--draft-quantize int8: no drafter to apply it to"),
        (["--draft", "ngram", "--draft-quantize", "int8"], "int8: is for a causal LM as the drafter, found ngram"),
        (
            ["--draft", "ngram", "--dynamic-k", "threshold"],
            "--dynamic-k threshold: the drafter ngram has no confidence",
        ),
        (["--draft", "ngram:x"], "--draft ngram:x: expected ngram, or ngram:N"),
    ],
)
@pytest.mark.parametrize("command", ["bench", "generate"])
def test_options_that_nothing_can_follow(
    pair: tuple[Path, Path], tmp_path: Path, command: str, options: list[str], line: str
) -> None:
    prompts = write(tmp_path / "prompts.jsonl", '{"id": "a", "prompt": "a b a b a b"}')
    what = ["hello"] if command == "generate" else ["--prompts", str(prompts)]
    code, _, err = invoke(command, *what, "--target", str(pair[0]), "--template", "none", *options)
    assert code == 2 and line in " ".join(err.split())
