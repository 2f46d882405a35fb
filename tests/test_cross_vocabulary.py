"""Drafting for a target with another tokenizer: what the two share, how text is expressed, and losslessness."""

import json
from pathlib import Path
from typing import Any

import pytest
import test_lossless_sampling
import torch
from test_lossless_sampling import P_FAIL, SIZES, cheap_draws, draw, exact_law, p_value  # noqa: F401
from tiny_models import tiny_target
from tiny_tokenizers import MERGES, added_entry, base_vocab, tokenizer_json, write
from typer.testing import CliRunner

from specdoctor.cli.app import app
from specdoctor.drafters.causal_lm import CausalLMDrafter
from specdoctor.drafters.load import load_drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.exact_encoder import ExactEncoder
from specdoctor.formats.shared_vocabulary import shared_vocabulary
from specdoctor.formats.tokenizer_files import read_side

MODES = ("intersection", "retokenize")
TEXT = "the ring and the return of the other one, er: é in a string"


def letters_json(pieces: list[str], merges: tuple[str, ...] = ()) -> dict[str, Any]:
    """A BPE over whole characters, ids in the order given."""
    model = {"type": "BPE", "vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": list(merges)}
    return tokenizer_json((), pre_tokenizer=None, decoder=None, model=model)


def other_json() -> dict[str, Any]:
    """A byte-level BPE that shares the bytes and half of the merges with `tokenizer_json()`, under other ids."""
    mine = [*MERGES[::2], ("o", "r"), ("or", "d"), ("Ġ", "f")]
    known = {piece for piece in base_vocab() if len(piece) == 1}
    merges = []
    for left, right in mine:
        if left in known and right in known:
            known.add(left + right)
            merges.append(f"{left} {right}")
    vocab = {piece: i for i, piece in enumerate(sorted(known, reverse=True))}
    specials = ("<s>", "<|im_end|>", "<think>")
    return tokenizer_json(
        (),
        model={"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": None},
        added_tokens=[added_entry(len(vocab) + i, text) for i, text in enumerate(specials)],
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [len(vocab)], "tokens": ["<s>"]}},
        },
    )


def save(folder: Path, tokenizer: dict[str, Any], rows: int, seed: int = 0, **sizes: Any) -> Path:
    tiny_target(rows, seed=seed, **sizes).save_pretrained(folder)
    write(folder / "tokenizer.json", tokenizer)
    write(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"})
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and draft folders with half a vocabulary in common."""
    root = tmp_path_factory.mktemp("pair")
    return save(root / "target", tokenizer_json(), 320), save(root / "draft", other_json(), 304, seed=1)


@pytest.fixture(scope="module")
def target(pair: tuple[Path, Path]) -> Target:
    return Target.load(pair[0], "cpu", "float32")


def loaded(pair: tuple[Path, Path], target: Target, mode: str) -> CausalLMDrafter:
    drafter = load_drafter(pair[1], target, vocabulary=mode)
    assert isinstance(drafter, CausalLMDrafter)
    return drafter


def tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def dense_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0, -1]


# What the two share -----------------------------------------------------------------------------------------------


def test_pairs_have_the_same_text(pair: tuple[Path, Path]) -> None:
    draft, target = read_side(pair[1]), read_side(pair[0])
    sides = shared_vocabulary(draft, target, 304, 320)
    mine, theirs = (json.loads((folder / "tokenizer.json").read_text()) for folder in (pair[1], pair[0]))
    common = mine["model"]["vocab"].keys() & theirs["model"]["vocab"].keys()
    expected = {(mine["model"]["vocab"][piece], theirs["model"]["vocab"][piece]) for piece in common}
    for text in ("<|im_end|>", "<think>"):  # special on both sides; <s> is the draft's alone
        ids = [next(e["id"] for e in data["added_tokens"] if e["content"] == text) for data in (mine, theirs)]
        expected.add((ids[0], ids[1]))
    assert set(sides.pairs) == expected and not sides.equal
    assert 256 < len(expected) < min(len(mine["model"]["vocab"]), len(theirs["model"]["vocab"])) + 2


def test_a_marker_is_not_a_text(tmp_path: Path) -> None:
    """The same characters as a special token on one side and as text on the other are two tokens."""
    ordinary, marker = letters_json(["a", "<s>"]), letters_json(["a"])
    marker["added_tokens"] = [added_entry(1, "<s>")]
    sides = [read_side(write(tmp_path / f"{i}.json", data)) for i, data in enumerate((ordinary, marker))]
    assert shared_vocabulary(*sides, 2, 2).pairs == [(0, 0)]


def test_rows_that_a_model_lacks_are_not_shared(tmp_path: Path) -> None:
    sides = [read_side(write(tmp_path / f"{i}.json", letters_json(["a", "b", "c"]))) for i in range(2)]
    assert shared_vocabulary(*sides, 3, 2).pairs == [(0, 0), (1, 1)]


@pytest.mark.parametrize(
    "data", [b"the ring", "é".encode(), "é".encode()[:1], b"x \xff y", b"the \xc3", b"<think>a", b""]
)
def test_exact_encoder_spells_what_it_is_given(pair: tuple[Path, Path], data: bytes) -> None:
    side = read_side(pair[1])
    assert side.vocabulary is not None
    encoder = ExactEncoder(pair[1], side.vocabulary, 304)
    ids = encoder.encode(data)
    assert encoder.bytes_of(ids) == data
    if data == b"the ring":
        assert ids == tokenizer(pair[1]).encode("the ring", add_special_tokens=False).ids  # its own cut, not any


def test_a_space_put_in_front_is_taken_off(tmp_path: Path) -> None:
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    vocab = {piece: i for i, piece in enumerate(["\u2581", "a", "b", "\u2581a"])}
    for merges, ids in (([], [1, 2]), (["\u2581 a"], [1, 2])):
        model = {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": False}
        data = tokenizer_json((), pre_tokenizer=metaspace, decoder=metaspace, model=model)
        folder = write(tmp_path / "tokenizer.json", data).parent
        side = read_side(folder)
        assert side.vocabulary is not None
        assert ExactEncoder(folder, side.vocabulary, 4).encode(b"ab") == ids


# What it proposes -------------------------------------------------------------------------------------------------


def prompt(pair: tuple[Path, Path]) -> list[int]:
    return tokenizer(pair[0]).encode(TEXT, add_special_tokens=False).ids


def begin(drafter: CausalLMDrafter, ids: list[int], sampling: Sampling | None = None) -> Sequence:
    sequence = Sequence(ids[:-1], max_new_tokens=64, sampling=sampling)
    drafter.begin([sequence])
    sequence.ids.append(ids[-1])
    return sequence


def expressed(pair: tuple[Path, Path], ids: list[int]) -> list[int]:
    """Target ids in the draft's, written down anew: shared pieces as they are, runs of others through its tokenizer."""
    mine, theirs = (json.loads((folder / "tokenizer.json").read_text()) for folder in (pair[1], pair[0]))
    piece_of = {i: piece for piece, i in theirs["model"]["vocab"].items()}
    out, run = [mine["added_tokens"][0]["id"]], b""
    byte_level = tokenizer(pair[0])
    for i in ids:
        if piece_of[i] in mine["model"]["vocab"]:
            out += tokenizer(pair[1]).encode(run.decode(), add_special_tokens=False).ids if run else []
            out.append(mine["model"]["vocab"][piece_of[i]])
            run = b""
        else:
            run += byte_level.decode([i]).encode()
    return out + (tokenizer(pair[1]).encode(run.decode(), add_special_tokens=False).ids if run else [])


def test_the_draft_law_is_renormalised_on_the_intersection(pair: tuple[Path, Path], target: Target) -> None:
    drafter = loaded(pair, target, "auto")
    assert drafter.vocabularies.mode == "intersection"
    ids = prompt(pair)
    (draft,) = drafter.propose([begin(drafter, ids, Sampling(0.9, seed=2))], 3)
    pairs = drafter.vocabularies.facts()["shared"]
    mine, theirs = (read_side(folder).vocabulary for folder in (pair[1], pair[0]))
    assert mine is not None and theirs is not None
    context = expressed(pair, ids)
    for k, token in enumerate(draft.tokens.tolist()):
        weights = (dense_logits(pair[1], context) / 0.9).softmax(-1)
        law = torch.zeros(320)
        for i, text in enumerate(mine.tokens):
            if text in theirs.tokens:
                law[theirs.tokens.index(text)] = weights[i]
        assert (law > 0).sum() == pairs
        assert draft.probs is not None and torch.allclose(draft.probs[k], law / law.sum(), atol=1e-5)
        context.append(mine.tokens.index(theirs.tokens[token]))


@pytest.mark.parametrize("mode", MODES)
def test_columns_of_accepted_drafts_stay(
    pair: tuple[Path, Path], target: Target, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a partial acceptance the logits are those of a fresh forward over the text as the draft model has it."""
    drafter = loaded(pair, target, mode)
    sequence = begin(drafter, prompt(pair))
    drafted = drafter.propose([sequence], 4)[0].tokens.tolist()
    assert drafted
    sequence.ids += [*drafted[:2], tokenizer(pair[0]).encode("ing", add_special_tokens=False).ids[0]]
    rows: list[int] = []
    forward = drafter.model.forward

    def counted(layout: Any, ids: Any, **options: Any) -> Any:
        rows.append(len(ids))
        return forward(layout, ids, **options)

    monkeypatch.setattr(drafter.model, "forward", counted)
    logits = drafter.catch_up([sequence])
    text = sequence.drafter_state.text.ids
    spelled = drafter.vocabularies.sides.draft  # type: ignore[union-attr]
    theirs = read_side(pair[0]).vocabulary
    assert theirs is not None
    wanted = b"".join(theirs.tokens[i] or b"" for i in sequence.ids)
    assert b"".join(spelled.tokens[i] or b"" for i in text) == b"<s>" + wanted
    assert torch.allclose(logits[0], dense_logits(pair[1], text), atol=1e-5)
    assert sum(rows) < 8 < len(text)  # the prompt is not read again
    if mode == "intersection":
        assert text == expressed(pair, sequence.ids)


def test_retokenised_drafts_are_the_draft_models_text(pair: tuple[Path, Path], target: Target) -> None:
    drafter = loaded(pair, target, "retokenize")
    ids = prompt(pair)
    sequence = begin(drafter, ids, Sampling(1.0))
    (draft,) = drafter.propose([sequence], 6)
    assert draft.probs is None and draft.is_chain
    mine, theirs = (read_side(folder).vocabulary for folder in (pair[1], pair[0]))
    assert mine is not None and theirs is not None
    context = [mine.added[min(mine.added)].id, *tokenizer(pair[1]).encode(TEXT, add_special_tokens=False).ids]
    written = b""
    for _ in range(6):
        scores = dense_logits(pair[1], context).clone()
        scores[[i for i in range(304) if i >= mine.size or mine.tokens[i] in (None, b"<s>")]] = -torch.inf
        context.append(int(scores.argmax()))
        written += mine.tokens[context[-1]] or b""
    proposed = b"".join(theirs.tokens[i] or b"" for i in draft.tokens.tolist())
    assert proposed and written.startswith(proposed)
    assert proposed == written or len(draft) == 6  # cut by the budget only


def test_a_long_text_is_not_cut_anew_from_its_start(pair: tuple[Path, Path], target: Target) -> None:
    drafter = loaded(pair, target, "retokenize")
    ids = prompt(pair) * 12
    sequence = begin(drafter, ids)
    sequence.ids += tokenizer(pair[0]).encode(" and then", add_special_tokens=False).ids
    drafter.catch_up([sequence])
    text = sequence.drafter_state.text
    assert text.settled > len(text.ids) - 100
    tail = text.ids[1:]
    assert tail == tokenizer(pair[1]).encode(TEXT * 12 + " and then", add_special_tokens=False).ids


# Losslessness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_greedy_text_is_the_targets(pair: tuple[Path, Path], target: Target, mode: str) -> None:
    drafter = loaded(pair, target, mode)
    prompts = [prompt(pair), [300], [10, 290, 289], prompt(pair)[:5]]  # markers too, of one side alone
    sequences = [Sequence(p, max_new_tokens=24) for p in prompts]
    Engine(target, drafter, draft_tokens=4).generate(sequences)
    for ids, sequence in zip(prompts, sequences, strict=True):
        plain = Sequence(ids, max_new_tokens=24)
        Engine(target).generate([plain])
        assert sequence.ids == plain.ids
    assert any(record.drafted for s in sequences for record in s.records)


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Path]:
    """Five target tokens a, b, c, ab, d; a drafter with c, x, a, bc, b: three in common, one of text it cannot say."""
    root = tmp_path_factory.mktemp("little")
    target = save(root / "target", letters_json(["a", "b", "c", "ab", "d"], ("a b",)), 5, **SIZES)
    draft = save(root / "draft", letters_json(["c", "x", "a", "bc", "b"], ("b c",)), 5, seed=0, **SIZES)
    return Target.load(target, "cpu", "float32"), draft


SETTINGS = [(1.0, "1x", 0, 1.0), (0.8, "1.4x", 3, 0.9)]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_sampled_text_has_the_targets_law(
    little: tuple[Target, Path], mode: str, setting: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "retokenize":  # a tokenizer at work in every round
        monkeypatch.setattr(test_lossless_sampling, "DRAWS", 10_000)
    target, folder = little
    engine = Engine(target, load_drafter(folder, target, vocabulary=mode), draft_tokens=2)
    law = exact_law(target, Sampling(*setting[:1], *setting[2:]))
    assert p_value(draw(engine, *setting), law) > P_FAIL


def test_a_law_that_is_not_renormalised_is_found(little: tuple[Target, Path]) -> None:
    """Negative control: tokens drawn on the intersection, judged by the draft model's law over its whole vocabulary."""
    target, folder = little
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, CausalLMDrafter)
    ways = drafter.vocabularies
    narrow, spread, mass = ways.narrow, ways.spread, [torch.ones(1)]  # type: ignore[union-attr]

    def weighed(logits: torch.Tensor) -> torch.Tensor:
        shared = torch.tensor([draft_id for draft_id, _ in ways.sides.pairs])  # type: ignore[union-attr]
        mass[0] = logits.softmax(-1)[:, shared].sum(-1, keepdim=True)
        return narrow(logits)

    ways.narrow = weighed  # type: ignore[method-assign]
    ways.spread = lambda q: spread(q) * mass[0]  # type: ignore[union-attr, method-assign]
    observed = draw(Engine(target, drafter, draft_tokens=2), *SETTINGS[0])
    assert p_value(observed, exact_law(target, Sampling(1.0))) < 1e-6


# Which way is taken -----------------------------------------------------------------------------------------------


def test_equal_tokenizers_with_other_padding_go_by_ids(tmp_path: Path, target: Target) -> None:
    draft = save(tmp_path, tokenizer_json(), 300, seed=1)
    drafter = load_drafter(draft, target)
    assert isinstance(drafter, CausalLMDrafter)
    assert drafter.vocabularies.facts() == {"mode": "equal", "shared": 300, "note": None}
    sequences = [Sequence([5, 310, 7], max_new_tokens=12, sampling=Sampling(1.0, seed=i)) for i in range(3)]
    drafter.begin(sequences)  # id 310 has no row in the draft model
    for draft_ in drafter.propose(sequences, 4):
        assert draft_.probs is not None and draft_.probs.shape == (4, 320)
        assert torch.allclose(draft_.probs.sum(-1), torch.ones(4), atol=1e-5)


def test_nothing_in_common_is_refused(tmp_path: Path, little: tuple[Target, Path]) -> None:
    folder = save(tmp_path, letters_json(["1", "2", "3"]), 3, **SIZES)
    with pytest.raises(SpecdoctorError, match="no token in common with the target target; run `specdoctor check-token"):
        load_drafter(folder, little[0])


def test_a_way_that_needs_tokenizers_without_them(tmp_path: Path, little: tuple[Target, Path]) -> None:
    tiny_target(5, **SIZES).save_pretrained(tmp_path)
    with pytest.raises(SpecdoctorError, match=r"--vocabulary retokenize: .* has no tokenizer files"):
        load_drafter(tmp_path, little[0], vocabulary="retokenize")
    with pytest.raises(SpecdoctorError, match="--vocabulary both: expected one of auto, intersection, retokenize"):
        load_drafter(tmp_path, little[0], vocabulary="both")


@pytest.mark.parametrize("mode", MODES)
def test_the_commands_say_what_is_shared(pair: tuple[Path, Path], tmp_path: Path, mode: str) -> None:
    target, draft = map(str, pair)
    prompts = write(tmp_path / "prompts.jsonl", json.dumps({"id": "a", "prompt": TEXT}))
    out = tmp_path / "out.json"
    common = ["--target", target, "--draft", draft, "--template", "none", "--max-new-tokens", "10"]
    how = ["--vocabulary", mode, "--json", str(out)]
    runner = CliRunner()
    result = runner.invoke(app, ["bench", "--prompts", str(prompts), *common, *how])
    assert result.exit_code == 0, result.stderr
    (row,) = [arm["draft"] for arm in json.loads(out.read_text())["arms"] if arm["name"] == "draft"]
    shared = row["vocabulary"]["shared"]
    assert row["vocabulary"]["mode"] == mode and shared > 256
    assert f"{shared} tokens in common" in " ".join(result.stderr.split())
    result = runner.invoke(app, ["generate", TEXT, *common, *how])
    assert result.exit_code == 0, result.stderr
    assert json.loads(out.read_text())["vocabulary"]["shared"] == shared
    assert f"{shared} tokens in common" in " ".join(result.stderr.split())
