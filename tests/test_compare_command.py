"""`specdoctor compare`: values, paired differences, conventions side by side, and what cannot be compared."""

import json
from pathlib import Path
from typing import Any

import gate_runs
import numpy as np
import pytest
from typer.testing import CliRunner

from specdoctor.cli import app as root

DATA = Path(__file__).parent / "data" / "results"


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    if "compare" not in root.COMMANDS:
        monkeypatch.setitem(root.COMMANDS, "compare", root.Entry("compare", "Measure", "compare"))
    for variable in ("COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(root.app, ["compare", *(str(argument) for argument in arguments)])


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    worse, base = gate_runs.simulate(np.random.default_rng(4), 60, gate_runs.factor_for(0.1))
    better, _ = gate_runs.simulate(np.random.default_rng(4), 60, 1.05)
    runs = {"base": base, "worse": worse, "better": better}
    return [gate_runs.write_bench(tmp_path / f"{name}.json", run) for name, run in runs.items()]


def test_three_files_are_compared_with_the_first(files: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "compare.json"
    result = call(*files, "--json", path)
    assert result.exit_code == 0 and "paired by prompt" in result.stdout and "\x1b" not in result.stdout
    document = json.loads(path.read_text())
    assert (document["schema_version"], document["kind"], len(document["results"])) == (1, "compare", 3)
    first, worse, better = document["metrics"]["tau"]
    assert "change" not in first and first["definition"] == "tau_step" and first["low"] < first["value"] < first["high"]
    assert worse["change"]["high"] < 0 < better["change"]["low"]
    assert worse["evidence"] == "paired" and worse["change"]["n"] == 60
    assert set(document["metrics"]) == {"tau", "alpha", "tokens_per_s"}


def test_the_paired_difference_is_tighter_than_the_two_intervals(files: list[Path]) -> None:
    rows = json.loads(call(*files[:2], "--json", "-").stdout)["metrics"]["tau"]
    alone = rows[0]["high"] - rows[0]["low"]
    change = rows[1]["change"]
    assert (change["high"] - change["low"]) * (rows[0]["value"] - 1) < alone


def test_the_arms_of_one_file_and_a_chosen_arm(files: list[Path]) -> None:
    bench = DATA / "two_requests.bench.json"
    alone = call(bench)
    assert alone.exit_code == 2 and "only one result (two_requests.bench.json@dspark)" in alone.stderr
    both = json.loads(call(f"{bench}@ar", f"{bench}@dspark", "--json", "-").stdout)
    assert [result["arm"] for result in both["results"]] == ["ar", "dspark"]
    tau = both["metrics"]["tau"]
    assert [line["value"] for line in tau] == [1.0, pytest.approx(7 / 3)]
    assert call(f"{bench}@nobody", bench).exit_code == 2


def test_files_of_six_tools_stand_side_by_side_under_their_own_conventions() -> None:
    names = ("records.jsonl", "vllm_bench.json", "aiperf.json", "sglang.jsonl", "llamacpp.log", "deepspec.txt")
    result = call(*(DATA / f"two_requests.{name}" for name in names), "--conventions")
    assert result.exit_code == 0
    styles = result.stdout.split("Acceptance length as each tool prints it")[1].splitlines()[2:8]
    table = {line.split()[0].removeprefix("two_requests.").split("@")[0]: line.split()[-5:] for line in styles}
    assert table == {
        "records.jsonl": ["2.67", "2.38", "2.67", "2.50", "2.33"],
        "vllm_bench.json": ["2.67", "-", "2.67", "-", "2.33"],
        "aiperf.json": ["2.67", "2.38", "2.67", "-", "2.33"],
        "sglang.jsonl": ["2.67", "2.38", "2.67", "2.50", "2.33"],
        "llamacpp.log": ["2.67", "2.38", "2.67", "2.50", "2.33"],
        "deepspec.txt": ["-", "-", "2.67", "-", "2.33"],
    }
    document = json.loads(call(*(DATA / f"two_requests.{name}" for name in names), "--json", "-").stdout)
    lines = dict(zip(names, document["metrics"]["tau"], strict=True))
    # The aggregate has an interval only for its mean over requests, and that is compared with the same mean of ours.
    assert {name for name, line in lines.items() if line["definition"] != "tau_step"} == {"aiperf.json"}
    assert (lines["aiperf.json"]["definition"], lines["aiperf.json"]["evidence"]) == (
        "aiperf_acceptance_length",
        "intervals",
    )
    assert all(line["change"]["value"] == pytest.approx(0, abs=3e-3) for line in document["metrics"]["tau"][1:])
    assert all(result["convention"] for result in document["results"])


def test_what_cannot_be_compared_says_why(tmp_path: Path) -> None:
    llama, sglang = DATA / "two_requests.llamacpp.jsonl", DATA / "two_requests.sglang_bench.jsonl"
    nothing = call(llama, sglang)
    assert nothing.exit_code == 5 and "nothing to compare" in nothing.stderr
    partly = call(DATA / "two_requests.records.jsonl", llama, sglang)
    assert partly.exit_code == 0 and "not comparable" not in partly.stdout.split("alpha")[0]
    assert "not comparable in alpha" in partly.stdout


def test_settings_that_differ_are_noted(files: list[Path], tmp_path: Path) -> None:
    run, _ = gate_runs.simulate(np.random.default_rng(4), 60, 1.0)
    hot = gate_runs.write_bench(tmp_path / "hot.json", run, temperature=0.8)
    result = call(files[0], hot)
    assert result.exit_code == 0
    assert "note: hot.json@drafter and base.json@drafter differ in temperature: 0.8, 0.0" in result.stdout


def test_markdown(files: list[Path]) -> None:
    text = call(*files, "--markdown", "-").stdout
    assert text.startswith("### specdoctor compare") and text.count("| --- |") == 3
    assert "| worse.json@drafter |" in text
