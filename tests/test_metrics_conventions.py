"""Every public convention on one trace of two requests whose numbers were worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdoctor.errors import SpecdoctorError
from specdoctor.metrics import acceptance
from specdoctor.metrics.conventions import CONVENTIONS, FORMULAS, explain
from specdoctor.metrics.record import RoundRecord


def rounds(prompt_id: str, accepted: list[int], committed: list[int], K: int = 3) -> list[RoundRecord]:
    return [
        RoundRecord("arm", prompt_id, i, K, K, a, list(range(c)))
        for i, (a, c) in enumerate(zip(accepted, committed, strict=True))
    ]


# K = 3. The last round of A accepts two drafts, the first of which is EOS: one token is committed.
A = rounds("A", [3, 1, 3, 2], [4, 2, 4, 1])
B = rounds("B", [0, 1], [1, 2])
TRACE = A + B


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("vllm_mean_acceptance_length", "2.67"),
        ("aiperf_acceptance_length", "2.38"),
        ("dflash_acceptance_length", "2.38"),
        ("deepspec_accept_len", "2.33"),
        ("decode_tokens_per_step", "2.33"),
        ("sglang_accept_length", "2.67"),
        ("sglang_accept_length_per_request", "2.50"),
        ("gpt_fast_mean_accepted", "1.67"),
    ],
)
def test_lengths_of_the_two_request_trace(name: str, table: str) -> None:
    assert f"{CONVENTIONS[name].compute(TRACE):.2f}" == table


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("vllm_draft_acceptance_rate", "55.6%"),
        ("aiperf_draft_acceptance_rate", "45.8%"),
        ("deepspec_verify_rate", "63.6%"),
        ("aiperf_accepted_per_verified", "59.4%"),
    ],
)
def test_rates_of_the_two_request_trace(name: str, table: str) -> None:
    assert f"{CONVENTIONS[name].compute(TRACE):.1%}" == table


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("vllm_per_position", [5 / 6, 3 / 6, 2 / 6]),
        ("conditional_per_position", [5 / 6, 3 / 5, 2 / 3]),
        # DeepSpec drops the two drafts after the accepted EOS from both counts: five rounds reach positions 1 and 2.
        ("deepspec_accept_rate", [5 / 6, 2 / 5, 2 / 5]),
    ],
)
def test_positions_of_the_two_request_trace(name: str, table: list[float]) -> None:
    assert CONVENTIONS[name].compute(TRACE) == pytest.approx(table)


def test_sglang_of_a_single_request() -> None:
    assert CONVENTIONS["sglang_accept_length"].compute(A) == 3.0


def test_our_own_words_on_the_two_request_trace() -> None:
    assert acceptance.tau_step(TRACE).value == pytest.approx(14 / 6)
    assert acceptance.tau_request(TRACE).value == pytest.approx((11 / 4 + 3 / 2) / 2)
    assert acceptance.alpha_draft(TRACE).value == pytest.approx(10 / 18)
    assert [e.value for e in acceptance.marginal(TRACE)] == pytest.approx([5 / 6, 3 / 6, 2 / 6])
    assert [e.value for e in acceptance.conditional(TRACE)] == pytest.approx([5 / 6, 3 / 5, 2 / 3])
    vllm = CONVENTIONS["vllm_mean_acceptance_length"].compute(TRACE)
    assert vllm == pytest.approx(1 + sum(e.value or 0 for e in acceptance.marginal(TRACE)))


def test_plain_decoding_has_no_acceptance_anywhere() -> None:
    plain = [RoundRecord("ar", "A", i, 0, 0, 0, [7]) for i in range(3)]
    values = {name: convention.compute(plain) for name, convention in CONVENTIONS.items()}
    absent = {name for name, value in values.items() if value is None or value == []}
    assert absent == {
        "vllm_mean_acceptance_length",
        "aiperf_acceptance_length",
        "vllm_draft_acceptance_rate",
        "aiperf_draft_acceptance_rate",
        "aiperf_accepted_per_verified",
        "vllm_per_position",
        "deepspec_accept_rate",
        "conditional_per_position",
    }
    assert values["deepspec_accept_len"] == 1 and values["sglang_accept_length"] == pytest.approx(4 / 3)


def test_no_rounds_are_absent_not_zero() -> None:
    assert all(convention.compute([]) in (None, []) for convention in CONVENTIONS.values())


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=8), min_size=1, max_size=5))
def test_without_cuts_the_pooled_conventions_agree(requests: list[list[int]]) -> None:
    trace = [r for i, row in enumerate(requests) for r in rounds(str(i), row, [a + 1 for a in row], K=4)]
    length = CONVENTIONS["vllm_mean_acceptance_length"].compute(trace)
    for name in ("deepspec_accept_len", "decode_tokens_per_step"):
        assert CONVENTIONS[name].compute(trace) == pytest.approx(length)
    assert CONVENTIONS["deepspec_accept_rate"].compute(trace) == CONVENTIONS["vllm_per_position"].compute(trace)
    assert CONVENTIONS["aiperf_acceptance_length"].compute(trace) == pytest.approx(
        CONVENTIONS["dflash_acceptance_length"].compute(trace)
    )


def test_explain_knows_every_metric_that_is_printed() -> None:
    for name in [*FORMULAS, *CONVENTIONS, "marginal[2]", "deepspec_accept_rate@1"]:
        assert name.split("[")[0].split("@")[0] in explain(name)
    printed = set(acceptance.summarise(TRACE).to_json()) & {"tau_step", "tau_request", "alpha_draft", "alpha_verified"}
    assert printed <= set(FORMULAS) and len(printed) == 4
    assert "vLLM" in explain("vllm_per_position")


def test_explain_names_the_nearest_metric() -> None:
    with pytest.raises(SpecdoctorError, match="did you mean tau_step"):
        explain("tau_stp")
