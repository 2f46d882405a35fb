"""`specdoctor gate` and `gate record` as a user calls them: exit codes, every output, the configuration file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gate_runs
import numpy as np
import pytest
import yaml
from junitparser import Failure, JUnitXml, Skipped
from typer.testing import CliRunner

from specdoctor.cli import app as root
from specdoctor.formats.results.load import read_results
from specdoctor.measure.gate import GateReport, MetricResult, gate
from specdoctor.measure.gate_config import GateConfig, load_config
from specdoctor.metrics.gate import Verdict
from specdoctor.reports.github import annotations
from specdoctor.reports.junit import gate_junit

SAMPLES = Path(__file__).parents[1] / "sample_configs"
DATA = Path(__file__).parent / "data" / "results"


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gate", "compare"):
        if name not in root.COMMANDS:
            monkeypatch.setitem(root.COMMANDS, name, root.Entry(name, "Measure", name))
    for variable in ("GITHUB_STEP_SUMMARY", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(root.app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two hundred prompts: an unchanged run, one that is worse by twice the margin, and a baseline."""
    folder = tmp_path_factory.mktemp("runs")
    same, base = gate_runs.simulate(np.random.default_rng(4), 200, 1.0)
    worse, base_too = gate_runs.simulate(np.random.default_rng(4), 200, gate_runs.factor_for(0.1))
    assert base.keys() == base_too.keys()
    few = dict(list(same.items())[:12])
    files = {
        "same": gate_runs.write_bench(folder / "same.json", same),
        "worse": gate_runs.write_bench(folder / "worse.json", worse),
        "bench": gate_runs.write_bench(folder / "bench.json", base),
        "few": gate_runs.write_bench(folder / "few.json", few),
        "few_base": gate_runs.write_bench(folder / "few_base.json", dict(list(base.items())[:12])),
    }
    files["baseline"] = folder / "baseline.json"
    result = CliRunner().invoke(_app(), ["gate", "record", str(files["bench"]), "-o", str(files["baseline"])])
    assert result.exit_code == 0 and "200 prompts of bench.json@drafter" in result.output
    return files


def _app() -> Any:
    root.COMMANDS.setdefault("gate", root.Entry("gate", "Measure", "gate"))
    return root.app


@pytest.mark.parametrize(
    ("run", "baseline", "code", "word"),
    [
        ("same", "baseline", 0, "PASS"),
        ("same", "bench", 0, "PASS"),
        ("worse", "baseline", 1, "REGRESSION"),
        ("few", "few_base", 6, "INCONCLUSIVE"),
    ],
)
def test_exit_codes_say_what_the_first_line_says(
    runs: dict[str, Path], run: str, baseline: str, code: int, word: str
) -> None:
    result = call("gate", "--run", runs[run], "--baseline", runs[baseline])
    assert (result.exit_code, result.stdout.splitlines()[0].split(":")[0]) == (code, f"gate {word}")
    assert "paired by prompt" in result.stdout and "shows a true drop of" in result.stdout
    assert "\x1b" not in result.stdout and not set(result.stdout) & set("│┃━─")


def test_an_undecided_gate_means_what_the_user_says(runs: dict[str, Path]) -> None:
    undecided = ("gate", "--run", runs["few"], "--baseline", runs["few_base"], "--inconclusive")
    assert [call(*undecided, policy).exit_code for policy in ("fail", "pass", "warn")] == [6, 0, 0]
    assert "warning: gate INCONCLUSIVE" in call(*undecided, "warn").stderr
    assert "further prompts on both sides would settle it" in call(*undecided, "pass").stdout
    assert call(*undecided, "maybe").exit_code == 2
    worse = ("gate", "--run", runs["worse"], "--baseline", runs["baseline"], "--inconclusive", "pass")
    assert call(*worse).exit_code == 1


def test_refusals_and_bad_arguments_are_one_line_and_exit_2(runs: dict[str, Path], tmp_path: Path) -> None:
    run, _ = gate_runs.simulate(np.random.default_rng(4), 200, 1.0)
    hot = gate_runs.write_bench(tmp_path / "hot.json", run, temperature=0.8)
    calls = {
        "--allow temperature": ("--run", hot, "--baseline", runs["baseline"]),
        "no such file": ("--run", tmp_path / "absent.json", "--baseline", runs["baseline"]),
        "--run is missing": ("--baseline", runs["baseline"]),
        "expected a number above 0": ("--run", runs["same"], "--baseline", runs["baseline"], "--margin", "-1"),
        "expected a number or METRIC=NUMBER": ("--run", runs["same"], "--baseline", runs["baseline"], "--margin", "x"),
        "did you mean 'tau'": ("--run", runs["same"], "--baseline", runs["baseline"], "--metric", "tua"),
        "did you mean 'temperature'": ("--run", hot, "--baseline", runs["baseline"], "--allow", "temprature"),
        "has no arm 'x'": ("--run", runs["same"], "--baseline", runs["baseline"], "--arm", "x"),
    }
    for message, arguments in calls.items():
        result = call("gate", *arguments)
        assert result.exit_code == 2 and message in result.stderr, (message, result.output)
        assert len(result.stderr.strip().splitlines()) == 1 and "Traceback" not in result.output
    allowed = call("gate", "--run", hot, "--baseline", runs["baseline"], "--allow", "temperature")
    assert allowed.exit_code == 0 and "allowed to differ in temperature: 0.8 here, 0.0" in allowed.stdout


def test_nothing_to_compare_is_exit_5(tmp_path: Path) -> None:
    llama, sglang = DATA / "two_requests.llamacpp.jsonl", DATA / "two_requests.sglang_bench.jsonl"
    result = call("gate", "--run", llama, "--baseline", sglang)
    assert result.exit_code == 5 and "nothing to compare" in result.stderr


def test_margins_are_for_all_or_for_one_metric(runs: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "gate.json"
    options = ("--metric", "tau", "--metric", "alpha", "--margin", "0.3", "--margin", "alpha=0.01", "--json", path)
    result = call("gate", "--run", runs["worse"], "--baseline", runs["baseline"], *options)
    document = json.loads(path.read_text())
    assert [row["margin"] for row in document["metrics"]] == [0.3, 0.01]
    assert [row["outcome"] for row in document["metrics"]] == ["pass", "regression"] and result.exit_code == 1


def test_json_holds_everything_and_alone_fills_stdout(runs: dict[str, Path]) -> None:
    result = call("gate", "--run", runs["worse"], "--baseline", runs["baseline"], "--json", "-", "--github")
    document = json.loads(result.stdout)
    assert (document["schema_version"], document["kind"], document["outcome"]) == (1, "gate", "regression")
    assert document["exit_code"] == result.exit_code == 1
    row = document["metrics"][0]
    assert row["definition"] == "tau_step" and row["evidence"] == "paired" and row["change"]["of"] == "tau - 1"
    for key in ("run", "baseline", "difference", "change"):
        assert row[key]["low"] <= row[key]["value"] <= row[key]["high"] and row[key]["n"] == 200
    assert row["minimum_detectable_effect"] > 0 and row["further_prompts"] == 0
    assert document["run"]["convention"] and document["baseline"]["settings"]["K"] == 3
    assert result.stderr.startswith("::error title=specdoctor gate%3A tau::")


def test_junit_is_what_ci_expects(runs: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    call("gate", "--run", runs["worse"], "--baseline", runs["baseline"], "--metric", "tau", "--junit", path)
    (suite,) = JUnitXml.fromfile(str(path))
    (case,) = suite
    assert (suite.tests, suite.failures, case.name, case.classname) == (1, 1, "tau", "specdoctor.gate")
    assert isinstance(case.result[0], Failure) and case.result[0].type == "regression"
    properties = {entry.name: entry.value for entry in suite.properties()}
    assert properties["outcome"] == "regression" and float(properties["tau.change"]) < -0.05
    assert "shows a true drop" in case.system_out

    undecided = ("gate", "--run", runs["few"], "--baseline", runs["few_base"], "--junit", path)
    for policy, kind in (("fail", Failure), ("warn", Skipped)):
        call(*undecided, "--inconclusive", policy)
        (case,) = next(iter(JUnitXml.fromfile(str(path))))
        assert isinstance(case.result[0], kind)


def test_github_gets_annotations_and_a_summary(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    result = call("gate", "--run", runs["worse"], "--baseline", runs["baseline"], "--github")
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("::")]
    assert line.startswith("::error title=specdoctor gate%3A tau::tau REGRESSION: ") and "%25" in line
    text = summary.read_text()
    assert text.startswith("before\n### ❌ gate REGRESSION") and "| tau | ❌ regression |" in text
    assert call("gate", "--run", runs["same"], "--baseline", runs["baseline"]).stdout.count("::") == 0


def test_github_shows_ten_of_a_kind_so_no_more_are_sent(runs: dict[str, Path]) -> None:
    report = gate(read_results(runs["same"])[0], read_results(runs["baseline"])[0])
    many = [MetricResult(f"metric {i}", Verdict("regression", "100 % worse\nindeed", 0.05)) for i in range(15)]
    lines = annotations(GateReport(report.run, report.baseline, [*many, *report.results], [], []))
    errors = [line for line in lines if line.startswith("::error")]
    assert len(errors) == 10 and "6 more metrics are in the step summary" in errors[-1]
    assert "100 %25 worse%0Aindeed" in errors[0] and len([x for x in lines if x.startswith("::notice")]) == 1
    assert gate_junit(GateReport(report.run, report.baseline, many, [], [])).failures == 15


def test_markdown_is_a_table_that_file_names_cannot_break(runs: dict[str, Path], tmp_path: Path) -> None:
    odd = tmp_path / "a_b|c*.json"
    odd.write_bytes(runs["same"].read_bytes())
    result = call("gate", "--run", odd, "--baseline", runs["baseline"], "--markdown", "-")
    lines = result.stdout.splitlines()
    assert lines[0] == r"### ✅ gate PASS: a\_b\|c\*.json@drafter against baseline.json@drafter"
    table = [line for line in lines if line.startswith("|")]
    assert len({line.replace(r"\|", "").count("|") for line in table}) == 1 and len(table) == 3
    assert "<details>" in result.stdout


def test_a_file_of_options_and_the_command_line_over_it(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "gate.yaml"
    config.write_text(
        f"run: {runs['worse']}\nbaseline: {runs['baseline']}\nmetric: [tau, alpha]\n"
        "margin: {tau: 0.5}\njunit: out.xml\njson: out.json\n"
    )
    assert call("gate", "--config", config).exit_code == 1  # alpha keeps its default margin
    assert [row["margin"] for row in json.loads((tmp_path / "out.json").read_text())["metrics"]] == [0.5, 0.05]
    assert (tmp_path / "out.xml").exists()
    assert call("gate", "--config", config, "--run", runs["same"]).exit_code == 0
    assert call("gate", "--config", config, "--metric", "tau").exit_code == 0
    assert call("gate", "--config", config, "--metric", "tau", "--margin", "0.01").exit_code == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("metrics: [tau]\n", r"unknown key metrics (did you mean 'metric'?), expected one of run, baseline"),
        ("metric: tua\n", "metric: expected one of tau"),
        ("margin: {taus: 0.1}\n", "(did you mean 'tau'?)"),
        ("margin: 0\n", "margin: expected numbers above 0"),
        ("margin: small\n", "margin is 'small', expected"),
        ("allow: [prompt]\n", "(did you mean 'prompts'?)"),
        ("inconclusive: maybe\n", "inconclusive is 'maybe', expected 'fail', 'pass' or 'warn'"),
        ("seed: x\nrun: 3\n", "(and 1 more)"),
        ("- tau\n", "expected 'key: value' lines"),
        ("run: [\n", "not YAML"),
    ],
)
def test_a_bad_file_of_options_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "gate.yaml"
    config.write_text(text)
    result = call("gate", "--config", config)
    assert result.exit_code == 2 and message in result.stderr, result.stderr
    assert str(config) in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_the_sample_configuration_is_valid_and_shows_every_key(tmp_path: Path) -> None:
    text = (SAMPLES / "gate.yaml").read_text()
    config = load_config(SAMPLES / "gate.yaml")
    assert (config.run, config.baseline, config.margin["tau"]) == ("bench.json", "baseline.json", 0.05)
    keys = {"json" if name == "json_path" else name for name in GateConfig.model_fields}
    assert all(f"{key}:" in text for key in keys)
    every = "".join(
        line.removeprefix("# ") + "\n"
        for line in text.splitlines()
        if line.removeprefix("# ").split(":")[0] in keys and "margin: 0.05" not in line
    )
    path = tmp_path / "gate.yaml"
    path.write_text(every)  # what is commented out must be valid too
    assert load_config(path).margin == {"tau": 0.05, "speedup": 0.10, "ece": 0.02}


def test_the_sample_workflow_calls_commands_and_options_that_exist() -> None:
    workflow = yaml.safe_load((SAMPLES / "github-workflow.yml").read_text())
    steps = [step["run"] for step in workflow["jobs"]["gate"]["steps"] if "run" in step]
    (line,) = [text for text in steps if text.startswith("specdoctor gate")]
    known = call("gate", "--help").stdout
    assert all(word in known for word in line.split() if word.startswith("--"))


def test_recording_a_profile_and_a_bad_format(runs: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "speculation_profile.json"
    records = DATA / "two_requests.records.jsonl"
    result = call("gate", "record", records, "-o", path, "--format", "speculation-profile")
    assert result.exit_code == 0 and json.loads(path.read_text())["marginal_accept_rates"][0] == pytest.approx(
        2 / 3, abs=1e-6
    )
    wrong = call("gate", "record", records, "-o", path, "--format", "profile")
    assert wrong.exit_code == 2 and "expected one of baseline, speculation-profile" in wrong.stderr


def test_recording_another_tool_s_file_makes_a_baseline_for_it(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    assert call("gate", "record", DATA / "two_requests.sglang.jsonl", "-o", path).exit_code == 0
    result = call("gate", "--run", DATA / "two_requests.vllm_responses.jsonl", "--baseline", path, "--json", "-")
    row = json.loads(result.stdout)["metrics"][0]
    assert (row["evidence"], row["change"]["value"], result.exit_code) == ("paired", 0.0, 6)
    assert any("counted by different tools: vLLM responses here, SGLang" in note for note in row["notes"])


def test_explain_prints_the_rule_and_every_formula() -> None:
    result = call("gate", "--explain")
    assert result.exit_code == 0 and "the whole interval lies above -margin" in result.stdout
    assert "tau: tau_step = committed tokens / verify rounds" in result.stdout and "ece" in result.stdout


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom specdoctor.cli import app as root\n"
        "[root.COMMANDS.setdefault(n, root.Entry(n, 'Measure', n)) for n in ('gate', 'compare')]\n"
        "sys.argv = ['specdoctor', sys.argv[1], '--help']\n"
        "try:\n    root.main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pandas', 'scipy', 'yaml', 'pydantic', 'junitparser'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    for command in ("gate", "compare"):
        done = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, check=True)
        assert "Example:" in done.stdout
        assert not {"torch", "transformers", "numpy", "pandas", "scipy", "junitparser"} & set(eval(done.stderr))
