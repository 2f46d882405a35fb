"""One story of two requests, told by every tool's file, reads into the same record and gives each tool's number."""

from pathlib import Path

import pytest

from specdoctor.formats.results.load import read_results, select_arm
from specdoctor.formats.results.result_set import ResultSet
from specdoctor.metrics.sums import Sums

DATA = Path(__file__).parent / "data" / "results"
PER_REQUEST = {
    "A": Sums.of_request(rounds=4, committed=11, draft_rounds=4, drafted=12, accepted=9, completion=12),
    "B": Sums.of_request(rounds=2, committed=3, draft_rounds=2, drafted=6, accepted=1, completion=4),
}
COUNTS = ("requests", "rounds", "committed", "draft_rounds", "drafted", "accepted", "completion")
LENGTHS = ("tau_sum", "length_sum", "completion_length_sum")


def read(name: str) -> ResultSet:
    return select_arm(read_results(DATA / f"two_requests.{name}"), None)


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("records.jsonl", "specdoctor records"),
        ("bench.json", "specdoctor bench"),
        ("accept.json", "specdoctor accept"),
        ("vllm_responses.jsonl", "vLLM responses"),
        ("aiperf.jsonl", "AIPerf records"),
        ("sglang.jsonl", "SGLang responses"),
    ],
)
def test_files_with_requests_give_the_same_counts_per_prompt(name: str, tool: str) -> None:
    result = read(name)
    assert result.tool == tool and result.pairable and result.settings["K"] == 3
    assert result.prompts is not None and list(result.prompts) == ["A", "B"]
    for prompt, sums in result.prompts.items():
        for field in (*COUNTS, *LENGTHS):
            assert getattr(sums, field) == getattr(PER_REQUEST[prompt], field), (prompt, field)


@pytest.mark.parametrize(
    "name",
    [
        *("records.jsonl", "bench.json", "vllm_responses.jsonl", "vllm_bench.json"),
        *("aiperf.jsonl", "aiperf.json", "sglang.jsonl", "llamacpp.log"),
    ],
)
def test_files_with_all_counts_give_the_same_pooled_counts(name: str) -> None:
    pooled = read(name).pooled
    assert [getattr(pooled, field) for field in COUNTS] == [2, 6, 14, 6, 18, 10, 16]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        # rounds, committed, drafted, accepted
        ("deepspec.txt", [6, 14, 16, None]),  # the two drafts after the accepted EOS are no part of its proposal
        ("speculation_profile.json", [6, 14, None, None]),
        ("llamacpp.jsonl", [None, 14, 18, 10]),
        ("sglang_bench.jsonl", [None, None, None, None]),
    ],
)
def test_what_a_file_does_not_state_is_absent_not_zero(name: str, known: list[int | None]) -> None:
    pooled = read(name).pooled
    assert [pooled.rounds, pooled.committed, pooled.drafted, pooled.accepted] == known


OURS, VLLM = "tau_step", "vllm_mean_acceptance_length"
SGLANG, PER_MEAN = "sglang_accept_length", "sglang_accept_length_per_request"
AIPERF, LLAMA = "aiperf_acceptance_length", "llamacpp_tokens_per_forward"


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("records.jsonl", {OURS: "2.33", VLLM: "2.67", AIPERF: "2.38", SGLANG: "2.67", PER_MEAN: "2.50"}),
        ("bench.json", {OURS: "2.33", VLLM: "2.67", AIPERF: "2.38", SGLANG: "2.67", PER_MEAN: "2.50"}),
        ("accept.json", {OURS: "2.33", "tau_request": "2.12"}),
        ("vllm_bench.json", {VLLM: "2.67", OURS: "2.33"}),
        ("vllm_responses.jsonl", {VLLM: "2.67", OURS: "2.33", AIPERF: "2.38", SGLANG: "2.67"}),
        ("aiperf.json", {AIPERF: "2.38", VLLM: "2.67", OURS: "2.33"}),
        ("aiperf.jsonl", {AIPERF: "2.38", VLLM: "2.67", OURS: "2.33"}),
        ("sglang.jsonl", {SGLANG: "2.67", PER_MEAN: "2.50", OURS: "2.33", VLLM: "2.67"}),
        ("sglang_bench.jsonl", {VLLM: "2.67"}),
        ("llamacpp.log", {VLLM: "2.67", OURS: "2.33", LLAMA: "2.67"}),
        ("llamacpp.jsonl", {LLAMA: "2.67"}),
        ("deepspec.txt", {OURS: "2.33"}),
        ("speculation_profile.json", {OURS: "2.33", "tau_request": "2.12"}),
    ],
)
def test_each_tool_s_acceptance_length_is_reproduced(name: str, lengths: dict[str, str]) -> None:
    result = read(name)
    assert {definition: f"{result.estimate(definition).value:.2f}" for definition in lengths} == lengths
    assert result.convention


@pytest.mark.parametrize(
    ("name", "definition", "why"),
    [
        ("sglang_bench.jsonl", OURS, "states no verify forwards"),
        ("llamacpp.jsonl", OURS, "count no rounds"),
        ("llamacpp.jsonl", VLLM, "count no rounds"),
        ("deepspec.txt", VLLM, "drafts after an accepted EOS are not counted"),
        ("deepspec.txt", "alpha_draft", "not printed"),
        ("speculation_profile.json", VLLM, "hides how many drafts were accepted"),
        ("vllm_bench.json", "tokens_per_second", "not the speed of one sequence"),
        ("accept.json", "tokens_per_second", "does not decode"),
    ],
)
def test_a_number_that_cannot_be_converted_is_absent_with_the_reason(name: str, definition: str, why: str) -> None:
    estimate = read(name).estimate(definition)
    assert estimate.value is None and why in (estimate.reason or "")


def test_sglang_and_gpt_fast_numbers_of_single_requests_follow_from_the_counts() -> None:
    prompts = read("sglang.jsonl").prompts
    assert prompts is not None
    a = prompts["A"]
    assert (a.completion or 0) / (a.rounds or 1) == 3.0  # what SGLang prints for A alone
    pooled = read("records.jsonl").pooled
    assert (pooled.accepted or 0) / (pooled.rounds or 1) == pytest.approx(1.67, abs=0.005)  # gpt-fast, without bonus


@pytest.mark.parametrize("name", ["records.jsonl", "vllm_bench.json", "aiperf.json", "sglang.jsonl", "llamacpp.log"])
def test_acceptance_rate_is_the_same_for_all(name: str) -> None:
    assert f"{read(name).estimate('alpha_draft').value:.1%}" == "55.6%"


def test_speed_and_calibration_come_from_the_rounds() -> None:
    result = read("records.jsonl")
    assert result.estimate("tokens_per_second").value == pytest.approx(14 / 0.3)
    assert result.estimate("measured_speedup").value == pytest.approx((14 / 0.3) / (14 / 0.56))
    # Position 0: 5 of 6 accepted at 0.9; position 1: 3 of 5 at 0.7; position 2: 2 of 3 at 0.5.
    expected = (abs(6 * 0.9 - 5) + abs(5 * 0.7 - 3) + abs(3 * 0.5 - 2)) / 14
    assert result.estimate("expected_calibration_error").value == pytest.approx(expected)
    assert read("accept.json").estimate("expected_calibration_error").value == pytest.approx(expected)
    assert result.histogram == [0, 2, 2, 0, 2]
    assert result.marginal == pytest.approx([5 / 6, 3 / 6, 2 / 6])
