"""Draft trees: shapes, growth, verification. Lossless for sampled and for likeliest siblings, exact in greedy."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from test_lossless_sampling import P_FAIL, SIZES, K, V, cheap_draws, draw, exact_law, p_value
from tiny_models import tiny_target, write_drafter

from specdoctor.drafters.load import load_drafter
from specdoctor.drafters.prompt_lookup import PromptLookupDrafter, prompt_lookup_spec
from specdoctor.drafters.tree_drafting import sample_without_replacement
from specdoctor.engine import verify as verify_module
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.engine.trees import DynamicTree, StaticTree, branching_parents, node_depths, parse_tree, rows_visible
from specdoctor.engine.verify import rejection_sampling, tree_rejection_sampling
from specdoctor.errors import SpecdoctorError
from specdoctor.metrics.acceptance import conditional, marginal

GOLDEN = Path(__file__).parent / "data" / "golden"
ALL_GOLDEN = sorted(p.name for p in GOLDEN.iterdir() if p.is_dir() and p.name != "target")
TREES = ["2,2,1", "[-1,-1,0,1,1,2,4]", "nodes=12,depth=4,top_k=3"]

__all__ = ["cheap_draws"]  # an autouse fixture, taken over from the test of chains


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(V, **SIZES))


@pytest.fixture(scope="module")
def golden() -> Iterator[Target]:
    yield Target.load(GOLDEN / "target", "cpu", "float32")


# Shapes ---------------------------------------------------------------------------------------------------------------


def test_branching_of_the_source_document() -> None:
    """The 14-node tree of 2,2,2: depth 3, children of one node side by side."""
    parents = branching_parents([2, 2, 2])
    assert parents == (-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5)
    assert node_depths(parents) == (1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3)


def test_rows_see_their_ancestors_only() -> None:
    seen = rows_visible((-1, -1, 0, 1), torch.device("cpu"))
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]


@pytest.mark.parametrize(
    "text", ["", "2,x", "0,2", "-1,2", "[1,0]", "[-1,0,-1]", "nodes=4", "nodes=0,depth=1", "16,17"]
)
def test_a_wrong_shape_is_one_line(text: str) -> None:
    with pytest.raises(SpecdoctorError) as error:
        parse_tree(text)
    assert "\n" not in str(error.value) and text in str(error.value)


def test_the_words_of_the_command_line() -> None:
    assert parse_tree("2,2,1") == StaticTree(branching_parents([2, 2, 1]))
    assert parse_tree("[-1, -1, 0]", sampled=False) == StaticTree((-1, -1, 0), sampled=False)
    assert parse_tree("nodes=16,depth=5") == DynamicTree(16, 5)


# Greedy ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ALL_GOLDEN)
def test_greedy_text_is_the_targets_own_for_every_drafter_and_shape(golden: Target, folder: str) -> None:
    drafter = load_drafter(GOLDEN / folder, golden)
    prompts = json.loads((GOLDEN / folder / "expected_greedy.json").read_text())["prompts"]
    for shape in TREES:
        sequences = [Sequence(p["prompt_ids"], max_new_tokens=48) for p in prompts]
        Engine(golden, drafter, tree=parse_tree(shape)).generate(sequences)
        assert [s.ids for s in sequences] == [p["output_ids"] for p in prompts], shape
        assert any(r.accepted and r.outcomes[0] == "rejected" for s in sequences for r in s.records), shape


@pytest.mark.parametrize("folder", ALL_GOLDEN)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_is_the_tree_with_one_child_a_node(golden: Target, folder: str, temperature: float) -> None:
    """The same text, the same rounds and the same random numbers."""
    drafter = load_drafter(GOLDEN / folder, golden)
    texts = []
    for settings in ({"draft_tokens": 3}, {"tree": parse_tree("1,1,1")}):
        sequence = Sequence(list(b"def add(a, b):"), max_new_tokens=40, sampling=Sampling(temperature, seed=5))
        Engine(golden, drafter, **settings).generate([sequence])
        texts.append((sequence.ids, [r.accepted for r in sequence.records]))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("folder", ["deepspec-dspark-rnn", "deepspec-eagle3"])
def test_a_tree_accepts_more_than_its_own_first_chain(golden: Target, folder: str) -> None:
    drafter = load_drafter(GOLDEN / folder, golden)
    prompts = json.loads((GOLDEN / folder / "expected_greedy.json").read_text())["prompts"]
    rounds = []
    for settings in ({"draft_tokens": 4}, {"tree": parse_tree("3,2,1,1")}, {"tree": parse_tree("nodes=20,depth=4")}):
        sequences = [Sequence(p["prompt_ids"], max_new_tokens=48) for p in prompts]
        Engine(golden, drafter, **settings).generate(sequences)
        rounds.append(sum(len(s.records) for s in sequences))
    assert rounds[1] < rounds[0] and rounds[2] < rounds[0]


@pytest.mark.parametrize("folder", ["deepspec-dspark-rnn", "deepspec-eagle3", "deepspec-dflash"])
@pytest.mark.parametrize("shape", TREES)
def test_each_node_is_drafted_from_its_own_path(golden: Target, folder: str, shape: str) -> None:
    """A node's children are what a chain drafter would propose had it drafted this path: most of all the likeliest."""
    drafter = load_drafter(GOLDEN / folder, golden)
    engine = Engine(golden, drafter, tree=parse_tree(shape))
    begun: list[Sequence] = []

    def prefilled() -> list[Sequence]:  # a round's features are taken once, so each walk begins anew
        sequence = Sequence(list(b"The rain in Spain"), max_new_tokens=40)
        engine.prefill([sequence])
        begun.append(sequence)
        return [sequence]

    with torch.inference_mode():
        [tree] = drafter.propose_tree(prefilled(), parse_tree(shape), 4)
        tokens = tree.tokens.tolist()
        paths = {-1: ()}
        for node, parent in enumerate(tree.parents):
            paths[node] = (*paths[parent], node)
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(tokens[node])
        for node, below in children.items():
            grown = drafter.expansion(prefilled(), 4)
            logits = grown.root()
            for step in paths[node]:  # walk down alone: no neighbour can have leaked in
                logits = grown.below(torch.tensor([[tokens[step]]]), torch.zeros(1, 1, dtype=torch.long))
            likeliest = drafter.to_target_ids(logits[0, 0].topk(len(below)).indices).tolist()
            # A dynamic tree may keep a later sibling only together with the earlier ones.
            assert below == likeliest
    engine.release(begun)


# Sampling -------------------------------------------------------------------------------------------------------------

SHAPES = {
    "sampled 2,2": StaticTree(branching_parents([2, 2])),
    "likeliest 2,2": StaticTree(branching_parents([2, 2]), sampled=False),
    "sampled, uneven": StaticTree((-1, -1, -1, 0, 0, 1)),
    "sampled, all five": StaticTree(branching_parents([5])),
    "dynamic": DynamicTree(6, 2, 3),
}


@pytest.mark.parametrize(
    ("head", "shape"), [*(("vanilla", shape) for shape in SHAPES), ("rnn", "sampled 2,2"), (None, "likeliest 2,2")]
)
def test_sampled_text_has_the_targets_law(target: Target, tmp_path: Path, head: str | None, shape: str) -> None:
    drafter = load_drafter(write_drafter(tmp_path, **SIZES, block=K, head=head), target)
    setting = (0.9, "1.5x", 4, 0.95) if shape == "sampled, uneven" else (1.0, "1x", 0, 1.0)
    observed = draw(Engine(target, drafter, tree=SHAPES[shape]), *setting)
    assert p_value(observed, exact_law(target, Sampling(*setting[:1], *setting[2:]))) > P_FAIL


@pytest.mark.parametrize("shape", ["sampled 2,2", "likeliest 2,2"])
def test_a_residual_that_is_not_updated_between_siblings_is_found(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """Negative control: every sibling judged by p itself, as if its elders had not been rejected."""

    def wrong(p, q, tokens, parents, accept_uniform, next_uniform):  # type: ignore[no-untyped-def]
        taken, after = tree_rejection_sampling(p, q, tokens, parents, accept_uniform, next_uniform)
        fresh = torch.zeros_like(taken)
        at = torch.full((len(p),), -1)
        row = torch.arange(len(p))
        for node in range(tokens.shape[1]):
            token = tokens[:, node]
            q_token = 1.0 if q is None else q[row, node, token]
            here = p[row, at + 1, token]
            accepted = (parents[:, node] == at) & (accept_uniform[:, node] * q_token < here)
            at = torch.where(accepted, node, at)
            fresh[:, node] = accepted
        same = (fresh == taken).all(1)
        return fresh, torch.where(same, after, p[row, at + 1].multinomial(1).squeeze(1))

    monkeypatch.setattr(verify_module, "tree_rejection_sampling", wrong)
    torch.manual_seed(0)
    drafter = load_drafter(write_drafter(tmp_path, **SIZES, block=K), target)
    observed = draw(Engine(target, drafter, tree=SHAPES[shape]), 1.0, "1x", 0, 1.0)
    assert p_value(observed, exact_law(target, Sampling(1.0))) < 1e-6


def test_siblings_are_distinct_and_their_laws_are_those_they_were_drawn_from() -> None:
    torch.manual_seed(3)
    q = torch.randn(4, 3, 7).softmax(-1)
    tokens, laws = sample_without_replacement(q, torch.rand(4, 3, 7, dtype=torch.float64))
    assert (tokens.sort(dim=-1).values == torch.arange(7)).all()  # all seven, each once
    torch.testing.assert_close(laws.sum(-1), torch.ones(4, 3, 7))
    left = q.clone()
    for i in range(6):
        torch.testing.assert_close(laws[:, :, i], left / left.sum(-1, keepdim=True), atol=1e-5, rtol=1e-4)
        left.scatter_(-1, tokens[:, :, i : i + 1], 0.0)


def test_an_exhausted_draft_distribution_still_gives_distinct_siblings() -> None:
    q = torch.tensor([0.0, 1.0, 0.0]).view(1, 1, 3)
    tokens, laws = sample_without_replacement(q, torch.full((1, 1, 3), 0.5, dtype=torch.float64))
    assert tokens.flatten().tolist() == [1, 0, 2]
    assert laws[0, 0].tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]


def test_the_kernel_of_trees_equals_that_of_chains_on_chains() -> None:
    torch.manual_seed(1)
    R, n, V = 500, 3, 6
    p, q = torch.randn(R, n + 1, V).softmax(-1), torch.randn(R, n, V).softmax(-1)
    tokens = q.flatten(0, 1).multinomial(1).view(R, n)
    uniforms, last = torch.rand(R, n, dtype=torch.float64), torch.rand(R, dtype=torch.float64)
    for law in (q, None):
        accepted, after = rejection_sampling(p, law, tokens, torch.full((R,), n), uniforms, last)
        parents = torch.arange(-1, n - 1).expand(R, -1)
        taken, tree_after = tree_rejection_sampling(p, law, tokens, parents, uniforms, last)
        assert (taken.sum(1) == accepted).all() and (after == tree_after).all()


def test_requests_with_trees_of_different_sizes_share_a_batch(golden: Target) -> None:
    """Dynamic trees differ from request to request; a batch changes no text."""
    drafter = load_drafter(GOLDEN / "deepspec-eagle3", golden)
    prompts = [list(b"def add(a, b):"), list(b"The rain in Spain falls mainly"), list(b"2 + 2 =")]
    engine = Engine(golden, drafter, tree=parse_tree("nodes=9,depth=3,top_k=3"))
    for temperature in (0.0, 0.8):
        batch = [Sequence(p, max_new_tokens=24, sampling=Sampling(temperature, seed=i)) for i, p in enumerate(prompts)]
        alone = [Sequence(p, max_new_tokens=24, sampling=Sampling(temperature, seed=i)) for i, p in enumerate(prompts)]
        engine.generate(batch)
        for sequence in alone:
            engine.generate([sequence])
        assert [s.ids for s in batch] == [s.ids for s in alone]


# Records --------------------------------------------------------------------------------------------------------------


def test_records_count_levels(golden: Target) -> None:
    """Positions of a tree's acceptance are levels: drafted counts nodes, marginal has one entry a level."""
    drafter = load_drafter(GOLDEN / "deepspec-dspark-vanilla", golden)
    sequence = Sequence(list(b"def add(a, b):"), max_new_tokens=40)
    Engine(golden, drafter, tree=parse_tree("2,2,1")).generate([sequence])
    assert {(r.drafted, r.verified, r.depth) for r in sequence.records} == {(10, 10, 3)}
    assert all(len(r.outcomes) == 10 and r.outcomes.count("accepted") == r.accepted for r in sequence.records)
    rates = [e.value for e in marginal(sequence.records)]
    assert len(rates) == 3 and all(a >= b for a, b in pairwise(rates))
    assert len(conditional(sequence.records)) == 3


def test_a_tree_needs_no_more_positions_than_its_depth() -> None:
    """Near the target's last position the tree is cut by levels, and the text still ends where plain decoding does."""
    model = tiny_target(V, **SIZES, max_position_embeddings=16)
    small = Target(model)
    texts = []
    for drafter in (None, "tree"):
        sequence = Sequence([0, 3, 1, 2], max_new_tokens=64)
        if drafter:
            import tempfile

            with tempfile.TemporaryDirectory() as folder:
                loaded = load_drafter(write_drafter(Path(folder) / "d", **SIZES, block=4), small)
                Engine(small, loaded, tree=parse_tree("2,2,2,2")).generate([sequence])
        else:
            Engine(small).generate([sequence])
        texts.append((sequence.ids, sequence.stop_reason))
    assert texts[0] == texts[1]
    assert texts[0][1] == "context"


def test_a_drafter_of_chains_is_refused_by_name(golden: Target) -> None:
    from scripted_drafter import Oracle

    with pytest.raises(SpecdoctorError, match=r"--tree: the drafter oracle proposes chains only"):
        Engine(golden, Oracle([1, 2, 3]), tree=parse_tree("2,1"))


# Drafters without a checkpoint of the block or recurrent kind ---------------------------------------------------------


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal LM that agrees with the target now and then."""
    folder = tmp_path_factory.mktemp("draft-model")
    tiny_target(V, **SIZES, seed=0).save_pretrained(folder)
    model = tiny_target(V, **SIZES, seed=0)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("shape", TREES)
def test_trees_of_a_causal_lm_are_exact_in_greedy(target: Target, draft_model: Path, shape: str) -> None:
    drafter = load_drafter(draft_model, target)
    prompts = [[0, 3, 1], [2, 2, 4, 1, 0], [1]]
    plain = [Sequence(p, max_new_tokens=24) for p in prompts]
    Engine(target).generate(plain)
    for batch in (prompts, prompts[:1]):
        drafted = [Sequence(p, max_new_tokens=24) for p in batch]
        Engine(target, drafter, tree=parse_tree(shape)).generate(drafted)
        assert [s.ids for s in drafted] == [s.ids for s in plain[: len(batch)]]
        assert sum(r.accepted for s in drafted for r in s.records) > 0


def test_a_causal_lm_drafts_each_node_from_its_own_path(target: Target, draft_model: Path) -> None:
    """Logits below a node equal a plain forward of the draft model over text and path."""
    drafter = load_drafter(draft_model, target)
    engine = Engine(target, drafter)
    sequence = Sequence([0, 3, 1, 2], max_new_tokens=24)
    model = drafter.model.model
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(draft_model).eval()
    assert type(plain) is type(model)
    with torch.inference_mode():
        engine.prefill([sequence])
        grown = drafter.expansion([sequence], 3)
        grown.root()
        grown.below(torch.tensor([[4, 2]]), torch.tensor([[0, 0]]))
        logits = grown.below(torch.tensor([[1, 1, 3]]), torch.tensor([[0, 1, 1]]))[0]
        for row, path in zip(logits, ([4, 1], [2, 1], [2, 3]), strict=True):
            wanted = plain(torch.tensor([[*sequence.ids, *path]])).logits[0, -1]
            torch.testing.assert_close(row, wanted, atol=1e-5, rtol=1e-4)
    engine.release([sequence])


def test_sampled_trees_of_a_causal_lm_keep_the_law(target: Target, draft_model: Path) -> None:
    drafter = load_drafter(draft_model, target)
    observed = draw(Engine(target, drafter, tree=SHAPES["sampled 2,2"]), 1.0, "1x", 0, 1.0)
    assert p_value(observed, exact_law(target, Sampling(1.0))) > P_FAIL


def test_a_draft_model_that_runs_out_of_positions_goes_on_with_chains(target: Target, tmp_path: Path) -> None:
    short = tiny_target(V, **SIZES, max_position_embeddings=10)
    short.save_pretrained(tmp_path)
    drafter = load_drafter(tmp_path, target)
    prompts = [[0, 3, 1], [2, 2, 4, 1, 0, 3, 3]]
    plain = [Sequence(p, max_new_tokens=16) for p in prompts]
    Engine(target).generate(plain)
    drafted = [Sequence(p, max_new_tokens=16) for p in prompts]
    Engine(target, drafter, tree=parse_tree("2,2,2")).generate(drafted)
    assert [s.ids for s in drafted] == [s.ids for s in plain]
    assert any(r.drafted == 0 for s in drafted for r in s.records)


def test_a_look_up_merges_what_followed_before(target: Target) -> None:
    drafter = PromptLookupDrafter(prompt_lookup_spec("ngram:2", V), target)
    sequence = Sequence([1, 2, 3, 3, 0, 2, 4, 4, 1, 2], max_new_tokens=8)
    drafter.begin([sequence])
    [draft] = drafter.propose_tree([sequence], parse_tree("nodes=5,depth=3"), 3)
    # After (1, 2) came 3 3 0; after 2 alone came, last of all, 4 4 1.
    assert draft.tokens.tolist() == [3, 3, 0, 4, 4] and draft.parents == (-1, 0, 1, -1, 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_of_a_look_up_are_lossless(target: Target, temperature: float) -> None:
    engine = Engine(target, PromptLookupDrafter(prompt_lookup_spec("ngram", V), target), tree=parse_tree("2,2"))
    if temperature:
        assert p_value(draw(engine, 1.0, "1x", 0, 1.0), exact_law(target, Sampling(1.0))) > P_FAIL
        return
    plain, drafted = (Sequence([0, 3, 1, 0, 3], max_new_tokens=40) for _ in range(2))
    Engine(target).generate([plain])
    engine.generate([drafted])
    assert plain.ids == drafted.ids and any(r.accepted for r in drafted.records)
