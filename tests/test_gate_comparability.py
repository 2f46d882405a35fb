"""What may be compared with what: settings, prompts, and conventions that must not be mixed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gate_runs
import numpy as np
import pytest

from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.formats.results.load import read_results, select_arm
from specdoctor.formats.results.result_set import ResultSet
from specdoctor.measure.comparability import change_of, differences
from specdoctor.measure.gate import gate
from specdoctor.metrics.sums import Sums

DATA = Path(__file__).parent / "data" / "results"


def pair(tmp_path: Path, prompts: int = 30, **changed: Any) -> tuple[ResultSet, ResultSet]:
    """(run, baseline) of one simulated pair; `changed` settings in the run."""
    run, baseline = gate_runs.simulate(np.random.default_rng(1), prompts, 1.0)
    (here,) = read_results(gate_runs.write_bench(tmp_path / "run.json", run, **changed))
    (there,) = read_results(gate_runs.write_bench(tmp_path / "baseline.json", baseline))
    return here, there


def two_requests(name: str) -> ResultSet:
    return select_arm(read_results(DATA / f"two_requests.{name}"), None)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"target": "models/other"}, "target"),
        ({"template": {"kind": "plain"}}, "template"),
        (
            {"template": {"kind": "chat", "name": "default", "sha256": "ab" * 32, "options": {"think": True}}},
            "template",
        ),
        ({"draft_tokens": {"drafter": 5}}, "K"),
        ({"temperature": 0.8}, "temperature"),
    ],
)
def test_runs_that_differ_are_refused_until_the_key_is_allowed(
    tmp_path: Path, changed: dict[str, Any], key: str
) -> None:
    run, baseline = pair(tmp_path)
    if key == "K":
        run = replace(run, settings=run.settings | {"K": 5})
    else:
        run, baseline = pair(tmp_path, **changed)
    with pytest.raises(SpecdoctorError, match=rf"differ in {key}: .*--allow {key}$") as error:
        gate(run, baseline)
    assert error.value.exit_code == ExitCode.USAGE
    report = gate(run, baseline, allow=[key])
    assert [difference.key for difference in report.allowed] == [key] and report.results[0].change is not None


def test_all_differing_keys_are_named_at_once(tmp_path: Path) -> None:
    run, baseline = pair(tmp_path, target="models/other", temperature=0.8)
    with pytest.raises(SpecdoctorError, match=r"target: .*; temperature: .*--allow target --allow temperature"):
        gate(run, baseline)
    with pytest.raises(SpecdoctorError, match=r"differ in temperature"):
        gate(run, baseline, allow=["target"])
    with pytest.raises(SpecdoctorError, match=r"--allow: found 'temprature', .* \(did you mean 'temperature'\?\)"):
        gate(run, baseline, allow=["temprature"])


def test_other_prompts_are_refused_and_when_allowed_the_shared_ones_are_paired(tmp_path: Path) -> None:
    run, baseline = pair(tmp_path)
    assert run.prompts is not None
    fewer = replace(run, prompts=dict(list(run.prompts.items())[:20]))
    with pytest.raises(SpecdoctorError, match=r"prompts: 20 ids \(20 shared\) here, 30 ids in the baseline"):
        gate(fewer, baseline)
    change = gate(fewer, baseline, allow=["prompts"]).results[0].change
    assert change is not None and (change.evidence, change.change.n) == ("paired", 20)
    assert "baseline: left out 10 without a partner of 30 prompts" in change.notes

    other = replace(run, prompts={f"new-{name}": sums for name, sums in run.prompts.items()})
    change = gate(other, baseline, allow=["prompts"]).results[0].change
    assert change is not None and change.evidence == "independent"


def test_another_text_under_the_same_id_is_another_prompt(tmp_path: Path) -> None:
    run, baseline = pair(tmp_path)
    changed = replace(run, hashes=run.hashes | {"p003": "edited"})
    with pytest.raises(SpecdoctorError, match=r"another text of 1 of 30 \(p003\)"):
        gate(changed, baseline)


def test_settings_that_a_side_does_not_state_are_noted_not_refused(tmp_path: Path) -> None:
    run, baseline = pair(tmp_path)
    bare = replace(run, settings={"K": 3})
    report = gate(bare, baseline)
    assert "run (specdoctor bench) does not state target, template, temperature: taken as equal" in report.notes
    loose = replace(run, settings=run.settings | {"device": "cuda:0"})
    assert "device: cuda:0 here, cpu in the baseline" in gate(loose, baseline).notes


def test_models_are_the_same_when_one_side_prints_only_the_end_of_the_name(tmp_path: Path) -> None:
    run, baseline = pair(tmp_path)
    short = replace(run, settings=run.settings | {"target": "target"})
    assert not differences(short, baseline)
    other = replace(run, settings=run.settings | {"target": "rget"})
    assert [difference.key for difference in differences(other, baseline)] == ["target"]


def test_a_pair_of_numbers_always_has_one_convention() -> None:
    ours, profile = two_requests("records.jsonl"), two_requests("speculation_profile.json")
    llama, bench = two_requests("llamacpp.jsonl"), two_requests("sglang_bench.jsonl")
    for one, other, definition in (
        (ours, two_requests("vllm_responses.jsonl"), "tau_step"),
        (ours, two_requests("sglang.jsonl"), "tau_step"),
        (ours, llama, "llamacpp_tokens_per_forward"),
        (ours, bench, "vllm_mean_acceptance_length"),
        (ours, profile, "tau_step"),
    ):
        change = change_of("tau", one, other)
        assert change is not None and change.definition.name == definition
        # Both tell of the same two requests, so under one convention nothing has changed.
        assert change.change.value == pytest.approx(0, abs=2e-6)
    assert change_of("tau", llama, bench) is None


def test_without_a_common_convention_there_is_nothing_to_compare() -> None:
    llama, bench = two_requests("llamacpp.jsonl"), two_requests("sglang_bench.jsonl")
    with pytest.raises(
        SpecdoctorError, match=r"nothing to compare.*has llamacpp_tokens_per_forward.*has vllm_mean"
    ) as e:
        gate(llama, bench)
    assert e.value.exit_code == ExitCode.NOTHING


def test_pooled_counters_without_intervals_are_inconclusive_whatever_they_show() -> None:
    document = json.loads((DATA / "two_requests.vllm_bench.json").read_text())
    before = two_requests("vllm_bench.json")
    assert document["spec_decode_num_drafts"] == 6
    worse = replace(before, pooled=replace(before.pooled, accepted=2, committed=8), values={})
    verdict = gate(worse, before).results[0].verdict
    assert verdict.outcome == "inconclusive" and "no interval" in verdict.reason


def test_published_intervals_are_the_next_best_and_are_called_so(tmp_path: Path) -> None:
    run, baseline = pair(tmp_path)
    named = {name: run.estimate("tau_step") for name in ("tau_step",)}
    run, baseline = (replace(side, prompts=None, pooled=Sums(), values=named) for side in (run, baseline))
    result = gate(run, baseline).results[0]
    assert result.change is not None and result.change.evidence == "intervals"
    assert any("taken as independent" in note for note in result.change.notes)


def test_rows_without_prompt_ids_are_compared_as_independent_samples(tmp_path: Path) -> None:
    run, baseline = pair(tmp_path, prompts=60)
    here, there = (replace(side, pairable=False) for side in (run, baseline))
    loose, tight = gate(here, there).results[0].change, gate(run, baseline).results[0].change
    assert loose is not None and tight is not None and loose.evidence == "independent"
    assert (loose.standard_error or 0) > 1.5 * (tight.standard_error or 0)  # what pairing is good for


def test_one_missing_metric_does_not_hide_the_others(tmp_path: Path) -> None:
    run, baseline = pair(tmp_path, prompts=200)
    report = gate(run, baseline, ["tau", "ece", "tokens_per_s"], {"tau": 0.2})
    assert [result.verdict.outcome for result in report.results][:2] == ["pass", "inconclusive"]
    assert report.outcome == "inconclusive" and "nothing to compare: neither side" in report.results[1].verdict.reason
    assert any("measured at different times" in note for note in report.results[2].change.notes)  # type: ignore[union-attr]
    with pytest.raises(SpecdoctorError, match=r"metric: found 'tua', expected one of tau, .*did you mean 'tau'"):
        gate(run, baseline, ["tua"])
