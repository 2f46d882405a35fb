"""The pure parts of `accept`: renewal, what-if, cost, change points, calibration. No model."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from specdoctor.errors import SpecdoctorError
from specdoctor.measure.token_classes import CLASSES, classify_piece, token_classes
from specdoctor.metrics.accept_calibration import apply_temperatures, confidence_bins, confidence_report
from specdoctor.metrics.accept_summary import AcceptanceFigures, answer_bins, by_anchor, by_round, prompt_sums
from specdoctor.metrics.change_point import ContextCurve, find_change_point
from specdoctor.metrics.renewal import (
    expected_committed,
    length_rules,
    replay,
    rule_committed,
    rule_visits,
    survival,
    visits,
)
from specdoctor.metrics.round_cost import RoundCost
from specdoctor.metrics.text_acceptance import ReplayedRounds, TextAcceptance
from specdoctor.metrics.whatif import Variant, follow, follow_rule, frequency_ranks, keep_mask, tree_coverage, trimmed


def text(
    accept: np.ndarray, prompt: str = "p", tokens: list[int] | None = None, confidence: np.ndarray | None = None
) -> TextAcceptance:
    """A text of which every anchor was looked at."""
    A, K = accept.shape
    accept = accept.astype(np.float32)
    accept[np.arange(A)[:, None] + 1 + np.arange(K) > A] = np.nan
    return TextAcceptance(
        prompt_id=prompt,
        category="code",
        repeat=0,
        prompt_tokens=10,
        tokens=np.array(tokens or list(range(A + 1)), np.int64),
        length=A + 1,
        anchors=np.arange(A),
        weight=np.ones(A, np.float32),
        accept=accept,
        room=np.full(A, 99),
        rank=np.where(np.nan_to_num(accept) > 0.5, 0, 3).astype(np.int64),
        confidence=confidence,
    )


def random_text(seed: int, A: int = 30, K: int = 4, prompt: str = "p") -> TextAcceptance:
    return text(np.random.default_rng(seed).random((A, K)), prompt)


def simulate(accept: np.ndarray, rng: np.random.Generator, rule=None) -> tuple[int, int, int]:  # type: ignore[no-untyped-def]
    """Rounds, accepted drafts (not cut) and committed tokens of one run, by tossing every coin."""
    A, K = accept.shape
    at = rounds = accepted = committed = 0
    k = K if rule is None else rule.first
    while at < A:
        j = 0
        while j < k and rng.random() < accept[at, j]:
            j += 1
        rounds, accepted = rounds + 1, accepted + j
        committed += min(j + 1, A - at)
        at += j + 1
        if rule is not None:
            k = rule.following[k, j]
    return rounds, accepted, committed


def test_renewal_equals_simulation() -> None:
    rng = np.random.default_rng(0)
    accept = rng.random((20, 3))
    alive = survival(accept)
    runs = np.array([simulate(accept, rng) for _ in range(20_000)])
    standard_error = runs[:, 0].std() / np.sqrt(len(runs))
    assert abs(visits(alive).sum() - runs[:, 0].mean()) < 4 * standard_error
    assert (runs[:, 2] == 20).all()
    assert (visits(alive) * expected_committed(alive)).sum() == pytest.approx(20)


@pytest.mark.parametrize("rule", length_rules(4), ids=lambda rule: rule.name)
def test_length_rules_equal_simulation(rule) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(1)
    accept = rng.random((25, 4)) ** 0.5
    alive = survival(accept)
    runs = np.array([simulate(accept, rng, rule) for _ in range(20_000)])
    by_length = rule_visits(alive, rule)
    assert abs(by_length.sum() - runs[:, 0].mean()) < 4 * runs[:, 0].std() / np.sqrt(len(runs))
    assert (by_length * rule_committed(alive)).sum() == pytest.approx(25)
    assert by_length[:, 0].sum() == 0 and rule.following[1:].min() >= 1
    totals = follow_rule([text(accept)], rule)
    assert totals.rounds[0] == pytest.approx(by_length.sum(), rel=0.2)
    assert totals.lengths.sum() == pytest.approx(totals.rounds[0])


def test_greedy_has_one_replay_only() -> None:
    accept = (np.random.default_rng(2).random((30, 3)) < 0.6).astype(float)
    rounds = replay(survival(accept), np.full(30, 0.5))
    assert rounds == replay(survival(accept), np.full(30, 0.01))
    assert len(rounds) == visits(survival(accept)).sum()


def test_average_by_anchor_is_not_average_by_round() -> None:
    """Rounds pile up where drafts fail: the mean over all positions flatters."""
    accept = np.repeat([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]], 20, axis=0)
    by = {w: AcceptanceFigures([text(accept)], Variant("all", 4), w).tau().value for w in (by_round, by_anchor)}
    assert by[by_round] == pytest.approx(40 / (4 + 20))
    assert by[by_anchor] == pytest.approx((16 * 5 + 5 + 4 + 3 + 2 + 20) / 40, abs=0.2)
    assert by[by_anchor] > by[by_round] + 1


def test_marginals_and_tau_agree_and_sums_add_up() -> None:
    texts = [random_text(i, prompt=f"p{i // 2}") for i in range(6)]
    figures = AcceptanceFigures(texts, Variant("all", 4))
    conditional = figures.conditional()
    survived = np.cumprod([c.value for c in conditional])
    # Every round of which the text shows all drafts enters both; only the ends differ.
    np.testing.assert_allclose([m.value for m in figures.marginal()], survived, rtol=0.15)
    sums = prompt_sums(texts, Variant("all", 4))
    assert [s.id for s in sums] == ["p0", "p1", "p2"] and all(s.texts == 2 for s in sums)
    tau = sum(s.expected_committed for s in sums) / sum(s.expected_rounds for s in sums)
    assert figures.tau().value == pytest.approx(tau)
    assert sum(s.expected_committed for s in sums) == pytest.approx(6 * 30)
    labels, bins = answer_bins((0, 10, 20))
    split = figures.split(labels, bins)
    assert list(split) == ["0-9", "10-19", "20+"]
    assert sum(row["tau"].n for row in split.values()) == pytest.approx(figures.tau().n, abs=2)


def test_thresholds_trim_and_account_for_rejected_drafts() -> None:
    """A chain cut at the first low confidence; deviating drafts are verified as the replayed rounds show."""
    rng = np.random.default_rng(3)
    accept, confidence = rng.random((40, 3)), rng.random((40, 3)).astype(np.float32)
    one = text(accept, confidence=confidence)
    variant = Variant("t", 3, 0.4)
    kept = keep_mask(confidence, 0.4)
    assert (kept == np.logical_and.accumulate(confidence >= 0.4, axis=1)).all()
    assert (keep_mask(confidence, 0.4, cumulative=True) <= kept).all()
    (totals,) = follow([one], [variant])
    starts = visits(survival(trimmed(one, variant)))
    # The head does not read drafts: what is verified is known exactly.
    assert totals.lengths[0] @ np.arange(4) == pytest.approx(starts @ kept.sum(axis=1))
    one.reads_drafts = True
    one.rounds = ReplayedRounds(np.arange(40), np.zeros(40, np.int64), np.full((40, 3), 0.99, np.float32))
    (deviating,) = follow([one], [variant])
    assert deviating.lengths.sum() == pytest.approx(totals.lengths.sum())
    assert deviating.lengths[0] @ np.arange(4) > totals.lengths[0] @ np.arange(4), "rejected drafts look good here"


def test_tree_coverage_and_vocabulary() -> None:
    one, two = random_text(5, prompt="a"), random_text(6, prompt="b")
    one.tokens, two.tokens = np.array([1] * 21 + [2] * 10), np.array([1] * 11 + [3] * 20)
    covered, reached = tree_coverage([one, two], 1, lambda t: np.ones(len(t.anchors)))
    assert (covered[:, 1:] <= covered[:, :-1]).all() and (covered <= reached).all()
    wide, _ = tree_coverage([one, two], 4, lambda t: np.ones(len(t.anchors)))
    assert wide[0].tolist() == [30, 29, 28, 27], "all ranks are below 4; the last anchors see fewer tokens"
    ranks, side = frequency_ranks([one, two], 8)
    assert ranks[side["a"], 3] == 0 and np.isinf(ranks[side["a"], 2]), "a is judged by what b says"
    floor = Variant("floor", 4, allowed=lambda t: ranks[side[t.prompt_id]] < 1)
    ceiling = Variant("ceiling", 4, allowed=lambda t: ranks[side[t.prompt_id]] < 1, perfect=True)
    free = Variant("free", 4)
    rounds = [totals.rounds.sum() for totals in follow([one, two], [floor, free, ceiling])]
    assert rounds[0] > rounds[1]
    tree = follow([one], [Variant("tree", 4, tree_width=4)])[0]
    assert tree.rounds[0] == 6, "every token covered: 30 tokens in rounds of 5"


def test_cost_table_reads_interpolates_and_refuses(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"rows": [1, 4, 8], "seconds": [1.0, 1.6, 2.0], "draft_seconds": 0.5}))
    cost = RoundCost.read(path)
    np.testing.assert_allclose(cost.round_seconds(3), [1.5, 1.7, 1.9, 2.1])
    assert cost.plain_seconds == 1.0
    assert np.isnan(cost.target_seconds(9))
    for bad, message in [
        ("[]", "expected an object"),
        ("{", "not JSON"),
        ('{"rows": [1], "seconds": [1, 2], "draft_seconds": 0}', "rows has 1 entries and seconds has 2"),
        ('{"rows": [2, 1], "seconds": [1, 2], "draft_seconds": 0}', "rising whole numbers"),
        ('{"rows": [1, 2], "seconds": [1, -2], "draft_seconds": 0}', "key seconds"),
        ('{"rows": [1, 2], "seconds": [1, 2]}', "key draft_seconds is null"),
    ]:
        path.write_text(bad)
        with pytest.raises(SpecdoctorError, match=message):
            RoundCost.read(path)
    with pytest.raises(SpecdoctorError, match=r"missing.json: No such file"):
        RoundCost.read(tmp_path / "missing.json")


def curves(step: float, at: int = 512, prompts: int = 30, seed: int = 0, span: int = 400) -> list[ContextCurve]:
    """Answers of prompts of very different length and difficulty, with a step of acceptance at a context length."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(prompts):
        context = rng.integers(100, 1000 - span) + np.arange(span)
        level = rng.normal(1.5, 0.5)
        out.append(ContextCurve(f"p{i}", context, level + step * (context >= at) + rng.normal(0, 0.7, span)))
    return out


def test_change_point_finds_the_step_and_names_the_number() -> None:
    marks = {"target max_position_embeddings": 8192, "drafter sliding_window": 512}
    found = find_change_point(curves(-0.8), marks)
    assert found.found and found.p < 0.01 and found.contrast == "within prompts"
    assert found.low <= 512 <= found.high and abs(found.context - 512) <= 40
    assert found.matches == ("drafter sliding_window = 512",)
    assert found.step == pytest.approx(-0.8, abs=0.25)
    elsewhere = find_change_point(curves(-0.8, at=700), marks)
    assert elsewhere.found and elsewhere.matches == ()


def test_change_point_without_a_step_is_rarely_found() -> None:
    found = sum(find_change_point(curves(0.0, seed=seed), {}).found for seed in range(40))
    assert found <= 3  # 1 % each


def test_change_point_between_prompts_and_too_few_prompts() -> None:
    short = [ContextCurve(c.prompt, c.context[:3], c.value[:3]) for c in curves(-2.0, prompts=60)]
    between = find_change_point(short, {"window": 512})
    assert between.contrast == "between prompts" and between.found
    few = find_change_point(curves(-2.0, prompts=3), {})
    assert not few.found and few.p is None and "3 prompts" in few.reason
    assert few.to_json()["reason"]


def calibrated_texts(distort: float = 1.0) -> list[TextAcceptance]:
    """Rounds whose confidence is the acceptance itself, to the power `distort`."""
    rng = np.random.default_rng(4)
    out = []
    for i in range(40):
        accept = rng.random((60, 3))
        one = text(accept, prompt=f"p{i}", confidence=(accept**distort).astype(np.float32))
        at, taken = np.array(replay(survival(np.nan_to_num(one.accept)), rng.random(60))).T
        one.rounds = ReplayedRounds(at, taken)
        out.append(one)
    return out


def test_calibration_of_an_honest_and_of_a_boastful_head() -> None:
    honest, boastful = (confidence_report(calibrated_texts(d), 3) for d in (1.0, 0.3))
    for question, k in itertools.product(("conditional", "cumulative"), range(3)):
        good, bad = (report["before"][question][k] for report in (honest, boastful))
        assert good["debiased_rms"].value < 0.04
        assert bad["ece"].value > good["ece"].value + 0.05
        assert bad["mean_prediction"] > bad["mean_label"] + 0.05
        assert good["brier"].value < bad["brier"].value
        assert good["auroc"].value > 0.7
        assert sum(row.count for row in good["reliability"]) == good["ece"].n
    counts = [row["ece"].n for row in honest["before"]["conditional"]]
    assert counts[0] > counts[1] > counts[2], "at risk: the drafts before were accepted"
    assert honest["ece"].value < boastful["ece"].value
    assert "after" not in honest


def test_stored_temperatures_cure_and_bins_add_up() -> None:
    rng = np.random.default_rng(7)
    texts = calibrated_texts()
    for one in texts:  # logits twice as sharp as they should be
        logit = np.log(one.confidence) - np.log1p(-one.confidence)
        one.confidence = (1 / (1 + np.exp(-2 * logit))).astype(np.float32)
    report = confidence_report(texts, 3, temperatures=[2.0, 2.0, 2.0])
    for k in range(3):
        before, after = (report[when]["cumulative"][k]["ece"].value for when in ("before", "after"))
        assert after < before
    assert report["after"]["mean"] < report["before"]["mean"]
    bins = confidence_bins(texts, 3)
    counts = np.sum([row[:20] for row in bins.values()], axis=0)
    gaps = np.sum([row[20:] for row in bins.values()], axis=0)
    assert np.abs(gaps).sum() / counts.sum() == pytest.approx(report["ece"].value)
    values = rng.random((5, 3))
    np.testing.assert_allclose(apply_temperatures(values, [1.0, 1.0, 1.0]), values)
    assert (apply_temperatures(np.array([[0.0, 1.0, 0.5]]), [3.0, 3.0, 3.0]) == [[0.0, 1.0, 0.5]]).all()
    with pytest.raises(SpecdoctorError, match="expected 3 numbers above 0"):
        confidence_report(texts, 3, temperatures=[1.0])


def test_no_head_and_no_paths_are_told_apart() -> None:
    plain = random_text(1)
    assert confidence_report([plain], 4) == {"reason": "the drafter has no confidence head"}
    blind = text(np.ones((5, 2)), confidence=np.ones((5, 2), np.float32))
    blind.reads_drafts, blind.rounds = True, ReplayedRounds(np.array([0]), np.array([0]))
    assert confidence_report([blind], 2) == {"reason": "rejected drafts were not followed"}
    assert confidence_bins([blind], 2) == {}


@pytest.mark.parametrize(
    ("piece", "after_space", "expected"),
    [
        ("42", False, "digits"),
        (" 42", False, "digits"),
        ("\n\n", False, "whitespace"),
        ("   ", True, "whitespace"),
        ("),", False, "punctuation"),
        (" (", False, "punctuation"),
        (" house", False, "word-start"),
        ("def", True, "word-start"),
        ("ing", False, "continuation"),
        ("x1", False, "continuation"),
        ("\ufffd", False, "continuation"),
        ("", False, "continuation"),
    ],
)
def test_token_classes_of_pieces(piece: str, after_space: bool, expected: str) -> None:
    assert classify_piece(piece, after_space) == expected and expected in CLASSES


def test_token_classes_of_bytes() -> None:
    one = random_text(0, A=6)
    one.tokens = np.array(list(b"x = 12\n"))
    class_of = token_classes([one], None, as_bytes=True)
    names = [CLASSES[i] for i in class_of(one)]
    assert names == ["word-start", "whitespace", "punctuation", "whitespace", "digits", "digits", "whitespace"]
    assert token_classes([one], None) is None
