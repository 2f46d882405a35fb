"""Drafters whose vocabulary is a part of the target's: sampled text still has the target's law, text for text."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import test_lossless_sampling
import torch
from block_layouts import Facts, speculators
from test_lossless_sampling import P_FAIL, SIZES, draw, exact_law, p_value
from tiny_models import tiny_target
from torch import Tensor

from specdoctor.drafters.block import BlockDrafter
from specdoctor.drafters.load import load_drafter
from specdoctor.engine import engine, rows
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target

V = 5
IDS = torch.tensor([1, 3, 4])  # target ids of the draft rows; 0 and 2 can only come from the target itself

DRAFTERS = {
    "dspark-vanilla": ({"markov": "vanilla", "block": 2}, "dspark", {"markov_rank": 8}),
    "dspark-gated-idle-row-0": (
        {"markov": "gated", "block": 3, "offset": 0},
        "dspark",
        {"markov_rank": 8, "markov_head_type": "gated", "sample_from_anchor": False},
    ),
    "dspark-rnn": ({"markov": "rnn", "block": 2}, "dspark", {"markov_rank": 8, "markov_head_type": "rnn"}),
    "dflash": ({"block": 3, "offset": 0}, "dflash", {}),
}
SETTINGS = [(1.0, "1x", 0, 1.0), (1.3, "0.4", 0, 1.0), (1.0, "0", 0, 1.0), (0.9, "1.5x", 2, 0.95)]


@pytest.fixture(scope="module", autouse=True)
def cheap_draws() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "COLUMN_BUCKET", 16)
        patch.setattr(engine, "PREFILL_ROWS", 8192)
        patch.setattr(test_lossless_sampling, "DRAWS", 8_000)
        yield


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(V, **SIZES))


def reduced(folder: Path, kind: str, target: Target) -> BlockDrafter:
    facts, model, keys = DRAFTERS[kind]
    f = Facts(ids=IDS, hidden=32, taps=(0, 2), **facts)
    if model == "dspark":
        keys = {"enable_confidence_head": False} | keys
    speculators(folder, f, model, vocab=V, target_width=32, **keys)
    return load_drafter(folder, target)


@pytest.mark.parametrize(("kind", "setting"), [(k, SETTINGS[i]) for i, k in enumerate(DRAFTERS)], ids=str)
def test_sampled_text_has_the_targets_law(target: Target, tmp_path: Path, kind: str, setting: tuple) -> None:
    observed = draw(Engine(target, reduced(tmp_path, kind, target)), *setting)
    assert p_value(observed, exact_law(target, Sampling(*setting[:1], *setting[2:]))) > P_FAIL


def test_q_left_at_draft_ids_is_found(target: Target, tmp_path: Path) -> None:
    """Negative control: tokens mapped to target ids, their distribution not."""
    drafter = reduced(tmp_path, "dspark-vanilla", target)

    def unmapped(q: Tensor, elsewhere: float = 0.0) -> Tensor:
        return torch.cat([q, q.new_full((*q.shape[:-1], V - q.shape[-1]), elsewhere)], dim=-1)

    drafter.in_target_vocabulary = unmapped
    observed = draw(Engine(target, drafter), *SETTINGS[0])
    assert p_value(observed, exact_law(target, Sampling(1.0))) < 1e-6


@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_text_is_the_targets_own(target: Target, tmp_path: Path, kind: str) -> None:
    prompts = [[a, b, c] for a in range(V) for b in range(V) for c in (0, 4)]
    plain, drafted = ([Sequence(ids, max_new_tokens=10) for ids in prompts] for _ in range(2))
    Engine(target).generate(plain)
    Engine(target, reduced(tmp_path, kind, target)).generate(drafted)
    assert [s.ids for s in drafted] == [s.ids for s in plain]
    assert sum(record.accepted for s in drafted for record in s.records) > 5, "or the test shows nothing"
