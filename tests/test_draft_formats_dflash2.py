"""DFlash2 of z-lab and of speculators: tiny checkpoints in exactly those layouts against a dense re-computation."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_lossless_sampling as law
import torch
from dflash2_drafts import LAYERS, TOP, B, Dense, H, V, write_speculators, write_zlab
from safetensors.torch import load_file, save_file
from test_decoding import greedy_text
from tiny_models import tiny_target
from torch import Tensor

from specdoctor.drafters.load import load_drafter
from specdoctor.drafters.teacher_forced import HeadWalk, blocks_hidden
from specdoctor.engine.draft import Draft
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.read import read_draft


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(V, layers=LAYERS))


def softmax(scores: dict[int, float], temperature: float) -> Tensor:
    """Over the vocabulary: what is no candidate has none."""
    out = torch.zeros(V, dtype=torch.float64)
    for c, score in scores.items():
        out[c] = math.exp(score / temperature)
    return (out / out.sum()).float()


# One round, and the next one after a partial acceptance ---------------------------------------------------------------

CASES: dict[str, Callable[[Path], Path]] = {
    "zlab": lambda folder: write_zlab(folder),
    "zlab full": lambda folder: write_zlab(folder, ["full_attention"] * 2),
    "zlab scales": lambda folder: write_zlab(
        folder, input_embedding_scale=8.0, output_multiplier=0.5, final_logit_softcapping=2.0
    ),
    "speculators": lambda folder: write_speculators(folder),
    "speculators own head": lambda folder: write_speculators(folder, own_embedding=True),
    "speculators causal": lambda folder: write_speculators(folder, sliding_window_non_causal=False),
    "speculators from anchor": lambda folder: write_speculators(folder, sample_from_anchor=True),
}


def some_taps(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 2 * H, generator=torch.Generator().manual_seed(seed))


def begun(drafter: Any, taps: Tensor, anchor: int, chunks: list[int] | None = None, **sampling: Any) -> Sequence:
    sequence = Sequence([0] * len(taps) + [anchor], max_new_tokens=9, sampling=Sampling(**sampling))
    drafter.begin([sequence])
    for piece in taps.split(chunks or [len(taps)]):
        drafter.observe([sequence], piece, [len(piece)])
    return sequence


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_two_rounds_equal_the_dense_computation(target: Target, tmp_path: Path, case: str) -> None:
    folder = CASES[case](tmp_path)
    drafter, dense = load_drafter(folder, target), Dense(folder, target)
    assert drafter.max_draft == B - dense.first_row
    taps, more = some_taps(9), some_taps(2, seed=1)
    sequence = begun(drafter, taps, 7)
    check_round(drafter, dense, sequence, taps, 7)
    drafter.observe([sequence], more, [2])  # the anchor and one draft were committed
    sequence.ids += [5, 3]
    check_round(drafter, dense, sequence, torch.cat([taps, more]), 3)


def check_round(drafter: Any, dense: Dense, sequence: Sequence, taps: Tensor, anchor: int) -> None:
    expected = dense.hidden(taps, anchor)
    anchors = torch.tensor([anchor])
    hidden = drafter.block_hidden([sequence], anchors)
    torch.testing.assert_close(hidden[0], expected[dense.first_row :], atol=1e-5, rtol=1e-5)
    (draft,) = drafter.propose([sequence], drafter.max_draft)
    assert draft.tokens.tolist() == dense.greedy(expected, anchor) and draft.probs is None
    uniforms = torch.rand(1, drafter.max_draft, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens, probs = drafter.choose(anchors, hidden, drafter.base_logits(hidden), Sampling(0.7), uniforms)
    assert probs is not None and probs.shape[-1] == V
    prev = anchor
    for k, row in enumerate(expected[dense.first_row :]):
        torch.testing.assert_close(probs[0, k], softmax(dense.scores(row, prev), 0.7), atol=1e-5, rtol=1e-5)
        prev = int(tokens[0, k])
        assert probs[0, k, prev] > 0


@torch.inference_mode()
def test_top_k_and_top_p_of_a_request_leave_q_alone(target: Target, tmp_path: Path) -> None:
    folder = write_zlab(tmp_path)
    drafter, dense, taps = load_drafter(folder, target), Dense(folder, target), some_taps(9)
    (draft,) = drafter.propose([begun(drafter, taps, 7, temperature=1.0, top_k=2, top_p=0.4)], 4)
    assert draft.probs is not None
    expected = softmax(dense.scores(dense.hidden(taps, 7)[1], 7), 1.0)
    torch.testing.assert_close(draft.probs[0], expected, atol=1e-5, rtol=1e-5)
    assert [int((q > 0).sum()) for q in draft.probs] == [TOP] * 4


@torch.inference_mode()
def test_a_tree_and_a_teacher_forced_walk_use_the_same_scores(target: Target, tmp_path: Path) -> None:
    folder = write_zlab(tmp_path)
    drafter, dense, taps = load_drafter(folder, target), Dense(folder, target), some_taps(9)
    sequence = begun(drafter, taps, 7)
    hidden = dense.hidden(taps, 7)
    first = max(dense.scores(hidden[1], 7), key=lambda c: dense.scores(hidden[1], 7)[c])
    expected = [softmax(dense.scores(hidden[1], 7), 1.0), softmax(dense.scores(hidden[2], first), 1.0)]
    tree = drafter.expansion([sequence], 2)
    levels = [tree.root()[0, 0], tree.below(torch.tensor([[first]]), torch.tensor([[0]]))[0, 0]]
    walk = HeadWalk(drafter, blocks_hidden(drafter, sequence.drafter_state, [9], torch.tensor([7])))
    for k, prev in enumerate((7, first)):
        torch.testing.assert_close(levels[k].softmax(-1), expected[k], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(walk.step(torch.tensor([prev]))[0].softmax(-1), expected[k], atol=1e-5, rtol=1e-5)


def test_each_new_part_does_matter(target: Target, tmp_path: Path) -> None:
    """Negative control: a drafter without one of them would not have passed."""
    folder = write_zlab(tmp_path)
    taps, dense = some_taps(9), Dense(folder, target)
    expected = dense.hidden(taps, 7)
    for name in ("layers.0.attention_conv.base_kernel", "layers.1.mlp_conv.kernel_projection.weight"):
        other = Dense(folder, target)
        other.t[name] = other.t[name] * torch.tensor(0.5)
        assert float((other.hidden(taps, 7) - expected).abs().max()) > 1e-2
    without = [int(dense.unary(row).argmax()) for row in expected[1:]]
    assert without != dense.greedy(expected, 7)


# Invariances ----------------------------------------------------------------------------------------------------------

KINDS = {name: CASES[name] for name in ("zlab", "speculators")}


@torch.inference_mode()
def hidden_of(drafter: Any, chunks: list[int] | None = None) -> tuple[Tensor, Sequence]:
    sequence = begun(drafter, some_taps(11), 5, chunks)
    return drafter.block_hidden([sequence], torch.tensor([5]))[0], sequence


@pytest.mark.parametrize("case", KINDS)
def test_context_in_chunks_and_shifted_positions_change_nothing(target: Target, tmp_path: Path, case: str) -> None:
    drafter = load_drafter(KINDS[case](tmp_path), target)
    expected, _ = hidden_of(drafter)
    torch.testing.assert_close(hidden_of(drafter, [1, 8, 2])[0], expected, atol=1e-5, rtol=1e-5)
    at: Callable = drafter.backbone.rope.at
    drafter.backbone.rope.at = lambda positions, limit: at(positions + 37, limit + 37)
    torch.testing.assert_close(hidden_of(drafter)[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", KINDS)
def test_nothing_of_a_block_survives_it(target: Target, tmp_path: Path, case: str) -> None:
    """Neither keys and values, nor rows for the convolution of the next block."""
    drafter = load_drafter(KINDS[case](tmp_path), target)
    hidden, sequence = hidden_of(drafter)
    cache, slot = drafter.backbone.cache, sequence.drafter_state
    assert cache.lengths[slot] == 11
    with torch.inference_mode():
        for keys, values in cache._layers.values():
            keys[slot, :, 11:] = 1e3
            values[slot, :, 11:] = 1e6
        assert torch.equal(drafter.block_hidden([sequence], torch.tensor([5]))[0], hidden)


@torch.inference_mode()
def test_a_batch_gives_each_request_its_own_block(target: Target, tmp_path: Path) -> None:
    """The convolution of a block never reads the last rows of the block before it in the batch."""
    drafter = load_drafter(write_zlab(tmp_path), target)
    contexts = [some_taps(n, seed=n) for n in (3, 20, 7)]
    alone = [drafter.block_hidden([begun(drafter, taps, a)], torch.tensor([a]))[0] for a, taps in enumerate(contexts)]
    sequences = [begun(drafter, taps, a) for a, taps in enumerate(contexts)]
    together = drafter.block_hidden(sequences, torch.tensor([0, 1, 2]))
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_convolutions_alone_look_back_and_full_attention_looks_ahead(target: Target, tmp_path: Path) -> None:
    for kinds, looks_ahead in ((["sliding_attention"] * 2, False), (["full_attention"] * 2, True)):
        drafter = load_drafter(write_zlab(tmp_path / kinds[0], kinds), target)
        before, sequence = hidden_of(drafter)
        conv = drafter.backbone.layers[0].attention_conv
        honest = conv.convolve

        def moved(x: Tensor, kernel: Tensor, honest: Callable = honest) -> Tensor:
            x = x.clone()
            x[-1] += 1.0  # the last slot of the block
            return honest(x, kernel)

        conv.convolve = moved
        after = drafter.block_hidden([sequence], torch.tensor([5]))[0]
        assert (float((after[:-1] - before[:-1]).abs().max()) > 1e-3) == looks_ahead
        assert float((after[-1] - before[-1]).abs().max()) > 1e-3


# Reading --------------------------------------------------------------------------------------------------------------


def test_the_canonical_specs_and_their_account(tmp_path: Path) -> None:
    zlab = read_draft(write_zlab(tmp_path / "z", input_embedding_scale=8.0))
    assert zlab.title == "z-lab DFlash2" and zlab.remarks == []
    spec = zlab.spec
    assert (spec.family, spec.algorithm, spec.row_offset, spec.max_draft) == ("zlab", "dflash2", 0, B - 1)
    assert (spec.conv_kernel_size, spec.conv_group_size, spec.selector_rank, spec.selector_top_k) == (3, 16, 8, 6)
    assert spec.taps == (1, 2) and spec.embed_scale == 8.0 and spec.head_source == "target"
    assert [layer.causal_in_block for layer in spec.layers] == [True, False]
    assert spec.origin["selector_top_k"] == "config key dflash_config.selector_top_k"
    speculators = read_draft(write_speculators(tmp_path / "s"))
    assert speculators.remarks == []
    spec = speculators.spec
    assert (spec.family, spec.algorithm, spec.row_offset, spec.window_anchor) == ("speculators", "dflash2", 0, "block")
    assert spec.taps == (0, 1) and spec.target_name == "Qwen/Qwen3-8B"
    assert [layer.causal_in_block for layer in spec.layers] == [False, False]


def test_speculators_defaults_are_its_own(tmp_path: Path) -> None:
    folder = write_speculators(tmp_path, conv_group_size="absent", sliding_window_non_causal="absent")
    spec = read_draft(folder).spec
    assert spec.conv_group_size == 16 and not any(layer.causal_in_block for layer in spec.layers)
    assert spec.origin["conv_group_size"] == "default of speculators dflash2 (no key conv_group_size)"


def test_settings_may_stand_at_the_top(tmp_path: Path) -> None:
    folder = write_zlab(tmp_path, selector_top_k="absent")
    config = json.loads((folder / "config.json").read_text()) | {"selector_top_k": 3}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_draft(folder).spec.selector_top_k == 3


def test_codebooks_with_a_suffix_are_the_same_and_remarked(target: Target, tmp_path: Path) -> None:
    folder = write_zlab(tmp_path)
    plain = load_drafter(folder, target)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("codebook")]:
        tensors[f"{name}.weight"] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    assert [r.kind for r in read_draft(folder).remarks] == ["unverified"] * 2
    assert torch.equal(load_drafter(folder, target).markov.successor_codebook, plain.markov.successor_codebook)


@pytest.mark.parametrize("missing", ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"])
def test_zlab_has_no_defaults(tmp_path: Path, missing: str) -> None:
    with pytest.raises(SpecdoctorError, match=f"dflash_config.{missing} is missing"):
        read_draft(write_zlab(tmp_path, **{missing: "absent"}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"conv_group_size": 24}, "expected a divisor of hidden_size, 64"),
        ({"selector_top_k": V + 1}, "expected at most vocab_size, 40"),
        ({"selector_top_k": 0}, "selector_top_k is 0"),
        ({"conv_kernel_size": 2}, "base_kernel has shape"),
        ({"block_size": 1}, "expected 2 or more"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    for write_one in (write_zlab, write_speculators):
        with pytest.raises(SpecdoctorError) as refusal:
            load_drafter(write_one(tmp_path / write_one.__name__, **changes), Target(tiny_target(V, layers=LAYERS)))
        assert named in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_reduced_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = write_speculators(tmp_path, own_embedding=True, draft_vocab_size=20)
    with pytest.raises(SpecdoctorError, match="draft_vocab_size is 20, expected the whole vocabulary, 40"):
        read_draft(folder)


def test_a_selector_in_a_plain_dflash_is_a_contradiction(target: Target, tmp_path: Path) -> None:
    folder = write_zlab(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["DFlashDraftModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert "contradiction" in {remark.kind for remark in read_draft(folder).remarks}
    with pytest.raises(SpecdoctorError, match="candidate_selector"):
        load_drafter(folder, target)


# Losslessness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", KINDS)
def test_greedy_text_is_the_targets_own(target: Target, tmp_path: Path, case: str) -> None:
    sequence = Sequence([3, 1, 4, 1, 5], max_new_tokens=24)
    Engine(target, load_drafter(KINDS[case](tmp_path), target)).generate([sequence])
    assert sequence.ids == greedy_text(tiny_target(V, layers=LAYERS), [3, 1, 4, 1, 5], 24)


cheap_draws = law.cheap_draws
LAW = {"hidden": law.SIZES["hidden"], "heads": law.SIZES["heads"], "vocab": law.V, "target_layers": 2}


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(law, "DRAWS", 8_000)


def law_drafter(folder: Path, target: Target) -> Any:
    """Three candidates of five tokens: q leaves out two tokens that p may give."""
    return load_drafter(write_zlab(folder, ["full_attention"] * 2, block=3, size=LAW, selector_top_k=3), target)


@pytest.mark.parametrize("setting", [law.SETTINGS[0], law.SETTINGS[1], law.SETTINGS[4]], ids=str)
def test_sampled_text_has_the_targets_law(tmp_path: Path, setting: tuple) -> None:
    target = Target(tiny_target(law.V, **law.SIZES))
    observed = law.draw(Engine(target, law_drafter(tmp_path, target)), *setting)
    assert law.p_value(observed, law.exact_law(target, Sampling(*setting[:1], *setting[2:]))) > law.P_FAIL


def test_a_q_of_the_unary_logits_is_found(tmp_path: Path) -> None:
    """Negative control: drafts chosen by the selector, but verified as if drawn from the whole vocabulary's softmax."""
    target = Target(tiny_target(law.V, **law.SIZES))
    drafter = law_drafter(tmp_path, target)
    honest = drafter.propose

    def lying(sequences: list[Sequence], budget: int) -> list[Draft]:
        drafts = honest(sequences, budget)
        hidden = drafter.block_hidden(sequences, torch.tensor([s.anchor for s in sequences]))[:, :budget]
        for draft, q in zip(drafts, drafter.base_logits(hidden).softmax(-1), strict=True):
            draft.probs = q
        return drafts

    drafter.propose = lying
    observed = law.draw(Engine(target, drafter), *law.SETTINGS[0])
    assert law.p_value(observed, law.exact_law(target, Sampling(1.0))) < 1e-6
