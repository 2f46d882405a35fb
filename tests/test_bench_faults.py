"""Faults that `specdoctor bench` must find in an engine, and the differences that are none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import GOLDEN, VANILLA, arm, bench, invoke, write_prompts

from specdoctor.engine.engine import Engine
from specdoctor.engine.target import Target, TargetOutput
from specdoctor.engine.verify import Verdict
from specdoctor.errors import ExitCode
from specdoctor.measure.arms import HuggingFaceArm


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path)


def test_a_planted_wrong_token_is_a_mismatch(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that commits one wrong token where drafts are verified: exit 1, and no excuse by rounding."""
    from specdoctor.engine import engine as module

    honest, done = module.ACCEPTANCE["lossless"], []

    def faulty(sequences: list, drafts: list, logits: torch.Tensor) -> list[Verdict]:
        verdicts = honest(sequences, drafts, logits)
        if len(drafts[0]) and sequences[0].prompt_id == "p1" and len(sequences[0].records) == 2:
            token = (verdicts[0].tokens[-1] + 1) % 256
            verdicts[0].tokens[-1] = token
            done.append(token)
        return verdicts

    monkeypatch.setitem(module.ACCEPTANCE, "lossless", faulty)
    result = bench(prompts, "--draft", VANILLA, code=ExitCode.FINDINGS)
    row = arm(result, VANILLA.name)
    assert done and row["greedy_mismatches"] == 1 and row["near_ties"] == 0
    (difference,) = result["divergences"]
    assert (difference["arm"], difference["prompt_id"]) == (VANILLA.name, "p1")
    assert difference["found"] == done[-1] and not difference["near_tie"]
    assert difference["gap"] > difference["noise"]
    shown = invoke(prompts, "--draft", VANILLA)
    assert shown.exit_code == ExitCode.FINDINGS
    assert "2 of 3 texts equal ar token for token, 1 DIFFER" in shown.stdout
    assert f"{VANILLA.name}, prompt p1, token " in shown.stdout


def test_a_text_that_ends_too_early_is_a_mismatch(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Engine._commit

    def faulty(self: Engine, sequences: list, verdicts: list) -> list:
        out = commit(self, sequences, verdicts)
        if self.drafter is not None and sequences[0].prompt_id == "p0":
            sequences[0].stop_reason = "stop"
        return out

    monkeypatch.setattr(Engine, "_commit", faulty)
    result = bench(prompts, "--draft", VANILLA, code=ExitCode.FINDINGS)
    (difference,) = result["divergences"]
    assert difference["gap"] is None and difference["found"] == -1 and not difference["near_tie"]
    assert invoke(prompts, "--draft", VANILLA).exit_code == ExitCode.FINDINGS


def test_near_ties_are_counted_apart_and_are_no_finding(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twin tokens of equal logits, and a forward over several rows that rounds the second twin up."""
    model = Target.load(GOLDEN / "target", "cpu", "float32").model
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[1::2] = head[0::2]
    model.save_pretrained(tmp_path / "twins")
    forward = Target.forward

    def rounding(self: Target, rows: Any, input_ids: torch.Tensor, **more: Any) -> TargetOutput:
        output = forward(self, rows, input_ids, **more)
        if len(input_ids) > 1 and more.get("logit_rows") is None:
            output.logits[:, 1::2] += 1e-4
        return output

    monkeypatch.setattr(Target, "forward", rounding)
    result = bench(prompts, "--draft", VANILLA, target=tmp_path / "twins")
    row = arm(result, VANILLA.name)
    assert row["near_ties"] == 3 and row["greedy_mismatches"] == 0
    assert all(d["near_tie"] and d["gap"] <= d["noise"] for d in result["divergences"])
    shown = invoke(prompts, "--draft", VANILLA, target=tmp_path / "twins")
    assert shown.exit_code == 0 and "3 part at a near tie" in shown.stdout


def test_a_mismatch_of_the_hugging_face_arm_is_told_apart_too(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = HuggingFaceArm.run

    def faulty(self: HuggingFaceArm, *arguments: Any) -> Any:
        request = run(self, *arguments)
        request.completion_ids[5] = (request.completion_ids[5] + 1) % 256
        return request

    monkeypatch.setattr(HuggingFaceArm, "run", faulty)
    result = bench(prompts, "--hf-baseline", code=ExitCode.FINDINGS)
    assert arm(result, "hf")["greedy_mismatches"] == 3
    assert all(d["noise"] > 0 or d["gap"] > 0 for d in result["divergences"])
