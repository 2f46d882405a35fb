"""The early-exit drafter: one round recomputed densely, KV sharing, losslessness in chains and trees."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from test_lossless_sampling import P_FAIL, SIZES, V, cheap_draws, draw, exact_law, p_value
from tiny_models import tiny_target
from torch import Tensor

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.draft import Draft
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.engine.trees import parse_tree
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.early_exit import ARCHITECTURE, early_exit_tensor_shapes, read_early_exit
from specdoctor.formats.drafts.read import read_draft
from specdoctor.formats.json_config import JsonConfig

__all__ = ["cheap_draws"]
LAYERS, EXIT = 4, 2


def write_head(
    folder: Path, *, vocab: int = V, layers: int = 1, own_norm: bool = False, seed: int = 3, **changes: object
) -> Path:
    """A random early-exit head for a `tiny_target(vocab, layers=4, **SIZES)`."""
    torch.manual_seed(seed)
    config = {
        "architectures": [ARCHITECTURE],
        "exit_layer": EXIT,
        "num_target_layers": LAYERS,
        "hidden_size": SIZES["hidden"],
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "num_attention_heads": SIZES["heads"],
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": SIZES["inner"],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "draft_tokens": 3,
    } | changes

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = ["norm.weight"] if own_norm else []
    spec = read_early_exit(JsonConfig.read(folder), names, None).spec  # type: ignore[arg-type]
    tensors = {
        name: 1 + 0.1 * torch.randn(shape) if name.endswith("norm.weight") else torch.randn(shape) * 0.2
        for name, shape in early_exit_tensor_shapes(spec).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_target(vocab: int = V, **more: object) -> Target:
    return Target(tiny_target(vocab, layers=LAYERS, **SIZES, **more))


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


# The dense recomputation, from docs/early-exit-format.md alone ------------------------------------------------


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def rotated(x: Tensor, offset: int = 0) -> Tensor:
    """[n, h, 16] at positions offset, offset + 1, ..."""
    n, _, D = x.shape
    inverse = 10000.0 ** (-torch.arange(0, D, 2).float() / D)
    angles = (torch.arange(n).float() + offset)[:, None] * inverse
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def dense_logits(model: torch.nn.Module, tensors: dict[str, Tensor], ids: list[int], offset: int = 0) -> Tensor:
    """Draft logits of the token after the last of `ids`, everything computed anew."""
    x = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[EXIT][0]
    n = len(ids)
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    for i in range(layers):
        w = {name.removeprefix(f"layers.{i}."): t for name, t in tensors.items() if name.startswith(f"layers.{i}.")}
        u = rms(x, w["input_layernorm.weight"])
        q, k, v = (F.linear(u, w[f"self_attn.{p}_proj.weight"]).view(n, -1, 16) for p in "qkv")
        q, k = rotated(q, offset), rotated(k, offset)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / 4
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)
        x = x + F.linear(torch.einsum("hqk,khd->qhd", scores, v).reshape(n, -1), w["self_attn.o_proj.weight"])
        u = rms(x, w["post_attention_layernorm.weight"])
        gate = F.silu(F.linear(u, w["mlp.gate_proj.weight"])) * F.linear(u, w["mlp.up_proj.weight"])
        x = x + F.linear(gate, w["mlp.down_proj.weight"])
    norm = tensors.get("norm.weight", model.model.norm.weight)
    return F.linear(rms(x[-1], norm), model.lm_head.weight)


@pytest.mark.parametrize("own_norm", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_rounds_equal_a_dense_recomputation(tmp_path: Path, layers: int, own_norm: bool) -> None:
    """Logits of every node of two rounds: in the second, states come from a verification that accepted some drafts."""
    vocab = 41
    model, prompt = tiny_target(vocab, layers=LAYERS, **SIZES), [3, 17, 5, 40, 8]
    target = make_target(vocab)
    folder = write_head(tmp_path / "head", vocab=vocab, layers=layers, own_norm=own_norm)
    tensors = read_draft(folder).load()
    drafter = load_drafter(folder, target)
    sequence = Sequence(prompt, max_new_tokens=40)
    engine = Engine(target, drafter, tree=parse_tree("2,2,1"))
    with torch.inference_mode():
        engine.prefill([sequence])
        for _ in range(3):
            grown = drafter.expansion([sequence], 3)
            first = grown.root()[0, 0]
            torch.testing.assert_close(first, dense_logits(model, tensors, sequence.ids), atol=1e-5, rtol=1e-4)
            shifted = dense_logits(model, tensors, sequence.ids, offset=37)
            torch.testing.assert_close(first, shifted, atol=1e-5, rtol=1e-4)  # RoPE is relative
            a, b = first.topk(2).indices.tolist()
            logits = grown.below(torch.tensor([[a, b]]), torch.tensor([[0, 0]]))[0]
            for row, token in zip(logits, (a, b), strict=True):
                wanted = dense_logits(model, tensors, [*sequence.ids, token])
                torch.testing.assert_close(row, wanted, atol=1e-5, rtol=1e-4)
            logits = grown.below(torch.tensor([[9, 9]]), torch.tensor([[0, 1]]))[0]  # the same token on two paths
            for row, token in zip(logits, (a, b), strict=True):
                wanted = dense_logits(model, tensors, [*sequence.ids, token, 9])
                torch.testing.assert_close(row, wanted, atol=1e-5, rtol=1e-4)
            engine.step([sequence])
    engine.release([sequence])


def test_drafting_leaves_both_caches_at_the_committed_length(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(write_head(tmp_path), target)
    sequence = Sequence([0, 3, 1], max_new_tokens=20)
    engine = Engine(target, drafter)
    engine.prefill([sequence])
    for _ in range(4):
        engine.step([sequence])
        committed = len(sequence.ids) - 1
        assert target.cache.lengths[sequence.slot] == drafter.cache.lengths[sequence.drafter_state] == committed
    engine.release([sequence])


def test_only_the_head_has_keys_of_its_own(target: Target, tmp_path: Path) -> None:
    """Drafting through the lower layers adds nothing: the head's cache is one layer deep."""
    drafter = load_drafter(write_head(tmp_path), target)
    Engine(target, drafter).generate([Sequence([0, 3, 1], max_new_tokens=8)])
    assert list(drafter.cache._layers) == [0]


@pytest.mark.parametrize("shape", [None, "2,2,1", "nodes=9,depth=3,top_k=3"])
def test_greedy_text_is_the_targets_own(shape: str | None, tmp_path: Path) -> None:
    target = make_target(41)
    drafter = load_drafter(write_head(tmp_path, vocab=41), target)
    prompts = [[3, 17, 5], [40, 8, 2, 2, 31, 7], [11]]
    plain = [Sequence(p, max_new_tokens=30) for p in prompts]
    Engine(target).generate(plain)
    drafted = [Sequence(p, max_new_tokens=30) for p in prompts]
    Engine(target, drafter, tree=None if shape is None else parse_tree(shape)).generate(drafted)
    assert [s.ids for s in drafted] == [s.ids for s in plain]


@pytest.mark.parametrize("shape", [None, "2,2", "nodes=6,depth=2,top_k=3"])
def test_sampled_text_has_the_targets_law(target: Target, tmp_path: Path, shape: str | None) -> None:
    drafter = load_drafter(write_head(tmp_path), target)
    engine = Engine(target, drafter, tree=parse_tree(shape)) if shape else Engine(target, drafter, draft_tokens=2)
    assert p_value(draw(engine, 1.0, "1x", 0, 1.0), exact_law_of(target)) > P_FAIL


def test_a_wrong_draft_law_is_found(target: Target, tmp_path: Path) -> None:
    """Negative control: the rule is told that drafts came from a flat distribution."""
    drafter = load_drafter(write_head(tmp_path), target)
    honest = drafter.propose

    def lying(sequences: list[Sequence], budget: int) -> list[Draft]:
        drafts = honest(sequences, budget)
        for draft in drafts:
            draft.probs = torch.full_like(draft.probs, 1 / V)
        return drafts

    drafter.propose = lying
    observed = draw(Engine(target, drafter, draft_tokens=2), 1.0, "1x", 0, 1.0)
    assert p_value(observed, exact_law_of(target)) < 1e-6


def exact_law_of(target: Target):  # type: ignore[no-untyped-def]
    return exact_law(target, Sampling(1.0), tiny_target(V, layers=LAYERS, **SIZES))


def test_another_dtype_than_the_targets_is_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(SpecdoctorError, match=r"--draft-dtype: an early-exit head shares the target's layers"):
        load_drafter(write_head(tmp_path), target, dtype="bfloat16")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"exit_layer": 4}, r"key exit_layer is 4, expected less than num_target_layers, 4"),
        ({"exit_layer": 0}, r"key exit_layer is 0, expected a whole number of 1 or more"),
        ({"num_target_layers": 5}, r"num_target_layers is 5, but the target .* has 4"),
    ],
)
def test_a_wrong_config_is_one_line(target: Target, tmp_path: Path, changes: dict, line: str) -> None:
    folder = write_head(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecdoctorError, match=line):
        load_drafter(folder, target)


def test_every_value_has_an_origin_and_nothing_is_left_over(tmp_path: Path) -> None:
    checkpoint = read_draft(write_head(tmp_path))
    assert checkpoint.title == "specdoctor early-exit head" and not checkpoint.remarks
    assert checkpoint.spec.origin["taps"] == "config key exit_layer"
