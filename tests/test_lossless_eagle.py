"""Drafters of the EAGLE family change nothing: greedy text is the target's own, sampled text has its law."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import test_lossless_sampling as sampled
import torch
from eagle_models import CASES, TARGET_LAYERS, Case, write_eagle
from eagle_models import V as TEXT_V
from test_lossless_sampling import P_FAIL, SETTINGS, SIZES, V, cheap_draws, draw, exact_law, p_value
from tiny_models import tiny_target
from torch import Tensor

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.engine.trees import DynamicTree

__all__ = ["cheap_draws"]  # a fixture that every test here runs under

REDUCED = "eagle3 with a reduced vocabulary"
K, H = 2, SIZES["hidden"]
AUX = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}


def small(name: str, rows: int, **config: object) -> Case:
    """A case for the target of the chi-square tests: two layers, five ids, of which the drafter has `rows`."""
    case = CASES[name]
    return replace(case, config=case.config | {"draft_vocab_size": rows} | config, draft_vocab=rows, hidden=H)


KINDS: dict[str, Case] = {
    REDUCED: replace(small("specforge", 3, **AUX), taps=(1, 2)),
    "eagle3 with all ids": replace(small("specforge", V, **AUX), taps=(1, 2)),
    "speculators, reduced, normed recurrence": replace(
        small("speculators converted", 4, eagle_aux_hidden_state_layer_ids=[0, 1], norm_output=True), taps=(0, 1)
    ),
    "peagle with a reduced vocabulary": replace(
        small("speculators peagle", 3, eagle_aux_hidden_state_layer_ids=[1, 2], mask_token_id=V - 1), taps=(1, 2)
    ),
    "eagle": replace(CASES["eagle with bias"], hidden=H),
}
RUNS = [*((kind, SETTINGS[0]) for kind in KINDS), (REDUCED, SETTINGS[1]), (REDUCED, SETTINGS[4])]
DRAWS = 8_000  # the negative control below is found with these


@pytest.fixture(scope="module", autouse=True)
def fewer_draws() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampled, "DRAWS", DRAWS)
        yield


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(V, **SIZES))


def engine_of(target: Target, folder: Path, case: Case) -> Engine:
    drafter = load_drafter(write_eagle(folder, case, vocab=V, target_hidden=H), target)
    return Engine(target, drafter, draft_tokens=K)


@pytest.mark.parametrize(("kind", "setting"), RUNS, ids=str)
def test_sampled_text_has_the_targets_law(target: Target, tmp_path: Path, kind: str, setting: tuple) -> None:
    observed = draw(engine_of(target, tmp_path, KINDS[kind]), *setting)
    assert p_value(observed, exact_law(target, Sampling(*setting[:1], *setting[2:]))) > P_FAIL


def test_a_q_without_the_vocabulary_map_is_found(target: Target, tmp_path: Path) -> None:
    """Negative control: tokens are mapped to target ids, but the law that they were drawn from is not."""
    engine = engine_of(target, tmp_path, KINDS[REDUCED])

    def unmapped(q: Tensor) -> Tensor:
        return torch.nn.functional.pad(q, (0, V - q.shape[-1]))

    engine.drafter.in_target_vocabulary = unmapped
    observed = draw(engine, *SETTINGS[0])
    assert p_value(observed, exact_law(target, Sampling(1.0))) < 1e-6


# Greedy ---------------------------------------------------------------------------------------------------------------

PROMPTS = [[7, 3, 11, 0, 22, 5, 9], [(7 * i + 3) % TEXT_V for i in range(23)], [1, 2]]


@pytest.fixture(scope="module")
def text_target() -> Target:
    return Target(tiny_target(TEXT_V, layers=TARGET_LAYERS))


@pytest.fixture(scope="module")
def plain(text_target: Target) -> list[list[int]]:
    return greedy_texts(Engine(text_target))


def greedy_texts(engine: Engine) -> list[list[int]]:
    sequences = [Sequence(prompt, max_new_tokens=12) for prompt in PROMPTS]
    engine.generate(sequences)
    return [sequence.ids for sequence in sequences]


@pytest.mark.parametrize("name", CASES)
def test_greedy_text_is_the_targets_own(text_target: Target, plain: list[list[int]], tmp_path: Path, name: str) -> None:
    engine = Engine(text_target, load_drafter(write_eagle(tmp_path, CASES[name]), text_target))
    assert greedy_texts(engine) == plain


@pytest.mark.parametrize("name", ["specforge", "speculators peagle", "eagle with bias"])
def test_greedy_text_of_trees_is_the_targets_own(
    text_target: Target, plain: list[list[int]], tmp_path: Path, name: str
) -> None:
    drafter = load_drafter(write_eagle(tmp_path, CASES[name]), text_target)
    assert greedy_texts(Engine(text_target, drafter, tree=DynamicTree(depth=3, top_k=3, nodes=8))) == plain


def test_cases_differ_in_what_they_draft(text_target: Target, tmp_path: Path) -> None:
    """The greedy tests above would pass with a drafter that proposes nothing; these propose, and not all the same."""
    drafted = set()
    for name, case in CASES.items():
        drafter = load_drafter(write_eagle(tmp_path / name, case), text_target)
        sequence = Sequence(PROMPTS[0], max_new_tokens=4)
        Engine(text_target, drafter).prefill([sequence])
        with torch.inference_mode():
            drafted.add(tuple(drafter.propose([sequence], 4)[0].tokens.tolist()))
    assert len(drafted) > len(CASES) // 2
    assert all(len(tokens) == 4 for tokens in drafted)
