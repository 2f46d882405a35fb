"""The real pair: SmolLM2-135M with the drafters that come with the package. Minutes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdoctor.cli.app import app
from specdoctor.drafters.load import load_drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import EnvironmentMissingError, ExitCode
from specdoctor.formats.sources import resolve_model
from specdoctor.measure.prompts import Prompt, load_bundled, load_tokenizer, render

DRAFTERS = ("dspark-smollm2-135m", "dflash-smollm2-135m", "eagle3-smollm2-135m", "early-exit-smollm2-135m")

pytestmark = [pytest.mark.slow, pytest.mark.integration]


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return resolve_model("smollm2-135m")
    except EnvironmentMissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[Prompt]:
    return render(load_bundled(["code", "chat", "math"], 6), load_tokenizer(folder))


def greedy(decoder: Engine, prompts: list[Prompt], stop_ids: frozenset[int]) -> list[Sequence]:
    sequences = [Sequence(prompt.ids, max_new_tokens=32, stop_ids=stop_ids) for prompt in prompts]
    for sequence in sequences:
        decoder.generate([sequence])
    return sequences


def test_float32_greedy_text_is_exactly_the_targets(folder: Path, prompts: list[Prompt]) -> None:
    target = Target.load(folder, "cpu", "float32")
    plain = greedy(Engine(target), prompts, target.stop_ids)
    for name in DRAFTERS:
        drafted = greedy(Engine(target, load_drafter(resolve_model(name), target)), prompts, target.stop_ids)
        assert [s.completion_ids for s in drafted] == [s.completion_ids for s in plain]
        rounds = [record for s in drafted for record in s.records]
        assert sum(r.accepted for r in rounds) / len(rounds) > 0.5
    batch = [Sequence(prompt.ids, max_new_tokens=32, stop_ids=target.stop_ids) for prompt in prompts]
    Engine(target, load_drafter(resolve_model(DRAFTERS[0]), target)).generate(batch)
    assert [s.completion_ids for s in batch] == [s.completion_ids for s in plain]


def test_bfloat16_bench_ends_in_a_full_report(folder: Path, tmp_path: Path) -> None:
    """Different texts are near ties, all of them: in bfloat16 this target has many, and a fault would exit 1."""
    options = ["--dtype", "bfloat16", "--device", "cpu", "--max-prompts", "6", "--max-new-tokens", "32"]
    drafts = [option for name in DRAFTERS for option in ("--draft", name)]
    path = tmp_path / "result.json"
    done = CliRunner().invoke(app, ["bench", "--target", str(folder), *drafts, *options, "--json", str(path)])
    assert done.exit_code == ExitCode.OK, done.output
    result = json.loads(path.read_text())
    assert result["environment"]["dtype"] == "bfloat16"
    assert result["environment"]["attention_path"]["name"] == "matmul"
    assert [arm["name"] for arm in result["arms"]] == ["ar", *DRAFTERS]
    for arm in result["arms"]:
        assert arm["requests"] == 6 and arm["greedy_mismatches"] == 0
        assert arm["tokens_per_s"]["value"] > 0
    for arm in result["arms"][1:]:
        assert arm["tau_step"]["value"] > 1.2
        assert arm["expected_speedup"]["value"] > 0 and arm["verify_ratio"]["value"] > 0
        assert set(arm["by_category"]) == {"code", "chat", "math"}
    for part in ("Where the time goes", "By category", "compare ", "greedy ", "limit "):
        assert part in done.stdout
