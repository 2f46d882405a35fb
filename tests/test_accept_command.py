"""`specdoctor accept` end to end on the golden pair (a byte-level target): result file, report, errors, exit codes."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specdoctor.cli.accept import app
from specdoctor.drafters.load import load_drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.formats.results.load import read_results

GOLDEN = Path(__file__).parent / "data" / "golden"
DSPARK, DFLASH = GOLDEN / "deepspec-dspark-vanilla", GOLDEN / "deepspec-dflash"
TEXTS = [
    ("code", "def area(width, height):\n    return "),
    ("code", "for i in range(10):\n    print("),
    ("code", "class Tree:\n    def __init__(self, left, right):\n"),
    ("chat", "Once upon a time there was a "),
    ("chat", "Dear Anna, thank you for the "),
    ("chat", "The weather in the north is "),
    ("math", "12 + 30 = "),
    ("math", "Let x be the number of apples. "),
    ("math", "1, 2, 3, 4, "),
    ("math", "The sum of two numbers is "),
]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"id": f"{category}-{i}", "category": category, "prompt": text} for i, (category, text) in enumerate(TEXTS)]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpora")


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(result.exception, SpecdoctorError):
        raise result.exception
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def measured(prompts: Path, corpus: Path, out: Path, *more: object, code: int = 0) -> tuple[dict[str, Any], str]:
    options = (
        "--target",
        GOLDEN / "target",
        "--draft",
        f"dspark={DSPARK}",
        "--prompts",
        prompts,
        "--template",
        "bytes",
    )
    output = run(*options, "--max-new-tokens", 40, "--corpus", corpus, "--json", out, *more, code=code)
    return json.loads(out.read_text()), output


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, float):
        yield value


def test_greedy_result_equals_real_rounds(prompts: Path, corpora: Path, tmp_path: Path) -> None:
    result, output = measured(prompts, corpora / "greedy", tmp_path / "a.json", "--draft", f"dflash={DFLASH}")
    assert (result["schema_version"], result["kind"], result["stopped"]) == (1, "accept", "prompts")
    target = Target.load(GOLDEN / "target", "cpu", "float32")
    for arm, folder in zip(result["arms"], (DSPARK, DFLASH), strict=True):
        sequences = [Sequence(list(text.encode()), max_new_tokens=40, stop_ids=target.stop_ids) for _, text in TEXTS]
        Engine(target, load_drafter(folder, target)).generate(sequences)
        records = [r for s in sequences for r in s.records]
        assert arm["tau_step"]["value"] == pytest.approx(sum(r.committed for r in records) / len(records))
        assert arm["tau_step"]["n"] == len(records)
        assert arm["alpha_draft"]["value"] == pytest.approx(
            sum(r.accepted for r in records) / sum(r.drafted for r in records)
        )
        accepted = [sum(r.accepted > k for r in records) / len(records) for k in range(5)]
        assert [row["value"] for row in arm["marginal"]] == pytest.approx(accepted)
        lengths = [sum(r.accepted == j for r in records) for j in range(6)]
        assert arm["accepted_length_histogram"] == pytest.approx(lengths)
        rows = {row["id"]: row for row in result["prompts"] if row["arm"] == arm["name"]}
        assert len(rows) == len(TEXTS)
        for i, ((category, _), sequence) in enumerate(zip(TEXTS, sequences, strict=True)):
            row = rows[f"{category}-{i}"]
            assert row["category"] == category
            assert row["expected_rounds"] == pytest.approx(len(sequence.records))
            assert row["expected_committed"] == pytest.approx(len(sequence.completion_ids) - 1)
    dspark = result["arms"][0]
    assert set(dspark["by_category"]) == {"code", "chat", "math"}
    assert {"digits", "whitespace", "word-start", "continuation"} <= set(dspark["by_token_class"])
    assert [row["K"] for row in dspark["what_if"]["draft_tokens"]] == [1, 2, 3, 4, 5]
    assert dspark["what_if"]["draft_tokens"][-1]["tau_step"] == dspark["tau_step"]
    assert dspark["what_if"]["tree_coverage"][0]["tau_ceiling"]["value"] == pytest.approx(dspark["tau_step"]["value"])
    assert len(dspark["calibration"]["before"]["cumulative"]) == 5
    assert result["arms"][1]["calibration"] == {"reason": "the drafter has no confidence head"}
    assert result["comparisons"][0]["tau_difference"]["n"] == len(TEXTS)
    assert dspark["numerics"]["argmax_disagreements"] == 0
    assert all(math.isfinite(number) for number in numbers(result))
    for word in ("tau_step", "tau_anchor", "What if: draft length", "Confidence, cumulative", "By category", "compare"):
        assert word in output
    assert "\x1b[" not in output and "─" not in output, "plain when piped"


def test_the_corpus_is_reused_and_gate_reads_the_result(prompts: Path, corpora: Path, tmp_path: Path) -> None:
    first, _ = measured(prompts, corpora / "reused", tmp_path / "a.json", "--no-what-if")
    second, _ = measured(prompts, corpora / "reused", tmp_path / "b.json", "--no-what-if")
    assert (first["corpus"]["written_now"], second["corpus"]["written_now"]) == (len(TEXTS), 0)
    assert first["arms"] == second["arms"] and first["arms"][0]["what_if"] is None
    assert not (corpora / "reused").name.startswith("/") and first["corpus"]["folder"] == "reused"
    (loaded,) = read_results(tmp_path / "a.json")
    assert loaded.pairable and len(loaded.prompts) == len(TEXTS)
    assert loaded.settings["K"] == 5 and loaded.settings["temperature"] == 0
    tau = loaded.estimate("tau_step")
    assert tau.value == pytest.approx(first["arms"][0]["tau_step"]["value"])
    assert loaded.estimate("alpha_draft").value == pytest.approx(first["arms"][0]["alpha_draft"]["value"])
    assert loaded.estimate("expected_calibration_error").value == pytest.approx(
        first["arms"][0]["calibration"]["ece"]["value"]
    )


def test_sampling_with_repeats_temperatures_and_costs(prompts: Path, corpora: Path, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"rows": [1, 2, 8], "seconds": [0.040, 0.042, 0.060], "draft_seconds": 0.004}))
    result, output = measured(
        *(prompts, corpora / "sampled", tmp_path / "a.json", "--temperature", 0.8, "--repeats", 2),
        *("--costs", costs, "--draft-temperatures", "0,0.5x,1x", "--max-prompts", 6),
    )
    (arm,) = result["arms"]
    assert (arm["requests"], len(result["prompts"])) == (12, 6)
    assert all(row["requests"] == 2 for row in result["prompts"])
    curves = arm["what_if"]
    assert [row["draft_temperature"] for row in curves["draft_temperature"]] == ["0", "0.5x", "1x"]
    assert curves["draft_temperature"][2]["tau_step"] == arm["tau_step"], "1x is the run's own"
    for row in curves["draft_tokens"]:
        seconds = 0.004 + {1: 0.042}.get(row["K"], 0.042 + 0.003 * (row["K"] - 1))
        assert row["tokens_per_s"]["value"] == pytest.approx(row["tau_step"]["value"] / seconds)
        assert row["speedup"]["value"] == pytest.approx(row["tokens_per_s"]["value"] * 0.040)
    best = max(curves["draft_tokens"], key=lambda row: row["tokens_per_s"]["value"])
    assert curves["best_K"]["K"] == (best["K"] if best["speedup"]["value"] > 1 else 0)
    assert "best K" in output and "tokens/s" in output
    assert curves["length_rule"][0]["rule"] == "last+1" and curves["confidence_threshold"]


def test_a_short_cost_table_leaves_speeds_absent(prompts: Path, corpora: Path, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"rows": [1, 4], "seconds": [0.040, 0.050], "draft_seconds": 0.004}))
    result, _ = measured(prompts, corpora / "greedy", tmp_path / "a.json", "--costs", costs)
    rows = result["arms"][0]["what_if"]["draft_tokens"]
    assert rows[2]["tokens_per_s"]["value"] and rows[3]["tokens_per_s"]["value"] is None
    assert "1 to 4 rows, expected 1 to 5" in rows[3]["tokens_per_s"]["reason"]


def test_stored_temperatures_are_applied(prompts: Path, corpora: Path, tmp_path: Path) -> None:
    stored = tmp_path / "calibration.json"
    stored.write_text(json.dumps({"temperatures": [1.0, 1.0, 1.0, 1.0, 1.0]}))
    result, output = measured(prompts, corpora / "greedy", tmp_path / "a.json", "--calibration", stored)
    report = result["arms"][0]["calibration"]
    assert report["temperatures"] == [1.0] * 5 and "ECE after" in output
    for k in range(5):
        before, after = (report[when]["cumulative"][k]["ece"]["value"] for when in ("before", "after"))
        assert after == pytest.approx(before, abs=1e-6)
    stored.write_text(json.dumps({"temperatures": [2.0]}))
    with pytest.raises(SpecdoctorError, match="expected 5 numbers above 0"):
        measured(prompts, corpora / "greedy", tmp_path / "a.json", "--calibration", stored)
    stored.write_text("{}")
    with pytest.raises(SpecdoctorError, match="list of numbers `temperatures`"):
        measured(prompts, corpora / "greedy", tmp_path / "a.json", "--calibration", stored)


def test_precision_budget_and_anchors(prompts: Path, corpora: Path, tmp_path: Path) -> None:
    loose, _ = measured(prompts, corpora / "greedy", tmp_path / "a.json", "--precision", 0.9, "--no-what-if")
    assert loose["stopped"] == "precision" and loose["corpus"]["texts"] == 8
    tight, _ = measured(
        *(prompts, corpora / "greedy", tmp_path / "b.json", "--precision", 0.001, "--no-what-if"),
        code=int(ExitCode.INCONCLUSIVE),
    )
    assert tight["stopped"] == "prompts" and tight["corpus"]["texts"] == len(TEXTS)
    short, output = measured(prompts, corpora / "greedy", tmp_path / "c.json", "--budget", 0.001, "--no-what-if")
    assert short["stopped"] == "budget" and short["corpus"]["texts"] == 1 and "budget spent" in output
    sampled, _ = measured(prompts, corpora / "greedy", tmp_path / "d.json", "--anchors", 6)
    arm = sampled["arms"][0]
    assert arm["tau_step"]["value"] is None and "sampled" in arm["tau_step"]["reason"]
    assert arm["tau_anchor"]["value"] > 1 and arm["splits_average"] == "anchor"
    assert arm["what_if"]["tree_coverage"][0]["average"] == "anchor"


def test_answers_of_one_token_have_no_rounds(prompts: Path, corpora: Path, tmp_path: Path) -> None:
    """The first token comes from the prefill: nothing is left to draft for, and nothing may crash."""
    result, _ = measured(prompts, corpora / "one", tmp_path / "a.json", "--max-new-tokens", 1, "--max-prompts", 3)
    (arm,) = result["arms"]
    assert arm["tau_step"] == {"value": None, "low": None, "high": None, "n": 0, "reason": arm["tau_step"]["reason"]}
    assert "more than one token" in arm["tau_step"]["reason"]
    assert all(row["expected_rounds"] == 0 for row in result["prompts"])


def test_interruption_keeps_what_is_complete(
    prompts: Path, corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdoctor.measure.accept_pass import AcceptancePass

    real, calls = AcceptancePass.run, []

    def interrupted(self: AcceptancePass, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(AcceptancePass, "run", interrupted)
    result, output = measured(
        *(prompts, corpora / "greedy", tmp_path / "a.json", "--no-what-if"), code=int(ExitCode.INTERRUPTED)
    )
    assert result["interrupted"] and result["corpus"]["texts"] == 3 and "interrupted" in output


def test_json_alone_on_stdout(prompts: Path, corpora: Path) -> None:
    output = run(
        *("--target", GOLDEN / "target", "--draft", DFLASH, "--prompts", prompts, "--template", "bytes"),
        *("--max-new-tokens", 12, "--corpus", corpora / "greedy", "--json", "-", "--no-what-if", "--max-prompts", 2),
    )
    assert json.loads(output)["arms"][0]["name"] == "deepspec-dflash"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--draft", ""), None),
        (("-K", 9), r"-K 9: .* proposes 1 to 5 tokens"),
        (("--repeats", 3), "a greedy target writes one text a prompt"),
        (("--precision", 0), "--precision 0.0: expected a number above 0"),
        (("--budget", -1), "--budget -1.0: expected a number above 0"),
        (("--anchors", 4, "--precision", 0.1), "a sample of --anchors does not show"),
        (("--costs", "nowhere.json"), "nowhere.json"),
        (("--temperature", -1), "--temperature -1.0"),
        (("--draft-temperatures", "hot", "--temperature", 1), "--draft-temperature hot"),
    ],
)
def test_bad_options_are_one_clear_line(
    prompts: Path, corpora: Path, tmp_path: Path, arguments: tuple, message: str | None
) -> None:
    if message is None:
        with pytest.raises(SpecdoctorError, match="--draft: found none, expected at least one"):
            run("--target", GOLDEN / "target", "--prompts", prompts, "--template", "bytes")
        return
    with pytest.raises(SpecdoctorError, match=message) as caught:
        measured(prompts, corpora / "greedy", tmp_path / "a.json", *arguments)
    assert "\n" not in str(caught.value)


def test_eagle_is_refused_by_name(prompts: Path, corpora: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecdoctorError, match=r"EAGLE-3|DSpark or DFlash"):
        measured(prompts, corpora / "greedy", tmp_path / "a.json", "--draft", GOLDEN / "deepspec-eagle3")


def test_no_prompts_is_exit_code_five(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(SpecdoctorError, match="no prompts") as caught:
        run("--target", GOLDEN / "target", "--draft", DFLASH, "--prompts", empty, "--template", "bytes")
    assert caught.value.exit_code == ExitCode.NOTHING
