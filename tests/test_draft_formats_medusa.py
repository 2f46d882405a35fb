"""Medusa-1 checkpoints in their layouts, against heads computed in the test from the formats page (1.11)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import tiny_target
from torch import Tensor

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.draft import Draft
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.engine.trees import StaticTree
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import DraftCheckpoint
from specdoctor.formats.drafts.read import read_draft

V, H, HEADS = 40, 64, 3
TEMPERATURE = 2.5  # flat enough for random drafts to be accepted now and then
PROMPT = [3, 17, 8, 25, 11, 30, 2]
KEPT = [2, 3, 7, 11, 13, 17, 19, 23, 29, 31, 37, 39]  # ids of a truncated vocabulary


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], pickled: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def original(layers: int = 1, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The reference's state dict: all ResBlocks of a head are one module, named once for each place."""
    torch.manual_seed(11)
    tensors: dict[str, Tensor] = {}
    for i in range(HEADS):
        weight, bias = torch.randn(H, H) * 0.1, torch.randn(H) * 0.5
        for j in range(layers):
            tensors[f"{prefix}{i}.{j}.linear.weight"], tensors[f"{prefix}{i}.{j}.linear.bias"] = weight, bias
        tensors[f"{prefix}{i}.{layers}.weight"] = torch.randn(V, H) * 0.06
    config = {"base_model_name_or_path": "someone/base", "medusa_num_heads": HEADS, "medusa_num_layers": layers}
    return tensors, config | {"transformers_version": "4.34.1"}


def vllm(layers: int = 2, rows: int = V, bias: bool = False, **more: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    torch.manual_seed(12)
    tensors: dict[str, Tensor] = {}
    for i in range(HEADS):
        for j in range(layers):
            tensors[f"blocks.{i}.layers.{j}.weight"] = torch.randn(H, H) * 0.1
            if bias:
                tensors[f"blocks.{i}.layers.{j}.bias"] = torch.randn(H) * 0.5
        tensors[f"lm_heads.{i}.weight"] = torch.randn(rows, H) * 0.06
    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": H, "vocab_size": V}
    config |= {"num_heads": HEADS, "num_hidden_layers": layers, "truncated_vocab_size": V, "max_paths": 64, "topk": 10}
    return tensors, config | more


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(V, hidden=H))


def final_hidden(ids: list[int]) -> Tensor:
    """The base model's state after its final norm at the last of `ids` [H], by its own attention."""
    with torch.inference_mode():
        return tiny_target(V, hidden=H)(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]


def by_hand(hidden: Tensor, blocks: list[list[tuple[Tensor, Tensor | None]]], heads: list[Tensor]) -> Tensor:
    """Logits [heads, rows], straight from the page: x + SiLU(Wx + b), as often as there are ResBlocks."""
    out = []
    for own, head in zip(blocks, heads, strict=True):
        x = hidden
        for weight, bias in own:
            z = weight @ x + (0 if bias is None else bias)
            x = x + z / (1 + torch.exp(-z))
        out.append(head @ x)
    return torch.stack(out)


def of_original(t: dict[str, Tensor], layers: int, prefix: str = "") -> tuple[list, list]:
    block = [(t[f"{prefix}{i}.0.linear.weight"], t[f"{prefix}{i}.0.linear.bias"]) for i in range(HEADS)]
    return [[one] * layers for one in block], [t[f"{prefix}{i}.{layers}.weight"] for i in range(HEADS)]


def of_vllm(t: dict[str, Tensor], layers: int, prefix: str = "") -> tuple[list, list]:
    names = [[f"{prefix}blocks.{i}.layers.{j}" for j in range(layers)] for i in range(HEADS)]
    blocks = [[(t[f"{name}.weight"], t.get(f"{name}.bias")) for name in own] for own in names]
    shared = t.get("lm_head.weight")
    heads = [t[f"{prefix}lm_heads.{i}.weight"] if shared is None else shared for i in range(HEADS)]
    return blocks, heads


def rounds(target: Target, folder: Path, sampling: Sampling, tree: Any = None) -> tuple[list, Sequence]:
    """Ids before each round and its draft, over a whole answer."""
    drafter: Any = load_drafter(folder, target)
    name = "propose" if tree is None else "propose_tree"
    honest, seen = getattr(drafter, name), []

    def watched(sequences: list[Sequence], *args: Any) -> list[Draft]:
        drafts = honest(sequences, *args)
        seen.append((list(sequences[0].ids), drafts[0]))
        return drafts

    setattr(drafter, name, watched)
    sequence = Sequence(PROMPT, max_new_tokens=14, sampling=sampling)
    Engine(target, drafter, tree=tree).generate([sequence])
    return seen, sequence


def check_rounds(target: Target, folder: Path, blocks: list, heads: list, ids: list[int] | None = None) -> None:
    """q of all rounds and greedy tokens equal the test's own; the state read is that of the token before the anchor."""
    seen, sequence = rounds(target, folder, Sampling(temperature=TEMPERATURE, seed=2))
    accepted = [record.accepted for record in sequence.records]
    assert len(seen) > 3 and max(accepted) > 0 and min(accepted) < HEADS
    for text, draft in seen:
        q = (by_hand(final_hidden(text[:-1]), blocks, heads) / TEMPERATURE).softmax(-1)
        whole = torch.zeros(HEADS, V)
        whole[:, ids or list(range(V))] = q
        assert torch.allclose(draft.probs, whole, atol=1e-5)
    seen, sequence = rounds(target, folder, Sampling())
    for text, draft in seen[:3]:
        best = by_hand(final_hidden(text[:-1]), blocks, heads).argmax(-1).tolist()
        best = best[: len(draft)] if ids is None else [ids[b] for b in best]
        assert draft.tokens.tolist() == best
    plain = Sequence(PROMPT, max_new_tokens=14)
    Engine(target).generate([plain])
    assert sequence.completion_ids == plain.completion_ids


def used(checkpoint: DraftCheckpoint) -> set[str]:
    return {stored.name for stored in checkpoint.tensors.values()}


@pytest.mark.parametrize("layers", [1, 3])
def test_original_pt(target: Target, tmp_path: Path, layers: int) -> None:
    tensors, config = original(layers)
    folder = write(tmp_path, tensors, config, pickled=True)
    checkpoint = read_draft(folder)
    spec = checkpoint.spec
    assert (spec.num_heads, spec.res_layers, spec.fc_bias, spec.vocab_size) == (HEADS, layers, True, V)
    assert spec.target_name == "someone/base" and not checkpoint.remarks and used(checkpoint) == set(tensors)
    check_rounds(target, folder, *of_original(tensors, layers))


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_safetensors_copies(target: Target, tmp_path: Path, prefix: str) -> None:
    """A copy that keeps one of the tensors that a head's ResBlocks share still says how many they are."""
    tensors, config = original(3, prefix)
    once = {n: x for n, x in tensors.items() if ".linear." not in n or ".0.linear." in n}
    folder = write(tmp_path, once, config)
    assert len(once) < len(tensors) and read_draft(folder).spec.res_layers == 3
    check_rounds(target, folder, *of_original(tensors, 3, prefix))


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_vllm_layout(target: Target, tmp_path: Path, prefix: str) -> None:
    tensors, config = vllm()
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    folder = write(tmp_path, tensors, config)
    checkpoint = read_draft(folder)
    assert not checkpoint.remarks and used(checkpoint) == set(tensors) and not checkpoint.spec.fc_bias
    check_rounds(target, folder, *of_vllm(tensors, 2, prefix))


def test_vllm_biases_are_used_and_remarked(target: Target, tmp_path: Path) -> None:
    tensors, config = vllm(bias=True)
    folder = write(tmp_path, tensors, config)
    remarks = read_draft(folder).remarks
    assert [(r.kind, r.subject, r.fatal) for r in remarks] == [("contradiction", "medusa_fc_bias", False)]
    assert "vLLM would drop" in remarks[0].evidence
    check_rounds(target, folder, *of_vllm(tensors, 2))
    told = write(tmp_path / "told", tensors, config | {"medusa_fc_bias": True})
    assert not read_draft(told).remarks


@pytest.mark.parametrize("cut", [True, False])
def test_vllm_truncated_vocabulary(target: Target, tmp_path: Path, cut: bool) -> None:
    """Heads cut to the map's rows, and whole ones that vLLM cuts when it loads them."""
    tensors, config = vllm(rows=len(KEPT) if cut else V, truncated_vocab_size=len(KEPT))
    tensors["token_map"] = torch.tensor(KEPT)
    folder = write(tmp_path, tensors, config)
    checkpoint = read_draft(folder)
    assert checkpoint.spec.draft_vocab_size == len(KEPT) and used(checkpoint) == set(tensors)
    blocks, heads = of_vllm(tensors, 2)
    check_rounds(target, folder, blocks, heads if cut else [head[KEPT] for head in heads], KEPT)


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight", None])
def test_vllm_original_head(target: Target, tmp_path: Path, name: str | None) -> None:
    """One head for all, from the file or, where it has none, the target's own."""
    tensors, config = vllm(original_lm_head=True)
    head = tensors["lm_heads.0.weight"] if name else target.lm_head.weight.detach()
    tensors = {n: x for n, x in tensors.items() if not n.startswith("lm_heads.")} | ({name: head} if name else {})
    folder = write(tmp_path, tensors, config)
    checkpoint = read_draft(folder)
    assert checkpoint.spec.shared_head and not checkpoint.remarks and used(checkpoint) == set(tensors)
    assert checkpoint.spec.head_source == ("checkpoint" if name else "target")
    check_rounds(target, folder, *of_vllm(tensors | {"lm_head.weight": head}, 2))


def test_a_token_map_without_truncation_is_set_aside(tmp_path: Path) -> None:
    tensors, config = vllm()
    checkpoint = read_draft(write(tmp_path, tensors | {"token_map": torch.arange(V)}, config))
    assert "not below vocab_size" in checkpoint.ignored["token_map"] and checkpoint.spec.draft_vocab_size is None


def test_the_map_must_be_there(tmp_path: Path) -> None:
    tensors, config = vllm(truncated_vocab_size=12)
    with pytest.raises(SpecdoctorError, match=r"truncated_vocab_size is 12, but there is no tensor token_map"):
        read_draft(write(tmp_path, tensors, config))


@pytest.mark.parametrize(("said", "fatal"), [(2, False), (5, True)])
def test_heads_are_counted_by_the_tensors(tmp_path: Path, said: int, fatal: bool) -> None:
    tensors, config = original()
    checkpoint = read_draft(write(tmp_path, tensors, config | {"medusa_num_heads": said}))
    assert checkpoint.spec.num_heads == HEADS
    assert [(r.kind, r.fatal, r.subject) for r in checkpoint.remarks] == [("contradiction", fatal, "medusa_num_heads")]


def test_missing_unknown_and_broken(tmp_path: Path) -> None:
    tensors, config = original()
    short = {n: x for n, x in tensors.items() if n != "1.0.linear.bias"}
    with pytest.raises(SpecdoctorError, match=r"tensor 1\.0\.linear\.bias is missing"):
        read_draft(write(tmp_path / "a", short, config))
    remarks = read_draft(write(tmp_path / "b", tensors | {"extra.weight": torch.ones(1)}, config)).remarks
    assert [(r.kind, r.subject, r.fatal) for r in remarks] == [("unknown-tensor", "extra.weight", True)]
    with pytest.raises(SpecdoctorError, match="no Medusa heads found"):
        read_draft(write(tmp_path / "c", {"x": torch.ones(1)}, config))


def test_another_targets_heads_are_refused(target: Target, tmp_path: Path) -> None:
    tensors, config = vllm(rows=V + 2, vocab_size=V + 2, truncated_vocab_size=V + 2)
    with pytest.raises(SpecdoctorError, match=r"vocab_size is 42 .* has 40"):
        load_drafter(write(tmp_path, tensors, config), target)


def test_tree_levels_are_heads(target: Target, tmp_path: Path) -> None:
    tensors, config = original()
    folder = write(tmp_path, tensors, config)
    tree = StaticTree((-1, -1, 0, 0, 1, 2), sampled=False)
    seen, sequence = rounds(target, folder, Sampling(), tree)
    for text, draft in seen[:2]:
        first, second, third = by_hand(final_hidden(text[:-1]), *of_original(tensors, 1)).topk(2).indices.tolist()
        assert draft.tokens.tolist() == [*first, *second, second[0], third[0]]
    plain = Sequence(PROMPT, max_new_tokens=14)
    Engine(target).generate([plain])
    assert sequence.completion_ids == plain.completion_ids


def test_two_requests_and_prompts_in_pieces(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last committed row counts, whatever the pieces of the prompt and the neighbours are."""
    tensors, config = original()
    drafter = load_drafter(write(tmp_path, tensors, config), target)

    def run(prompts: list[list[int]]) -> list[list[int]]:
        sequences = [Sequence(p, max_new_tokens=9, sampling=Sampling(1.0, seed=len(p))) for p in prompts]
        Engine(target, drafter).generate(sequences)
        return [s.completion_ids for s in sequences]

    prompts = [PROMPT, [1, 2, 3]]
    together = run(prompts)
    assert together == [*run(prompts[:1]), *run(prompts[1:])]
    monkeypatch.setattr("specdoctor.engine.engine.PREFILL_ROWS", 2)
    assert run(prompts) == together
