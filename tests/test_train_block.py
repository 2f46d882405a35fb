"""Objective of DSpark and DFlash: packed equals block by block, frozen stays frozen, memory stays within the chunk."""

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_cases import made_batch, made_recipe, made_target, made_texts

from specdoctor.drafters.block import BlockDrafter
from specdoctor.drafters.load import load_drafter
from specdoctor.engine.sequence import Sequence
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.read import read_draft
from specdoctor.formats.spec import AttentionShape
from specdoctor.training.anchors import candidates, sample_blocks
from specdoctor.training.batch import TrainingBatch
from specdoctor.training.block_attention import block_attention
from specdoctor.training.block_objective import BlockObjective, make_block
from specdoctor.training.head_loss import HeadJob, head_losses
from specdoctor.training.recipe import LossWeights
from specdoctor.training.vocabulary import sample_columns

TEXTS = [17, 9, 23]
ALL = {"ce": 0.3, "kl": 0.5, "l1": 0.9, "confidence": 1.0, "decay": 4.0}


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _objective(target: Any, **changes: Any) -> BlockObjective:
    objective = make_block(made_recipe(**changes), target, None)
    torch.manual_seed(2)
    with torch.no_grad():  # heads that start at zero would hide a mistake in them
        for name, parameter in objective.module.named_parameters():
            if name.startswith(("markov", "confidence")):
                parameter.normal_(0, 0.5)
    return objective


def _block_by_block(
    drafter: BlockDrafter, target: Any, batch: TrainingBatch, objective: BlockObjective
) -> tuple[float, int]:
    """The loss from the drafter that decodes, one block at a time, and the number of its rows that count."""
    spec, weights = objective.spec, objective.weights
    blocks = sample_blocks(batch, objective.sampling.anchors, spec.block_size, spec.max_draft, _seeded())
    total = mass = 0.0
    rows = 0
    for anchor, first in zip(blocks.anchors.tolist(), blocks.firsts.tolist(), strict=True):
        end = next(b for b in batch.starts if b > anchor)
        sequence = Sequence(batch.ids[first : anchor + 1].tolist(), max_new_tokens=1)
        drafter.begin([sequence])
        if anchor > first:
            drafter.observe([sequence], batch.taps[first:anchor], [anchor - first])
        hidden = drafter.block_hidden([sequence], batch.ids[anchor : anchor + 1])  # [1, K, H]
        drafter.end(sequence)
        base = drafter.base_logits(hidden)[0]
        state = None if drafter.markov is None else drafter.markov.start(1)
        for k in range(spec.max_draft):
            at = anchor + 1 + k
            if at >= end or not batch.loss_mask[at]:
                break
            z, row, prev = base[k : k + 1], hidden[:, k], batch.ids[at - 1 : at]
            if drafter.markov is not None:
                code, state = drafter.markov.step(state, prev, row)
                z = drafter.markov.corrected(z, code)
            log_q, log_p = z[0].log_softmax(-1), target.lm_head(batch.last_hidden[at - 1]).log_softmax(-1)
            l1 = (log_p.exp() - log_q.exp()).abs().sum()
            loss = weights.ce * -log_q[batch.ids[at]] + weights.kl * F.kl_div(
                log_q, log_p, log_target=True, reduction="sum"
            )
            loss = loss + weights.l1 * l1
            if drafter.confidence is not None:
                features = row
                if spec.confidence == "hidden+markov":
                    features = torch.cat([row, drafter.markov.markov_w1(prev)], dim=-1)
                guess = torch.sigmoid(drafter.confidence.logits(features))[0]
                loss = loss + weights.confidence * F.binary_cross_entropy(guess, 1 - 0.5 * l1)
            total += weights.position_weight(k) * float(loss)
            mass += weights.position_weight(k)
            rows += 1
    return total / mass, rows


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None])
@torch.no_grad()
def test_packed_equals_block_by_block(tmp_path: Path, head: str | None) -> None:
    target = made_target()
    changes: dict[str, Any] = {"losses": ALL, "draft": {"markov": head}}
    if head is None:
        changes = {"algorithm": "dflash", "losses": ALL | {"confidence": 0.0}}
    objective = _objective(target, **changes)
    objective.save(tmp_path / "drafter")
    drafter = load_drafter(tmp_path / "drafter", target)
    assert isinstance(drafter, BlockDrafter)
    batch = made_batch(target, objective.taps, made_texts(TEXTS))
    losses = objective.loss(batch, _seeded())
    expected, rows = _block_by_block(drafter, target, batch, objective)
    assert rows > 40
    assert float(losses.total.detach()) == pytest.approx(expected, abs=1e-5)


def test_another_block_changes_nothing() -> None:
    """Isolation: the hidden states of a block do not depend on which other blocks and sequences are packed with it."""
    target = made_target()
    objective = _objective(target)
    texts = made_texts(TEXTS)
    whole, alone = made_batch(target, objective.taps, texts), made_batch(target, objective.taps, texts[2:])
    spec = objective.spec
    many = sample_blocks(whole, 50, spec.block_size, spec.max_draft, _seeded())
    few = sample_blocks(alone, 3, spec.block_size, spec.max_draft, _seeded())
    shift = whole.starts[2]
    rows = [many.anchors.tolist().index(a + shift) for a in few.anchors.tolist()]
    assert torch.allclose(objective.hidden(whole, many)[rows], objective.hidden(alone, few), atol=1e-5)


def test_no_row_is_padding() -> None:
    """Rows through the drafter's layers are the tokens and the blocks, and the LM head sees rows that count only."""
    target = made_target()
    objective = _objective(target)
    batch = made_batch(target, objective.taps, made_texts(TEXTS))
    seen: dict[str, int] = {}
    backbone = objective.module.backbone
    backbone.fc.register_forward_hook(lambda m, a, out: seen.__setitem__("context", len(out)))
    backbone.layers[0].mlp.register_forward_hook(lambda m, a, out: seen.__setitem__("blocks", len(out)))
    objective.loss(batch, _seeded())
    blocks = sample_blocks(batch, 5, 4, 4, _seeded())
    assert seen == {"context": sum(TEXTS), "blocks": blocks.count * 4}
    assert int(blocks.valid.sum()) < blocks.count * 4  # there are rows beyond an answer


def test_anchors_are_answer_tokens_with_one_behind_them() -> None:
    target = made_target()
    batch = made_batch(target, (1,), made_texts([8, 5, 4]))
    assert candidates(batch).tolist() == [3, 4, 5, 6, 11]  # the last sequence has an answer of one token
    blocks = sample_blocks(batch, 2, 4, 4, _seeded())
    assert blocks.bounds == [0, 2, 3, 3]
    assert torch.equal(blocks.labels[2, :1], batch.ids[12:13])
    assert blocks.valid[2].tolist() == [True, False, False, False]


def test_a_batch_without_anchors_gives_zero_and_a_graph() -> None:
    target = made_target()
    objective = _objective(target)
    losses = objective.loss(made_batch(target, objective.taps, made_texts([4, 4])), _seeded())
    losses.total.backward()
    assert float(losses.total.detach()) == 0 and all(p.grad is not None for p in objective.module.parameters())


def test_gradient_of_the_chunked_head_is_autograds() -> None:
    torch.manual_seed(0)
    M, H, V, r = 11, 8, 23, 3
    head, states = torch.randn(V, H, dtype=torch.double), torch.randn(M, H, dtype=torch.double)
    labels, row_weights = torch.randint(0, V, (M,)), torch.rand(M, dtype=torch.double)
    for losses in (LossWeights(ce=0.7), LossWeights(kl=1.3), LossWeights(l1=0.9), LossWeights(ce=0.2, kl=0.3, l1=0.5)):
        rows, code, w2 = (torch.randn(s, dtype=torch.double, requires_grad=True) for s in ((M, H), (M, r), (V, r)))
        job = HeadJob(head, head, states, labels, row_weights, losses, 4, torch.double)
        got = torch.autograd.grad(head_losses(rows, code, w2, job).total * 2, (rows, code, w2))
        log_q, log_p = (rows @ head.T + code @ w2.T).log_softmax(-1), (states @ head.T).log_softmax(-1)
        each = losses.ce * F.nll_loss(log_q, labels, reduction="none")
        each = each + losses.kl * (log_p.exp() * (log_p - log_q)).sum(-1)
        each = each + losses.l1 * (log_p.exp() - log_q.exp()).abs().sum(-1)
        wanted = torch.autograd.grad((each * row_weights).sum() * 2, (rows, code, w2))
        for ours, theirs in zip(got, wanted, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)  # distributions are float32 inside


class _Peak(TorchDispatchMode):
    """Most bytes alive at once in storages that were made inside."""

    def __init__(self, frozen: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in frozen}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._note(value.untyped_storage())
        return out

    def _note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _peak(vocab: int, anchors: int, chunk: int) -> int:
    target = made_target(vocab=vocab)
    changes: dict[str, Any] = {"sampling": {"anchors": anchors, "head_chunk": chunk}, "losses": {"ce": 0.1, "l1": 0.9}}
    objective = _objective(target, algorithm="dflash", **changes)
    batch = made_batch(target, objective.taps, made_texts([150], vocab=40))
    with _Peak(target.model.parameters()) as peak:
        objective.loss(batch, _seeded()).total.backward()
    return peak.peak


def test_peak_memory_does_not_grow_with_the_vocabulary_beyond_the_chunk() -> None:
    small, large, chunk, anchors = 12000, 36000, 16, 60
    chunk_growth = chunk * 4 * (large - small)
    growth = _peak(large, anchors, chunk) - _peak(small, anchors, chunk)
    assert 2 * chunk_growth < growth < 8 * chunk_growth  # logits, distributions and gradient of one chunk
    all_rows = _peak(large, anchors, 1000) - _peak(small, anchors, 1000)
    assert all_rows > 4 * growth  # negative control: it is the chunk that bounds it


def test_nothing_frozen_changes_or_gets_a_gradient() -> None:
    target = made_target()
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    objective = _objective(target)
    frozen = {id(p) for p in target.model.parameters()}
    assert not frozen & {id(p) for p in objective.module.parameters()}
    shapes = {tuple(p.shape) for p in objective.module.parameters()}
    assert (target.vocab_size, target.hidden_size) not in shapes
    optimiser = torch.optim.AdamW(objective.module.parameters(), lr=0.1)
    objective.loss(made_batch(target, objective.taps, made_texts(TEXTS)), _seeded()).total.backward()
    optimiser.step()
    assert all(p.grad is None for p in target.model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in target.model.state_dict().items())


@pytest.mark.parametrize("window,from_anchor,causal", [(None, False, False), (3, False, True), (3, True, False)])
def test_attention_paths_agree(window: int | None, from_anchor: bool, causal: bool) -> None:
    target = made_target()
    batch = made_batch(target, (1,), made_texts(TEXTS))
    blocks = sample_blocks(batch, 4, 4, 4, _seeded())
    shape = AttentionShape(4, 2, 16, 8, window=window, causal_in_block=causal)
    torch.manual_seed(1)
    n = blocks.count * 4
    q, ck, cv, k, v = (torch.randn(h, m, 16) for h, m in ((4, n), (2, sum(TEXTS)), (2, sum(TEXTS)), (2, n), (2, n)))
    outs = [
        block_attention(blocks, batch.starts, shape, from_anchor, path)(q, ck, cv, k, v, 0.25)
        for path in ("blockwise", "flex")
    ]
    assert torch.allclose(*outs, atol=1e-5)


def test_pieces_of_a_long_sequence_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    target = made_target()
    objective = _objective(target)
    batch = made_batch(target, objective.taps, made_texts(TEXTS))
    whole = objective.loss(batch, _seeded()).total
    expected = torch.autograd.grad(whole, list(objective.module.parameters()))
    monkeypatch.setattr("specdoctor.training.block_attention.SCORE_BYTES", 1)
    pieces = objective.loss(batch, _seeded()).total
    got = torch.autograd.grad(pieces, list(objective.module.parameters()))
    assert torch.allclose(whole, pieces, atol=1e-6)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True))


def test_sampled_vocabulary_estimates_the_loss() -> None:
    target = made_target(vocab=400)
    recipe = {"losses": {"ce": 1.0, "l1": 1.0}, "draft": {"confidence": None}}
    exact = _objective(target, **recipe)
    sampled = _objective(target, **recipe, sampling={"anchors": 50, "head_chunk": 64, "vocabulary": 300})
    exact.sampling = exact.sampling.model_copy(update={"anchors": 50})
    sampled.module.load_state_dict(exact.module.state_dict())
    batch = made_batch(target, exact.taps, made_texts([80], vocab=400))
    wanted = float(exact.loss(batch, _seeded()).total.detach())
    draws = [float(sampled.loss(batch, torch.Generator().manual_seed(i)).total.detach()) for i in range(12)]
    assert sum(draws) / len(draws) == pytest.approx(wanted, rel=0.03)
    columns = sample_columns(400, 100, torch.tensor([399, 7]), _seeded())
    assert len(columns.ids) == 100 and columns.place_of(torch.tensor([399])).item() == 99
    assert columns.log_factor.exp().sum().item() == pytest.approx(400, rel=1e-4)


def test_target_layers_are_where_it_starts() -> None:
    target = made_target()
    objective = make_block(made_recipe(), target, None)
    assert isinstance(objective, BlockObjective)
    own = objective.module.backbone.layers[1].mlp.up_proj.weight
    assert torch.equal(own, target.layers[3].mlp.up_proj.weight)
    scratch = make_block(made_recipe(draft={"init": "scratch"}), target, None)
    assert not torch.equal(scratch.module.backbone.layers[1].mlp.up_proj.weight, own)


def test_warm_start_takes_over_an_existing_drafter(tmp_path: Path) -> None:
    target = made_target()
    plain = _objective(target, algorithm="dflash", losses={"ce": 1.0})
    plain.save(tmp_path / "plain")
    recipe = made_recipe(draft={"init": str(tmp_path / "plain")})
    warm = make_block(recipe, target, tmp_path / "plain")
    assert warm.spec.algorithm == "dspark" and warm.spec.confidence == "hidden+markov"
    assert torch.equal(warm.module.backbone.fc.weight, plain.module.backbone.fc.weight)
    warm.save(tmp_path / "warm")
    assert read_draft(tmp_path / "warm", 4).spec.markov_rank == 8
    with pytest.raises(SpecdoctorError, match=r"taps is \[1, 2, 3\], but the recipe's draft.taps is \[1, 2\]"):
        make_block(made_recipe(draft={"taps": [1, 2]}), target, tmp_path / "plain")


def test_the_confidence_head_alone_learns(tmp_path: Path) -> None:
    target = made_target()
    _objective(target).save(tmp_path / "start")
    objective = make_block(made_recipe(draft={"only_confidence": True}), target, tmp_path / "start")
    batch = made_batch(target, objective.taps, made_texts([14, 9]))
    objective.loss(batch, torch.Generator().manual_seed(0)).total.backward()
    learning = {name for name, value in objective.module.named_parameters() if value.grad is not None}
    assert learning == {"confidence.proj.weight", "confidence.proj.bias"}
    with pytest.raises(SpecdoctorError, match=r"needs draft.init with the folder of a trained drafter"):
        make_block(made_recipe(draft={"only_confidence": True}), target, None)


@pytest.mark.parametrize(
    "changes,line",
    [
        ({"draft": {"markov": None}}, "draft.markov is None"),
        ({"draft": {"taps": [1, 9]}}, r"draft.taps is \[1, 9\], expected rising numbers of 0 .* to 3"),
        ({"draft": {"taps": [1, 4]}}, r"to 3: DeepSpec's format cannot hold a tap of the last layer \(4\)"),
        ({"draft": {"mask_id": 99}}, "draft.mask_id is 99, expected 0 to 39"),
        ({"draft": {"exit_layer": 2}}, "draft.exit_layer has no meaning for algorithm dspark"),
        ({"draft": {"confidence": None}}, "losses.confidence is above 0"),
        ({"losses": {"ce": 1.0, "l1": 0.0, "confidence": 0.0}}, "losses.confidence is 0 throughout"),
    ],
)
def test_recipes_that_cannot_be(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(SpecdoctorError, match=line):
        make_block(made_recipe(**changes), made_target(), None)


def test_checkpoint_leaves_embedding_and_head_to_the_target(tmp_path: Path) -> None:
    objective = _objective(made_target())
    objective.save(tmp_path / "drafter")
    checkpoint = read_draft(tmp_path / "drafter", 4)
    checkpoint.refuse_if_broken()
    assert checkpoint.spec.embed_source == checkpoint.spec.head_source == "target"
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(checkpoint.source.names())
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]
