"""Drafts whose length varies: the adaptive rule, that it is each request's own, and losslessness."""

from pathlib import Path

import pytest
from scripted_drafter import Oracle
from test_lossless_sampling import P_FAIL, SIZES, cheap_draws, draw, exact_law, p_value  # noqa: F401
from tiny_models import tiny_target, write_drafter

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.draft import Draft
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.measure.drafting import Drafting, drafting_engine
from specdoctor.metrics.record import RoundRecord
from specdoctor.scheduling.dynamic_k import DEFAULT_THRESHOLD, adaptive, check_dynamic_k

V = 32
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(V))


def ran(sequence: Sequence, verified: int, accepted: int) -> None:
    sequence.records.append(RoundRecord("a", "p", len(sequence.records), verified, verified, accepted, [0]))


def test_two_more_after_a_whole_draft_one_less_after_any_other() -> None:
    rule, sequence = adaptive(first=4, most=9), Sequence(PROMPT, max_new_tokens=9)
    lengths = [rule(sequence)]
    for verified, accepted in [(4, 4), (6, 6), (8, 8), (9, 9), (9, 3), (8, 0), (7, 7), (0, 0)]:
        ran(sequence, verified, accepted)
        lengths.append(rule(sequence))
    assert lengths == [4, 6, 8, 9, 9, 8, 7, 9, 9]  # an empty draft tells nothing


def test_never_below_one() -> None:
    rule, sequence = adaptive(first=2, most=9), Sequence(PROMPT, max_new_tokens=9)
    for _ in range(5):
        ran(sequence, 2, 0)
    assert rule(sequence) == rule(sequence) == 1


def test_each_request_has_its_own_length() -> None:
    rule = adaptive(first=3, most=9)
    lucky, unlucky = Sequence(PROMPT, max_new_tokens=9), Sequence(PROMPT, max_new_tokens=9)
    ran(lucky, 3, 3)
    ran(unlucky, 3, 1)
    assert (rule(lucky), rule(unlucky)) == (5, 2)


def test_the_engine_drafts_what_the_rule_says(target: Target) -> None:
    plain = Sequence(PROMPT, max_new_tokens=40)
    Engine(target).generate([plain])
    engine = Engine(target, Oracle(plain.ids, max_draft=8), draft_tokens=7, draft_length=adaptive(2, 7))
    sequence = Sequence(PROMPT, max_new_tokens=40)
    engine.generate([sequence])
    assert sequence.ids == plain.ids
    assert [record.drafted for record in sequence.records] == [2, 4, 6, 7, 7, 7][: len(sequence.records)]
    engine = Engine(target, Oracle(plain.ids, max_draft=8, misses=1), draft_tokens=7, draft_length=adaptive(4, 7))
    sequence = Sequence(PROMPT, max_new_tokens=20)
    engine.generate([sequence])
    assert sequence.ids == plain.ids[: len(sequence.ids)]
    drafted = [record.drafted for record in sequence.records]
    assert drafted[:6] == [4, 3, 2, 1, 3, 2]  # at one draft the oracle is right again


def test_text_does_not_depend_on_neighbours(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(write_drafter(tmp_path, vocab=V, block=6), target)
    prompts = [PROMPT, [1], [2, 2, 2]]

    def sequences() -> list[Sequence]:
        return [Sequence(p, max_new_tokens=24, sampling=Sampling(0.8, seed=i)) for i, p in enumerate(prompts)]

    together, alone = sequences(), sequences()
    Engine(target, drafter, draft_tokens=6, draft_length=adaptive(3, 6)).generate(together)
    for sequence in alone:
        Engine(target, drafter, draft_tokens=6, draft_length=adaptive(3, 6)).generate([sequence])
    assert [s.ids for s in together] == [s.ids for s in alone]
    assert [[r.drafted for r in s.records] for s in together] == [[r.drafted for r in s.records] for s in alone]


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(SpecdoctorError, match="--dynamic-k often: expected one of constant, threshold, adaptive"):
        check_dynamic_k("often")


def test_how_an_engine_is_made(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(write_drafter(tmp_path, vocab=V, block=6), target)
    constant = drafting_engine(target, drafter, Drafting(draft_tokens=4))
    assert (constant.draft_tokens, constant.draft_length, constant.schedule) == (4, None, None)
    varying = drafting_engine(target, drafter, Drafting(dynamic_k="adaptive"))
    assert varying.draft_tokens == 6 and varying.draft_length is not None
    by_confidence = drafting_engine(target, drafter, Drafting(dynamic_k="threshold"))
    sequence = Sequence(PROMPT, max_new_tokens=20)
    by_confidence.generate([sequence])
    for record in sequence.records:
        assert record.confidence is not None
        first = next((i for i, c in enumerate(record.confidence) if c < DEFAULT_THRESHOLD), record.drafted)
        assert record.verified == first
    assert drafting_engine(target, drafter, Drafting(), wished=3).draft_tokens == 3


# Losslessness -----------------------------------------------------------------------------------------------------

SETTING = (1.0, "0.7x", 0, 1.0)


@pytest.fixture(scope="module")
def little() -> Target:
    return Target(tiny_target(5, **SIZES))


def test_sampled_text_has_the_targets_law(little: Target, tmp_path: Path) -> None:
    drafter = load_drafter(write_drafter(tmp_path, block=3, **SIZES), little)
    observed = draw(Engine(little, drafter, draft_tokens=3, draft_length=adaptive(1, 3)), *SETTING)
    assert p_value(observed, exact_law(little, Sampling(1.0))) > P_FAIL


def test_a_length_that_looks_at_the_tokens_is_found(little: Target, tmp_path: Path) -> None:
    """Negative control: a draft is cut before every token 0, so that only other tokens are ever judged."""
    drafter = load_drafter(write_drafter(tmp_path, block=3, **SIZES), little)

    def choosy(sequences: list[Sequence], drafts: list[Draft]) -> list[Draft]:
        return [draft.prefix([*draft.tokens.tolist(), 0].index(0)) for draft in drafts]

    observed = draw(Engine(little, drafter, draft_tokens=3, schedule=choosy), *SETTING)
    assert p_value(observed, exact_law(little, Sampling(1.0))) < 1e-6
