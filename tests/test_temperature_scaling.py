"""Sequential temperature scaling on made-up heads whose faults are known."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdoctor.metrics.accept_calibration import ConfidenceRounds, scaled
from specdoctor.metrics.calibration import auroc, expected_calibration_error
from specdoctor.metrics.temperature_scaling import (
    Grid,
    calibration_error,
    fit_sequentially,
    mean_error,
    mean_error_change,
)

SHARPNESS = (2.0, 1.6, 1.3, 2.4)  # how much too sure the made-up head is, by position


def made_rounds(count: int = 40_000, sharpness: Seq[float] = SHARPNESS, seed: int = 0, spread: float = 1.5) -> Any:
    """Rounds of a head that ranks rightly and is too sure: its logits are the true ones times `sharpness`."""
    rng = np.random.default_rng(seed)
    K = len(sharpness)
    true = rng.normal(1.0, spread, (count, K))
    alive = np.cumprod(rng.random((count, K)) < scaled(true, 1.0), axis=-1)
    logit = true * np.array(sharpness)
    prompt = np.arange(count) % 50
    shown = np.full(count, K)
    return ConfidenceRounds(prompt, alive.sum(axis=-1), shown, scaled(logit, 1.0), logit, scaled(true, 1.0))


def product_error(rounds: ConfidenceRounds, temperatures: Seq[float] | float) -> list[float]:
    product = np.cumprod(scaled(rounds.logit, temperatures), axis=-1)
    return [calibration_error(product[:, k], rounds.accepted > k) for k in range(product.shape[1])]


def test_an_overconfident_head_is_cured_on_rounds_that_were_not_fitted() -> None:
    fit = fit_sequentially(made_rounds())
    np.testing.assert_allclose(fit.temperatures, SHARPNESS, rtol=0.15)
    fresh = made_rounds(seed=1)
    before, after = product_error(fresh, 1.0), product_error(fresh, fit.temperatures)
    assert max(before) > 0.05, "else there is nothing to cure"
    assert max(after) <= 0.02
    assert mean_error(fresh, fit.temperatures).value == pytest.approx(np.mean(after))
    change = mean_error_change(fresh, fit.temperatures)
    assert change.value == pytest.approx(np.mean(after) - np.mean(before)) and change.high < 0


def test_each_position_ranks_its_drafts_as_before() -> None:
    rounds = made_rounds(4000)
    temperatures = fit_sequentially(rounds).temperatures
    assert len(set(temperatures)) > 1
    for k, temperature in enumerate(temperatures):
        risk = rounds.accepted >= k
        label, prompt = (rounds.accepted > k)[risk], rounds.prompt[risk]
        raw, cured = (auroc(scaled(rounds.logit[risk, k], t), label, prompt).value for t in (1.0, temperature))
        assert raw == cured and 0.6 < raw < 1


def test_shuffled_outcomes_cannot_be_calibrated_to_tell_drafts_apart() -> None:
    """Negative control: temperatures may make the mean right, never the ranking."""
    rounds = made_rounds(20_000)
    np.random.default_rng(3).shuffle(rounds.accepted)
    fit = fit_sequentially(rounds)
    product = np.cumprod(scaled(rounds.logit, fit.temperatures), axis=-1)
    for k in range(len(SHARPNESS)):
        assert auroc(product[:, k], rounds.accepted > k, rounds.prompt).value == pytest.approx(0.5, abs=0.02)
    honest = product_error(made_rounds(20_000), fit_sequentially(made_rounds(20_000)).temperatures)
    assert np.mean(product_error(rounds, fit.temperatures)) > 3 * np.mean(honest)
    assert set(fit.temperatures) & {Grid().high}, "the best that can be done is to be sure of nothing"


def test_the_order_of_positions_matters() -> None:
    """A fault at position 1 that no temperature cures is made up for by those behind, which have to know of it."""
    rounds = made_rounds(sharpness=(1.0, 1.0, 1.0))
    rounds.logit[:, 0] -= 1  # a bias, not a scale
    sequential = fit_sequentially(rounds).temperatures
    alone = []
    for k in range(3):  # each position by itself, on the rounds that reached it
        risk = rounds.accepted >= k
        own = ConfidenceRounds(*(getattr(rounds, name)[risk] for name in ("prompt", "accepted", "shown")), *[None] * 3)
        own.logit, own.accepted, own.shown = rounds.logit[risk, k : k + 1], own.accepted - k, own.shown - k
        alone += fit_sequentially(own).temperatures
    assert alone[1] == pytest.approx(1, abs=0.15) and sequential[1] < 0.5
    assert product_error(rounds, sequential)[1] < product_error(rounds, alone)[1] - 0.02
    # Earlier temperatures do not depend on what comes later.
    shorter = ConfidenceRounds(
        rounds.prompt, np.minimum(rounds.accepted, 2), rounds.shown - 1, *[rounds.logit[:, :2]] * 2, rounds.logit[:, :2]
    )
    assert fit_sequentially(shorter).temperatures == sequential[:2]


def test_what_too_few_rounds_show_is_left_alone() -> None:
    rounds = made_rounds(400)
    rounds.shown[:] = 2
    fit = fit_sequentially(rounds)
    assert fit.temperatures[2:] == [1.0, 1.0] and fit.error[2:] == [None, None] and None not in fit.error[:2]
    never = made_rounds(400)
    never.accepted[:] = 0
    assert fit_sequentially(never).temperatures == [1.0] * 4


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 200))
def test_the_quick_error_is_that_of_the_metrics(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    pred = np.round(rng.random(count), 2)  # many at the edges of bins
    label = rng.random(count) < pred
    exact = expected_calibration_error(pred, label, np.arange(count) % 3).value
    assert calibration_error(pred, label) == pytest.approx(exact, abs=1e-12)


def test_the_grid_holds_one_and_is_geometric() -> None:
    values = Grid().values()
    assert [Grid().ends_at(float(values[i])) for i in (0, 1, 80, -2, -1)] == [True, False, False, False, True]
    assert 1.0 in values and (values[0], values[-1]) == (pytest.approx(0.2), pytest.approx(5))
    np.testing.assert_allclose(np.diff(np.log(values)), np.log(25) / 160)
    assert 1.0 in Grid(0.5, 3, 7).values()
