"""MTP, Medusa, early-exit and causal-LM objectives: losses against plain recomputations, formats, and learning."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense_mtp import DenseMTP
from safetensors.torch import load_file
from tiny_models import tiny_family, tiny_target
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
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdoctor.drafters.load import load_drafter
from specdoctor.drafters.medusa import MedusaDrafter
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import FINAL_NORMED, Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.read import read_draft
from specdoctor.training.anchors import sample_blocks
from specdoctor.training.chains import draw_chains
from specdoctor.training.recipe import LossWeights
from specdoctor.training.recipe_file import load_recipe
from specdoctor.training.samples import Sample
from specdoctor.training.trained_head import DraftVocabulary, TargetHead, TrainedHeadJob, trained_head_losses

STEPS = 3
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mtp": ("mtp", {"block_size": STEPS}),
    "medusa, shared head": ("medusa", {"block_size": STEPS, "layers": 2}),
    "medusa, own heads": ("medusa", {"block_size": STEPS, "own_heads": True}),
    "early exit": ("early-exit", {"exit_layer": 2}),
    "early exit, two layers": ("early-exit", {"exit_layer": 1, "layers": 2}),
    "causal LM": ("causal-lm", {"layers": 2}),
}
STEPS_OF = {"mtp": STEPS, "medusa": STEPS, "early-exit": 1, "causal-lm": 1}


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def plain_model(target: Target) -> PreTrainedModel:
    model = tiny_target(vocab=V, layers=LAYERS)
    model.load_state_dict(target.model.state_dict())
    model.set_attn_implementation("eager")
    return model


# What a saved drafter predicts, each row computed by itself from the files -----------------------------------------


class Plain:
    """Logits [V] of the token behind anchor + k, from a saved folder, as its format says."""

    def __init__(self, algorithm: str, folder: Path, target: Target) -> None:
        self.algorithm, self.model = algorithm, plain_model(target)
        self.tensors = load_file(folder / "model.safetensors")
        self.config = json.loads((folder / "config.json").read_text())
        if algorithm == "mtp":
            block = self.config["transformer_layer_config"] | {"rope_theta": 10000.0}
            head, embedding = self.model.lm_head.weight, self.model.get_input_embeddings().weight
            self.mtp = DenseMTP(block, self.tensors, "qwen3", embedding, head)
        if algorithm == "causal-lm":
            self.student = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            )

    @torch.inference_mode()
    def __call__(self, sample: Sample, anchor: int, k: int) -> Tensor:
        ids = sample.ids
        if self.algorithm == "causal-lm":
            return self.student(torch.tensor([ids[: anchor + 1]])).logits[0, -1]
        if self.algorithm == "medusa":
            return self.medusa(self.normed(ids[:anchor]), k)
        if self.algorithm == "early-exit":
            states = self.model(torch.tensor([ids[: anchor + 1]]), output_hidden_states=True).hidden_states
            return exit_logits(states[self.config["exit_layer"]][0], self.tensors, self.model)
        raw: list[Tensor] = []
        hook = self.model.model.layers[-1].register_forward_hook(lambda _m, _a, out: raw.append(out))
        self.model(torch.tensor([ids[:anchor]]))
        hook.remove()
        hidden = raw[0][0] if isinstance(raw[0], tuple) else raw[0]
        return self.mtp.logits(ids[: anchor + 1], hidden.view(anchor, -1), ids[anchor + 1 : anchor + 2 + k])[k]

    def normed(self, ids: list[int]) -> Tensor:
        return self.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]

    def medusa(self, x: Tensor, k: int) -> Tensor:
        for j in range(self.config["num_hidden_layers"]):
            name = f"blocks.{k}.layers.{j}"
            x = x + F.silu(self.tensors[f"{name}.weight"] @ x + self.tensors[f"{name}.bias"])
        own = self.tensors.get(f"lm_heads.{k}.weight")
        return (self.model.lm_head.weight if own is None else own) @ x


def exit_logits(x: Tensor, tensors: dict[str, Tensor], model: PreTrainedModel) -> Tensor:
    """Exit states [n, H] of a text to the logits [V] behind it (docs/early-exit-format.md)."""

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    n = len(x)
    angles = torch.arange(n).float()[:, None] * 10000.0 ** (-torch.arange(0, 16, 2).float() / 16)

    def turned(row: Tensor) -> Tensor:
        cos, sin, a, b = angles.cos()[:, None], angles.sin()[:, None], row[..., :8], row[..., 8:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    for i in range(1 + max(int(name.split(".")[1]) for name in tensors)):
        w = {name.removeprefix(f"layers.{i}."): t for name, t in tensors.items() if name.startswith(f"layers.{i}.")}
        u = rms(x, w["input_layernorm.weight"])
        q, k, v = (F.linear(u, w[f"self_attn.{p}_proj.weight"]).view(n, -1, 16) for p in "qkv")
        q, k = turned(rms(q, w["self_attn.q_norm.weight"])), turned(rms(k, w["self_attn.k_norm.weight"]))
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / 4
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)
        x = x + F.linear(torch.einsum("hqk,khd->qhd", scores, v).reshape(n, -1), w["self_attn.o_proj.weight"])
        u = rms(x, w["post_attention_layernorm.weight"])
        gate = F.silu(F.linear(u, w["mlp.gate_proj.weight"])) * F.linear(u, w["mlp.up_proj.weight"])
        x = x + F.linear(gate, w["mlp.down_proj.weight"])
    return F.linear(rms(x[-1], model.model.norm.weight), model.lm_head.weight)


@pytest.mark.parametrize("case", CASES)
def test_losses_equal_a_plain_recomputation(tmp_path: Path, target: Target, case: str) -> None:
    algorithm, draft = CASES[case]
    made, steps = recipe(algorithm, draft), STEPS_OF[algorithm]
    objective, samples = shaken(make(target, made)), mixed_samples()
    losses = objective.loss(one_batch(target, samples, objective), torch.Generator())
    objective.save(tmp_path / "draft")
    plain = Plain(algorithm, tmp_path / "draft", target)
    total, accept = plain_loss(target, samples, made, steps, plain)
    assert float(losses.total.detach()) == pytest.approx(total, abs=1e-5, rel=1e-5)
    for name, value in accept.items():
        assert float(losses.parts[name]) == pytest.approx(value, abs=1e-5)
    shifted, _ = plain_loss(target, samples, made, steps, lambda s, a, k: plain(s, a - 1, k))
    assert abs(shifted - total) > 1e-3, "rows one place off make no difference"


@pytest.mark.parametrize("case", CASES)
def test_a_warm_start_goes_on_where_the_drafter_is(tmp_path: Path, target: Target, case: str) -> None:
    algorithm, draft = CASES[case]
    first = shaken(make(target, recipe(algorithm, draft)))
    first.save(tmp_path / "draft")
    checkpoint = read_draft(tmp_path / "draft", LAYERS)
    assert not checkpoint.unused() and not any(remark.fatal for remark in checkpoint.remarks)
    again = make(target, recipe(algorithm, {"block_size": STEPS} if algorithm == "mtp" else {}), tmp_path / "draft")
    batch = one_batch(target, mixed_samples(), first)
    values = [float(o.loss(batch, torch.Generator()).total.detach()) for o in (first, again)]
    assert values[0] == pytest.approx(values[1], abs=1e-7)
    again.loss(batch, torch.Generator()).total.backward()
    assert all(p.grad is not None for p in again.module.parameters())
    assert all(p.grad is None for p in target.model.parameters())
    assert not list(tmp_path.glob(".*partial*"))


@pytest.mark.parametrize("case", CASES)
def test_under_autocast_it_saves_bfloat16(tmp_path: Path, target: Target, case: str) -> None:
    algorithm, draft = CASES[case]
    objective = make(target, recipe(algorithm, draft, autocast=True))
    exact = make(target, recipe(algorithm, draft))
    batch = one_batch(target, mixed_samples(), objective)
    losses = [o.loss(batch, torch.Generator()).total for o in (objective, exact)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=0.02)
    losses[0].backward()
    assert all(p.dtype == torch.float32 and p.grad is not None for p in objective.module.parameters())
    objective.save(tmp_path / "draft")
    assert {t.dtype for t in read_draft(tmp_path / "draft", LAYERS).load().values()} == {torch.bfloat16}
    load_drafter(tmp_path / "draft", target)


# The loaded drafters give the training logits ----------------------------------------------------------------------


def states_before(target: Target, ids: list[int], taps: tuple[int, ...]) -> Tensor:
    """The taps [n, w] of `ids`."""
    like: Any = type("Taps", (), {"taps": taps})
    return one_batch(target, [Sample("", ids, [True] * len(ids))], like).taps


def test_mtp_drafts_what_was_trained(tmp_path: Path, target: Target) -> None:
    objective = shaken(make(target, recipe("mtp", {"block_size": STEPS})))
    sample = mixed_samples()[1]
    batch = one_batch(target, [sample], objective)
    objective.save(tmp_path / "draft")
    drafter: Any = load_drafter(tmp_path / "draft", target)
    assert drafter.default_draft == STEPS and drafter.taps == (LAYERS,)
    chains = draw_chains(batch, 1000, STEPS, torch.Generator())
    with torch.no_grad():
        trained = F.linear(objective.scored(batch, chains), target.lm_head.weight)  # type: ignore[attr-defined]
    for c, anchor in enumerate(chains.anchors.tolist()):
        sequence = Sequence(sample.ids[: anchor + 1], max_new_tokens=1)
        drafter.begin([sequence])
        drafter.observe([sequence], states_before(target, sample.ids[:anchor], drafter.taps), [anchor])
        with torch.inference_mode():
            hidden, scored = drafter.extend([sequence])
            assert torch.allclose(drafter.logits(scored)[0], trained[c, 0], atol=2e-5)
            for t in range(1, int(chains.valid[c].sum())):
                rows = drafter.rows([sequence], [anchor + t - 1], [1])
                hidden, scored = drafter.step(torch.tensor([sample.ids[anchor + t]]), hidden, rows, t)
                assert torch.allclose(drafter.logits(scored)[0], trained[c, t], atol=2e-5)
        drafter.end(sequence)


@pytest.mark.parametrize("own_heads", [False, True])
def test_medusa_drafts_what_was_trained(tmp_path: Path, target: Target, own_heads: bool) -> None:
    objective: Any = shaken(make(target, recipe("medusa", {"block_size": STEPS, "own_heads": own_heads})))
    sample = mixed_samples()[1]
    batch = one_batch(target, [sample], objective)
    objective.save(tmp_path / "draft")
    drafter: Any = load_drafter(tmp_path / "draft", target)
    assert isinstance(drafter, MedusaDrafter) and drafter.max_draft == STEPS and drafter.taps == (FINAL_NORMED,)
    blocks = sample_blocks(batch, 1000, STEPS, STEPS, torch.Generator())
    with torch.no_grad():
        states = objective.scored(batch, blocks)
        for k in range(STEPS):
            weight = objective.module.lm_heads[k].weight if own_heads else target.lm_head.weight
            real = drafter.logits(k, batch.last_hidden[blocks.anchors - 1])
            assert torch.allclose(real, F.linear(states[:, k], weight), atol=1e-5)


def test_the_early_exit_drafts_what_was_trained(tmp_path: Path, target: Target) -> None:
    objective: Any = shaken(make(target, recipe("early-exit", {"exit_layer": 2, "block_size": 5})))
    sample = mixed_samples()[0]
    batch = one_batch(target, [sample], objective)
    objective.save(tmp_path / "draft")
    drafter: Any = load_drafter(tmp_path / "draft", target)
    assert drafter.default_draft == 5 and drafter.taps == (2,)
    with torch.no_grad():
        trained = F.linear(objective.scored(batch), target.lm_head.weight)
    n = len(sample.ids)
    sequence = Sequence(sample.ids, max_new_tokens=1)
    drafter.begin([sequence])
    with torch.inference_mode():
        rows = PackedRows([sequence.drafter_state], [0], [n], target.device)
        real = drafter.logits(drafter.head_states(batch.taps, rows))
    assert torch.allclose(real, trained, atol=2e-5)


def test_the_distilled_model_drafts_what_was_trained(tmp_path: Path, target: Target) -> None:
    objective: Any = shaken(make(target, recipe("causal-lm", {"layers": 2})), scale=0.02)
    samples = mixed_samples()
    batch = one_batch(target, samples, objective)
    objective.save(tmp_path / "draft")
    drafter: Any = load_drafter(tmp_path / "draft", target)
    with torch.no_grad():
        trained = F.linear(objective.scored(batch), objective.module.lm_head.weight)
    sample, end = samples[1], batch.starts[2]
    sequence = Sequence(sample.ids, max_new_tokens=1)
    drafter.begin([sequence])
    assert torch.allclose(drafter.catch_up([sequence])[0], trained[end - 1], atol=2e-5)


# The head that is trained, or has other rows -----------------------------------------------------------------------


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("chunk", [3, 100])
def test_a_trained_head_has_autograds_gradient(target: Target, reduced: bool, chunk: int) -> None:
    torch.manual_seed(1)
    M, H, ids = 11, 64, torch.arange(0, V, 2) if reduced else torch.arange(V)
    states, weight = torch.randn(M, H, requires_grad=True), torch.randn(len(ids), H, requires_grad=True)
    hidden, labels, rows = torch.randn(M, H), torch.randint(0, V, (M,)), torch.rand(M)
    losses = LossWeights(ce=0.5, kl=0.3, l1=0.7)
    vocabulary = DraftVocabulary.of(ids, V) if reduced else None
    job = TrainedHeadJob(
        lambda x, _: F.linear(x, weight), TargetHead(target), hidden, labels, rows, losses, chunk, vocabulary
    )
    found = trained_head_losses(states, [weight], job)
    p = F.linear(hidden, target.lm_head.weight.detach()).softmax(-1)
    log_q = F.linear(states, weight).log_softmax(-1)
    cut = p[:, ids] / p[:, ids].sum(-1, keepdim=True)
    at = [(ids == label).nonzero().flatten() for label in labels]
    ce = torch.stack([-log_q[i, j[0]] if len(j) else torch.zeros(()) for i, j in enumerate(at)])
    kl = (cut * (cut.log() - log_q)).sum(-1)
    l1 = (p[:, ids] - log_q.exp()).abs().sum(-1) + 1 - p[:, ids].sum(-1)
    total = (rows * (0.5 * ce + 0.3 * kl + 0.7 * l1)).sum()
    assert found.total.item() == pytest.approx(total.item(), rel=1e-5)
    assert torch.allclose(found.l1, l1.detach(), atol=1e-5)
    ours = torch.autograd.grad(found.total * 2, [states, weight])
    theirs = torch.autograd.grad(total * 2, [states, weight])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


# Refusing ----------------------------------------------------------------------------------------------------------


def test_what_an_algorithm_has_not_is_refused(target: Target) -> None:
    for algorithm, draft, said in (
        ("mtp", {"taps": [2]}, "draft.taps"),
        ("mtp", {"layers": 3}, "draft.layers"),
        ("medusa", {"exit_layer": 2}, "draft.exit_layer"),
        ("early-exit", {"exit_layer": 4}, "draft.exit_layer is 4, expected 1 to 3"),
        ("early-exit", {"exit_layer": 3, "layers": 2}, "draft.layers is 2 behind exit_layer 3"),
        ("causal-lm", {"layers": 4}, "draft.layers is 4, expected less than the 4"),
    ):
        with pytest.raises(SpecdoctorError, match=said):
            make(target, recipe(algorithm, draft))


def test_a_start_of_another_shape_is_refused(tmp_path: Path, target: Target) -> None:
    make(target, recipe("early-exit", {"exit_layer": 2})).save(tmp_path / "exit")
    with pytest.raises(SpecdoctorError, match="exit_layer is 2, but the recipe's"):
        make(target, recipe("early-exit", {"exit_layer": 1}), tmp_path / "exit")
    make(target, recipe("medusa", {"block_size": 2})).save(tmp_path / "heads")
    with pytest.raises(SpecdoctorError, match="block_size is 2"):
        make(target, recipe("medusa", {"block_size": 3}), tmp_path / "heads")
    tiny_target(vocab=V + 1).save_pretrained(tmp_path / "other")
    with pytest.raises(SpecdoctorError, match="its head has 41 rows, expected the 40"):
        make(target, recipe("causal-lm"), tmp_path / "other")


@pytest.mark.parametrize("algorithm", ["mtp", "early-exit", "eagle3"])
def test_a_target_of_another_form_is_refused(algorithm: str) -> None:
    with pytest.raises(SpecdoctorError, match="gpt2"):
        make(Target(tiny_family("GPT2")), recipe(algorithm))


@pytest.mark.parametrize("family", ["Gemma2", "GPT2", "Granite", "Cohere2"])
def test_any_family_can_be_distilled(family: str) -> None:
    """Its own windows, soft caps and logit scales are those of the student, too: the whole model costs nothing."""
    target = Target(tiny_family(family))
    objective: Any = make(target, recipe("causal-lm", {"layers": 3}, losses={"ce": 1.0, "kl": 1.0}))
    batch = one_batch(target, [Sample("", [i % 40 for i in range(3, 24)], [i > 4 for i in range(21)])], objective)
    with torch.inference_mode():
        plain = tiny_family(family)(batch.ids.unsqueeze(0)).logits[0]
        assert torch.allclose(objective.target.logits(batch.last_hidden), plain, atol=2e-5)
        student = AutoModelForCausalLM.from_config(copy.deepcopy(objective.module.config), dtype=torch.float32).eval()
        student.load_state_dict(objective.module.state_dict())
        student.set_attn_implementation("eager")
        head, own = objective.student.lm_head, objective.own
        trained = own.shaped(F.linear(objective.scored(batch), head.weight, head.bias))
        assert torch.allclose(trained, student(batch.ids.unsqueeze(0)).logits[0], atol=2e-5)
    assert torch.isfinite(objective.loss(batch, torch.Generator()).total)


# Learning ----------------------------------------------------------------------------------------------------------

# Draft tokens, learning steps, the most that the untrained and the least that the trained drafter commits in a round.
LEARNS = {
    "mtp": (STEPS, 120, 1.3, 2.5),
    "medusa, shared head": (STEPS, 200, 1.3, 2.5),
    "medusa, own heads": (STEPS, 100, 1.3, 2.5),
    "early exit": (STEPS, 150, 2.0, 2.5),
    "early exit, two layers": (STEPS, 150, 2.0, 2.5),
    "causal LM": (STEPS, 100, 1.5, 2.5),
}


@pytest.mark.parametrize("case", CASES)
def test_it_learns_a_small_corpus(tmp_path: Path, target: Target, case: str) -> None:
    algorithm, draft = CASES[case]
    tokens, steps, untrained, trained = LEARNS[case]
    objective = make(target, recipe(algorithm, draft, losses={"ce": 1.0}))
    batch = one_batch(target, written(target), objective)
    objective.save(tmp_path / "untrained")
    train(objective, batch, steps)
    objective.save(tmp_path / "trained")
    before, after = (tau(target, tmp_path / name, tokens) for name in ("untrained", "trained"))
    assert before < untrained and after > trained, (before, after)


@pytest.mark.parametrize("algorithm", ["eagle3", "mtp", "medusa", "early-exit"])
def test_the_sample_recipe_can_be_made(algorithm: str) -> None:
    """Read as a user's file, and made for a target with SmolLM2's depth."""
    path = Path(__file__).parents[1] / "sample_configs" / "train" / f"{algorithm}-smollm2.yaml"
    read = load_recipe(path)
    assert read.algorithm == algorithm
    objective = make(Target(tiny_target(vocab=V, layers=30, hidden=32, heads=2, inner=32)), read)
    assert sum(p.numel() for p in objective.module.parameters()) > 0
