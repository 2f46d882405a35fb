"""The EAGLE family in every public layout: read, accounted for, and computed as the formats page says."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dense_eagle import DenseEagle
from eagle_models import CASES, DRAFT_V, TARGET_LAYERS, Case, H, V, kept_ids, specforge, speculators, write_eagle
from safetensors.torch import load_file, save_file
from tiny_models import tiny_target
from torch import Tensor

from specdoctor.drafters.load import load_drafter
from specdoctor.drafters.recurrent import RecurrentDrafter
from specdoctor.engine.draft import Draft
from specdoctor.engine.engine import Engine
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.engine.trees import StaticTree
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.detect import detect
from specdoctor.formats.drafts.read import open_draft, read_draft

K = 3
PROMPT = [7, 3, 11, 0, 22, 5, 9]
LONG = [(7 * i + 3) % V for i in range(19)]  # more than a round commits: run ahead of the first proposal
PARALLEL = [name for name, case in CASES.items() if case.facts.get("parallel")]
RECURRENT = [name for name in CASES if name not in PARALLEL]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(V, layers=TARGET_LAYERS))


class Rounds:
    """Runs rounds of a request and keeps what the drafter saw and computed in each: ids, tokens, logits [K, dV].

    The first `truth` drafts of a round are replaced by the target's own, so that they are accepted.
    """

    def __init__(self, target: Target, drafter: RecurrentDrafter, prompt: list[int], truth: int = 0) -> None:
        plain = Sequence(prompt, max_new_tokens=24)
        Engine(target).generate([plain])
        self.seen: list[tuple[list[int], list[int], Tensor]] = []
        self.engine = Engine(target, drafter, draft_tokens=K)
        self.sequence = Sequence(prompt, max_new_tokens=24)
        logits: list[Tensor] = []
        propose, score = drafter.propose, drafter.logits

        def scoring(scored: Tensor) -> Tensor:
            logits.append(score(scored))
            return logits[-1]

        def proposing(sequences: list[Sequence], budget: int) -> list[Draft]:
            logits.clear()
            (draft,) = propose(sequences, budget)
            at = len(sequences[0].ids)
            assert drafter.cache.lengths[sequences[0].drafter_state.slot] == at - 1  # none of its own columns stays
            rows = torch.cat([part.flatten(0, -2) for part in logits])
            self.seen.append((list(sequences[0].ids), draft.tokens.tolist(), rows))
            wrong = [(token + 1) % V for token in plain.ids[at : at + budget]]
            forced = [*plain.ids[at : at + truth], *wrong[truth:]]
            return [Draft(torch.tensor(forced), draft.parents)]

        drafter.propose, drafter.logits = proposing, scoring
        self.engine.prefill([self.sequence])

    def step(self) -> tuple[list[int], list[int], Tensor]:
        self.engine.step([self.sequence])
        return self.seen[-1]


@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("name", CASES)
def test_two_rounds_equal_the_second_implementation(
    target: Target, tmp_path: Path, name: str, prompt: list[int]
) -> None:
    """The first round, and the one after a partial acceptance, whose context came in two pieces."""
    case = CASES[name]
    folder = write_eagle(tmp_path, case)
    dense = DenseEagle(folder, case, tiny_target(V, layers=TARGET_LAYERS))
    rounds = Rounds(target, load_drafter(folder, target), prompt, truth=2)
    for _ in range(2):
        ids, tokens, logits = rounds.step()
        expected_tokens, expected = dense.draft(ids, K)
        torch.testing.assert_close(logits, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)
        assert tokens == expected_tokens
    assert [r.accepted for r in rounds.sequence.records] == [2, 2]
    rounds.engine.release([rounds.sequence])


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_and_key_is_accounted_for(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    checkpoint = read_draft(write_eagle(tmp_path, case), TARGET_LAYERS)
    assert checkpoint.remarks == []
    names = {stored.name for stored in checkpoint.tensors.values()} | set(checkpoint.ignored)
    assert names == set(checkpoint.source.names())
    assert ("t2d" in checkpoint.ignored) == ("t2d" in case.tensors)
    spec = checkpoint.spec
    assert spec.taps == ((-1,) if case.facts.get("plain") else case.taps)
    assert spec.has_vocabulary_map == (case.draft_vocab != V)
    assert (spec.residual_normed, spec.recurrent_normed) == (
        case.facts.get("residual_normed", False),
        case.facts.get("recurrent_normed", False),
    )
    assert spec.head_normed == case.facts.get("head_normed", not case.facts.get("plain", False))
    assert spec.feature_norm == case.facts.get("feature_norm")
    assert spec.algorithm == ("eagle" if case.facts.get("plain") else "peagle" if name in PARALLEL else "eagle3")
    if case.draft_vocab != V:
        assert checkpoint.load()["d2t"].tolist() == kept_ids(DRAFT_V, V).tolist()


# Invariances ----------------------------------------------------------------------------------------------------------

SOME = ["specforge", "speculators qwen3", "speculators peagle", "eagle with bias"]


def first_logits(target: Target, folder: Path, prompt: list[int], prepare: Callable = lambda drafter: None) -> Tensor:
    drafter = load_drafter(folder, target)
    prepare(drafter)
    rounds = Rounds(target, drafter, prompt)
    logits = rounds.step()[2]
    rounds.engine.release([rounds.sequence])
    return logits


@pytest.mark.parametrize("name", SOME)
def test_shifting_all_positions_changes_nothing(target: Target, tmp_path: Path, name: str) -> None:
    """So a writer that begins at position 1 (speculators) is the same as one that begins at 0."""
    folder = write_eagle(tmp_path, CASES[name])

    def shift(drafter: RecurrentDrafter) -> None:
        at = drafter.rope.at
        drafter.rope.at = lambda positions, limit: at(positions + 37, limit + 37)

    expected = first_logits(target, folder, PROMPT)
    torch.testing.assert_close(first_logits(target, folder, PROMPT, shift), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SOME)
def test_running_ahead_of_the_first_proposal_changes_nothing(target: Target, tmp_path: Path, name: str) -> None:
    folder = write_eagle(tmp_path, CASES[name])

    def wait(drafter: RecurrentDrafter) -> None:
        drafter.runs_ahead = False

    expected = first_logits(target, folder, LONG)
    torch.testing.assert_close(first_logits(target, folder, LONG, wait), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SOME)
def test_neighbours_in_a_batch_change_nothing(target: Target, tmp_path: Path, name: str) -> None:
    drafter = load_drafter(write_eagle(tmp_path, CASES[name]), target)
    texts = []
    for batch in ([[PROMPT], [LONG], [LONG[:3]]], [[PROMPT, LONG, LONG[:3]]]):
        drafted = []
        for prompts in batch:
            sequences = [Sequence(prompt, max_new_tokens=9) for prompt in prompts]
            engine = Engine(target, drafter, draft_tokens=K)
            engine.prefill(sequences)
            with torch.inference_mode():
                drafted += [draft.tokens.tolist() for draft in drafter.propose(sequences, K)]
            engine.release(sequences)
        texts.append(drafted)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", PARALLEL)
def test_a_shorter_parallel_proposal_is_the_beginning_of_the_longer_one(
    target: Target, tmp_path: Path, name: str
) -> None:
    """Attention among the depths is causal: what follows a depth cannot reach it."""
    drafted = []
    for budget in (1, 2, K):
        drafter = load_drafter(write_eagle(tmp_path, CASES[name]), target)
        sequence = Sequence(PROMPT, max_new_tokens=9)
        Engine(target, drafter).prefill([sequence])
        with torch.inference_mode():
            drafted.append(drafter.propose([sequence], budget)[0].tokens.tolist())
    assert [drafted[2][:1], drafted[2][:2]] == drafted[:2]


def test_a_tree_of_a_parallel_drafter_is_a_product_of_marginals(target: Target, tmp_path: Path) -> None:
    folder, case = write_eagle(tmp_path, CASES["speculators peagle"]), CASES["speculators peagle"]
    drafter = load_drafter(folder, target)
    sequence = Sequence(PROMPT, max_new_tokens=9)
    Engine(target, drafter).prefill([sequence])
    tree = StaticTree((-1, -1, 0, 0, 1, 1))
    with torch.inference_mode():
        (draft,) = drafter.propose_tree([sequence], tree, 2)
    _, logits = DenseEagle(folder, case, tiny_target(V, layers=TARGET_LAYERS)).draft(sequence.ids, 2)
    best = [kept_ids(DRAFT_V, V)[row.topk(2).indices].tolist() for row in logits]
    assert draft.tokens.tolist() == [*best[0], *best[1], *best[1]]


# What is refused, and what is said ------------------------------------------------------------------------------------


def changed(folder: Path, **keys: object) -> Path:
    """Set keys of a config; None takes one away."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def replaced(folder: Path, **tensors: Tensor | None) -> Path:
    path = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if name not in tensors}
    save_file(kept | {name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    return folder


def test_default_taps_depend_on_the_target(tmp_path: Path) -> None:
    folder = write_eagle(tmp_path, CASES["specforge default taps"])
    spec = read_draft(folder).spec
    assert spec.taps == () and "unknown without the target" in spec.origin["taps"]
    spec = read_draft(folder, 36).spec
    assert spec.taps == (2, 18, 33) and "default of SpecForge for 36 target layers" in spec.origin["taps"]
    with pytest.raises(SpecdoctorError, match=r"eagle_aux_hidden_state_layer_ids is missing, .* 7 layers or more"):
        read_draft(folder, 6)


def test_ids_of_specforge_are_outputs_and_ids_of_speculators_inputs(tmp_path: Path) -> None:
    """[1, L//2 - 1, L - 4] of the one and [2, L//2, L - 3] of the other are the same features (formats page 1.8)."""
    aux = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    one = read_draft(write_eagle(tmp_path / "a", replace(CASES["specforge"], config=specforge(**aux))))
    ids = speculators(eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    other = read_draft(write_eagle(tmp_path / "b", replace(CASES["speculators converted"], config=ids)))
    assert one.spec.taps == other.spec.taps == (2, 4, 5)


def test_flags_that_leave_no_trace_are_named(tmp_path: Path) -> None:
    case = CASES["speculators llama"]
    folder = changed(write_eagle(tmp_path, case), norm_before_residual=None, norm_output=None, fc_norm=None)
    checkpoint = read_draft(folder, TARGET_LAYERS)
    assert [(r.kind, r.subject, r.fatal) for r in checkpoint.remarks] == [
        ("unverified", "norm_before_residual", False),
        ("unverified", "norm_output", False),
    ]
    assert "training command's default is true" in checkpoint.spec.origin["residual_normed"]
    assert checkpoint.spec.origin["feature_norm"] == "tensor fc_norm.0.weight (no key fc_norm)"  # has a trace
    assert checkpoint.spec.feature_norm == "per_tap"


def test_llamas_defaults_are_named(tmp_path: Path) -> None:
    spec = read_draft(write_eagle(tmp_path, CASES["yuhuili"]), TARGET_LAYERS).spec
    assert spec.rope["rope_theta"] == 10000.0
    assert spec.origin["rope"] == "default of SafeAILab EAGLE-3 (no key rope_theta)"
    assert (spec.family, spec.layers[0].head_dim) == ("yuhuili", H // 4)


def test_a_full_vocabulary_sets_the_identity_maps_aside(tmp_path: Path) -> None:
    checkpoint = read_draft(write_eagle(tmp_path, CASES["specforge full vocabulary"]), TARGET_LAYERS)
    assert set(checkpoint.ignored) == {"d2t", "t2d"} and "d2t" not in checkpoint.tensors
    assert all("identity" in reason for reason in checkpoint.ignored.values())


MAPS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "absolute ids, t2d tells": ({"d2t": kept_ids(DRAFT_V, V)}, "holds target ids"),
    "absolute ids, without t2d": ({"d2t": kept_ids(DRAFT_V, V), "t2d": None}, r"ids 0 to 62, .* absolute ids"),
    "another mask": ({"t2d": torch.ones(V, dtype=torch.bool)}, "name different tokens"),
    "an id twice": ({"d2t": torch.tensor([0, -1] + [0] * (DRAFT_V - 2)), "t2d": None}, "1 of them twice"),
    "floats": ({"d2t": torch.zeros(DRAFT_V)}, "dtype float32, expected int64"),
    "a mask of another size": ({"t2d": torch.ones(V + 1, dtype=torch.bool)}, r"t2d has shape \[41\], expected \[40\]"),
}


@pytest.mark.parametrize("name", MAPS)
def test_a_wrong_vocabulary_map_is_refused(target: Target, tmp_path: Path, name: str) -> None:
    tensors, message = MAPS[name]
    folder = replaced(write_eagle(tmp_path, CASES["specforge"]), **tensors)
    with pytest.raises(SpecdoctorError, match=message) as caught:
        load_drafter(folder, target)
    assert "\n" not in str(caught.value) and "model.safetensors" in str(caught.value)


REFUSALS: dict[str, tuple[str, dict, dict, str]] = {
    "no head for a reduced vocabulary": ("specforge", {}, {"lm_head.weight": None}, "lm_head.weight"),
    "a draft vocabulary above the target's": ("specforge", {"draft_vocab_size": V + 1}, {}, "at most vocab_size, 40"),
    "a head of other rows": ("specforge", {"draft_vocab_size": 20}, {}, r"lm_head.weight has shape \[24, 64\]"),
    "other taps than fc": (
        "specforge",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3]}},
        {},
        r"fc.weight has shape \[64, 192\], expected \[64, 128\]",
    ),
    "taps beyond the target": (
        "specforge",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 8]}},
        {},
        "layers 0 to 7",
    ),
    "no aux states": ("specforge", {"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state"),
    "an unknown tensor": ("specforge", {}, {"enc.aux_norm": torch.ones(4)}, "enc.aux_norm is not used"),
    "a norm that the key denies": ("speculators qwen3", {"norm_before_fc": False}, {}, "input_norm.weight is not used"),
    "two norms before fc": ("speculators qwen3", {"fc_norm": True}, {}, "two norms before fc"),
    "no norm where Qwen3 has one": ("speculators qwen3", {}, {"layers.0.self_attn.q_norm.weight": None}, "q_norm"),
    "no mask id in speculators": ("speculators peagle", {"mask_token_id": None}, {}, "mask_token_id is missing"),
    "no mask id in SpecForge": ("specforge peagle", {"mask_token_id": None}, {}, "add it as mask_token_id"),
    "a mask id beyond the embedding": ("specforge peagle", {"mask_token_id": V}, {}, "mask_token_id is 40"),
    "no mask feature": ("specforge peagle", {}, {"mask_hidden": None}, "mask_hidden is missing"),
    "a mask feature in EAGLE-3": (
        "speculators converted",
        {},
        {"mask_hidden": torch.ones(1, 1, 3 * H)},
        "mask_hidden belongs to",
    ),
    "a narrow drafter without embedding": (
        "specforge narrow",
        {},
        {"embed_tokens.weight": None},
        "hidden_size is 32 and the checkpoint has no tensor embed_tokens.weight",
    ),
    "another vocabulary": ("eagle with bias", {"vocab_size": 41}, {"embed_tokens.weight": torch.ones(41, H)}, "vocab"),
    "speculative_tokens of no length": (
        "speculators qwen3",
        {"speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 0}]}},
        {},
        "speculative_tokens 0, expected",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_refused_in_one_line(target: Target, tmp_path: Path, name: str) -> None:
    case, keys, tensors, message = REFUSALS[name]
    folder = changed(replaced(write_eagle(tmp_path, CASES[case]), **tensors), **keys)
    with pytest.raises(SpecdoctorError, match=message) as caught:
        load_drafter(folder, target)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_the_missing_mask_id_is_a_remark_for_who_only_looks(tmp_path: Path) -> None:
    folder = changed(write_eagle(tmp_path, CASES["specforge peagle"]), mask_token_id=None)
    checkpoint = read_draft(folder, TARGET_LAYERS)
    assert checkpoint.spec.mask_id is None
    assert [(r.subject, r.fatal) for r in checkpoint.remarks] == [("mask_token_id", True)]


def test_queries_with_a_norm_in_specforge_are_used_and_named(target: Target, tmp_path: Path) -> None:
    norms = {f"midlayer.self_attn.{p}_norm.weight": 1 + 0.2 * torch.randn(16) for p in "qk"}
    folder = write_eagle(tmp_path, CASES["specforge"], changes=dict(norms))
    checkpoint = read_draft(folder, TARGET_LAYERS)
    assert [r.kind for r in checkpoint.remarks] == ["unverified"] and checkpoint.spec.layers[0].qk_norm
    case: Case = replace(CASES["specforge"], qk_norm=True)
    _, expected = DenseEagle(folder, case, tiny_target(V, layers=TARGET_LAYERS)).draft([*PROMPT, 1], 1)
    logits = first_logits_behind(target, folder, [*PROMPT, 1])
    torch.testing.assert_close(logits, expected[0], atol=1e-4, rtol=1e-4)


def first_logits_behind(target: Target, folder: Path, ids: list[int]) -> Tensor:
    """Logits of the first draft behind the anchor `ids[-1]`, features and all by hand."""
    drafter = load_drafter(folder, target)
    sequence = Sequence(ids[:-1], max_new_tokens=4)
    Engine(target, drafter).prefill([sequence])
    sequence.ids[-1] = ids[-1]
    with torch.inference_mode():
        return drafter.logits(drafter.extend([sequence])[1])[0]


def test_the_old_eagle_type_of_speculators_is_recognised_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "eagle", "fusion_bias": False}))
    save_file({"fusion_fc.weight": torch.ones(4, 8)}, tmp_path / "model.safetensors")
    assert detect(*open_draft(tmp_path)).family == "speculators-eagle"
    with pytest.raises(SpecdoctorError, match=r"recognised as speculators eagle .* cannot be run"):
        read_draft(tmp_path)


def test_old_rotary_buffers_are_set_aside(tmp_path: Path) -> None:
    buffer = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    checkpoint = read_draft(write_eagle(tmp_path, CASES["specforge"], changes=dict(buffer)), TARGET_LAYERS)
    assert "midlayer.self_attn.rotary_emb.inv_freq" in checkpoint.ignored and checkpoint.remarks == []
