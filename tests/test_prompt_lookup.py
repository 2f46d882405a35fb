"""Prompt lookup: what is proposed, that a round reads its own new tokens only, and losslessness."""

import random

import pytest
import torch
from test_lossless_sampling import P_FAIL, SIZES, cheap_draws, draw, exact_law, p_value  # noqa: F401
from tiny_models import tiny_target

from specdoctor.drafters.prompt_lookup import NgramIndex, PromptLookupDrafter, prompt_lookup_spec
from specdoctor.engine.draft import Draft, chain_parents
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError

V = 40


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(V))


def lookup(target: Target, text: str = "ngram") -> PromptLookupDrafter:
    return PromptLookupDrafter(prompt_lookup_spec(text, target.vocab_size), target)


def propose(drafter: PromptLookupDrafter, ids: list[int], budget: int = 10) -> list[int]:
    sequence = Sequence(ids, max_new_tokens=1)
    drafter.begin([sequence])
    return drafter.propose([sequence], budget)[0].tokens.tolist()


@pytest.mark.parametrize(
    ("ids", "budget", "drafted"),
    [
        ([1, 2, 3, 9, 8, 1, 2, 3], 10, [9, 8, 1, 2, 3]),
        ([1, 2, 3, 9, 8, 1, 2, 3], 2, [9, 8]),
        ([1, 2, 3, 4, 5], 10, []),  # nothing was there before
        ([7, 1, 7, 2, 7], 10, [2, 7]),  # of two places the last
        ([1, 2, 3, 5, 6, 3, 7, 2, 3], 10, [5, 6, 3, 7, 2, 3]),  # the longer n-gram before the later place
        ([4, 4], 10, [4]),
        ([4, 4, 4], 10, [4]),  # the text ends there
        ([1], 10, []),
    ],
)
def test_what_followed_the_last_time(target: Target, ids: list[int], budget: int, drafted: list[int]) -> None:
    assert propose(lookup(target), ids, budget) == drafted


def test_the_longest_ngram_is_set_by_the_name(target: Target) -> None:
    ids = [5, 1, 2, 3, 4, 8, 6, 2, 3, 4, 9, 5, 1, 2, 3, 4]
    assert propose(lookup(target), ids, 1) == [9]  # by [2, 3, 4], the later place
    assert propose(lookup(target, "ngram:5"), ids, 1) == [8]  # by [5, 1, 2, 3, 4]


@pytest.mark.parametrize("text", ["ngram:", "ngram:0", "ngram:x", "ngram:-1", "ngram:65", "ngram:3:4"])
def test_a_wrong_length_is_refused(text: str) -> None:
    with pytest.raises(SpecdoctorError, match=f"--draft {text}: expected ngram, or ngram:N"):
        prompt_lookup_spec(text, V)


def searched(ids: list[int], longest: int) -> int | None:
    """The same look-up by going through the whole text."""
    for n in range(min(longest, len(ids)), 0, -1):
        for start in range(len(ids) - n - 1, -1, -1):
            if ids[start : start + n] == ids[-n:]:
                return start + n
    return None


def test_the_index_finds_what_a_search_finds_however_the_text_grows() -> None:
    chooser = random.Random(0)
    for _ in range(60):
        longest, index, ids = chooser.randint(1, 5), None, []
        index = NgramIndex(1, longest)
        while len(ids) < 60:
            ids += [chooser.randrange(4) for _ in range(chooser.choice((1, 1, 2, 5)))]
            assert next(iter(index.look_up(ids)), None) == searched(ids, longest)
            assert next(iter(index.look_up(ids)), None) == searched(ids, longest)  # asking twice changes nothing


def test_a_round_reads_only_what_is_new() -> None:
    class Counted(list):
        reads = 0

        def __getitem__(self, key: object) -> object:
            Counted.reads += 1
            return super().__getitem__(key)  # type: ignore[index]

    index, ids = NgramIndex(1, 3), Counted(range(10_000))
    index.look_up(ids)
    Counted.reads = 0
    ids.append(5)
    index.look_up(ids)
    assert Counted.reads <= 2 * 3


def test_greedy_text_is_the_targets(target: Target) -> None:
    prompts = [[1, 2, 3, 1, 2], [7], [4] * 12, list(range(20)) * 2]
    sequences = [Sequence(p, max_new_tokens=50) for p in prompts]
    Engine(target, lookup(target)).generate(sequences)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        plain = Sequence(prompt, max_new_tokens=50)
        Engine(target).generate([plain])
        assert sequence.ids == plain.ids
    records = [record for s in sequences for record in s.records]
    assert {0} < {record.drafted for record in records}  # empty drafts and others
    assert any(record.accepted for record in records) and any(record.accepted < record.drafted for record in records)


LITTLE = tiny_target(5, **SIZES)
SETTING = (1.0, "1x", 0, 1.0)


def test_sampled_text_has_the_targets_law() -> None:
    target = Target(LITTLE)
    observed = draw(Engine(target, lookup(target), draft_tokens=2), *SETTING)
    assert p_value(observed, exact_law(target, Sampling(1.0))) > P_FAIL


def test_a_look_up_that_claims_to_have_drawn_is_found() -> None:
    """Negative control: looked-up tokens verified as if drawn from a uniform law."""
    target = Target(LITTLE)
    drafter = lookup(target)
    honest = drafter.look_up

    def lying(sequences: list[Sequence], budget: int) -> list[Draft]:
        drafts = []
        for sequence in sequences:
            ids = honest(sequence, budget)
            q = torch.full((len(ids), 5), 0.2)
            drafts.append(Draft(torch.tensor(ids, dtype=torch.long), chain_parents(len(ids)), q))
        return drafts

    drafter.propose = lying  # type: ignore[method-assign]
    observed = draw(Engine(target, drafter, draft_tokens=2), *SETTING)
    assert p_value(observed, exact_law(target, Sampling(1.0))) < 1e-6
