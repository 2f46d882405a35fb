"""EAGLE-3 with training-time test: attention, losses against a dense recomputation, formats, and learning."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense_eagle import DenseEagle
from eagle_models import Case
from tiny_models import tiny_target
from torch import Tensor
from training_runs import (
    LAYERS,
    V,
    make,
    make_target,
    mixed_samples,
    one_batch,
    plain_loss,
    recipe,
    shaken,
    tau,
    train,
    written,
)

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.read import read_draft
from specdoctor.training import packed_attention
from specdoctor.training.anchors import lay_blocks
from specdoctor.training.batch import TrainingBatch
from specdoctor.training.chains import draw_chains
from specdoctor.training.packed_attention import TrainingColumns, TrainingRows, attend
from specdoctor.training.recurrent_objective import RecurrentObjective
from specdoctor.training.samples import Sample

STEPS = 3
KINDS: dict[str, dict[str, Any]] = {
    "specforge": {},
    "deepspec": {"qk_norm": True},
    "specforge, part of the vocabulary": {"vocabulary": [0, 2, 3, 7, 11, 12, 17, 20, 25, 26, 31, 39]},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def draft_keys(kind: str, folder: Path) -> dict[str, Any]:
    """The recipe's keys of a kind; a vocabulary becomes a file."""
    keys = {"block_size": STEPS, **KINDS[kind]}
    if "vocabulary" in keys:
        path = folder / "vocabulary.json"
        path.write_text(json.dumps(keys["vocabulary"]))
        keys["vocabulary"] = path
    return keys


# The attention ----------------------------------------------------------------------------------------------------


def plain_attention(
    q: Tensor, keys: list[Tensor], values: list[Tensor], window: int | None, places: list[int]
) -> Tensor:
    """One query [h, D] at the last of `places` over columns [hkv, D], by loops."""
    out = []
    for head in range(q.shape[0]):
        own = head // (q.shape[0] // keys[0].shape[0])
        seen = [j for j, place in enumerate(places) if window is None or places[-1] - place < window]
        scores = torch.stack([q[head] @ keys[j][own] * 0.3 for j in seen]).softmax(0)
        out.append(sum(w * values[j][own] for w, j in zip(scores, seen, strict=True)))
    return torch.stack(out)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("chunk", [2, 256])
def test_attention_equals_loops_with_gradients(monkeypatch: pytest.MonkeyPatch, window: int | None, chunk: int) -> None:
    """Step 0 over three sequences, then two own steps of chains in two of them."""
    monkeypatch.setattr(packed_attention, "QUERY_CHUNK", chunk)
    torch.manual_seed(0)
    starts, anchors, bounds = [0, 6, 8, 13], [2, 3, 5, 9, 12], [0, 3, 3, 5]
    ids = torch.zeros(13, dtype=torch.long)
    batch = TrainingBatch(ids, torch.ones(13, dtype=torch.bool), starts, ids, ids)
    chains = lay_blocks(batch, torch.tensor(anchors), bounds, 3, 3)
    counts = [13, 5, 5]
    made = [[torch.randn(h, n, 8, requires_grad=True) for h in (4, 2, 2)] for n in counts]
    columns, out = TrainingColumns(), []
    for t, (q, k, v) in enumerate(made):
        rows = TrainingRows(starts, ids.device, t, chains if t else None)
        seen = columns.write(0, k, v, rows)
        out.append(rows.gather(attend(rows.spread(q), *seen, rows.mask(window), 0.3)))
    mixed = torch.cat(out)  # [13 + 5 + 5, h, D]
    expected = []
    k0, v0 = made[0][1], made[0][2]
    for start, end in pairwise(starts):
        for i in range(start, end):
            keys, values = ([part[:, j] for j in range(start, i + 1)] for part in (k0, v0))
            expected.append(plain_attention(made[0][0][:, i], keys, values, window, list(range(i - start + 1))))
    for t in (1, 2):
        for c, anchor in enumerate(anchors):
            start = max(s for s in starts if s <= anchor - 1)
            keys, values = (
                [part[0][:, j] for j in range(start, anchor)] + [part[s][:, c] for s in range(1, t + 1)]
                for part in ([step[1] for step in made], [step[2] for step in made])
            )
            places = list(range(anchor - start + t))
            expected.append(plain_attention(made[t][0][:, c], keys, values, window, places))
    wanted = torch.stack(expected)
    assert torch.allclose(mixed, wanted, atol=1e-5)
    probe = torch.randn_like(wanted)
    leaves = [leaf for step in made for leaf in step]
    found = torch.autograd.grad((mixed * probe).sum(), leaves, allow_unused=True)
    right = torch.autograd.grad((wanted * probe).sum(), leaves, allow_unused=True)
    for ours, theirs in zip(found, right, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


# The losses -------------------------------------------------------------------------------------------------------


def dense(folder: Path, target: Target) -> DenseEagle:
    """The independent recomputation of a saved drafter."""
    config = json.loads((folder / "config.json").read_text())
    deepspec = config["architectures"] == ["Qwen3Eagle3Model"]
    ids = config["target_layer_ids"] if deepspec else config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    first, taps = "layers.0." if deepspec else "midlayer.", tuple(i + 1 for i in ids)
    case = Case(config, first=first, qk_norm=deepspec, taps=taps, draft_vocab=config.get("draft_vocab_size", V))
    model = tiny_target(vocab=V, layers=LAYERS)
    model.load_state_dict(target.model.state_dict())
    return DenseEagle(folder, case, model)


def chain_logits(own: DenseEagle, ids: list[int], anchor: int, k: int, forced: bool = False) -> Tensor:
    """Logits [V] of the token behind anchor + k: k own steps from the anchor, all rows again at each.

    `forced`: the target's features stand in for the drafter's own states, which is not what is trained.
    """
    features, tokens = own.context(ids[:anchor]), ids[1 : anchor + 1]
    for t in range(k):
        fed, _ = own.run(tokens, features)
        state = own.context(ids[: anchor + t + 1])[-1:] if forced else fed[-1:]
        features, tokens = torch.cat([features, state]), [*tokens, ids[anchor + t + 1]]
    _, scored = own.run(tokens, features)
    drafted = scored[-1] @ own.head.T
    if "d2t" not in own.t:
        return drafted
    out = torch.full((V,), -torch.inf)
    out[torch.arange(len(drafted)) + own.t["d2t"]] = drafted
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_losses_equal_a_dense_recomputation(tmp_path: Path, target: Target, kind: str) -> None:
    made = recipe("eagle3", draft_keys(kind, tmp_path))
    objective, samples = shaken(make(target, made)), mixed_samples()
    losses = objective.loss(one_batch(target, samples, objective), torch.Generator())
    objective.save(tmp_path / "draft")
    own = dense(tmp_path / "draft", target)
    total, accept = plain_loss(target, samples, made, STEPS, lambda s, a, k: chain_logits(own, s.ids, a, k))
    assert float(losses.total.detach()) == pytest.approx(total, abs=1e-5, rel=1e-5)
    for name, value in accept.items():
        assert float(losses.parts[name]) == pytest.approx(value, abs=1e-5)
    wrong, _ = plain_loss(target, samples, made, STEPS, lambda s, a, k: chain_logits(own, s.ids, a, k, forced=True))
    assert abs(wrong - total) > 1e-3, "the target's features instead of own states make no difference"


def drafter_logits(drafter: Any, target: Target, sample: Sample, anchor: int, steps: int) -> Tensor:
    """Logits [steps, dV] of the loaded drafter below one anchor, told the text's own tokens."""
    sequence = Sequence(sample.ids[: anchor + 1], max_new_tokens=1)
    drafter.begin([sequence])
    objective_like = type("Taps", (), {"taps": drafter.taps})
    batch = one_batch(target, [Sample("", sample.ids[:anchor], [True] * anchor)], objective_like)  # type: ignore[arg-type]
    drafter.observe([sequence], batch.taps, [anchor])
    with torch.inference_mode():
        hidden, scored = drafter.extend([sequence])
        out = [drafter.logits(scored)]
        for t in range(1, steps):
            rows = drafter.rows([sequence], [anchor + t - 1], [1])
            hidden, scored = drafter.step(torch.tensor([sample.ids[anchor + t]]), hidden, rows, t)
            out.append(drafter.logits(scored))
    drafter.end(sequence)
    return torch.cat(out)


@pytest.mark.parametrize("kind", KINDS)
def test_the_saved_drafter_gives_the_training_logits(tmp_path: Path, target: Target, kind: str) -> None:
    objective: RecurrentObjective = shaken(make(target, recipe("eagle3", draft_keys(kind, tmp_path))))  # type: ignore[assignment]
    sample = mixed_samples()[1]
    batch = one_batch(target, [sample], objective)
    chains = draw_chains(batch, 1000, STEPS, torch.Generator())
    objective.save(tmp_path / "draft")
    drafter: Any = load_drafter(tmp_path / "draft", target)
    assert drafter.spec.draft_tokens in (STEPS, 5)  # SpecForge has no key for it
    head = drafter.head
    with torch.no_grad():
        trained = F.linear(objective.scored(batch, chains), head)  # [A, K, dV]
    for c, anchor in enumerate(chains.anchors.tolist()):
        real = drafter_logits(drafter, target, sample, anchor, int(chains.valid[c].sum()))
        assert torch.allclose(real, trained[c, : len(real)], atol=2e-5)


def test_anchors_are_drawn_by_the_generator(target: Target) -> None:
    made = recipe("eagle3", {"block_size": STEPS}, sampling={"anchors": 3, "head_chunk": 7})
    objective = make(target, made)
    batch = one_batch(target, mixed_samples(), objective)
    values = {float(objective.loss(batch, torch.Generator().manual_seed(seed)).total.detach()) for seed in (1, 1, 2)}
    assert len(values) == 2


def test_a_batch_without_answers_has_a_zero_gradient(target: Target) -> None:
    objective = make(target, recipe("eagle3"))
    batch = one_batch(target, [mixed_samples()[2]], objective)
    losses = objective.loss(batch, torch.Generator())
    losses.total.backward()
    assert float(losses.total.detach()) == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in objective.module.parameters())


def test_a_sampled_vocabulary_estimates_the_whole(target: Target) -> None:
    """L1 over a part of the columns, another at each step, is near L1 over all."""
    whole = make(target, recipe("eagle3", losses={"l1": 1.0}))
    batch = one_batch(target, written(target), whole)
    true = float(whole.loss(batch, torch.Generator()).total.detach())
    part = make(target, recipe("eagle3", losses={"l1": 1.0}, sampling={"anchors": 1000, "vocabulary": V - 4}))
    found = [float(part.loss(batch, torch.Generator().manual_seed(seed)).total.detach()) for seed in range(20)]
    assert sum(found) / len(found) == pytest.approx(true, rel=0.05) and len(set(found)) > 1


# Starting, saving, refusing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_start_goes_on_where_the_drafter_is(tmp_path: Path, target: Target, kind: str) -> None:
    keys = draft_keys(kind, tmp_path)
    first = shaken(make(target, recipe("eagle3", keys)))
    first.save(tmp_path / "draft")
    checkpoint = read_draft(tmp_path / "draft", LAYERS)
    assert checkpoint.remarks == [] and not checkpoint.unused()
    again = make(target, recipe("eagle3", {"block_size": STEPS}), tmp_path / "draft")
    batch = one_batch(target, mixed_samples(), first)
    values = [float(o.loss(batch, torch.Generator()).total.detach()) for o in (first, again)]
    assert values[0] == values[1]
    losses = again.loss(batch, torch.Generator())
    losses.total.backward()
    assert all(p.grad is not None for p in again.module.parameters())
    again.save(tmp_path / "again")
    one, two = read_draft(tmp_path / "draft", LAYERS).load(), read_draft(tmp_path / "again", LAYERS).load()
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)
    assert not list(tmp_path.glob(".*partial*"))


def test_under_autocast_it_saves_bfloat16(tmp_path: Path, target: Target) -> None:
    objective = make(target, recipe("eagle3", autocast=True))
    batch = one_batch(target, mixed_samples(), objective)
    objective.loss(batch, torch.Generator()).total.backward()
    assert all(p.dtype == torch.float32 and p.grad is not None for p in objective.module.parameters())
    objective.save(tmp_path / "draft")
    assert {t.dtype for t in read_draft(tmp_path / "draft", LAYERS).load().values()} == {torch.bfloat16}


def test_nothing_of_the_target_gets_a_gradient(target: Target) -> None:
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    objective = make(target, recipe("eagle3"))
    train(objective, one_batch(target, mixed_samples(), objective), 2)
    assert all(p.grad is None for p in target.model.parameters())
    assert all(value.equal(before[name]) for name, value in target.model.state_dict().items())
    owned = {p.data_ptr() for p in objective.module.parameters()}
    assert not owned & {p.data_ptr() for p in target.model.parameters()}


def test_what_the_algorithm_has_not_is_refused(tmp_path: Path, target: Target) -> None:
    other = tmp_path / "vocabulary.json"
    for draft, key in (
        ({"markov": "vanilla"}, "draft.markov"),
        ({"layers": 2}, "draft.layers"),
        ({"taps": [0, 2]}, "draft.taps"),
        ({"taps": [1, 9]}, "draft.taps"),
        ({"vocabulary": other}, "draft.vocabulary"),
    ):
        with pytest.raises(SpecdoctorError, match=key):
            make(target, recipe("eagle3", draft))
    other.write_text("[1, 2, 2]")
    with pytest.raises(SpecdoctorError, match="different target ids, 0 to 39"):
        make(target, recipe("eagle3", {"vocabulary": other}))
    with pytest.raises(SpecdoctorError, match=r"losses\.confidence"):
        make(target, recipe("eagle3", losses={"ce": 1.0, "confidence": 1.0}))


def test_another_drafter_is_no_start(tmp_path: Path, target: Target) -> None:
    make(target, recipe("medusa", {"block_size": 2})).save(tmp_path / "heads")
    with pytest.raises(SpecdoctorError, match="eagle3"):
        make(target, recipe("eagle3"), tmp_path / "heads")
    make(target, recipe("eagle3", {"qk_norm": True})).save(tmp_path / "eagle")
    with pytest.raises(SpecdoctorError, match=r"embed_tokens\.weight is not the target's"):
        make(make_target(seed=4), recipe("eagle3"), tmp_path / "eagle")


# Learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["target-layers", "scratch"])
def test_it_learns_a_small_corpus(tmp_path: Path, target: Target, init: str) -> None:
    """Greedy rollouts from the prompts of the corpus: at least 2.5 tokens a round of at most 4; untrained below 1.3."""
    made = recipe("eagle3", {"block_size": STEPS, "init": init}, losses={"ce": 1.0})
    objective = make(target, made)
    batch = one_batch(target, written(target), objective)
    objective.save(tmp_path / "untrained")
    seen = train(objective, batch, 120)
    objective.save(tmp_path / "trained")
    assert seen[-1] < 0.2 * seen[0]
    assert tau(target, tmp_path / "untrained", STEPS) < 1.3
    assert tau(target, tmp_path / "trained", STEPS) > 2.5
