"""`check-tokenizer` from end to end: verdicts of good pairs, each fault named, exit codes, one line for bad input."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers as tiny
from typer.testing import CliRunner

from specdoctor.checks import registry
from specdoctor.checks.registry import Check
from specdoctor.cli.app import app


def run(target: Path, drafter: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of the command."""
    result = CliRunner().invoke(app, ["check-tokenizer", str(target), str(drafter), "--json", "-"])
    return result.exit_code, json.loads(result.stdout)


def serious(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [f for f in document["findings"] if f["severity"] != "info"]


def finding(document: dict[str, Any], code: str, **where: str) -> dict[str, Any]:
    matches = [f for f in document["findings"] if f["code"] == code and where.items() <= f["where"].items()]
    assert matches, [f["title"] for f in document["findings"]]
    return matches[0]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny.model_folder(tmp_path / "target")


# Pairs with nothing wrong


def test_same_files_are_identical(target: Path, tmp_path: Path) -> None:
    code, document = run(target, tiny.model_folder(tmp_path / "drafter"))
    assert (code, document["verdict"], document["findings"]) == (0, "identical", [])
    assert document["counts"]["same_ids"] == document["counts"]["target_tokens"] == tiny.TOKENS


def test_drafter_without_tokenizer_is_bound_and_clean(target: Path, tmp_path: Path) -> None:
    code, document = run(target, tiny.block_drafter(tmp_path / "drafter"))
    assert (code, document["verdict"], serious(document)) == (0, "identical", [])
    assert {f["code"] for f in document["findings"]} == {"SD108", "SD110"}  # both information


def test_padded_embedding_is_padding_only(target: Path, tmp_path: Path) -> None:
    rows = tiny.ROWS + 64
    drafter = tiny.model_folder(
        tmp_path / "drafter", config={"vocab_size": rows}, tensors={"model.embed_tokens.weight": tiny.embedding(rows)}
    )
    code, document = run(target, drafter)
    assert (code, document["verdict"], serious(document)) == (0, "padding-only", [])
    evidence = finding(document, "SD102")["evidence"]
    assert (evidence["target_rows"], evidence["drafter_rows"], evidence["target_tokens"]) == (320, 384, tiny.TOKENS)
    assert finding(document, "SD102")["fault"] == "tokenizer.vocab-padding"


@pytest.mark.parametrize(
    "specials",
    [(*tiny.SPECIALS, "<|new_and_unused|>"), (*tiny.SPECIALS[:4], "<|spare_0|>", *tiny.SPECIALS[5:])],
    ids=["one more at the end", "another place-holder"],
)
def test_unused_added_tokens_raise_no_alarm(target: Path, tmp_path: Path, specials: tuple[str, ...]) -> None:
    code, document = run(target, tiny.model_folder(tmp_path / "drafter", tiny.tokenizer_json(specials)))
    assert (code, document["verdict"], serious(document)) == (0, "padding-only", [])
    assert document["counts"]["idle_ids"] == 1


def make_gguf(folder: Path) -> Path:
    return tiny.gguf_file(folder / "model.gguf")


def make_tokenizer_json(folder: Path) -> Path:
    return tiny.write(folder / "tokenizer.json", tiny.tokenizer_json())


def make_tiktoken(folder: Path) -> Path:
    return tiny.tiktoken_file(folder / "ranks.tiktoken")


def make_vocab_and_merges(folder: Path) -> Path:
    data = tiny.tokenizer_json()
    tiny.write(folder / "vocab.json", data["model"]["vocab"])
    tiny.write(folder / "merges.txt", "#version: 0.2\n" + "\n".join(data["model"]["merges"]) + "\n")
    tiny.write(folder / "added_tokens.json", {entry["content"]: entry["id"] for entry in data["added_tokens"]})
    tiny.write(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    return folder


@pytest.mark.parametrize("make", [make_gguf, make_tokenizer_json, make_tiktoken, make_vocab_and_merges])
@pytest.mark.parametrize("swap", [False, True], ids=["drafter", "target"])
def test_same_vocabulary_in_another_kind_of_file(
    target: Path, tmp_path: Path, make: Callable[[Path], Path], swap: bool
) -> None:
    (tmp_path / "other").mkdir()
    sides = [target, make(tmp_path / "other")]
    code, document = run(*(reversed(sides) if swap else sides))
    assert code == 0, document["findings"]
    # A rank file cannot name the added tokens, so its table is shorter.
    assert document["verdict"] == ("padding-only" if make is make_tiktoken else "identical")


# Faults: tokenizer.id-map


def swapped(data: dict[str, Any], left: str, right: str, in_model: bool = False) -> dict[str, Any]:
    entries = {entry["content"]: entry for entry in data["added_tokens"]}
    entries[left]["id"], entries[right]["id"] = entries[right]["id"], entries[left]["id"]
    if in_model:
        data["model"]["vocab"].update({left: entries[right]["id"], right: entries[left]["id"]})
    return data


def test_swapped_chat_markers_are_named_and_weighted(target: Path, tmp_path: Path) -> None:
    drafter = tiny.model_folder(tmp_path / "drafter", swapped(tiny.tokenizer_json(), "<|im_start|>", "<|im_end|>"))
    code, document = run(target, drafter)
    assert (code, document["verdict"]) == (1, "ids-differ")
    found = finding(document, "SD101", side="drafter", file="tokenizer.json")
    assert (found["severity"], found["fault"], found["evidence"]["differing"]) == ("error", "tokenizer.id-map", 2)
    first = {entry["id"]: entry for entry in document["differing_ids"]}[tiny.IM_START]
    assert (first["target"], first["drafter"]) == ("<|im_start|>", "<|im_end|>")
    assert first["count"] > 0  # from the rendered conversations
    assert 0 < found["evidence"]["weight"] < 0.2
    assert finding(document, "SD103")["evidence"]["role"] == "eos"  # its id moved along


def test_inserted_token_shifts_all_later_ids(target: Path, tmp_path: Path) -> None:
    specials = (tiny.SPECIALS[0], "<|inserted|>", *tiny.SPECIALS[1:])
    code, document = run(target, tiny.model_folder(tmp_path / "drafter", tiny.tokenizer_json(specials)))
    assert (code, document["verdict"]) == (1, "ids-differ")
    found = finding(document, "SD101")
    assert found["severity"] == "error"
    assert set(found["evidence"]["by_reason"]) <= {"same token at another id", "special token in use"}
    assert {entry["id"] for entry in document["differing_ids"]} >= {tiny.IM_START, tiny.IM_END}


def test_swapped_ordinary_tokens_are_weighted_by_their_use(target: Path, tmp_path: Path) -> None:
    data = tiny.tokenizer_json()
    vocab = data["model"]["vocab"]
    vocab["Ġthe"], vocab["he"] = vocab["he"], vocab["Ġthe"]
    code, document = run(target, tiny.model_folder(tmp_path / "drafter", data))
    assert (code, document["verdict"], document["counts"]["differing_ids"]) == (1, "ids-differ", 2)
    the, he = document["differing_ids"]
    assert the["target"] == " the" and the["count"] > he["count"] > 0  # sorted by use
    weight = (the["count"] + he["count"]) / document["sample"]["tokens"]
    assert document["counts"]["differing_weight"] == pytest.approx(weight)


def test_place_holder_that_the_template_uses_is_an_error(target: Path, tmp_path: Path) -> None:
    specials = (*tiny.SPECIALS[:4], "<|turn|>", *tiny.SPECIALS[5:])
    template = tiny.TEMPLATE.replace("<|im_end|>", "<|turn|>")
    other = tiny.model_folder(tmp_path / "other", tiny.tokenizer_json(specials), template=template)
    code, document = run(other, target)
    assert (code, document["verdict"]) == (1, "ids-differ")
    assert document["differing_ids"][0]["target"] == "<|turn|>"


def test_files_that_contradict_each_other(target: Path, tmp_path: Path) -> None:
    data = tiny.tokenizer_json()
    data["model"]["vocab"] |= {"<|im_start|>": tiny.IM_END, "<|im_end|>": tiny.IM_START}
    code, document = run(target, tiny.model_folder(tmp_path / "drafter", data))
    assert code == 1
    assert finding(document, "SD104", side="drafter")["evidence"]["conflicts"] == 2


def test_token_of_the_prompts_that_the_drafter_lacks(target: Path, tmp_path: Path) -> None:
    code, document = run(target, tiny.model_folder(tmp_path / "drafter", tiny.tokenizer_json(tiny.SPECIALS[:6])))
    assert code == 1
    found = finding(document, "SD104")
    assert [example["token"] for example in found["evidence"]["examples"]] == ["<think>", "</think>"]


def test_other_family(target: Path, tmp_path: Path) -> None:
    words = [
        "the",
        "of",
        "and",
        "a",
        "to",
        "in",
        "is",
        "you",
        "that",
        "it",
        "he",
        "was",
        "for",
        "on",
        "are",
        "as",
        "with",
        "his",
        "they",
        "I",
        "at",
        "be",
        "this",
        "have",
        "from",
    ]
    model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(["[UNK]", *words])}, "unk_token": "[UNK]"}
    data = tiny.tokenizer_json((), model=model, pre_tokenizer={"type": "Whitespace"}, decoder=None, added_tokens=[])
    drafter = tiny.write(tmp_path / "words" / "tokenizer.json", data)
    code, document = run(target, drafter)
    assert (code, document["verdict"]) == (1, "different-families")
    assert document["string_mapping"]["of_vocabulary"] < 0.1
    assert document["string_mapping"]["of_sample"] is not None
    assert finding(document, "SD101")["evidence"]["same_share"] < 0.1


def test_other_normaliser_and_other_pre_tokenizer(target: Path, tmp_path: Path) -> None:
    normalised = tiny.model_folder(tmp_path / "nfc", tiny.tokenizer_json(normalizer={"type": "NFC"}))
    code, document = run(target, normalised)
    evidence = finding(document, "SD105")["evidence"]
    assert code == 1 and 0 < evidence["normalised_differently"] == evidence["different"] < 5  # only decomposed texts
    split = {"type": "Split", "pattern": {"Regex": r"\s"}, "behavior": "Isolated", "invert": False}
    spaces = {"type": "Sequence", "pretokenizers": [split, {**tiny.BYTE_LEVEL, "use_regex": False}]}
    code, document = run(target, tiny.model_folder(tmp_path / "split", tiny.tokenizer_json(pre_tokenizer=spaces)))
    evidence = finding(document, "SD105")["evidence"]
    assert code == 1 and evidence["normalised_differently"] == 0 < evidence["different"]


def test_other_end_of_text(target: Path, tmp_path: Path) -> None:
    drafter = tiny.block_drafter(tmp_path / "drafter", {"eos_token_id": [5, 6]})
    code, document = run(target, drafter)
    assert (code, finding(document, "SD103")["evidence"]) == (1, {"target_eos": [tiny.IM_END], "drafter_eos": [5, 6]})


# Faults: tokenizer.vocab-padding


def test_configuration_that_lies_about_the_tensor(target: Path, tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": tiny.embedding(tiny.ROWS - 8)}
    code, document = run(target, tiny.model_folder(tmp_path / "drafter", tensors=tensors))
    found = finding(document, "SD102", side="drafter", key="vocab_size")
    assert (code, found["severity"]) == (1, "error")
    assert found["evidence"] == {"declared": 320, "rows": 312, "difference": -8}


def test_rows_missing_for_tokens_in_use(target: Path, tmp_path: Path) -> None:
    code, document = run(target, tiny.block_drafter(tmp_path / "drafter", {"vocab_size": 256, "mask_token_id": 255}))
    assert (code, document["verdict"]) == (1, "ids-differ")
    missing = finding(document, "SD102")["evidence"]
    assert (
        missing["ids_without_row"] == document["counts"]["differing_ids"] == tiny.BASE - 256 + 5
    )  # specials in use: 5


# Faults: tokenizer.mask-token


@pytest.mark.parametrize(
    ("config", "severity", "words"),
    [
        ({"mask_token_id": tiny.IM_END}, "warning", "is also eos"),
        ({"mask_token_id": tiny.ENDOFTEXT}, "warning", "is also pad"),
        ({"mask_token_id": tiny.ROWS + 3}, "error", "beyond the 320 rows"),
        ({"mask_token_id": -1}, "error", "mask id -1"),
        ({"mask_token_id": "absent"}, "error", "needs a mask token"),
        ({"mask_token_id": "<|MASK|>"}, "error", "expected a token id"),
        ({"mask_token_id": 300, "dflash_config": {"mask_token_id": 301}}, "error", "disagree"),
        ({"mask_token_id": ord("e")}, "warning", "token of ordinary texts"),
        ({"mask_token_id": tiny.FIM}, None, ""),
        ({"mask_token_id": tiny.EXTRA_0}, None, ""),
    ],
)
def test_mask_token(target: Path, tmp_path: Path, config: dict[str, Any], severity: str | None, words: str) -> None:
    code, document = run(target, tiny.block_drafter(tmp_path / "drafter", config))
    found = [f for f in serious(document) if f["code"] == "SD108"]
    assert code == (1 if severity else 0)
    assert [f["severity"] for f in found] == ([severity] if severity else [])
    assert not found or (words in found[0]["title"] and found[0]["fault"] == "tokenizer.mask-token")


@pytest.mark.parametrize(("value", "words"), [(0.0, "is zero"), (float("nan"), "NaN")])
@pytest.mark.parametrize("owner", ["target", "drafter"])
def test_broken_mask_row_is_read_from_the_embedding_in_use(
    tmp_path: Path, value: float, words: str, owner: str
) -> None:
    mask = tiny.TOKENS + 2
    broken = tiny.embedding()
    broken[mask] = value
    tensors = {"model.embed_tokens.weight": broken if owner == "target" else tiny.embedding()}
    target = tiny.model_folder(tmp_path / "target", tensors=tensors)
    own = {"embed_tokens.weight": broken if owner == "drafter" else tiny.embedding()}
    drafter = tiny.block_drafter(tmp_path / "drafter", tensors=own if owner == "drafter" else None)
    code, document = run(target, drafter)
    found = finding(document, "SD108", key="mask_token_id")
    assert (
        code == 1 and words in [f for f in document["findings"] if f["code"] == "SD108"][-1]["title"] + found["title"]
    )


# Faults: prompt.chat-template


def test_stripped_think_suffix_shows_as_token_diff(tmp_path: Path) -> None:
    served = tiny.TEMPLATE.replace("<think>\n\n</think>\n\n", "")
    target = tiny.model_folder(tmp_path / "target", template=served)
    code, document = run(target, tiny.model_folder(tmp_path / "drafter"))
    found = finding(document, "SD106")
    assert (code, document["verdict"], found["severity"]) == (1, "identical", "warning")
    (difference,) = found["evidence"]["examples"]
    assert (difference["conversation"], difference["target"]) == ("thinking off", [])
    assert difference["drafter"][0] == "<think>" and "</think>" in difference["drafter"]
    assert found["fault"] == "prompt.chat-template"


def test_template_in_other_words_is_information(target: Path, tmp_path: Path) -> None:
    code, document = run(target, tiny.model_folder(tmp_path / "drafter", template="{# ours #}" + tiny.TEMPLATE))
    assert (code, finding(document, "SD106")["severity"]) == (0, "info")


def test_template_that_refuses_is_a_difference(target: Path, tmp_path: Path) -> None:
    refusing = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + tiny.TEMPLATE
    )
    code, document = run(target, tiny.model_folder(tmp_path / "drafter", template=refusing))
    (difference,) = finding(document, "SD106")["evidence"]["examples"]
    assert code == 1 and difference["drafter"] == "refused: no system turn"


# The command


def test_crashed_check_does_not_stop_the_others(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(pair: Any) -> list[Any]:
        raise ZeroDivisionError("planted")

    real = registry.load
    broken = Check("SD101", "planted", "static", explode)
    monkeypatch.setattr(registry, "load", lambda code: broken if code == "SD101" else real(code))
    code, document = run(target, tiny.block_drafter(tmp_path / "drafter"))
    assert code == 3
    crash = finding(document, "SD101")
    assert (crash["severity"], crash["evidence"]["exception"]) == ("crash", "ZeroDivisionError")
    assert finding(document, "SD110")


def test_fingerprint_survives_other_numbers_and_folders(tmp_path: Path) -> None:
    prints = set()
    for name, rows in (("a", 312), ("b", 304)):
        target = tiny.model_folder(tmp_path / name / "target")
        drafter = tiny.model_folder(
            tmp_path / name / "drafter", tensors={"model.embed_tokens.weight": tiny.embedding(rows)}
        )
        prints.add(finding(run(target, drafter)[1], "SD102", key="vocab_size")["fingerprint"])
    assert len(prints) == 1
