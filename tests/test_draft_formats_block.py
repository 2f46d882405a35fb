"""Block drafters of speculators, SpecForge and z-lab: tiny checkpoints in each layout against a dense second reading.

The first round and the one after it (whatever was accepted) are compared: hidden states, tokens, distributions and
confidences, behind a real prompt of a real (tiny) target.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from block_layouts import (
    LAYOUTS,
    Facts,
    V,
    dflash_reduced,
    dspark_gated_reduced_08,
    dspark_vanilla_reduced,
    zlab_last_layer,
)
from dense_block import DenseBlock
from tiny_models import tiny_target
from torch import Tensor

from specdoctor.drafters.block import BlockDrafter
from specdoctor.drafters.load import load_drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.measure.accept import AcceptArm, AcceptSettings
from specdoctor.measure.accept_pass import AcceptancePass, PassOptions
from specdoctor.measure.accept_whatif import what_if
from specdoctor.measure.corpus import CorpusText
from specdoctor.metrics.whatif import Variant

DEPTH = 8
PROMPT = [3, 17, 9, 22, 8, 30, 1, 14, 5, 27, 11, 2]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(V, layers=DEPTH))


layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)


@torch.inference_mode()
def context_states(f: Facts, ids: list[int]) -> Tensor:
    """The tapped states of all of `ids` [n, taps * H] by a fresh model's own forward."""
    model = tiny_target(V, layers=DEPTH)
    raw: list[Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda m, a, out: raw.append(out))
    states = [s[0] for s in model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states]
    hook.remove()
    if not f.final_normed:
        states[DEPTH] = raw[0].view_as(states[DEPTH])
    return torch.cat([states[tap] for tap in f.taps], dim=-1)


def dense_of(f: Facts, target: Target) -> DenseBlock:
    return DenseBlock(f, target.embedding.weight.detach(), target.lm_head.weight.detach())


def compare_round(drafter: BlockDrafter, sequence: Sequence, f: Facts, dense: DenseBlock) -> None:
    """The drafter's next proposal, its hidden states and its distributions, against the dense ones."""
    taps = context_states(f, sequence.ids[:-1])
    expected = dense.hidden(taps, sequence.anchor)
    tokens, _, confidence = dense.walk(expected, sequence.anchor)
    with torch.inference_mode():
        anchors = torch.tensor([sequence.anchor])
        hidden = drafter.block_hidden([sequence], anchors)
        (draft,) = drafter.propose([sequence], drafter.max_draft)
        warm = Sampling(1.0, draft_temperature="0.7")
        uniforms = torch.full((1, drafter.max_draft), 0.4, dtype=torch.float64)
        drawn, q = drafter.choose(anchors, hidden, drafter.base_logits(hidden), warm, uniforms)
    torch.testing.assert_close(hidden[0], expected if f.offset else expected[1:], atol=1e-5, rtol=1e-5)
    assert draft.tokens.tolist() == tokens
    assert drafter.max_draft == len(tokens) == f.block - 1 + f.offset
    if f.confidence:
        torch.testing.assert_close(draft.confidence, torch.tensor(confidence), atol=1e-5, rtol=1e-5)
    else:
        assert draft.confidence is None
    _, forced, _ = dense.walk(expected, sequence.anchor, drawn[0].tolist())
    assert q is not None
    assert q.shape == (1, len(tokens), V)
    torch.testing.assert_close(q[0], (forced / 0.7).softmax(-1), atol=1e-5, rtol=1e-5)


@layouts
def test_rounds_equal_the_dense_reading(target: Target, tmp_path: Path, layout: Callable[[Path], Facts]) -> None:
    f = layout(tmp_path)
    drafter, dense = load_drafter(tmp_path, target), dense_of(f, target)
    decoder = Engine(target, drafter)
    sequence = Sequence(PROMPT, max_new_tokens=20)
    decoder.prefill([sequence])
    compare_round(drafter, sequence, f, dense)
    # Drafts that the target would take at once, one of them wrong: the next round stands behind a short one.
    truth = Sequence(list(sequence.ids), max_new_tokens=8)
    Engine(target).generate([truth])
    honest = drafter.propose

    def lucky(sequences: list[Sequence], budget: int) -> list:
        (draft,) = honest(sequences, budget)
        draft.tokens = torch.tensor([*truth.completion_ids[:2], (truth.completion_ids[2] + 1) % V])
        return [draft.prefix(3)]

    if drafter.max_draft >= 3:
        drafter.propose = lucky
        decoder.step([sequence])
        drafter.propose = honest
        assert sequence.records[-1].accepted == 2
        compare_round(drafter, sequence, f, dense)
    decoder.release([sequence])


@layouts
def test_context_in_chunks_and_shifted_positions_change_nothing(
    target: Target, tmp_path: Path, layout: Callable[[Path], Facts]
) -> None:
    f = layout(tmp_path)
    drafter = load_drafter(tmp_path, target)
    taps = context_states(f, PROMPT)
    whole = hidden_behind(drafter, taps, [len(taps)])
    torch.testing.assert_close(hidden_behind(drafter, taps, [5, 1, len(taps) - 6]), whole, atol=1e-5, rtol=1e-5)
    at = drafter.backbone.rope.at
    drafter.backbone.rope.at = lambda positions, limit: at(positions + 37, limit + 37)
    torch.testing.assert_close(hidden_behind(drafter, taps, [len(taps)]), whole, atol=2e-5, rtol=1e-5)


@torch.inference_mode()
def hidden_behind(drafter: BlockDrafter, taps: Tensor, pieces: list[int]) -> Tensor:
    sequence = Sequence([0] * len(taps) + [7], max_new_tokens=4)
    drafter.begin([sequence])
    for piece in taps.split(pieces):
        drafter.observe([sequence], piece, [len(piece)])
    hidden = drafter.block_hidden([sequence], torch.tensor([7]))[0]
    assert drafter.backbone.cache.lengths[sequence.drafter_state] == len(taps), "the block has left no column"
    drafter.end(sequence)
    return hidden


@layouts
def test_decoding_is_the_targets_own(target: Target, tmp_path: Path, layout: Callable[[Path], Facts]) -> None:
    layout(tmp_path)
    plain = [Sequence(PROMPT[: 4 + i], max_new_tokens=10) for i in range(3)]
    Engine(target).generate(plain)
    drafted = [Sequence(PROMPT[: 4 + i], max_new_tokens=10) for i in range(3)]
    Engine(target, load_drafter(tmp_path, target)).generate(drafted)
    assert [s.ids for s in drafted] == [s.ids for s in plain]


@pytest.mark.parametrize("layout", [dflash_reduced, dspark_gated_reduced_08, dspark_vanilla_reduced, zlab_last_layer])
@pytest.mark.parametrize("anchor", [2, 6, 9])
def test_blocks_of_a_known_text_equal_the_dense_reading(
    target: Target, tmp_path: Path, layout: Callable[[Path], Facts], anchor: int
) -> None:
    """`accept`: the acceptance of a text's tokens is min(1, q / p), 0 where the draft vocabulary lacks the token."""
    f = layout(tmp_path)
    drafter, dense = load_drafter(tmp_path, target), dense_of(f, target)
    text = [int(i) for i in torch.randint(V, (16,), generator=torch.Generator().manual_seed(anchor))]
    K = drafter.max_draft
    one_pass = AcceptancePass(target, drafter, Sampling(1.0), PassOptions(K, K, tree_width=8))
    result = one_pass.run(CorpusText("p", "", 0, PROMPT, text, None, 16), 16)
    hidden = dense.hidden(context_states(f, [*PROMPT, *text[:anchor]]), text[anchor])
    _, logits, _ = dense.walk(hidden, text[anchor], text[anchor + 1 : anchor + 1 + K])
    with torch.inference_mode():
        p = tiny_target(V, layers=DEPTH)(torch.tensor([[*PROMPT, *text]])).logits[0, len(PROMPT) + anchor :].softmax(-1)
    for k in range(K):
        y = text[anchor + 1 + k]
        accept = min(1.0, float(logits[k].softmax(-1)[y] / p[k][y]))
        assert result.accept[anchor, k] == pytest.approx(accept, abs=2e-5)
        if accept == 0:
            break  # nothing behind it is looked at
    assert result.rank is not None
    y = text[anchor + 1]
    covered = f.ids is None or y in f.ids.tolist()
    assert result.rank[anchor, 0] == (int((logits[0] > logits[0][y]).sum()) if covered else V)


def test_the_ceiling_of_a_draft_vocabulary(target: Target, tmp_path: Path) -> None:
    """A drafter that is perfect on its own ids, its rounds followed by hand through two texts."""
    f = dspark_vanilla_reduced(tmp_path)
    drafter = load_drafter(tmp_path, target)
    K = drafter.max_draft
    arm = AcceptArm("d", drafter, K, Variant("headline", K))
    rounds = committed = covered = 0
    for seed in range(2):
        text = [int(i) for i in torch.randint(V, (24,), generator=torch.Generator().manual_seed(seed))]
        one_pass = AcceptancePass(target, drafter, Sampling(), PassOptions(K, K))
        arm.texts.append(one_pass.run(CorpusText(f"p{seed}", "", 0, PROMPT, text, None, 24), 24))
        known = [token in f.ids.tolist() for token in text]
        covered += sum(known[1:])
        at = 0
        while at < 23:
            accepted = 0
            while accepted < K and at + accepted + 1 < 24 and known[at + accepted + 1]:
                accepted += 1
            at += accepted + 1
            rounds += 1
        committed += 23
    own = what_if(arm, AcceptSettings(), None)["draft_vocabulary"]
    assert own["rows"] == 22
    assert own["coverage"] == pytest.approx(covered / 46)
    assert own["tau_ceiling"].value == pytest.approx(committed / rounds)
