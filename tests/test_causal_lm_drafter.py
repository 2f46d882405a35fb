"""The causal LM drafter: what it proposes, which columns it keeps, losslessness."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from causal_lm_models import near_copy, save
from safetensors.torch import load_file, save_file
from test_lossless_sampling import P_FAIL, SETTINGS, SIZES, cheap_draws, draw, exact_law, p_value  # noqa: F401
from tiny_models import tiny_family, tiny_target

from specdoctor.drafters.causal_lm import CausalLMDrafter
from specdoctor.drafters.load import load_drafter
from specdoctor.engine.draft import Draft
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import EnvironmentMissingError, SpecdoctorError
from specdoctor.formats.drafts.read import read_draft
from specdoctor.formats.spec import CausalLMSpec

V = 40
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(V))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("draft") / "small", near_copy(tiny_target(V)))


@pytest.fixture
def drafter(folder: Path, target: Target) -> CausalLMDrafter:
    loaded = load_drafter(folder, target)
    assert isinstance(loaded, CausalLMDrafter)
    return loaded


def dense_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """Logits [V] after `ids` by one plain forward of transformers' own attention over everything."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0, -1]


def dense_draft(folder: Path, ids: list[int], k: int) -> list[int]:
    drafted: list[int] = []
    for _ in range(k):
        drafted.append(int(dense_logits(folder, ids + drafted).argmax()))
    return drafted


# Recognition ------------------------------------------------------------------------------------------------------


def test_the_spec_comes_from_the_config(folder: Path) -> None:
    checkpoint = read_draft(folder)
    spec = checkpoint.spec
    assert isinstance(spec, CausalLMSpec)
    assert (spec.family, spec.algorithm, spec.model_type) == ("causal-lm", "causal-lm", "qwen3")
    assert (spec.hidden_size, spec.vocab_size, len(spec.layers), spec.taps) == (64, V, 2, ())
    assert (spec.layers[0].heads, spec.layers[0].kv_heads, spec.layers[0].head_dim) == (4, 2, 16)
    assert (spec.default_draft, spec.max_draft) == (5, 16)
    assert not [remark for remark in checkpoint.remarks if remark.fatal or remark.kind.startswith("unknown")]
    assert spec.origin["hidden_size"] == "config key hidden_size"


@pytest.mark.parametrize("family", ["GPT2", "OPT", "Gemma2", "Mistral", "GptOss"])
def test_model_classes_with_keys_of_their_own(tmp_path: Path, family: str) -> None:
    model = tiny_family(family)
    spec = read_draft(save(tmp_path, model)).spec
    config = model.config
    assert (spec.hidden_size, spec.vocab_size) == (config.hidden_size, config.vocab_size)
    assert len(spec.layers) == config.num_hidden_layers and spec.layers[0].heads == config.num_attention_heads


def test_a_missing_tensor_is_refused(folder: Path, tmp_path: Path, target: Target) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SpecdoctorError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_drafter(tmp_path, target)


def test_other_rows_without_tokenizers_are_refused(tmp_path: Path, target: Target) -> None:
    save(tmp_path, tiny_target(V + 8))
    with pytest.raises(SpecdoctorError, match=rf"vocab_size is {V + 8}, but the target \w+ has {V}, and .*tokenizer"):
        load_drafter(tmp_path, target)


# What it proposes, and what it reads ------------------------------------------------------------------------------


def begin(drafter: CausalLMDrafter, ids: list[int], sampling: Sampling | None = None) -> Sequence:
    sequence = Sequence(ids[:-1], max_new_tokens=64, sampling=sampling)
    drafter.begin([sequence])
    sequence.ids.append(ids[-1])
    return sequence


@pytest.fixture
def read_rows(drafter: CausalLMDrafter, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every forward of the draft model."""
    rows: list[int] = []
    forward = drafter.model.forward

    def counted(layout, ids, **options):  # type: ignore[no-untyped-def]
        rows.append(len(ids))
        return forward(layout, ids, **options)

    monkeypatch.setattr(drafter.model, "forward", counted)
    return rows


def test_greedy_drafts_are_the_models_own_text(drafter: CausalLMDrafter, folder: Path) -> None:
    (draft,) = drafter.propose([begin(drafter, PROMPT)], 5)
    assert draft.tokens.tolist() == dense_draft(folder, PROMPT, 5)
    assert draft.is_chain and draft.probs is None
    sure = [float(dense_logits(folder, [*PROMPT, *draft.tokens.tolist()[:k]]).softmax(-1).max()) for k in range(5)]
    assert draft.confidence is not None and torch.allclose(draft.confidence, torch.tensor(sure), atol=1e-5)


@pytest.mark.parametrize("accepted", range(6))
def test_columns_of_accepted_drafts_stay(
    drafter: CausalLMDrafter, folder: Path, read_rows: list[int], accepted: int
) -> None:
    """After any acceptance the logits are those of a fresh forward, and only tokens that were never read are read."""
    sequence = begin(drafter, PROMPT)
    drafted = drafter.propose([sequence], 5)[0].tokens.tolist()
    assert read_rows == [len(PROMPT) - 1, 1, 1, 1, 1, 1]  # the prompt, the anchor, four of the five drafts
    correction = (drafted[accepted] + 1) % V if accepted < 5 else 7
    sequence.ids += [*drafted[:accepted], correction]
    read_rows.clear()
    logits = drafter.catch_up([sequence])
    assert read_rows == [1 if accepted < 5 else 2]  # the fifth draft was proposed, but never read
    assert torch.allclose(logits[0], dense_logits(folder, sequence.ids), atol=1e-5)
    again = drafter.propose([sequence], 5)[0].tokens.tolist()  # the anchor alone runs again
    assert again == dense_draft(folder, sequence.ids, 5)


def test_a_second_proposal_on_the_same_text_is_the_same(drafter: CausalLMDrafter) -> None:
    sequence = begin(drafter, PROMPT)
    assert drafter.propose([sequence], 4)[0].tokens.tolist() == drafter.propose([sequence], 4)[0].tokens.tolist()


def test_sampled_drafts_come_with_the_law_they_were_drawn_from(drafter: CausalLMDrafter, folder: Path) -> None:
    sampling = Sampling(0.8, top_k=9, top_p=0.9, draft_temperature="1.5x", seed=4)
    (draft,) = drafter.propose([begin(drafter, PROMPT, sampling)], 3)
    for k, token in enumerate(draft.tokens.tolist()):
        scores = dense_logits(folder, [*PROMPT, *draft.tokens.tolist()[:k]]) / 1.2
        scores[scores < scores.topk(9).values[-1]] = -torch.inf
        law, order = scores.softmax(-1).sort(descending=True)
        law[(law.cumsum(0) - law) >= 0.9] = 0
        expected = torch.zeros(V).scatter(0, order, law / law.sum())
        assert draft.probs is not None and torch.allclose(draft.probs[k], expected, atol=1e-5)
        assert expected[token] > 0


def test_long_prompts_are_read_in_pieces(
    drafter: CausalLMDrafter, folder: Path, read_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdoctor.drafters.causal_lm.PREFILL_ROWS", 5)
    long, short = PROMPT * 2, PROMPT[:3]
    sequences = [Sequence(long, max_new_tokens=8), Sequence(short, max_new_tokens=8)]
    drafter.begin(sequences)
    assert read_rows == [5, 5, 5, 4]  # of 16 and 3, the last piece of the first with the whole second
    logits = drafter.catch_up(sequences)
    for row, ids in zip(logits, (long, short), strict=True):
        assert torch.allclose(row, dense_logits(folder, ids), atol=1e-5)


def test_windows_of_the_draft_model(tmp_path: Path) -> None:
    """Sliding layers look back over kept columns as over fresh ones."""
    target = Target(tiny_family("Mistral"))
    save(tmp_path, tiny_family("Mistral", seed=5))
    drafter = load_drafter(tmp_path, target)
    assert isinstance(drafter, CausalLMDrafter)
    sequence = begin(drafter, PROMPT * 2)
    drafted = drafter.propose([sequence], 6)[0].tokens.tolist()
    assert drafted == dense_draft(tmp_path, PROMPT * 2, 6)
    sequence.ids += [*drafted[:3], 11]
    assert torch.allclose(drafter.catch_up([sequence])[0], dense_logits(tmp_path, sequence.ids), atol=1e-4)


def test_stops_where_it_is_not_sure(drafter: CausalLMDrafter, folder: Path) -> None:
    sequences = [begin(drafter, PROMPT), begin(drafter, [7, 7, 1])]
    whole = drafter.propose(sequences, 6)
    confidences = torch.cat([draft.confidence for draft in whole]).tolist()
    drafter.stop_below = sorted(confidences)[5]
    for draft, cut in zip(whole, drafter.propose(sequences, 6), strict=True):
        expected = next((i for i, c in enumerate(draft.confidence.tolist()) if c < drafter.stop_below), 6)
        assert cut.tokens.tolist() == draft.tokens.tolist()[:expected]
    drafter.stop_below = 1.0
    assert [len(draft) for draft in drafter.propose(sequences, 6)] == [0, 0]


# Losslessness -----------------------------------------------------------------------------------------------------


def plain(target: Target, prompt: list[int], n: int, sampling: Sampling | None = None) -> list[int]:
    sequence = Sequence(prompt, max_new_tokens=n, sampling=sampling)
    Engine(target).generate([sequence])
    return sequence.ids


@pytest.mark.parametrize("stop_below", [None, 0.3, 0.7, 1.0])
def test_greedy_text_is_the_targets(target: Target, drafter: CausalLMDrafter, stop_below: float | None) -> None:
    prompts = [PROMPT, [1], [5, 5, 5, 5], list(range(30))]
    drafter.stop_below = stop_below
    sequences = [Sequence(p, max_new_tokens=40) for p in prompts]
    Engine(target, drafter, draft_tokens=4).generate(sequences)
    assert [s.ids for s in sequences] == [plain(target, p, 40) for p in prompts]
    if stop_below is None:
        accepted = [record.accepted for s in sequences for record in s.records]
        assert {0, 4} < set(accepted)  # rounds that kept nothing, something and everything


def test_a_draft_model_that_is_the_target_has_all_accepted(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(save(tmp_path, tiny_target(V)), target)
    sequence = Sequence(PROMPT, max_new_tokens=31)
    Engine(target, drafter, draft_tokens=5).generate([sequence])
    assert [record.accepted for record in sequence.records] == [5] * 5


def test_a_draft_model_with_fewer_positions_stops_drafting(tmp_path: Path, target: Target) -> None:
    drafter = load_drafter(save(tmp_path, tiny_target(V, max_position_embeddings=16)), target)
    sequences = [Sequence(PROMPT, max_new_tokens=30), Sequence([1, 2] * 9, max_new_tokens=12)]
    Engine(target, drafter, draft_tokens=5).generate(sequences)
    assert sequences[0].ids == plain(target, PROMPT, 30) and sequences[1].ids == plain(target, [1, 2] * 9, 12)
    assert sequences[0].records[0].drafted == 5 and sequences[0].records[-1].drafted == 0
    assert {record.drafted for record in sequences[1].records} == {0}


@pytest.mark.parametrize("stop_below", [None, 0.5])
def test_text_does_not_depend_on_neighbours(target: Target, drafter: CausalLMDrafter, stop_below: float | None) -> None:
    drafter.stop_below = stop_below
    prompts = [PROMPT, [1, 2], [5] * 11]

    def sequences() -> list[Sequence]:
        return [Sequence(p, max_new_tokens=20, sampling=Sampling(0.9, seed=i)) for i, p in enumerate(prompts)]

    together, alone = sequences(), sequences()
    Engine(target, drafter, draft_tokens=3).generate(together)
    for sequence in alone:
        Engine(target, drafter, draft_tokens=3).generate([sequence])
    assert [s.ids for s in together] == [s.ids for s in alone]


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Target, Path]]:
    """The target of the chi-square tests, and a drafter that half agrees with it."""
    model = tiny_target(5, **SIZES)
    yield Target(model), save(tmp_path_factory.mktemp("little"), near_copy(model, noise=0.1))


@pytest.mark.parametrize(("setting", "stop_below"), [*((s, None) for s in SETTINGS), (SETTINGS[1], 0.6)], ids=str)
def test_sampled_text_has_the_targets_law(
    little: tuple[Target, Path], setting: tuple, stop_below: float | None
) -> None:
    target, folder = little
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, CausalLMDrafter)
    drafter.stop_below = stop_below
    observed = draw(Engine(target, drafter, draft_tokens=2), *setting)
    assert p_value(observed, exact_law(target, Sampling(*setting[:1], *setting[2:]))) > P_FAIL


def test_a_stop_that_looks_at_the_token_is_found(little: tuple[Target, Path]) -> None:
    """Negative control: a draft dropped for the token that it is, not for what was known before it was drawn."""
    target, folder = little
    drafter = load_drafter(folder, target)
    honest = drafter.propose

    def choosy(sequences: list[Sequence], budget: int) -> list[Draft]:
        return [
            draft.prefix(next((i for i, q in enumerate(_own_probability(draft)) if q < 0.4), len(draft)))
            for draft in honest(sequences, budget)
        ]

    drafter.propose = choosy  # type: ignore[method-assign]
    observed = draw(Engine(target, drafter, draft_tokens=2), *SETTINGS[0])
    assert p_value(observed, exact_law(target, Sampling(1.0))) < 1e-6


def _own_probability(draft: Draft) -> list[float]:
    assert draft.probs is not None
    return draft.probs.gather(1, draft.tokens[:, None]).squeeze(1).tolist()


# Weights in 8 bits ------------------------------------------------------------------------------------------------


def test_int8_weights_draft_nearly_the_same_and_stay_lossless(target: Target, folder: Path) -> None:
    pytest.importorskip("torchao")
    drafter = load_drafter(folder, target, quantize="int8")
    assert isinstance(drafter, CausalLMDrafter) and drafter.quantized == "int8"
    sequence = begin(drafter, PROMPT)
    difference = (drafter.catch_up([sequence])[0] - dense_logits(folder, PROMPT)).abs().max()
    assert 1e-5 < difference < 0.2  # 8 bits: neither the same weights nor others
    sequences = [Sequence(PROMPT, max_new_tokens=30), Sequence([2, 3], max_new_tokens=20)]
    Engine(target, drafter, draft_tokens=4).generate(sequences)
    assert [s.ids for s in sequences] == [plain(target, PROMPT, 30), plain(target, [2, 3], 20)]


def test_int8_without_torchao_names_the_command(target: Target, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.quantization", None)
    with pytest.raises(EnvironmentMissingError, match=r"pip install 'specdoctor\[quantize\]'"):
        load_drafter(folder, target, quantize="int8")


def test_other_bits_are_refused(target: Target, folder: Path) -> None:
    with pytest.raises(SpecdoctorError, match="--draft-quantize int3: expected int8"):
        load_drafter(folder, target, quantize="int3")
