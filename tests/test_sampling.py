"""From logits to probabilities, to a draw, to a verdict: each against the library or against arithmetic by hand."""

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdoctor.engine.draft import Draft, chain_parents
from specdoctor.engine.sampling import Sampling, probabilities, sample, widest_float
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.verify import rejection_sampling, verify
from specdoctor.errors import SpecdoctorError

ALMOST_ONE = 1 - 2**-53  # the largest number that torch.rand gives in float64

# probabilities --------------------------------------------------------------------------------------------------------


def by_the_library(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """transformers' warpers in the order in which its `generate` applies them."""
    scores = TemperatureLogitsWarper(temperature)(None, logits.float())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 40, 100])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.95, 1.0])
def test_probabilities_are_those_of_the_librarys_warpers(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(64, 40, generator=torch.Generator().manual_seed(5)) * 3
    found = probabilities(logits, temperature, top_k, top_p)
    expected = by_the_library(logits, temperature, top_k, top_p)
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_the_token_that_crosses_top_p_stays() -> None:
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    kept = probabilities(p.log(), 1.0, top_p=0.7)
    torch.testing.assert_close(kept, torch.tensor([[0.625, 0.375, 0.0, 0.0]]))
    assert (probabilities(p.log(), 1.0, top_p=1e-6) > 0).tolist() == [[True, False, False, False]]


def test_top_k_comes_before_top_p() -> None:
    """0.4 and 0.3 make up all of what top-k 2 leaves; the other order would keep three tokens at top-p 0.75."""
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    kept = probabilities(p.log(), 1.0, top_k=2, top_p=0.5)
    assert (kept > 0).tolist() == [[True, False, False, False]]  # 4/7 of the mass already crosses one half
    assert (probabilities(p.log(), 1.0, top_k=2, top_p=0.75) > 0).tolist() == [[True, True, False, False]]


def test_ties_at_the_top_k_boundary_are_kept() -> None:
    assert (probabilities(torch.tensor([2.0, 1.0, 1.0, 0.0]), 1.0, top_k=2) > 0).tolist() == [True, True, True, False]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45])
def test_a_vanishing_temperature_is_the_argmax_and_never_nan(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [-5.0, -4.0, -90.0]])
    p = probabilities(logits, temperature)
    assert p.tolist() == [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]


def test_half_precision_logits_give_float32_probabilities() -> None:
    p = probabilities(torch.randn(3, 1000).bfloat16(), 1.0, 50, 0.9)
    assert p.dtype == torch.float32
    torch.testing.assert_close(p.sum(-1), torch.ones(3))


# sample ---------------------------------------------------------------------------------------------------------------


def test_sample_is_the_inverse_of_the_running_sum() -> None:
    p = torch.tensor([0.25, 0.0, 0.5, 0.25]).expand(7, -1)
    u = torch.tensor([0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 0.999], dtype=torch.float64)
    assert sample(p, u).tolist() == [0, 0, 2, 2, 2, 3, 3]


def test_scale_does_not_matter() -> None:
    p = torch.rand(100, 9, generator=torch.Generator().manual_seed(1))
    u = torch.rand(100, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert torch.equal(sample(p, u), sample(p / p.sum(-1, keepdim=True), u))
    assert torch.equal(sample(p, u), sample(p * 1e-6, u))


@pytest.mark.parametrize("u", [0.0, 2**-53, 0.5, 1 - 2**-24, ALMOST_ONE, 1.0])
def test_a_token_of_probability_zero_is_never_drawn(u: float) -> None:
    generator = torch.Generator().manual_seed(3)
    p = torch.rand(4000, 11, generator=generator)
    p[torch.rand(4000, 11, generator=generator) < 0.5] = 0.0
    p[:, -1] = 0.0  # where a draw that runs over the end would land
    p[:, 0] = 0.0
    p[:, 5] += 0.1
    drawn = sample(p, torch.full((4000,), u, dtype=torch.float64))
    assert (p.gather(1, drawn[:, None]) > 0).all()


def test_a_vocabulary_of_one() -> None:
    u = torch.tensor([0.0, 0.5, ALMOST_ONE], dtype=torch.float64)
    assert sample(torch.ones(3, 1), u).tolist() == [0, 0, 0]
    assert probabilities(torch.zeros(3, 1), 0.7, 1, 0.5).tolist() == [[1.0]] * 3


def test_rare_tokens_of_a_large_vocabulary_are_drawn_at_their_rate() -> None:
    """The last of 200,000 tokens with 1e-6 each: a float32 running sum would lose or double it."""
    p = torch.full((200_000,), 5e-6)
    p[0] = 1.0
    total = p.double().sum()
    inside = 1 - 0.5 * 5e-6 / float(total)
    below = 1 - 1.5 * 5e-6 / float(total)
    assert sample(p.expand(2, -1), torch.tensor([inside, below], dtype=torch.float64)).tolist() == [199_999, 199_998]


def test_no_float64_where_there_is_none() -> None:
    assert widest_float(torch.device("mps")) == torch.float32
    assert widest_float(torch.device("cpu")) == widest_float(torch.device("cuda")) == torch.float64


# rejection_sampling ---------------------------------------------------------------------------------------------------


def test_acceptance_and_residual_by_hand() -> None:
    p = torch.tensor([[[0.2, 0.8, 0.0], [0.5, 0.25, 0.25], [0.0, 0.0, 1.0]]])
    q = torch.tensor([[[0.4, 0.6, 0.0], [1.0, 0.0, 0.0]]])
    tokens, counts = torch.tensor([[0, 0]]), torch.tensor([2])

    def run(u0: float, u1: float, after: float) -> tuple[int, int]:
        uniforms = torch.tensor([[u0, u1]], dtype=torch.float64)
        accepted, token = rejection_sampling(p, q, tokens, counts, uniforms, torch.tensor([after], dtype=torch.float64))
        return int(accepted), int(token)

    assert run(0.51, 0.0, 0.0) == (0, 1)  # 0.2 / 0.4 is 0.5: rejected; of max(p - q, 0) only token 1 is left
    assert run(0.49, 0.51, 0.49) == (1, 1)  # the residual of row 1 is [0, .25, .25]
    assert run(0.49, 0.51, 0.51) == (1, 2)
    assert run(0.49, 0.49, 0.3) == (2, 2)  # all accepted: the bonus comes from p of row 2


def test_drafts_chosen_without_chance_have_a_one_hot_q() -> None:
    p = torch.tensor([[[0.3, 0.7], [0.5, 0.5]]])
    tokens, counts = torch.tensor([[0]]), torch.tensor([1])
    one_hot = torch.tensor([[[1.0, 0.0]]])
    for u in (0.0, 0.29, 0.31, 0.99):
        for after in (0.1, 0.9):
            arguments = tokens, counts, torch.tensor([[u]]).double(), torch.tensor([after]).double()
            none, hot = rejection_sampling(p, None, *arguments), rejection_sampling(p, one_hot, *arguments)
            assert [int(x) for x in none] == [int(x) for x in hot]
            assert int(none[0]) == (u < 0.3)
            if u > 0.3:
                assert int(none[1]) == 1


def test_equal_distributions_accept_everything() -> None:
    generator = torch.Generator().manual_seed(4)
    p = torch.rand(500, 4, 7, generator=generator).softmax(-1)
    q = p[:, :3].clone()
    tokens = torch.multinomial(q.reshape(-1, 7), 1, generator=generator).view(500, 3)
    uniforms = torch.rand(500, 3, generator=generator, dtype=torch.float64)
    after = torch.rand(500, generator=generator, dtype=torch.float64)
    accepted, token = rejection_sampling(p, q, tokens, torch.full((500,), 3), uniforms, after)
    assert (accepted == 3).all()
    assert torch.equal(token, sample(p[:, 3], after))


def test_a_rejection_without_residual_draws_from_p() -> None:
    """q = p up to rounding and a rejection all the same: nothing is left over, and p is the right law."""
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]])
    q = torch.tensor([[[0.5, 0.5, 0.0]]])
    uniforms, after = torch.tensor([[1.0]]).double(), torch.tensor([0.7]).double()
    accepted, token = rejection_sampling(p, q, torch.tensor([[0]]), torch.tensor([1]), uniforms, after)
    assert (int(accepted), int(token)) == (0, 1)


def test_a_draft_that_the_target_excludes_is_never_accepted() -> None:
    p = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    zero = torch.zeros(1, 1).double()
    accepted, token = rejection_sampling(p, None, torch.tensor([[0]]), torch.tensor([1]), zero, torch.zeros(1).double())
    assert (int(accepted), int(token)) == (0, 1)


def test_no_drafts_at_all() -> None:
    p = torch.tensor([[[0.2, 0.8]], [[1.0, 0.0]]])
    accepted, token = rejection_sampling(
        p,
        None,
        torch.empty(2, 0, dtype=torch.long),
        torch.zeros(2, dtype=torch.long),
        torch.empty(2, 0),
        torch.tensor([0.5, 0.5]),
    )
    assert accepted.tolist() == [0, 0] and token.tolist() == [1, 0]


def test_padding_behind_a_short_draft_is_never_accepted() -> None:
    p = torch.full((2, 4, 3), 1 / 3)
    tokens = torch.zeros(2, 3, dtype=torch.long)
    accepted, _ = rejection_sampling(
        p, None, tokens, torch.tensor([1, 3]), torch.zeros(2, 3).double(), torch.zeros(2).double()
    )
    assert accepted.tolist() == [1, 3]


# verify ---------------------------------------------------------------------------------------------------------------


def draft(tokens: list[int], probs: torch.Tensor | None = None) -> Draft:
    return Draft(torch.tensor(tokens, dtype=torch.long), chain_parents(len(tokens)), probs)


def requests(count: int, sampling: Sampling) -> list[Sequence]:
    return [Sequence([0], max_new_tokens=9, sampling=sampling) for _ in range(count)]


def test_greedy_verdicts_of_chains_of_different_length() -> None:
    best = torch.tensor([3, 1, 4, 1, 5, 2, 6])
    logits = torch.nn.functional.one_hot(best, 8).float()
    verdicts = verify(requests(3, Sampling()), [draft([3, 1]), draft([]), draft([5, 7])], logits)
    assert [(v.path, v.tokens) for v in verdicts] == [([0, 1], [3, 1, 4]), ([], [1]), ([0], [5, 2])]


def test_greedy_takes_the_right_branch_of_a_tree() -> None:
    # anchor -> 5 | 7; 7 -> 2 | 3; 3 -> 1
    tree = Draft(torch.tensor([5, 7, 2, 3, 1]), (-1, -1, 1, 1, 3))
    best = torch.tensor([7, 0, 3, 0, 6, 0])
    (verdict,) = verify(requests(1, Sampling()), [tree], torch.nn.functional.one_hot(best, 8).float())
    assert verdict.path == [1, 3] and verdict.tokens == [7, 3, 6]


def test_an_empty_draft_beside_a_sampled_one_takes_nothing_of_its_distribution() -> None:
    """A scheduler may leave a request without drafts, or the context may be full: q must stay with its own request."""
    sampling = Sampling(1.0, seed=3)
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    q = torch.full((3, 6), 1 / 6)
    together = verify(requests(2, sampling), [draft([]), draft([1, 2, 3], q)], logits)
    alone = verify(requests(1, sampling), [draft([1, 2, 3], q)], logits[1:])
    assert [v.tokens for v in together[1:]] == [v.tokens for v in alone]
    assert together[0].tokens == verify(requests(1, sampling), [draft([])], logits[:1])[0].tokens


# Sampling settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"temperature": math.nan}, "--temperature nan: expected a number of 0 or more"),
        ({"temperature": -0.1}, "--temperature -0.1"),
        ({"temperature": math.inf}, "--temperature inf"),
        ({"top_k": -1}, "--top-k -1"),
        ({"top_p": 0.0}, "--top-p 0.0: expected a number above 0, at most 1"),
        ({"top_p": 1.01}, "--top-p 1.01"),
        ({"top_p": math.nan}, "--top-p nan"),
        ({"draft_temperature": ""}, "--draft-temperature"),
        ({"draft_temperature": "warm"}, "--draft-temperature warm: expected a temperature such as 0.5, or a factor"),
        ({"draft_temperature": "x"}, "--draft-temperature x"),
        ({"draft_temperature": "nanx"}, "--draft-temperature nanx"),
        ({"draft_temperature": "-0.5"}, "--draft-temperature -0.5"),
        ({"draft_temperature": "1e999"}, "--draft-temperature 1e999"),
        ({"seed": -(2**70)}, "--seed -1180591620717411303424: expected a whole number"),
        ({"seed": 2**64}, "--seed 18446744073709551616"),
    ],
)
def test_settings_out_of_range_are_one_line(settings: dict, line: str) -> None:
    with pytest.raises(SpecdoctorError) as error:
        Sampling(**settings)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize(
    ("text", "temperature", "expected"),
    [
        ("1x", 0.8, 0.8),
        ("0.5x", 0.8, 0.4),
        (" 0.5X ", 0.8, 0.4),
        ("0.3", 0.8, 0.3),
        ("0", 0.8, 0.0),
        ("0x", 0.8, 0.0),
        ("0.3", 0.0, 0.3),
        ("2x", 0.0, 0.0),
    ],
)
def test_draft_temperature_is_absolute_or_a_factor(text: str, temperature: float, expected: float) -> None:
    assert Sampling(temperature, draft_temperature=text).drafting_temperature == pytest.approx(expected)
