"""Readers on files of real engines, on damaged files, and on files that are something else."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.formats.results.load import read_results, select_arm
from specdoctor.formats.results.result_set import rounds_behind

DATA = Path(__file__).parent / "data" / "results"


def load(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def write(folder: Path, content: Any, name: str = "file.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_a_real_llama_log_gives_exact_rounds_where_they_add_up() -> None:
    (result,) = read_results(DATA / "llamacpp_qwen.log")
    assert result.settings == {"target": "models/qwen15.gguf", "draft": "models/qwen05.gguf"}
    assert (result.pooled.rounds, result.pooled.committed, result.pooled.accepted) == (14, 56, 42)
    assert result.estimate("tau_step").value == 4.0
    assert result.pooled.seconds == pytest.approx(43.33117)


def test_a_real_llama_log_with_undrafted_rounds_refuses_to_guess_them() -> None:
    (result,) = read_results(DATA / "llamacpp_synth.log")
    assert result.prompts is not None and len(result.prompts) == 2
    assert result.pooled.rounds is None
    assert "some rounds had no draft" in (result.estimate("tau_step").reason or "")
    assert result.estimate("vllm_mean_acceptance_length").value == pytest.approx(1 + 236 / 160)
    assert "drew acceptance at random" in result.notes[0]


def test_real_llama_timings_know_the_rate_but_not_the_rounds() -> None:
    (result,) = read_results(DATA / "llamacpp_resp.json")
    assert result.estimate("alpha_draft").value == pytest.approx(42 / 56)
    assert result.estimate("llamacpp_tokens_per_forward").value == pytest.approx(57 / 15)
    assert result.estimate("tau_step").value is None


def test_timings_without_drafts_are_plain_decoding(tmp_path: Path) -> None:
    row = load("llamacpp_resp.json")
    del row["timings"]["draft_n"], row["timings"]["draft_n_accepted"]
    (result,) = read_results(write(tmp_path, row))
    assert result.estimate("tau_step").value == 1.0
    assert result.estimate("alpha_draft").value is None


def test_an_old_llama_log_is_read(tmp_path: Path) -> None:
    text = (
        "draft acceptance rate = 0.63658 ( 1093 accepted /  1717 generated)\n"
        "statistics draft-simple: #calls(b,g,a) = 1 699 364, #gen drafts = 470, #acc drafts = 364, "
        "#gen tokens = 1717, #acc tokens = 1093, dur(b,g,a) = 0.001, 40346.627, 0.207 ms\n"
        "prompt eval time =    1129.11 ms /    35 tokens (   32.26 ms per token,    31.00 tokens per second)\n"
        "       eval time =  156488.86 ms /  1793 tokens (   87.28 ms per token,    11.46 tokens per second)\n"
    )
    (result,) = read_results(write(tmp_path, text, "server.log"))
    assert result.prompts is not None and len(result.prompts) == 1
    assert (result.pooled.drafted, result.pooled.accepted, result.pooled.draft_rounds) == (1717, 1093, 470)
    assert result.estimate("vllm_mean_acceptance_length").value == pytest.approx(1 + 1093 / 470)
    # 470 drafts and 1093 accepted do not make 1792 tokens: 229 rounds had no draft.
    assert result.estimate("tau_step").value is None


def test_old_logs_tell_requests_apart_by_the_line_above_or_by_repetition(tmp_path: Path) -> None:
    eval_time = "       eval time =    100.00 ms /    {} tokens (   10.00 ms per token,    100.00 tokens per second)\n"
    accepted = "draft acceptance rate = 0.50000 (    {} accepted /     8 generated)\n"
    tagged = "slot print_timing: id  0 | task {} | \n"
    requests = [(10, 4), (12, 6)]
    by_line = "".join(tagged.format(i) + eval_time.format(n) + accepted.format(a) for i, (n, a) in enumerate(requests))
    by_order = "".join(eval_time.format(n) + accepted.format(a) for n, a in requests)
    for text in (by_line, by_order):
        prompts = read_results(write(tmp_path, text, "server.log"))[0].prompts
        assert prompts is not None
        assert [(sums.completion, sums.accepted) for sums in prompts.values()] == requests


def test_a_vllm_bench_without_speculation_says_so() -> None:
    (result,) = read_results(DATA / "vllm_bench_serve.json")
    assert "without speculative decoding" in (result.estimate("tau_step").reason or "")
    assert result.settings["target"] == "smol"


def test_vllm_counts_that_do_not_add_up_are_not_converted(tmp_path: Path) -> None:
    document = load("two_requests.vllm_bench.json") | {"total_output_tokens": 40}
    (result,) = read_results(write(tmp_path, document))
    assert result.pooled.rounds is None and result.estimate("vllm_mean_acceptance_length").value == pytest.approx(8 / 3)
    assert "some rounds had no draft" in (result.estimate("tau_step").reason or "")


@pytest.mark.parametrize(("committed", "rounds"), [(16, 6), (14, 6), (13, 6), (12, None), (17, None)])
def test_rounds_follow_only_while_the_cut_is_possible(committed: int, rounds: int | None) -> None:
    assert rounds_behind(accepted=10, draft_rounds=6, committed=committed, most_cut=3) == rounds


def test_a_client_s_prompt_id_makes_rows_pairable_and_its_lack_is_noted(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (DATA / "two_requests.sglang.jsonl").read_text().splitlines()]
    assert read_results(write(tmp_path, rows))[0].pairable  # a JSON list is as good as JSONL
    for row in rows:
        del row["prompt_id"]
    (result,) = read_results(write(tmp_path, rows))
    assert not result.pairable and "no prompt_id" in result.notes[0]


def test_older_sglang_names_and_openai_responses_are_read(tmp_path: Path) -> None:
    info = {"spec_verify_ct": 4, "spec_accept_token_num": 9, "spec_draft_token_num": 12}
    row = {"choices": [{"message": {}, "meta_info": info}], "usage": {"completion_tokens": 12}}
    (result,) = read_results(write(tmp_path, row))
    pooled = result.pooled
    assert (pooled.rounds, pooled.committed, pooled.accepted, pooled.drafted) == (4, 11, 9, 12)


def test_an_sglang_without_draft_counts_has_a_length_but_no_rate(tmp_path: Path) -> None:
    (result,) = read_results(write(tmp_path, {"meta_info": {"completion_tokens": 12, "spec_verify_ct": 4}}))
    assert result.estimate("sglang_accept_length").value == 3.0
    assert "does not state" in (result.estimate("alpha_draft").reason or "")


def test_each_line_of_sglang_bench_serving_is_a_run(tmp_path: Path) -> None:
    line = (DATA / "two_requests.sglang_bench.jsonl").read_text()
    results = read_results(write(tmp_path, line * 2, "bench.jsonl"))
    assert [result.arm for result in results] == ["run 1", "run 2"]


def test_aiperf_means_over_requests_have_an_interval_and_warm_up_is_left_out() -> None:
    (aggregate,) = read_results(DATA / "two_requests.aiperf.json")
    estimate = aggregate.estimate("aiperf_acceptance_length")
    assert estimate.low is not None and estimate.low < 2.375 < (estimate.high or 0) and estimate.n == 2
    assert aggregate.marginal == pytest.approx([5 / 6, 3 / 6, 2 / 6]) and aggregate.settings["target"] == "tiny-target"
    (records,) = read_results(DATA / "two_requests.aiperf.jsonl")
    assert "1 of 3 records" in records.notes[0]


def test_an_aiperf_folder_gives_its_most_detailed_export(tmp_path: Path) -> None:
    (tmp_path / "profile_export_aiperf.json").write_text((DATA / "two_requests.aiperf.json").read_text())
    assert read_results(tmp_path)[0].tool == "AIPerf aggregate"
    (tmp_path / "profile_export.jsonl").write_text((DATA / "two_requests.aiperf.jsonl").read_text())
    assert read_results(tmp_path)[0].tool == "AIPerf records"


def test_a_deepspec_table_of_several_datasets_pools_rounds_and_reads_without_boxes(tmp_path: Path) -> None:
    header = (
        "dataset\ttarget_model\tdraft_model\t#propose\taccept_len\tverify_rate\tsamples\tout_tokens\ttok/s\tverify/s"
    )
    rows = [
        "gsm8k\tT\tD\t7.00+1\t4.00\t0.5000\t10\t4010\t100.00\t24.94",
        "mtbench\tT\tD\t7.00+1\t2.00\t0.2500\t5\t1005\t50.00\t24.88",
    ]
    (result,) = read_results(write(tmp_path, "\n".join(["some log", header, *rows]), "eval.txt"))
    assert (result.pooled.requests, result.pooled.completion) == (15, 5015)
    assert result.pooled.rounds == round(4010 * 0.2494) + round(1005 * 0.4976)
    assert result.estimate("tau_step").value == pytest.approx((4 * 1000 + 2 * 500) / 1500, rel=1e-3)
    assert result.settings["prompts"] == "gsm8k:10 mtbench:5"


def test_an_unmeasured_profile_holds_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, {"schema_version": "1.0", "measured": False, "note": "not measured"})
    with pytest.raises(SpecdoctorError, match="without any measured arm") as error:
        read_results(path)
    assert error.value.exit_code == ExitCode.NOTHING


def test_a_profile_with_conditional_rates_alone_is_read(tmp_path: Path) -> None:
    profile = load("two_requests.speculation_profile.json")
    del profile["marginal_accept_rates"], profile["acceptance_length_histogram"]
    (result,) = read_results(write(tmp_path, profile))
    assert result.marginal == pytest.approx([2 / 3, 1 / 3, 1 / 3], abs=1e-5)
    assert result.estimate("tau_step").value == pytest.approx(7 / 3, abs=1e-5)  # as printed


def test_bench_uses_the_records_beside_it_only_when_they_are_its_own(tmp_path: Path) -> None:
    document = load("two_requests.bench.json") | {"records": "elsewhere/rounds.jsonl"}
    records = (DATA / "two_requests.records.jsonl").read_text()
    write(tmp_path, records, "rounds.jsonl")
    result = select_arm(read_results(write(tmp_path, document)), None)
    assert result.estimate("expected_calibration_error").value is not None
    assert result.histogram == [0, 2, 2, 0, 2] and result.settings["target"] == "models/tiny-target"

    write(tmp_path, "\n".join(records.splitlines()[1:]), "rounds.jsonl")
    result = select_arm(read_results(tmp_path / "file.json"), None)
    assert result.estimate("expected_calibration_error").value is None
    assert "holds other rounds" in result.notes[0]


def test_bench_without_prompts_keeps_its_printed_intervals(tmp_path: Path) -> None:
    document = load("two_requests.bench.json")
    del document["prompts"]
    result = select_arm(read_results(write(tmp_path, document)), None)
    estimate = result.estimate("tau_step")
    assert (estimate.value, estimate.low, estimate.high) == (pytest.approx(7 / 3), 1.5, 2.75)


def test_accept_with_sampled_anchors_keeps_its_reason_and_a_prompt_without_confidences_counts_none(
    tmp_path: Path,
) -> None:
    document = load("two_requests.accept.json")
    del document["prompts"][1]["confidence_bins"]
    (result,) = read_results(write(tmp_path, document))
    assert result.estimate("expected_calibration_error").n == 1  # B says nothing, but A still does
    for row in document["prompts"]:
        row["expected_rounds"] = row["expected_committed"] = None
    document["arms"][0]["tau_step"] = {"value": None, "low": None, "high": None, "n": 2, "reason": "anchors sampled"}
    document["arms"][0]["calibration"] = {"reason": "the drafter has no confidence head"}
    for row in document["prompts"]:
        row.pop("confidence_bins", None)
    (result,) = read_results(write(tmp_path, document))
    assert result.estimate("tau_step").reason == "anchors sampled"
    assert result.estimate("expected_calibration_error").reason == "the drafter has no confidence head"


def test_an_arm_of_another_engine_has_a_speed_but_no_rounds(tmp_path: Path) -> None:
    document = load("two_requests.bench.json")
    document["arms"].append({"name": "hf", "draft": None})
    row = {"id": "A", "arm": "hf", "rounds": 0, "drafted": 0, "accepted": 0, "committed": 0, "completion_tokens": 12}
    document["prompts"].append(row | {"seconds": 0.5})
    result = select_arm(read_results(write(tmp_path, document)), "hf")
    assert result.estimate("tokens_per_second").value == pytest.approx(22)
    assert result.estimate("tau_step").value is None


def test_arms_are_chosen_by_name_or_when_only_one_drafts() -> None:
    results = read_results(DATA / "two_requests.bench.json")
    assert select_arm(results, None).arm == "dspark"
    assert select_arm(results, "ar").arm == "ar"
    with pytest.raises(SpecdoctorError, match="has no arm 'dflash', found ar, dspark"):
        select_arm(results, "dflash")
    with pytest.raises(SpecdoctorError, match=r"has 2 arms \(dspark, dspark\); choose one with --arm"):
        select_arm(results * 2, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "an empty file, which is no results file known here"),
        ("nothing of interest\n", "text, which is no results file"),
        ({"a": 1, "b": 2}, "a JSON object with keys a, b"),
        ('{"schema_version": 1, "arms": [', "not valid JSON"),
        ('{"schema_version": 1,\n "arms": [{"name": "x"}', "not valid JSON"),
        ("[1, 2]", r"holds a int, expected a JSON object|no results file"),
        ({"schema_version": 2, "arms": []}, "key schema_version is 2, expected at most 1; upgrade"),
        ({"schema_version": 1, "arms": ["ar"]}, "key arms holds"),
        ({"schema_version": 1, "arms": [], "prompts": [{"arm": "x"}]}, r"prompts\[0\]: expected an object with id"),
    ],
)
def test_a_file_that_is_no_result_is_refused_in_one_line(tmp_path: Path, content: Any, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(SpecdoctorError, match=message) as error:
        read_results(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("value", [-1, "many", True, float("inf")])
def test_a_damaged_count_names_file_and_key(tmp_path: Path, value: Any) -> None:
    document = load("two_requests.bench.json")
    document["prompts"][2]["rounds"] = value
    with pytest.raises(SpecdoctorError, match=r"prompts\[2\]: key rounds is .*expected a number of 0 or more"):
        read_results(write(tmp_path, document))


def test_a_damaged_line_of_jsonl_names_its_number(tmp_path: Path) -> None:
    text = (DATA / "two_requests.sglang.jsonl").read_text() + "{broken\n"
    with pytest.raises(SpecdoctorError, match=r"file\.jsonl:3: not valid JSON"):
        read_results(write(tmp_path, text, "file.jsonl"))


def test_missing_and_foreign_encoded_files(tmp_path: Path) -> None:
    with pytest.raises(SpecdoctorError, match="no such file"):
        read_results(tmp_path / "absent.json")
    path = tmp_path / "file.json"
    path.write_bytes('{"a": 1}'.encode("utf-16"))
    with pytest.raises(SpecdoctorError, match="not UTF-8"):
        read_results(path)
    with pytest.raises(SpecdoctorError, match="a folder without profile_export"):
        read_results(tmp_path)
