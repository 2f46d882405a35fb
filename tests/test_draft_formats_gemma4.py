"""DeepSpec drafters on a Gemma4 backbone: tiny checkpoints in exactly that layout against a dense re-computation."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_lossless_sampling as law
import torch
from gemma4_drafts import HD, RANK, B, Dense, H, V, write_block, write_eagle3
from safetensors.torch import load_file, save_file
from test_decoding import greedy_text
from tiny_models import tiny_target
from torch import Tensor

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.draft import Draft
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.read import read_draft


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(V))


# One round, and the next one after a partial acceptance ---------------------------------------------------------------


def some_taps(n: int, seed: int = 0, width: int = 2 * H) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def begun(drafter: Any, taps: Tensor, ids: list[int], chunks: list[int] | None = None) -> Sequence:
    """A request whose committed tokens `ids` end with the anchor; `taps` of all but the anchor are fed in pieces."""
    sequence = Sequence(ids, max_new_tokens=9)
    drafter.begin([sequence])
    for piece in taps.split(chunks or [len(taps)]):
        drafter.observe([sequence], piece, [len(piece)])
    return sequence


@pytest.mark.parametrize("k_eq_v", [True, False])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None])
@torch.inference_mode()
def test_two_rounds_of_a_block_equal_the_dense_computation(
    target: Target, tmp_path: Path, head: str | None, k_eq_v: bool
) -> None:
    folder = write_block(tmp_path, head, k_eq_v)
    drafter, dense = load_drafter(folder, target), Dense(folder)
    assert drafter.taps == (0, 1) and drafter.max_draft == B
    taps, more = some_taps(9), some_taps(3, seed=1)
    sequence = begun(drafter, taps, [0] * 9 + [7])
    check_block(drafter, dense, sequence, taps, 7)
    drafter.propose([sequence], B)  # leaves no column of its own behind
    drafter.observe([sequence], more, [3])  # the anchor and two of the drafts were committed
    sequence.ids += [5, 6, 3]
    check_block(drafter, dense, sequence, torch.cat([taps, more]), 3)


def check_block(drafter: Any, dense: Dense, sequence: Sequence, taps: Tensor, anchor: int) -> None:
    anchors = torch.tensor([anchor])
    hidden = drafter.block_hidden([sequence], anchors)
    expected = dense.block(taps, anchor)
    torch.testing.assert_close(hidden[0], expected, atol=1e-5, rtol=1e-5)
    tokens, logits, sure = dense.walk(expected, anchor)
    base = drafter.base_logits(hidden)
    torch.testing.assert_close(base[0], torch.stack([dense.capped(h) for h in expected]), atol=1e-5, rtol=1e-5)
    chosen, probs = drafter.choose(anchors, hidden, base, Sampling(1.0), torch.zeros(1, B, dtype=torch.float64))
    assert probs is not None
    (draft,) = drafter.propose([sequence], B)
    assert draft.tokens.tolist() == tokens
    if drafter.markov is None:
        torch.testing.assert_close(probs[0], torch.stack(logits).softmax(-1), atol=1e-5, rtol=1e-5)
        assert draft.confidence is None
        return
    torch.testing.assert_close(draft.confidence, torch.tensor(sure), atol=1e-5, rtol=1e-5)
    prev = [anchor, *chosen[0].tolist()]
    state = torch.zeros(RANK)
    for k, h in enumerate(expected):  # along the tokens that were drawn
        code, state = dense.head(state, dense.t["markov_head.markov_w1.weight"][prev[k]], h)
        row = dense.capped(h) + dense.t["markov_head.markov_w2.weight"] @ code
        torch.testing.assert_close(probs[0, k], row.softmax(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("k_eq_v", [True, False])
@torch.inference_mode()
def test_two_rounds_of_eagle3_equal_the_dense_computation(target: Target, tmp_path: Path, k_eq_v: bool) -> None:
    folder = write_eagle3(tmp_path, k_eq_v)
    drafter, dense = load_drafter(folder, target), Dense(folder)
    ids, taps = [3, 1, 4, 1, 5, 9, 2], some_taps(6)
    sequence = begun(drafter, taps, ids, [4, 2])
    check_eagle(drafter, dense, sequence, taps)
    sequence.ids += [6, 8]
    more = some_taps(2, seed=3)
    drafter.observe([sequence], more, [2])
    check_eagle(drafter, dense, sequence, torch.cat([taps, more]))


def check_eagle(drafter: Any, dense: Dense, sequence: Sequence, taps: Tensor) -> None:
    expected, logits = dense.eagle(taps, sequence.ids, 4)
    seen: list[Tensor] = []
    scored: Callable = drafter.logits
    drafter.logits = lambda hidden: seen.append(scored(hidden)) or seen[-1]
    (draft,) = drafter.propose([sequence], 4)
    drafter.logits = scored
    torch.testing.assert_close(torch.cat(seen), torch.stack(logits), atol=1e-5, rtol=1e-5)
    assert draft.tokens.tolist() == expected


def test_the_cap_the_scalar_and_the_scale_do_matter(target: Target, tmp_path: Path) -> None:
    """Negative control: what the second implementation would have missed is seen."""
    folder = write_block(tmp_path)
    taps, dense = some_taps(9), Dense(folder)
    expected = dense.block(taps, 7)
    for name, change in (("layers.0.layer_scalar", 1.0), ("layers.1.pre_feedforward_layernorm.weight", 1.0)):
        other = Dense(folder)
        other.t[name] = torch.full_like(other.t[name], change)
        assert float((other.block(taps, 7) - expected).abs().max()) > 1e-3
    unscaled = Dense(folder)
    unscaled.t["embed_tokens.weight"] = unscaled.t["embed_tokens.weight"] / math.sqrt(H)
    assert float((unscaled.block(taps, 7) - expected).abs().max()) > 1e-3
    assert float((dense.t["lm_head.weight"] @ expected[0] - dense.capped(expected[0])).abs().max()) > 1e-2


# Invariances ----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def hidden_of(drafter: Any, chunks: list[int] | None = None) -> tuple[Tensor, Sequence]:
    sequence = begun(drafter, some_taps(11), [0] * 11 + [5], chunks)
    return drafter.block_hidden([sequence], torch.tensor([5]))[0], sequence


@pytest.mark.parametrize("chunks", [[6, 5], [1, 9, 1]])
def test_context_in_chunks_equals_context_at_once(target: Target, tmp_path: Path, chunks: list[int]) -> None:
    drafter = load_drafter(write_block(tmp_path), target)
    torch.testing.assert_close(hidden_of(drafter, chunks)[0], hidden_of(drafter)[0], atol=1e-5, rtol=1e-5)


def test_shifting_all_positions_changes_nothing_and_shifting_the_block_does(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(write_block(tmp_path), target)
    expected, sequence = hidden_of(drafter)
    at: Callable = drafter.backbone.rope.at
    drafter.backbone.rope.at = lambda positions, limit: at(positions + 37, limit + 37)
    torch.testing.assert_close(hidden_of(drafter)[0], expected, atol=1e-5, rtol=1e-5)
    with torch.inference_mode():
        shifted = drafter.block_hidden([sequence], torch.tensor([5]))[0]
    assert float((shifted - expected).abs().max()) > 1e-3


def test_the_blocks_own_keys_and_values_never_survive(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(write_block(tmp_path), target)
    hidden, sequence = hidden_of(drafter)
    cache, slot = drafter.backbone.cache, sequence.drafter_state
    assert cache.lengths[slot] == 11
    with torch.inference_mode():
        for keys, values in cache._layers.values():
            keys[slot, :, 11:] = 1e3
            values[slot, :, 11:] = 1e6
        assert torch.equal(drafter.block_hidden([sequence], torch.tensor([5]))[0], hidden)


@torch.inference_mode()
def test_rows_of_the_block_see_what_comes_after_them(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(write_block(tmp_path), target)
    hidden, sequence = hidden_of(drafter)
    changed = drafter.embedding.clone()
    changed[4] += 0.5  # of the mask, which stands in slots 1 to B - 1
    drafter.embedding = changed
    moved = drafter.block_hidden([sequence], torch.tensor([5]))[0]
    assert float((moved[0] - hidden[0]).abs().max()) > 1e-3


# Reading --------------------------------------------------------------------------------------------------------------


def test_the_canonical_spec_and_its_account(tmp_path: Path) -> None:
    checkpoint = read_draft(write_block(tmp_path))
    spec = checkpoint.spec
    assert (spec.family, spec.algorithm, spec.backbone) == ("deepspec", "dspark", "gemma4")
    assert spec.embed_scale == 8.0 and spec.softcap == 1.5 and spec.v_from_k and spec.layer_scalar
    assert {(a.heads, a.kv_heads, a.head_dim, a.window) for a in spec.layers} == {(4, 1, 32, None)}
    assert spec.rope == {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    assert checkpoint.remarks == []
    assert "rope_parameters.sliding_attention" in checkpoint.ignored_keys
    assert spec.origin["v_from_k"] == "config key attention_k_eq_v"
    eagle = read_draft(write_eagle3(tmp_path / "eagle"))
    assert (eagle.spec.algorithm, eagle.spec.backbone, eagle.spec.draft_tokens) == ("eagle3", "gemma4", 4)
    assert eagle.spec.taps == (1, 2) and eagle.remarks == []


def test_a_proportional_rope_without_a_factor_turns_everything(tmp_path: Path) -> None:
    rope = {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6}}
    spec = read_draft(write_block(tmp_path, changes={"rope_parameters": rope})).spec
    assert spec.rope == {"rope_type": "proportional", "partial_rotary_factor": 1.0, "rope_theta": 1e6}


def test_without_rope_parameters_gemmas_own_is_taken(tmp_path: Path) -> None:
    with_keys = read_draft(write_block(tmp_path / "a")).spec
    without = read_draft(write_block(tmp_path / "b", changes={"rope_parameters": "absent"})).spec
    assert without.rope == with_keys.rope
    assert without.origin["rope"] == "default of DeepSpec (no key rope_parameters.full_attention)"


def test_the_shared_name_of_both_backbones_is_told_apart_by_tensors(target: Target, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path, changes={"architectures": ["Eagle3DraftModel"]})
    assert load_drafter(folder, target).spec.backbone == "gemma4"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"enable_moe_block": True}, "enable_moe_block is true"),
        ({"hidden_size_per_layer_input": 16}, "hidden_size_per_layer_input is 16"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "global layers only"),
        ({"global_head_dim": "absent", "per_layer_config": {"0": {"head_dim": 32}}}, "per_layer_config"),
        ({"global_head_dim": "absent"}, "global_head_dim is missing"),
        ({"num_global_key_value_heads": None}, "num_global_key_value_heads is missing"),
        ({"num_global_key_value_heads": 3}, "expected a divisor"),
        ({"attention_k_eq_v": "absent"}, "attention_k_eq_v is missing"),
        ({"attention_k_eq_v": False}, "v_proj.weight is missing"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "expected full_attention"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecdoctorError) as refusal:
        read_draft(write_block(tmp_path, changes=changes))
    assert named in str(refusal.value) and str(tmp_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_tensor_that_the_format_has_not_stops_the_load(target: Target, tmp_path: Path) -> None:
    folder = write_block(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.0.self_attn.v_proj.weight"] = torch.zeros(HD, H)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SpecdoctorError, match="v_proj"):
        load_drafter(folder, target)


# Losslessness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3"])
def test_greedy_text_is_the_targets_own(target: Target, tmp_path: Path, kind: str) -> None:
    folder = write_eagle3(tmp_path) if kind == "eagle3" else write_block(tmp_path, "rnn" if kind == "dspark" else None)
    sequence = Sequence([3, 1, 4, 1, 5], max_new_tokens=24)
    Engine(target, load_drafter(folder, target)).generate([sequence])
    assert sequence.ids == greedy_text(tiny_target(V), [3, 1, 4, 1, 5], 24)


LAW = {"vocab": 5, "hidden": law.SIZES["hidden"], "heads": 2}
cheap_draws = law.cheap_draws


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(law, "DRAWS", 8_000)
    yield


def law_drafter(folder: Path, kind: str, target: Target) -> Any:
    folder = write_eagle3(folder, steps=2, **LAW) if kind == "eagle3" else write_block(folder, kind, block=2, **LAW)
    return load_drafter(folder, target)


@pytest.mark.parametrize("setting", [law.SETTINGS[0], law.SETTINGS[4]], ids=str)
@pytest.mark.parametrize("kind", ["vanilla", "eagle3"])
def test_sampled_text_has_the_targets_law(tmp_path: Path, kind: str, setting: tuple) -> None:
    target = Target(tiny_target(5, **law.SIZES))
    observed = law.draw(Engine(target, law_drafter(tmp_path, kind, target)), *setting)
    assert law.p_value(observed, law.exact_law(target, Sampling(*setting[:1], *setting[2:]))) > law.P_FAIL


@pytest.mark.parametrize("kind", ["vanilla", "eagle3"])
def test_a_planted_bug_is_found(tmp_path: Path, kind: str) -> None:
    """Negative control: the recorded q is not the one that drafts were drawn from."""
    target = Target(tiny_target(5, **law.SIZES))
    drafter = law_drafter(tmp_path, kind, target)
    honest = drafter.propose

    def lying(sequences: list[Sequence], budget: int) -> list[Draft]:
        drafts = honest(sequences, budget)
        for draft in drafts:
            assert draft.probs is not None
            draft.probs = torch.full_like(draft.probs, 1 / 5)
        return drafts

    drafter.propose = lying
    observed = law.draw(Engine(target, drafter), *law.SETTINGS[0])
    assert law.p_value(observed, law.exact_law(target, Sampling(1.0))) < 1e-6
