"""Block drafters against a second implementation, dense and without a cache, and the invariances of their semantics."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from dense_drafter import Dense
from safetensors.torch import load_file, save_file
from tiny_models import tiny_target, write_drafter
from torch import Tensor

from specdoctor.drafters.block import BlockDrafter
from specdoctor.drafters.load import load_drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import FINAL_NORMED, Target
from specdoctor.formats.drafts.zlab import default_taps

V, H = 24, 64


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(V))


# Running the drafter by hand ------------------------------------------------------------------------------------------


def some_taps(n: int, count: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(n, count * H, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def block(drafter: BlockDrafter, taps: Tensor, anchor: int, chunks: list[int] | None = None) -> tuple[Tensor, Sequence]:
    """Hidden states [max_draft, H] below `anchor` behind the context `taps`, fed in pieces."""
    sequence = Sequence([0] * len(taps) + [anchor], max_new_tokens=9)
    drafter.begin([sequence])
    for piece in taps.split(chunks or [len(taps)]):
        drafter.observe([sequence], piece, [len(piece)])
    return drafter.block_hidden([sequence], torch.tensor([anchor]))[0], sequence


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
ALL_SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}


def zlab(**own: object) -> dict:
    return {"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": V - 1, **own}}


CASES: dict[str, dict] = {
    "vanilla": {"head": "vanilla"},
    "gated": {"head": "gated"},
    "rnn": {"head": "rnn"},
    "no head": {"head": None},
    "confidence of the hidden state": {"config_changes": {"confidence_head_with_markov": False}},
    "no confidence": {"config_changes": {"enable_confidence_head": False, "confidence_head_with_markov": False}},
    "head without markov but confident": {"head": None, "config_changes": {"enable_confidence_head": True}},
    "attention biases": {"config_changes": {"attention_bias": True}},
    "embedding of the target": {"own_embedding": False},
    "taps with the embedding output": {"taps": (-1, 0, 1)},
    "zlab": {"family": "zlab"},
    "zlab own embedding": {"family": "zlab", "own_embedding": True},
    "zlab sliding": {"family": "zlab", "config_changes": SLIDING},
    "zlab all sliding": {"family": "zlab", "config_changes": ALL_SLIDING},
    "zlab window 1": {"family": "zlab", "config_changes": ALL_SLIDING | {"sliding_window": 1}},
    "zlab window 3, narrower than the block": {"family": "zlab", "config_changes": SLIDING | {"sliding_window": 3}},
    "zlab wide window": {"family": "zlab", "config_changes": SLIDING | {"sliding_window": 500}},
    "zlab causal everywhere": {"family": "zlab", "config_changes": SLIDING | {"is_causal": True}},
    "zlab causal nowhere": {"family": "zlab", "config_changes": SLIDING | {"is_causal": False}},
    "zlab scales": {
        "family": "zlab",
        "config_changes": zlab(input_embedding_scale=8.0, output_multiplier=0.25, final_logit_softcapping=1.5),
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [1, 4, 19])
def test_block_and_heads_equal_the_second_implementation(target: Target, tmp_path: Path, case: str, n: int) -> None:
    folder = write_drafter(tmp_path, vocab=V, block=5, **CASES[case])
    drafter, dense = load_drafter(folder, target), Dense(folder, target)
    taps, anchor = some_taps(n, len(drafter.taps)), 7
    hidden, _ = block(drafter, taps, anchor)
    expected = dense.hidden(taps, anchor)
    torch.testing.assert_close(hidden, expected[1:] if dense.zlab else expected, atol=2e-5, rtol=1e-4)
    tokens, logits, confidence = dense.greedy(expected, anchor)
    anchors = torch.tensor([anchor])
    with torch.inference_mode():
        base = drafter.base_logits(hidden[None])
        found, _ = drafter.choose(anchors, hidden[None], base, Sampling(), None)
        sure = drafter.confidences(anchors, hidden[None], found)
    assert found[0].tolist() == tokens
    if drafter.markov is None:
        torch.testing.assert_close(base[0], torch.stack(logits), atol=1e-4, rtol=1e-4)
    assert (sure is None) == (not confidence)
    if sure is not None:
        torch.testing.assert_close(sure[0], torch.tensor(confidence), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_the_recorded_q_is_softmax_of_the_corrected_logits(target: Target, tmp_path: Path, head: str) -> None:
    folder = write_drafter(tmp_path, vocab=V, head=head)
    drafter, dense = load_drafter(folder, target), Dense(folder, target)
    taps, anchor = some_taps(6), 3
    hidden, _ = block(drafter, taps, anchor)
    anchors, sampling = torch.tensor([anchor]), Sampling(1.0, draft_temperature="0.6")
    with torch.inference_mode():
        base = drafter.base_logits(hidden[None])
        uniforms = torch.full((1, 4), 0.5, dtype=torch.float64)
        tokens, probs = drafter.choose(anchors, hidden[None], base, sampling, uniforms)
    assert probs is not None and probs.dtype == torch.float32
    prev = anchor
    state = torch.zeros(8)
    for k in range(4):
        code, state = dense.step(state, dense.t["markov_head.markov_w1.weight"][prev], hidden[k])
        row = base[0, k] + dense.t["markov_head.markov_w2.weight"] @ code
        torch.testing.assert_close(probs[0, k], (row / 0.6).softmax(-1), atol=1e-5, rtol=1e-3)
        prev = int(tokens[0, k])
        assert int((probs[0, k].double().cumsum(-1) < 0.5).sum()) == prev  # the inverse of the running sum at 0.5


# Invariances ----------------------------------------------------------------------------------------------------------

KINDS = {name: CASES[name] for name in ("vanilla", "rnn", "zlab", "zlab sliding", "zlab causal nowhere")}


@pytest.mark.parametrize("case", KINDS)
def test_shifting_all_positions_changes_nothing(target: Target, tmp_path: Path, case: str) -> None:
    drafter = load_drafter(write_drafter(tmp_path, vocab=V, **KINDS[case]), target)
    expected, _ = block(drafter, some_taps(11), 5)
    at: Callable = drafter.backbone.rope.at
    drafter.backbone.rope.at = lambda positions, limit: at(positions + 37, limit + 37)
    found, _ = block(drafter, some_taps(11), 5)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_shifting_only_the_block_does_change_it(target: Target, tmp_path: Path) -> None:
    """Negative control of the above: positions do reach the block."""
    drafter = load_drafter(write_drafter(tmp_path, vocab=V), target)
    expected, sequence = block(drafter, some_taps(11), 5)
    at: Callable = drafter.backbone.rope.at
    drafter.backbone.rope.at = lambda positions, limit: at(positions + 5, limit + 5)
    with torch.inference_mode():
        found = drafter.block_hidden([sequence], torch.tensor([5]))[0]
    assert float((found - expected).abs().max()) > 1e-2


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("chunks", [[6, 5], [1, 9, 1], [1] * 11])
def test_context_in_chunks_equals_context_at_once(target: Target, tmp_path: Path, case: str, chunks: list[int]) -> None:
    drafter = load_drafter(write_drafter(tmp_path, vocab=V, **KINDS[case]), target)
    expected, _ = block(drafter, some_taps(11), 5)
    found, _ = block(drafter, some_taps(11), 5, chunks)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", KINDS)
def test_keys_and_values_of_a_block_never_survive(target: Target, tmp_path: Path, case: str) -> None:
    drafter = load_drafter(write_drafter(tmp_path, vocab=V, **KINDS[case]), target)
    hidden, sequence = block(drafter, some_taps(11), 5)
    cache, slot = drafter.backbone.cache, sequence.drafter_state
    assert cache.lengths[slot] == 11  # the block of 4 has left no column
    with torch.inference_mode():
        for keys, values in cache._layers.values():
            keys[slot, :, 11:] = 1e3
            values[slot, :, 11:] = 1e6
        again = drafter.block_hidden([sequence], torch.tensor([5]))[0]
        drafter.observe([sequence], some_taps(2, seed=9), [2])
        later = drafter.block_hidden([sequence], torch.tensor([8]))[0]
    assert torch.equal(again, hidden)
    fresh, _ = block(drafter, torch.cat([some_taps(11), some_taps(2, seed=9)]), 8)
    torch.testing.assert_close(later, fresh, atol=1e-5, rtol=1e-5)


def row_0_after_changing_slot_1(drafter: BlockDrafter) -> float:
    """How far row 0's hidden state moves when the token in slot 1 is another one."""
    _, sequence = block(drafter, some_taps(11), 5)
    states = []
    for second in (drafter.spec.mask_id, 2):
        ids = torch.tensor([5, second] + [drafter.spec.mask_id] * (drafter.spec.block_size - 2))
        x = F.embedding(ids, drafter.embedding)
        rows = PackedRows([sequence.drafter_state], [11], [len(ids)], torch.device("cpu"), visible="all")
        with torch.inference_mode():
            states.append(drafter.backbone(x, rows))
    return float((states[0][0] - states[1][0]).abs().max())


@pytest.mark.parametrize("case", ["vanilla", "zlab", "zlab sliding", "zlab causal nowhere"])
def test_full_layers_are_bidirectional_inside_the_block(target: Target, tmp_path: Path, case: str) -> None:
    drafter = load_drafter(write_drafter(tmp_path, vocab=V, **CASES[case]), target)
    assert row_0_after_changing_slot_1(drafter) > 1e-3


@pytest.mark.parametrize("case", ["zlab all sliding", "zlab causal everywhere"])
def test_causal_layers_do_not_look_ahead_in_the_block(target: Target, tmp_path: Path, case: str) -> None:
    drafter = load_drafter(write_drafter(tmp_path, vocab=V, **CASES[case]), target)
    assert row_0_after_changing_slot_1(drafter) == 0.0


@pytest.mark.parametrize("case", KINDS)
def test_a_batch_gives_each_request_its_own_block(target: Target, tmp_path: Path, case: str) -> None:
    drafter = load_drafter(write_drafter(tmp_path, vocab=V, **KINDS[case]), target)
    contexts = [some_taps(n, seed=n) for n in (3, 70, 12)]
    expected = [block(drafter, taps, anchor)[0] for anchor, taps in enumerate(contexts)]
    sequences = [Sequence([0], max_new_tokens=4) for _ in contexts]
    with torch.inference_mode():
        drafter.begin(sequences)
        drafter.observe(sequences, torch.cat(contexts), [len(c) for c in contexts])
        found = drafter.block_hidden(sequences, torch.tensor([0, 1, 2]))
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", KINDS)
def test_a_shorter_proposal_is_the_beginning_of_the_longer_one(target: Target, tmp_path: Path, case: str) -> None:
    """The whole block is run whatever K is: a shorter block would be another context than the trained one."""
    drafter = load_drafter(write_drafter(tmp_path, vocab=V, **KINDS[case]), target)
    _, sequence = block(drafter, some_taps(11), 5)
    with torch.inference_mode():
        (long,), (short,) = drafter.propose([sequence], drafter.max_draft), drafter.propose([sequence], 2)
    assert short.tokens.tolist() == long.tokens[:2].tolist()


# What the engine feeds the drafter ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("case", ["vanilla", "taps with the embedding output", "zlab sliding"])
def test_context_is_the_states_of_all_tokens_before_the_anchor(
    target: Target, tmp_path: Path, case: str, temperature: float
) -> None:
    """Whatever was rejected on the way, the context equals the plain hidden states of the final text; the anchor's own
    is not among them."""
    drafter = load_drafter(write_drafter(tmp_path, vocab=V, **CASES[case]), target)
    seen: dict[str, list[Tensor]] = {"a": [], "b": []}
    observe, propose = drafter.observe, drafter.propose

    def watched_observe(sequences: list[Sequence], taps: Tensor, counts: list[int]) -> None:
        for sequence, part in zip(sequences, taps.split(list(counts)), strict=True):
            seen[sequence.prompt_id].append(part)
        observe(sequences, taps, counts)

    def watched_propose(sequences: list[Sequence], budget: int) -> list:
        for sequence in sequences:
            assert drafter.backbone.cache.lengths[sequence.drafter_state] == len(sequence.ids) - 1
            assert sum(map(len, seen[sequence.prompt_id])) == len(sequence.ids) - 1
        return propose(sequences, budget)

    drafter.observe, drafter.propose = watched_observe, watched_propose
    sequences = [
        Sequence([1, 2, 3], max_new_tokens=20, sampling=Sampling(temperature, seed=1), prompt_id="a"),
        Sequence([4] * 9, max_new_tokens=14, sampling=Sampling(temperature, seed=2), prompt_id="b"),
    ]
    Engine(target, drafter).generate(sequences)
    plain = tiny_target(V)
    for sequence in sequences:
        taps = torch.cat(seen[sequence.prompt_id])
        with torch.inference_mode():
            model = plain.model
            captured: list[Tensor] = []
            hook = model.layers[-1].register_forward_hook(lambda m, a, out, into=captured: into.append(out[0]))
            states = model(torch.tensor([sequence.ids]), output_hidden_states=True, use_cache=False).hidden_states
            hook.remove()
        raw = [*states[:-1], captured[0].view_as(states[-1])]  # HS[L] as the layer gives it, before the final norm
        by_tap = dict(enumerate(raw)) | {FINAL_NORMED: states[-1]}  # z-lab's tap L is the one after it
        expected = torch.cat([by_tap[i][0] for i in drafter.taps], dim=-1)[: len(taps)]
        torch.testing.assert_close(taps, expected, atol=2e-5, rtol=1e-4)


# Equivalences ---------------------------------------------------------------------------------------------------------


def test_dflash_is_dspark_with_an_empty_head(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(write_drafter(tmp_path, vocab=V, head="vanilla"), target)
    _, sequence = block(drafter, some_taps(8), 2)
    with torch.inference_mode():
        corrected = drafter.propose([sequence], 4)[0].tokens.tolist()
        drafter.markov.markov_w2.weight.zero_()
        bare = drafter.propose([sequence], 4)[0].tokens.tolist()
        drafter.markov = None
        drafter.confidence = None
        without = drafter.propose([sequence], 4)[0].tokens.tolist()
    assert bare == without != corrected


def test_frozen_copies_of_the_targets_tensors_are_shared_with_it(target: Target, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path, vocab=V)
    drafter = load_drafter(folder, target)
    assert drafter.head.data_ptr() != target.lm_head.weight.data_ptr()  # another tensor: its own is used
    tensors = load_file(folder / "model.safetensors")
    tensors |= {
        "embed_tokens.weight": target.embedding.weight.detach().clone(),
        "lm_head.weight": target.lm_head.weight.detach().clone(),
    }
    save_file(tensors, folder / "model.safetensors")
    shared = load_drafter(folder, target)
    assert shared.head.data_ptr() == target.lm_head.weight.data_ptr()
    assert shared.embedding.data_ptr() == target.embedding.weight.data_ptr()


@pytest.mark.parametrize(
    ("draft_layers", "target_layers", "expected"),
    [
        (5, 28, [1, 7, 13, 19, 25]),
        (5, 36, [1, 9, 17, 25, 33]),
        (5, 40, [1, 10, 19, 28, 37]),
        (5, 48, [1, 12, 23, 34, 45]),
        (5, 64, [1, 16, 31, 46, 61]),
        (1, 36, [18]),
    ],
)
def test_default_taps_of_zlab(draft_layers: int, target_layers: int, expected: list[int]) -> None:
    assert default_taps(draft_layers, target_layers) == expected
