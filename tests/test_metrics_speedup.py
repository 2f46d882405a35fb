"""The speed-up model by hand, and the term that limits it in cases a serving engineer would judge at sight."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdoctor.errors import SpecdoctorError
from specdoctor.metrics.record import RoundRecord
from specdoctor.metrics.speedup import SpeedupModel, equivalent_alpha, expected_tau, limiting_term

# 10 ms a token; a round of 10 + 2 + 0.5 ms commits 3 of 5.
GOOD = SpeedupModel(tau=3.5, t_target=0.010, t_draft=0.002, t_verify=0.010, t_overhead=0.0005, proposal_length=4)


def test_terms_by_hand() -> None:
    assert GOOD.speedup == pytest.approx(3.5 * 10 / 12.5) == GOOD.end_to_end_speedup
    assert GOOD.break_even_tau == pytest.approx(1.25)
    assert (GOOD.draft_share, GOOD.overhead_share, GOOD.verify_growth) == pytest.approx((0.16, 0.04, 1.0))
    long_prompt = replace(GOOD, prefill=1.0, tokens=350)  # 1 s + 3.5 s against 1 s + 100 rounds of 12.5 ms
    assert long_prompt.end_to_end_speedup == pytest.approx(4.5 / 2.25)
    assert long_prompt.prefill_share == pytest.approx(1 / 2.25)
    json.dumps(long_prompt.to_json(), allow_nan=False)


def test_leviathan_equation_one() -> None:
    assert expected_tau(0.5, 3) == pytest.approx(1.875)
    assert expected_tau(1.0, 3) == 4 and expected_tau(0.0, 3) == 1
    assert equivalent_alpha(1.875, 3) == pytest.approx(0.5)
    assert (equivalent_alpha(1.0, 3), equivalent_alpha(4.0, 3)) == (0.0, 1.0)


@given(st.floats(0.01, 0.99), st.integers(1, 16))
def test_alpha_and_tau_are_inverse(alpha: float, K: int) -> None:
    assert expected_tau(equivalent_alpha(expected_tau(alpha, K), K), K) == pytest.approx(expected_tau(alpha, K))


@pytest.mark.parametrize(
    ("change", "term", "numbers"),
    [
        ({"t_draft": 0.012}, "draft", ["53%", "12.00 of 22.50 ms"]),
        ({"t_verify": 0.030}, "verify", ["5 rows", "30.00 ms against 10.00 ms", "3.00x"]),
        ({"t_overhead": 0.006}, "overhead", ["33%", "6.00 of 18.00 ms"]),
        ({"tau": 1.2}, "tau", ["commits 1.20 tokens", "breaks even at 1.25"]),
        ({"prefill": 1.0, "tokens": 350.0}, "prefill", ["44% of a request"]),
        ({}, "none", ["stands out"]),
    ],
)
def test_the_limiting_term_names_its_numbers(change: dict[str, float], term: str, numbers: list[str]) -> None:
    model = replace(GOOD, **change)
    limit = limiting_term(model)
    assert limit.term == term
    assert all(number in limit.sentence for number in numbers), limit.sentence
    assert f"from {model.end_to_end_speedup:.2f}x to {limit.speedup_if_cured:.2f}x" in limit.sentence
    assert limit.gain == pytest.approx(limit.speedup_if_cured / limit.speedup) and limit.gain >= 1


def test_of_two_faults_the_costlier_one_is_named() -> None:
    both = replace(GOOD, t_draft=0.010, t_verify=0.018)  # without drafting 18.5 ms, with a flat verify 20.5 ms
    assert limiting_term(both).term == "draft"
    assert limiting_term(replace(both, t_verify=0.022)).term == "verify"
    assert limiting_term(both).gain == pytest.approx(28.5 / 18.5)


def test_prefill_is_no_excuse_where_decoding_itself_is_slow() -> None:
    slow = replace(GOOD, tau=1.1, t_draft=0.02, prefill=1.0, tokens=100.0)
    assert slow.prefill_share > 0.2 and limiting_term(slow).term == "draft"


def test_tau_gains_one_step_of_acceptance_not_perfection() -> None:
    low = replace(GOOD, tau=expected_tau(0.3, 4))
    assert limiting_term(low).gain == pytest.approx(expected_tau(0.4, 4) / expected_tau(0.3, 4))


def timed(arm: str, drafted: int, committed: int, times: dict[str, float], count: int = 4) -> list[RoundRecord]:
    return [
        RoundRecord(arm, f"p{i % 2}", i, drafted, drafted, max(0, committed - 1), [0] * committed, times=times)
        for i in range(count)
    ]


def test_from_records_adds_up_to_the_measured_speedup() -> None:
    arm = timed("spec", 4, 3, {"draft": 0.003, "verify": 0.011, "accept": 0.001, "round": 0.016})
    baseline = timed("ar", 0, 1, {"verify": 0.009, "round": 0.010})
    model = SpeedupModel.from_records(arm, baseline, prefill=0.05)
    assert (model.t_draft, model.t_verify, model.t_overhead) == pytest.approx((0.003, 0.011, 0.002))
    assert (model.tau, model.t_target, model.proposal_length, model.tokens) == pytest.approx((3, 0.010, 4, 6))
    measured = (12 / (4 * 0.016)) / (4 / (4 * 0.010))
    assert model.speedup == pytest.approx(measured)


def test_bad_terms_are_one_clear_line() -> None:
    with pytest.raises(SpecdoctorError, match="t_draft: found -1"):
        replace(GOOD, t_draft=-1.0)
    with pytest.raises(SpecdoctorError, match="t_target: found nan"):
        replace(GOOD, t_target=float("nan"))
    with pytest.raises(SpecdoctorError, match="tokens"):
        replace(GOOD, prefill=1.0)
    with pytest.raises(SpecdoctorError, match="an arm that drafts"):
        limiting_term(replace(GOOD, proposal_length=0))
    untimed = timed("spec", 4, 3, {"round": 0.016})
    with pytest.raises(SpecdoctorError, match="times has no 'draft'"):
        SpeedupModel.from_records(untimed, timed("ar", 0, 1, {"round": 0.01}))
    with pytest.raises(SpecdoctorError, match="an arm without rounds"):
        SpeedupModel.from_records([], untimed)


def test_without_prefill_the_whole_request_speeds_up_like_decoding() -> None:
    diluted = replace(GOOD, prefill=1.0, tokens=350.0)
    assert limiting_term(diluted).speedup_if_cured == pytest.approx(diluted.speedup) == pytest.approx(GOOD.speedup)
