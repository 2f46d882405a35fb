"""`specdoctor bench` from the command line to the JSON, on the tiny trained pairs."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench_runs import DFLASH, GOLDEN, VANILLA, ZLAB, arm, bench, invoke, records, write_prompts
from tiny_models import tiny_target

from specdoctor.engine.engine import Engine
from specdoctor.engine.target import Target
from specdoctor.errors import ExitCode
from specdoctor.measure.arms import EngineArm


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path)


# The JSON -------------------------------------------------------------------------------------------------------------

TOP = "schema_version environment settings arms comparisons limiting_term records"
ARM = (
    "name draft tau_step tau_request alpha_draft marginal conditional tokens_per_s speedup draft_share verify_ratio "
    "overhead_share expected_speedup greedy_mismatches near_ties"
)
ESTIMATES = (
    "tau_step tau_request alpha_draft tokens_per_s speedup draft_share verify_ratio overhead_share expected_speedup"
)


def assert_estimate(value: object) -> None:
    assert isinstance(value, dict) and {"value", "low", "high", "n"} <= set(value) <= {
        "value",
        "low",
        "high",
        "n",
        "reason",
    }
    assert isinstance(value["n"], int)
    if value["value"] is None:
        assert value["low"] is None and value["high"] is None and value["reason"]
    elif value["low"] is not None:
        assert value["low"] <= value["value"] <= value["high"]
    else:
        assert value["reason"]  # a value without an interval says why


def test_keys_and_estimates(prompts: Path) -> None:
    result = bench(prompts, "--draft", VANILLA, "--draft", ZLAB)
    assert set(TOP.split()) <= set(result)
    assert {"packages", "device", "dtype", "attention_path"} <= set(result["environment"])
    assert {"torch", "transformers", "specdoctor"} <= set(result["environment"]["packages"])
    assert {"template", "seed", "draft_tokens", "temperature", "draft_temperature"} <= set(result["settings"])
    assert [row["name"] for row in result["arms"]] == ["ar", VANILLA.name, ZLAB.name]
    for row in result["arms"]:
        assert set(ARM.split()) <= set(row)
        for name in ESTIMATES.split():
            assert_estimate(row[name])
        for name in ("marginal", "conditional"):
            assert len(row[name]) == (5 if row["draft"] else 0)
            for value in row[name]:
                assert_estimate(value)
        assert row["greedy_mismatches"] == row["near_ties"] == 0
    plain = arm(result, "ar")
    assert plain["draft"] is None and plain["tau_step"]["value"] == 1.0
    for absent in ("alpha_draft", "speedup", "draft_share", "verify_ratio", "expected_speedup"):
        assert plain[absent]["value"] is None  # plain decoding has none of these: absent, not zero
    for name in (VANILLA.name, ZLAB.name):
        row = arm(result, name)
        assert row["tau_step"]["value"] > 1 and row["speedup"]["value"] > 0 and row["verify_ratio"]["value"] > 0
        assert 0 < row["draft_share"]["value"] < 1 and 0 <= row["overhead_share"]["value"] < 1
        assert set(row["by_category"]) == {"even", "odd"}
        assert result["limiting_term"][name]["sentence"]
    (comparison,) = result["comparisons"]
    assert (comparison["a"], comparison["b"]) == (VANILLA.name, ZLAB.name)
    assert_estimate(comparison["tau_difference"])
    assert_estimate(comparison["tokens_per_s_ratio"])
    assert result["records"] is None


def test_numbers_follow_from_the_records(prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    result = bench(prompts, "--draft", VANILLA, "--draft", ZLAB, "--records", path)
    assert result["records"] == str(path)
    assert {row["arm"] for row in records(path)} == {"ar", VANILLA.name, ZLAB.name}
    for name in ("ar", VANILLA.name, ZLAB.name):
        rows, summary = records(path, name), arm(result, name)
        wanted = "arm prompt_id round drafted verified accepted committed_ids confidence times"
        assert all(set(wanted.split()) <= set(row) for row in rows)
        committed = sum(len(row["committed_ids"]) for row in rows)
        assert summary["tau_step"]["value"] == pytest.approx(committed / len(rows))
        assert summary["tau_step"]["n"] == len(rows)
        by_prompt = [[r for r in rows if r["prompt_id"] == p] for p in ("p0", "p1", "p2")]
        taus = [sum(len(r["committed_ids"]) for r in mine) / len(mine) for mine in by_prompt]
        assert summary["tau_request"]["value"] == pytest.approx(sum(taus) / 3)
        if name == "ar":
            assert all(row["drafted"] == 0 and len(row["committed_ids"]) == 1 for row in rows)
            continue
        accepted = [row["accepted"] for row in rows]
        assert summary["alpha_draft"]["value"] == pytest.approx(sum(accepted) / sum(row["drafted"] for row in rows))
        for i in range(5):
            survivors = sum(a > i for a in accepted)
            at_risk = sum(a >= i and row["verified"] > i for a, row in zip(accepted, rows, strict=True))
            assert summary["marginal"][i]["value"] == pytest.approx(survivors / len(rows))
            assert summary["marginal"][i]["n"] == len(rows)
            assert summary["conditional"][i]["n"] == at_risk
            if at_risk:
                assert summary["conditional"][i]["value"] == pytest.approx(survivors / at_risk)
    texts = {name: [r["committed_ids"] for r in records(path, name)] for name in ("ar", VANILLA.name)}
    flat = {name: [token for ids in rows for token in ids] for name, rows in texts.items()}
    assert flat["ar"] == flat[VANILLA.name]


def test_json_to_stdout_is_nothing_but_json(prompts: Path) -> None:
    result = invoke(prompts, "--draft", DFLASH, "--json", "-")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["schema_version"] == 1


def test_the_report_for_a_person(prompts: Path) -> None:
    result = invoke(prompts, "--draft", f"one={VANILLA}", "--draft", f"two={ZLAB}")
    assert result.exit_code == 0
    for part in ("tau_step", "alpha_draft", "tokens/s", "speed-up", "Acceptance by position: one", "T(K+1)/T(1)"):
        assert part in result.stdout
    assert "compare  one against two: tau_step" in result.stdout
    assert "greedy   one: 3 of 3 texts equal ar token for token" in result.stdout
    assert "limit    two: " in result.stdout
    assert not set(result.stdout) & set("│─┃━┏\x1b")


def test_without_drafters_it_measures_the_target(prompts: Path) -> None:
    result = bench(prompts)
    assert [row["name"] for row in result["arms"]] == ["ar"]
    assert result["comparisons"] == [] and result["limiting_term"] == {}
    assert arm(result, "ar")["tokens_per_s"]["value"] > 0


# Arms and options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["deepspec-dspark-gated", "deepspec-dspark-rnn", "deepspec-dflash"])
def test_every_drafter_gives_the_targets_text(prompts: Path, folder: str) -> None:
    result = bench(prompts, "--draft", GOLDEN / folder)
    row = arm(result, folder)
    assert row["greedy_mismatches"] == row["near_ties"] == 0 and result["divergences"] == []
    assert row["draft"]["head"] == (None if folder == "deepspec-dflash" else folder.rsplit("-", 1)[1])


def test_only_the_arms_asked_for(prompts: Path) -> None:
    result = bench(prompts, "--draft", f"a={VANILLA}", "--draft", f"b={ZLAB}", "--arms", "b")
    assert [row["name"] for row in result["arms"]] == ["ar", "b"]


def test_hugging_face_baseline(prompts: Path) -> None:
    result = bench(prompts, "--hf-baseline")
    row = arm(result, "hf")
    assert row["greedy_mismatches"] == 0 and row["attention"] in ("sdpa", "eager")
    assert_estimate(row["tokens_per_s"])
    assert_estimate(row["speedup"])


def test_hugging_face_baseline_ignores_the_models_own_defaults(prompts: Path, tmp_path: Path) -> None:
    """A model may ship a penalty or a stop id as default; under them `generate` would decode another text."""
    folder = tmp_path / "target"
    folder.mkdir()
    for file in (GOLDEN / "target").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "generation_config.json").write_text(
        json.dumps({"repetition_penalty": 3.0, "no_repeat_ngram_size": 1, "eos_token_id": list(range(97, 123))})
    )
    result = bench(prompts, "--hf-baseline", "--ignore-stop", target=folder)
    assert arm(result, "hf")["greedy_mismatches"] == 0
    assert {row["completion_tokens"] for row in result["prompts"]} == {14}
    stopping = bench(prompts, "--hf-baseline", target=folder)
    assert arm(stopping, "hf")["greedy_mismatches"] == 0
    assert {row["stop"] for row in stopping["prompts"]} == {"stop"}


def test_hugging_face_arm_ends_where_the_context_does(prompts: Path, tmp_path: Path) -> None:
    tiny_target(256, max_position_embeddings=40).save_pretrained(tmp_path / "short")
    prompts.write_text(json.dumps({"prompt_ids": list(range(35))}) + "\n")
    result = bench(prompts, "--hf-baseline", target=tmp_path / "short")
    assert arm(result, "hf")["greedy_mismatches"] == 0
    assert {(row["completion_tokens"], row["stop"]) for row in result["prompts"]} == {(6, "context")}


def test_a_drafter_in_another_dtype(prompts: Path) -> None:
    result = bench(prompts, "--draft", VANILLA, "--draft-dtype", "bfloat16")
    row = arm(result, VANILLA.name)
    assert row["draft"]["dtype"] == "bfloat16" and result["environment"]["dtype"] == "float32"
    assert row["greedy_mismatches"] == row["near_ties"] == 0


def test_confidence_threshold(prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    result = bench(prompts, "--draft", VANILLA, "--confidence-threshold", 0.5, "--records", path)
    assert result["settings"]["confidence_threshold"] == 0.5
    rows = records(path, VANILLA.name)
    for row in rows:
        assert row["verified"] == next((i for i, c in enumerate(row["confidence"]) if c < 0.5), row["drafted"])
    assert any(row["verified"] < row["drafted"] for row in rows)
    summary = arm(result, VANILLA.name)
    assert summary["greedy_mismatches"] == 0
    for i, value in enumerate(summary["marginal"]):  # of the rounds in which draft i was verified
        reached = [row for row in rows if row["verified"] > i]
        assert value["n"] == len(reached)
        assert value["value"] == pytest.approx(sum(row["accepted"] > i for row in reached) / len(reached))
        assert summary["conditional"][i]["n"] == sum(row["accepted"] >= i for row in reached)


@pytest.mark.parametrize(
    ("scenario", "K", "temperature", "draft_temperature"),
    [("code", 5, 0.7, "0.4"), ("chat", 4, 1.0, "0.8"), ("summarize", 5, 0.7, "0.42")],
)
def test_scenarios_on_a_drafter_with_a_smaller_block(
    prompts: Path, scenario: str, K: int, temperature: float, draft_temperature: str
) -> None:
    """The preset of code wants K = 7, and the block has 5 rows."""
    result = bench(prompts, "--draft", VANILLA, "--scenario", scenario)
    settings = result["settings"]
    assert settings["scenario"] == scenario and settings["draft_tokens"][VANILLA.name] == K
    assert (settings["temperature"], settings["draft_temperature"]) == (temperature, draft_temperature)
    assert settings["max_new_tokens"] == 14  # an option given wins over the preset
    assert len(arm(result, VANILLA.name)["marginal"]) == K


def test_sampled_text_has_no_greedy_check(prompts: Path) -> None:
    result = bench(prompts, "--draft", VANILLA, "--hf-baseline", "--temperature", 0.8, "--top-k", 20, "--seed", 5)
    assert result["divergences"] == []
    for row in result["arms"]:
        assert row["greedy_mismatches"] is None and row["near_ties"] is None
    again = bench(prompts, "--draft", VANILLA, "--temperature", 0.8, "--top-k", 20, "--seed", 5)

    def counts(result: dict[str, Any]) -> list[tuple]:
        return [(r["id"], r["accepted"], r["committed"]) for r in result["prompts"] if r["arm"] == VANILLA.name]

    assert counts(result) == counts(again)


def test_a_smaller_proposal(prompts: Path) -> None:
    result = bench(prompts, "--draft", VANILLA, "-K", 2)
    assert len(arm(result, VANILLA.name)["marginal"]) == 2
    assert result["settings"]["draft_tokens"] == {"ar": 0, VANILLA.name: 2}


def test_one_token_has_no_rounds(prompts: Path) -> None:
    result = bench(prompts, "--draft", VANILLA, "--max-new-tokens", 1)
    row = arm(result, VANILLA.name)
    assert row["rounds"] == 0 and row["greedy_mismatches"] == 0
    for name in ESTIMATES.split():
        assert_estimate(row[name])
        assert row[name]["value"] is None


def test_prompts_that_fill_the_context(prompts: Path, tmp_path: Path) -> None:
    """Bare costs are sampled in the middle of an answer: their block has to fit as well."""
    limit = 24
    model = Target.load(GOLDEN / "target", "cpu", "float32").model
    model.config.max_position_embeddings = limit
    model.save_pretrained(tmp_path / "short")
    prompts.write_text("".join(json.dumps({"prompt_ids": [97] * n}) + "\n" for n in (1, 18, limit - 2, limit - 1)))
    result = bench(prompts, "--draft", VANILLA, target=tmp_path / "short")
    assert arm(result, VANILLA.name)["greedy_mismatches"] == 0
    assert [row["stop"] for row in result["prompts"] if row["arm"] == "ar"].count("context") == 3


# How it is run --------------------------------------------------------------------------------------------------------


def test_arms_take_turns(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, str]] = []
    run = EngineArm.run

    def watched(self: EngineArm, prompt: Any, tokens: int, *rest: object) -> object:
        if tokens == 14:  # not a warm-up
            order.append((prompt.id, self.name))
        return run(self, prompt, tokens, *rest)

    monkeypatch.setattr(EngineArm, "run", watched)
    bench(prompts, "--draft", f"a={VANILLA}", "--draft", f"b={ZLAB}")
    names = ["ar", "a", "b"]
    assert sorted(order) == sorted((f"p{i}", name) for i in range(3) for name in names)
    assert [prompt for prompt, _ in order] == sorted(prompt for prompt, _ in order)  # all arms, then the next prompt
    assert {name for _, name in order[::3]} == set(names)  # and each arm is first once


@pytest.mark.parametrize("after", [0, 3, 60])
def test_interrupted_it_keeps_what_is_complete(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    step, calls = Engine.step, 0

    def interrupted(self: Engine, sequences: list) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt
        step(self, sequences)

    monkeypatch.setattr(Engine, "step", interrupted)
    monkeypatch.setattr("specdoctor.measure.bench.WARM_UP_TRIES", 1)  # at most 22 steps, and then 26 a prompt
    path = tmp_path / "records.jsonl"
    result = bench(prompts, "--draft", VANILLA, "--records", path, code=ExitCode.INTERRUPTED)
    assert result["interrupted"] is True and result["exit_code"] == ExitCode.INTERRUPTED
    complete = {row["id"] for row in result["prompts"]}
    assert complete == {row["prompt_id"] for row in records(path)}
    assert (after == 60) == bool(complete)
    for name in complete:  # a prompt counts for all arms or not at all
        assert {row["arm"] for row in result["prompts"] if row["id"] == name} == {"ar", VANILLA.name}
    for row in result["arms"]:
        assert row["requests"] == len(complete)
        assert_estimate(row["tau_step"])


def test_interrupted_it_still_prints_a_report(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupted)
    result = invoke(prompts, "--draft", VANILLA, "--draft", ZLAB)
    assert result.exit_code == ExitCode.INTERRUPTED
    assert "interrupted: what follows is what was complete" in result.stdout
    assert "Traceback" not in result.output


def test_interrupted_while_it_explains_differences(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is decoded by then, and a second Ctrl-C must not lose it."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specdoctor.measure.bench.explain_divergence", interrupted)
    result = bench(prompts, "--draft", VANILLA, code=ExitCode.INTERRUPTED)
    assert result["interrupted"] and len(result["prompts"]) == 6
