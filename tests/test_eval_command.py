"""`specdoctor eval` on the golden pair: the table by data set and domain, thresholds, both ways, errors."""

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specdoctor.cli.eval import app
from specdoctor.drafters.load import load_drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.measure import evaluate
from specdoctor.measure.data_sets import DataSet, load_data_sets
from specdoctor.measure.drafting import draft_name
from specdoctor.scheduling.confidence import confidence_threshold

GOLDEN = Path(__file__).parent / "data" / "golden"
DSPARK, DFLASH, EAGLE3 = (GOLDEN / f"deepspec-{name}" for name in ("dspark-vanilla", "dflash", "eagle3"))
ROWS = [
    {"id": "a", "source": "gsm8k", "prompt": "12 + 30 = "},
    {"id": "b", "source": "mbpp", "category": "code", "prompt": "def area(w, h):\n    return "},
    {"id": "c", "source": "gsm8k", "prompt": "Let x be the number of apples. "},
    {"id": "d", "source": "mbpp", "category": "code", "prompt": "class Tree:\n    def __init__"},
    {"id": "e", "source": "mt-bench", "prompt": "Once upon a time"},
    {"id": "f", "dataset": "aime25", "source": "somewhere", "prompt": "1, 2, 3, 4, "},
]
CAP = 40


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    costs = {"rows": [1, 2, 8], "seconds": [0.040, 0.042, 0.060], "draft_seconds": 0.004}
    (folder / "costs.json").write_text(json.dumps(costs))
    return folder


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(result.exception, SpecdoctorError):
        raise result.exception
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def evaluated(home: Path, drafts: Seq[object], *more: object, code: int = 0) -> tuple[dict[str, Any], str]:
    options = ("--target", GOLDEN / "target", "--template", "bytes", "--max-new-tokens", CAP)
    where = ("--corpus", home / "corpus", "--json", home / "out.json")
    output = run(*drafts, *options, "--prompts", home / "prompts.jsonl", *where, *more, code=code)
    return json.loads((home / "out.json").read_text()), output


@pytest.fixture(scope="module")
def table(home: Path) -> tuple[dict[str, Any], str]:
    more = ("--costs", home / "costs.json", "--thresholds", "0.3,0.45,0.6", "--markdown", home / "out.md")
    return evaluated(home, [f"dspark={DSPARK}", f"dflash={DFLASH}"], *more)


def decoded(folder: Path, rows: Seq[dict[str, Any]], threshold: float | None = None) -> tuple[int, int, int, int]:
    """Rounds, committed, verified and accepted of real decoding."""
    target = Target.load(GOLDEN / "target", "cpu", "float32")
    sequences = [Sequence(list(r["prompt"].encode()), max_new_tokens=CAP, stop_ids=target.stop_ids) for r in rows]
    schedule = None if threshold is None else confidence_threshold(threshold)
    Engine(target, load_drafter(folder, target), schedule=schedule).generate(sequences)
    records = [r for s in sequences for r in s.records]
    sums = (sum(getattr(r, name) for r in records) for name in ("committed", "verified", "accepted"))
    committed, verified, accepted = sums
    return len(records), committed, verified, accepted


def test_cells_are_those_of_decoding(table: tuple[dict[str, Any], str]) -> None:
    result, _ = table
    assert (result["kind"], result["schema_version"], result["method"]) == ("eval", 1, "accept")
    assert [(one["name"], one["domain"]) for one in result["data_sets"]] == [
        ("gsm8k", "math"),
        ("aime25", "math"),
        ("mbpp", "code"),
        ("mt-bench", "chat"),
    ]
    assert [one["prompts"] for one in result["data_sets"]] == [2, 1, 2, 1]
    for one, folder in zip(result["drafters"], (DSPARK, DFLASH), strict=True):
        cells = {cell["name"]: cell["tau_step"] for cell in one["by_data_set"]}
        for name, rows in {"gsm8k": [ROWS[0], ROWS[2]], "aime25": [ROWS[5]], "mbpp": [ROWS[1], ROWS[3]]}.items():
            rounds, committed, _, _ = decoded(folder, rows)
            assert cells[name]["value"] == pytest.approx(committed / rounds) and cells[name]["n"] == rounds
        assert cells["gsm8k"]["low"] < cells["gsm8k"]["value"] < cells["gsm8k"]["high"]
        assert cells["aime25"]["low"] is None and "one prompt" in cells["aime25"]["reason"]
        rounds, committed, _, _ = decoded(folder, [ROWS[0], ROWS[2], ROWS[5]])
        assert one["by_domain"]["math"]["tau_step"]["value"] == pytest.approx(committed / rounds)
        rounds, committed, _, _ = decoded(folder, ROWS)
        assert one["tau_step"]["value"] == pytest.approx(committed / rounds)
        mine = [row for row in result["prompts"] if row["drafter"] == one["name"]]
        assert sum(row["committed"] for row in mine) == pytest.approx(committed)
    dspark, dflash = result["drafters"]
    ratio = result["comparisons"][0]["tau_ratio"]
    assert ratio["value"] == pytest.approx(dspark["tau_step"]["value"] / dflash["tau_step"]["value"])
    assert ratio["low"] < ratio["value"] < ratio["high"] and ratio["n"] == len(ROWS)


def test_the_sweep_is_that_of_decoding_with_each_threshold(table: tuple[dict[str, Any], str]) -> None:
    dspark, dflash = table[0]["drafters"]
    assert dflash["thresholds"] is None, "no confidence head"
    rows = dspark["thresholds"]
    assert [row["threshold"] for row in rows] == [None, 0.3, 0.45, 0.6]
    assert rows[0]["tau_step"] == dspark["tau_step"]
    for row in rows:
        rounds, committed, verified, accepted = decoded(DSPARK, ROWS, row["threshold"])
        assert row["tau_step"]["value"] == pytest.approx(committed / rounds)
        # How far fallen drafts were verified is taken from the replayed rounds: near, exact without a threshold.
        near = 1e-9 if row["threshold"] is None else 0.12
        assert row["verified_per_round"]["value"] == pytest.approx(verified / rounds, rel=near)
        assert row["alpha_verified"]["value"] == pytest.approx(committed / (verified + rounds), rel=near)
        assert row["verified_waste"]["value"] == pytest.approx((verified - accepted) / verified, rel=1.5 * near)
        assert row["waste"]["value"] * committed + accepted == pytest.approx(5 * rounds, rel=0.02), "K = 5 are drafted"
    taus = [row["tau_step"]["value"] for row in rows]
    waste = [row["verified_waste"]["value"] for row in rows]
    assert taus == sorted(taus, reverse=True) and taus[0] > taus[-1] and waste[0] > waste[-1] + 0.1
    whole = rows[0]
    seconds = 0.004 + 0.042 + (0.060 - 0.042) * 4 / 6
    assert whole["speedup"]["value"] == pytest.approx(whole["tau_step"]["value"] * 0.040 / seconds)
    assert set(whole["by_domain"]) == {"math", "code", "chat"}


def test_rollouts_give_the_same_table_and_take_any_drafter(table: tuple[dict[str, Any], str], home: Path) -> None:
    drafts = [f"dspark={DSPARK}", f"dflash={DFLASH}", EAGLE3, "ngram"]
    result, output = evaluated(home, drafts, "--rollouts", "--thresholds", "0.45", "--costs", home / "costs.json")
    assert result["method"] == "rollouts" and result["corpus"] is None
    for one, other in zip(result["drafters"][:2], table[0]["drafters"], strict=True):
        assert one["tau_step"]["value"] == pytest.approx(other["tau_step"]["value"])
        for cell, expected in zip(one["by_data_set"], other["by_data_set"], strict=True):
            assert cell["tau_step"]["value"] == pytest.approx(expected["tau_step"]["value"])
    rows = result["drafters"][0]["thresholds"]
    assert [row["threshold"] for row in rows] == [None, 0.45]
    expected = next(row for row in table[0]["drafters"][0]["thresholds"] if row["threshold"] == 0.45)
    _, _, verified, accepted = decoded(DSPARK, ROWS, 0.45)
    assert rows[1]["tau_step"]["value"] == pytest.approx(expected["tau_step"]["value"])
    assert rows[1]["verified_waste"]["value"] == pytest.approx((verified - accepted) / verified)
    assert rows[0]["speedup"]["value"] == pytest.approx(table[0]["drafters"][0]["thresholds"][0]["speedup"]["value"])
    assert [one["draft"]["algorithm"] for one in result["drafters"]] == ["dspark", "dflash", "eagle3", "prompt-lookup"]
    assert all(one["thresholds"] is None for one in result["drafters"][1:]) and len(result["comparisons"]) == 6
    assert "by decoding" in output


def test_the_reports(table: tuple[dict[str, Any], str], home: Path) -> None:
    result, output = table
    for word in (
        "by data set",
        "by domain",
        "Confidence threshold (dspark)",
        "in vain",
        "speed-up",
        "dspark against dflash",
    ):
        assert word in output, word
    assert "\x1b[" not in output and "─" not in output
    text = (home / "out.md").read_text()
    head = next(line for line in text.splitlines() if line.startswith("| drafter"))
    assert head == "| drafter | math: gsm8k | math: aime25 | code: mbpp | chat: mt-bench | all |"
    cell = result["drafters"][0]["by_data_set"][0]["tau_step"]
    assert f"{cell['value']:.2f} [{cell['low']:.2f}, {cell['high']:.2f}]" in text
    for block in text.split("\n\n"):  # every table has as many cells in each row
        rows = [line.count(" | ") for line in block.splitlines() if line.startswith("|")]
        assert len(set(rows)) <= 1


def test_markdown_or_json_alone_on_stdout(home: Path) -> None:
    options = (
        DSPARK,
        "--target",
        GOLDEN / "target",
        "--template",
        "bytes",
        "--max-new-tokens",
        8,
        "--thresholds",
        "none",
    )
    where = ("--prompts", home / "prompts.jsonl", "--corpus", home / "corpus-8")
    assert run(*options, *where, "--markdown", "-").startswith("### specdoctor eval\n")
    document = json.loads(run(*options, *where, "--json", "-"))
    assert document["drafters"][0]["thresholds"] is None and document["settings"]["thresholds"] == []


def test_data_sets_of_several_files_and_of_the_bundled_prompts(tmp_path: Path) -> None:
    for name, count in (("gsm8k", 3), ("my_own", 2)):
        rows = [json.dumps({"prompt": f"{name} {i}"}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n" + "\n".join(rows) + "\n")
    data = load_data_sets([tmp_path / "gsm8k.jsonl", tmp_path / "my_own.jsonl"])
    assert data.columns() == [DataSet("gsm8k", "math"), DataSet("my_own", "other")]
    assert [p.id for p in data.prompts] == ["gsm8k/2", "my_own/2", "gsm8k/3", "my_own/3", "gsm8k/4"], "sets in turn"
    assert data.prompts[0].category == "math"
    few = load_data_sets([tmp_path / "gsm8k.jsonl", tmp_path / "my_own.jsonl"], max_prompts=1)
    assert len(few.prompts) == 2
    bundled = load_data_sets([], ["math", "chat"], max_prompts=3)
    assert len(bundled.prompts) == 6 and [one.name for one in bundled.columns()] == ["math", "chat"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "gsm8k.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(SpecdoctorError, match="two files of one name"):
        load_data_sets([tmp_path / "gsm8k.jsonl", tmp_path / "other" / "gsm8k.jsonl"])
    with pytest.raises(SpecdoctorError, match="give one of them"):
        load_data_sets([tmp_path / "gsm8k.jsonl"], ["math"])
    with pytest.raises(SpecdoctorError, match=r"missing\.jsonl"):
        load_data_sets([tmp_path / "missing.jsonl"])


def test_bad_input_is_one_line(home: Path) -> None:
    with pytest.raises(SpecdoctorError, match=r"^eval: .* give --rollouts for others"):
        evaluated(home, [EAGLE3])
    with pytest.raises(SpecdoctorError, match=rf"^{DSPARK}: the arm name .* is taken; name it with NAME=/"):
        evaluated(home, [DSPARK, DSPARK])
    with pytest.raises(SpecdoctorError, match=r"--thresholds 0\.3;0\.5: expected probabilities"):
        evaluated(home, [DSPARK], "--thresholds", "0.3;0.5")
    with pytest.raises(SpecdoctorError, match="--repeats 2: is for texts"):
        evaluated(home, [DSPARK], "--rollouts", "--repeats", 2)
    with pytest.raises(SpecdoctorError, match="no confidence head"):
        evaluated(home, [DFLASH], "--confidence-threshold", 0.4)


def test_an_interrupted_run_keeps_whole_prompts(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = evaluate.EngineArm.run, []

    def interrupted(self: Any, *arguments: Any) -> Any:
        calls.append(self.name)
        if len(calls) == 6:  # in the middle of the third prompt
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(evaluate.EngineArm, "run", interrupted)
    code = int(ExitCode.INTERRUPTED)
    result, output = evaluated(home, [f"dspark={DSPARK}", f"dflash={DFLASH}"], "--rollouts", code=code)
    assert result["interrupted"] and "interrupted" in output
    assert {row["id"] for row in result["prompts"]} == {"a", "b"} and len(result["prompts"]) == 4
    empty = next(one for one in result["drafters"][0]["by_data_set"] if one["name"] == "aime25")
    assert empty["tau_step"]["value"] is None and empty["tau_step"]["reason"]


def test_a_drafter_of_train_is_called_as_its_run(tmp_path: Path) -> None:
    for folder, name in (("one/drafter", "one"), ("two/drafter", "two"), ("drafts", "drafts"), ("x.gguf", "x")):
        (tmp_path / folder).mkdir(parents=True)
        assert draft_name(tmp_path / folder) == name
    assert draft_name("ngram:5") == "ngram-5"
