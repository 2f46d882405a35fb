"""Readers of tokenizer files: every kind to the same bytes, reduced encoders to the same ids as the whole tokenizer."""

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tiny_tokenizers as tiny
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from specdoctor.checks.text_sample import bundled_sample
from specdoctor.checks.tokenizer_examination import examine_tokenizers
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.gguf_header import GgufHeader
from specdoctor.formats.merges_text import MergesText, load_tokenizer_json
from specdoctor.formats.sentencepiece_model import BYTE, CONTROL, NORMAL, UNKNOWN, encoder_from_pieces
from specdoctor.formats.split_patterns import pre_tokenizer_of
from specdoctor.formats.tensor_headers import read_integers, read_row, safetensors_places
from specdoctor.formats.text_encoder import GENERIC_PATTERN, encoder_from_ranks, encoder_from_tokenizer_json
from specdoctor.formats.tokenizer_files import read_side
from specdoctor.formats.vocabulary import (
    Segmentation,
    Vocabulary,
    bytes_of_byte_level,
    bytes_of_sentencepiece,
    is_unused_slot,
)

TEXTS = [*bundled_sample().texts, "", " ", "<|im_start|>user\nHello<|im_end|>\n", "the\u2581the  the", "x" * 70]


def vocabulary(path: Path) -> Vocabulary:
    found = read_side(path).vocabulary
    assert found is not None
    return found


# Canonical bytes


def test_each_alphabet_reduces_to_bytes() -> None:
    assert bytes_of_byte_level("Ġthe") == b" the"
    assert bytes_of_byte_level("Ã©") == "é".encode()
    assert bytes_of_byte_level("<｜begin▁of▁sentence｜>") == "<｜begin▁of▁sentence｜>".encode()  # outside the alphabet
    assert bytes_of_sentencepiece("▁the") == b" the"
    assert bytes_of_sentencepiece("<0xE2>") == b"\xe2"
    assert bytes_of_sentencepiece("<0xZZ>") == b"<0xZZ>"


@pytest.mark.parametrize(
    "token", ["<unused12>", "<|reserved_special_token_3|>", "[PAD151669]", "<extra_id_0>", "<|extra_0|>"]
)
def test_place_holders_are_known(token: str) -> None:
    assert is_unused_slot(token.encode())


@pytest.mark.parametrize("token", ["<|im_start|>", "<pad>", "[INST]", "padding 12", "<think>", "<|fim_pad|>"])
def test_real_tokens_are_no_place_holders(token: str) -> None:
    assert not is_unused_slot(token.encode())


def test_every_kind_of_file_gives_the_same_table(tmp_path: Path) -> None:
    whole = vocabulary(tiny.write(tmp_path / "tokenizer.json", tiny.tokenizer_json()))
    assert whole.size == tiny.TOKENS and whole.family == "byte-level BPE"
    assert whole.tokens[ord(" ")] == b" " and whole.tokens[tiny.IM_START] == b"<|im_start|>"
    gguf = vocabulary(tiny.gguf_file(tmp_path / "model.gguf"))
    assert gguf.tokens == whole.tokens and gguf.declared_rows == tiny.ROWS
    assert {token.text for token in gguf.added.values()} == set(tiny.SPECIALS)
    ranks = vocabulary(tiny.tiktoken_file(tmp_path / "ranks.tiktoken"))
    assert ranks.tokens == whole.tokens[: tiny.BASE] and not ranks.lists_added


def test_tekken_puts_special_tokens_first(tmp_path: Path) -> None:
    entries = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode()} for i in range(256)]
    data = {
        "config": {"pattern": GENERIC_PATTERN, "default_vocab_size": 266, "default_num_special_tokens": 10},
        "vocab": entries,
    }
    found = vocabulary(tiny.write(tmp_path / "tekken.json", data))
    assert found.tokens[1] == b"<s>" and found.tokens[10 + ord("a")] == b"a"
    assert found.encoder_for is not None and found.encoder_for(["ab"]).encode_batch(["ab"]) == [[10 + 97, 10 + 98]]


# Hugging Face folders


def test_roles_template_and_late_tokens_of_a_folder(tmp_path: Path) -> None:
    folder = tiny.model_folder(tmp_path / "model", template=None)
    settings = {
        "eos_token": {"content": "<|im_end|>"},
        "unk_token": "<|nowhere|>",
        "chat_template": [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}],
        "added_tokens_decoder": {str(tiny.TOKENS + 1): {"content": "<|late|>", "special": True}},
    }
    tiny.write(folder / "tokenizer_config.json", settings)
    tiny.write(folder / "special_tokens_map.json", {"bos_token": "<|im_start|>", "eos_token": "<|fim|>"})
    tiny.write(folder / "generation_config.json", {"eos_token_id": [3, 4]})
    side = read_side(folder)
    assert side.vocabulary is not None
    assert {name: role.id for name, role in side.roles.items()} == {
        "eos": tiny.IM_END,
        "unk": None,
        "bos": tiny.IM_START,
    }
    assert side.eos_ids() == {tiny.IM_END, 3, 4}
    assert (side.chat_template, side.template_file) == ("A", "tokenizer_config.json")
    assert side.vocabulary.tokens[tiny.TOKENS :] == [None, b"<|late|>"]


def test_rows_come_from_the_models_own_tensors(tmp_path: Path) -> None:
    tensors = {"model.layers.61.embed_tokens.weight": tiny.embedding(7), "model.embed_tokens.weight": tiny.embedding(9)}
    facts = read_side(tiny.model_folder(tmp_path / "model", tensors=tensors)).facts
    assert facts.rows("embedding") == 9 and facts.rows("head") is None


def test_folder_with_one_gguf_is_that_gguf(tmp_path: Path) -> None:
    tiny.gguf_file(tmp_path / "model.gguf")
    assert vocabulary(tmp_path).kind == "gguf"


def test_pickles_are_named_not_read(tmp_path: Path) -> None:
    tiny.write(tmp_path / "config.json", {"vocab_size": 10})
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04not a pickle")
    assert read_side(tmp_path).facts.unread == ["pytorch_model.bin"]


# GGUF


def test_header_agrees_with_the_reference_reader(tmp_path: Path) -> None:
    import gguf

    path = tiny.gguf_file(tmp_path / "model.gguf", mask=300, architecture="dflash")
    ours, reference = GgufHeader(path), gguf.GGUFReader(path)
    for name, entry in reference.fields.items():
        if not name.startswith("GGUF."):
            assert ours.get(name) == entry.contents(), name
    (tensor,) = reference.tensors
    place = ours.tensors[tensor.name]
    assert (place.offset, place.shape) == (tensor.data_offset, (tiny.ROWS, 8))
    assert [entry.value for entry in read_side(path).facts.mask_ids] == [300]


def test_any_cut_of_a_header_is_one_clear_error(tmp_path: Path) -> None:
    whole = tiny.gguf_file(tmp_path / "model.gguf").read_bytes()
    weights = GgufHeader(tmp_path / "model.gguf").tensors["token_embd.weight"].offset
    path, chooser = tmp_path / "cut.gguf", random.Random(3)
    for size in [1, 4, 23, 24, weights, *(chooser.randrange(24, weights) for _ in range(40))]:
        path.write_bytes(whole[:size])
        with pytest.raises(SpecdoctorError, match=r"cut\.gguf"):
            read_side(path)


def test_unknown_pre_tokenizer_is_not_guessed(tmp_path: Path) -> None:
    found = vocabulary(tiny.gguf_file(tmp_path / "model.gguf", pre="somebody-elses"))
    assert not found.encoder_is_exact and found.encoder_for is not None  # good for frequencies
    assert pre_tokenizer_of("qwen2") is not None


def test_quantised_rows_are_read_one_by_one(tmp_path: Path) -> None:
    import gguf

    values = np.random.default_rng(0).standard_normal((4, 64)).astype("f4")
    quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(str(tmp_path / "q.gguf"), "llama")
    writer.add_tensor("token_embd.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    place = read_side(tmp_path / "q.gguf").facts.tensors["embedding"]
    row = read_row(place, 2)
    assert place.rows == 4 and row is not None and np.abs(row - values[2]).max() < 0.03


def test_safetensors_rows_in_every_float(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    values = torch.randn(5, 6)
    for dtype, bound in ((torch.float32, 0), (torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.float64, 1e-7)):
        path = tmp_path / f"{dtype}.safetensors"
        save_torch({"w": values.to(dtype), "ids": torch.tensor([3, -1]), "flags": torch.tensor([True, False])}, path)
        places = safetensors_places(path)
        row = read_row(places["w"], 3)
        assert row is not None and np.abs(row - values[3].numpy()).max() <= bound
    assert read_row(places["w"], 5) is None
    ids, flags = read_integers(places["ids"]), read_integers(places["flags"])
    assert ids is not None and ids.tolist() == [3, -1] and flags is not None and flags.tolist() == [True, False]


# Encoders: the same ids as the whole tokenizer


def unigram_json() -> dict[str, Any]:
    pieces = [
        ["<unk>", 0.0],
        ["▁", -2.0],
        ["▁the", -3.0],
        ["the", -4.0],
        ["t", -6.0],
        ["h", -6.5],
        ["e", -5.0],
        ["he", -5.5],
    ]
    pieces += [
        ["zzzz", -30.0],
        ["▁an", -4.5],
        ["an", -5.2],
        ["a", -5.1],
        ["n", -5.3],
        *([c, -7.0] for c in "bcdfgiklmoprsuw"),
    ]
    return {
        "added_tokens": [tiny.added_entry(40, "<|im_start|>"), tiny.added_entry(0, "<unk>")],
        "normalizer": {"type": "NFKC"},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False},
    }


def wordpiece_json() -> dict[str, Any]:
    words = ["[UNK]", "the", "##the", "t", "##h", "##e", "an", "##d", "s", "##a", "##i", "h", "e", "##n", "##ing"]
    return {
        "added_tokens": [],
        "normalizer": {"type": "BertNormalizer", "lowercase": True, "clean_text": True, "handle_chinese_chars": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "vocab": {w: i for i, w in enumerate(words)}, "unk_token": "[UNK]",
                  "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    }  # fmt: skip


def byte_fallback_json() -> dict[str, Any]:
    vocab = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "n"), ("é", "t"), ("▁", "▁")]
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyzé\n", *(left + right for left, right in merges)]:
        vocab.setdefault(piece, len(vocab))
    spaces = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    return {
        "added_tokens": [tiny.added_entry(0, "<unk>"), tiny.added_entry(len(vocab), "<|im_start|>")],
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "vocab": vocab, "merges": [list(m) for m in merges], "unk_token": "<unk>",
                  "byte_fallback": True, "fuse_unk": True},
    }  # fmt: skip


def whole_words_json() -> dict[str, Any]:
    data = tiny.tokenizer_json()
    data["model"]["vocab"]["Ġbaker"] = tiny.BASE  # no merge leads there
    for entry in data["added_tokens"]:
        entry["id"] += 1
    data["model"]["ignore_merges"] = True
    return data


@pytest.mark.parametrize(
    "make", [tiny.tokenizer_json, whole_words_json, unigram_json, wordpiece_json, byte_fallback_json]
)
def test_reduced_encoder_gives_the_ids_of_the_whole_tokenizer(make: Any) -> None:
    data = {"version": "1.0", "truncation": None, "padding": None, "post_processor": None, **make()}
    whole = Tokenizer.from_str(json.dumps(data))
    expected = [encoding.ids for encoding in whole.encode_batch(TEXTS, add_special_tokens=False)]
    if make is unigram_json:  # `tokenizers` itself ignores the id that the file declares for this token
        assert {i for row in expected for i in row} & {len(data["model"]["vocab"])}
        expected = [[40 if i == len(data["model"]["vocab"]) else i for i in row] for row in expected]
    assert encoder_from_tokenizer_json(data, TEXTS).encode_batch(TEXTS) == expected
    assert any(len(row) > 5 for row in expected)


def test_reduced_ranks_give_the_ids_of_all_ranks() -> None:
    import tiktoken

    ranks = {bytes([b]): b for b in range(256)} | {
        b"th": 256,
        b"the": 257,
        b" the": 258,
        b"qqqqq": 259,
        "é".encode(): 260,
    }
    whole = tiktoken.Encoding("whole", pat_str=GENERIC_PATTERN, mergeable_ranks=ranks, special_tokens={})
    reduced = encoder_from_ranks(ranks, GENERIC_PATTERN, TEXTS)
    assert reduced.encode_batch(TEXTS) == [whole.encode_ordinary(text) for text in TEXTS]


@pytest.fixture(scope="module")
def sentencepiece_bytes() -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3), model_writer=model, vocab_size=1000, model_type="bpe", byte_fallback=True,
        character_coverage=0.98, normalization_rule_name="identity", remove_extra_whitespaces=False,
        control_symbols=["[INST]"], user_defined_symbols=["▁▁"], pad_id=3, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def test_sentencepiece_file(tmp_path: Path, sentencepiece_bytes: bytes) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sentencepiece_bytes)
    side = read_side(path)
    found = vocabulary(path)
    assert found.family == "SentencePiece BPE" and found.size == 1000
    assert {role: entry.id for role, entry in side.roles.items()} == {"unk": 0, "bos": 1, "eos": 2, "pad": 3}
    assert {token.text for token in found.added.values()} == {"<unk>", "<s>", "</s>", "<pad>", "[INST]", "▁▁"}
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_bytes)
    assert found.tokens[processor.piece_to_id("<0xE2>")] == b"\xe2"
    assert found.encoder_for is not None
    assert found.encoder_for(TEXTS).encode_batch(TEXTS) == [processor.encode(text) for text in TEXTS]
    with pytest.raises(SpecdoctorError, match="cut off"):
        path.write_bytes(sentencepiece_bytes[:-5])
        read_side(path)


def test_sentencepiece_rebuilt_from_pieces_cuts_alike(sentencepiece_bytes: bytes) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_bytes)
    ids = list(range(processor.get_piece_size()))
    pieces, scores = processor.id_to_piece(ids), processor.get_score(ids)
    types = [
        BYTE if processor.is_byte(i) else CONTROL if processor.is_control(i) else UNKNOWN if processor.is_unknown(i)
        else 4 if pieces[i] == "▁▁" else NORMAL
        for i in ids
    ]  # fmt: skip
    rebuilt = encoder_from_pieces(pieces, scores, types, unigram=False, dummy_prefix=True, texts=TEXTS)
    assert rebuilt.encode_batch(TEXTS) == [processor.encode(text) for text in TEXTS]


def test_merges_in_both_spellings_describe_the_same() -> None:
    joined, pairs = Segmentation(merges=["a b", "c d"]), Segmentation(merges=[["a", "b"], ["c", "d"]])
    assert joined.describes_same(pairs)
    assert not joined.describes_same(Segmentation(merges=["a b", "c e"]))
    assert not Segmentation().describes_same(Segmentation())  # nothing known is not the same
    assert not joined.describes_same(Segmentation(merges=["a b", "c d"], pre_tokenizer={"type": "Digits"}))


def test_merges_stay_text_until_they_are_needed(tmp_path: Path) -> None:
    data = tiny.tokenizer_json()
    data["model"]["vocab"]["merges"] = tiny.TOKENS  # a token of the same spelling must not be taken for the key
    path = tiny.write(tmp_path / "tokenizer.json", data)
    expected = json.loads(path.read_text("utf-8"))
    data["model"] = {"merges": data["model"].pop("merges"), **data["model"]}  # merges first: read as ordinary JSON
    for written in (path.read_text("utf-8"), json.dumps(expected, indent=1), json.dumps(data)):
        found = load_tokenizer_json(tiny.write(path, written))
        assert list(found["model"]["merges"]) == expected["model"]["merges"]
        assert found["model"]["vocab"] == expected["model"]["vocab"]
    one, other = MergesText(b'["a b"]'), MergesText(b'[ "a b" ]')
    assert one == other and one == ["a b"] and one != MergesText(b'["a c"]') and not one.same_text(other)


def test_merges_broken_inside_leave_the_table_comparable(tmp_path: Path) -> None:
    healthy = tiny.model_folder(tmp_path / "healthy")
    drafter = tiny.model_folder(tmp_path / "drafter")
    model = {"type": "BPE", "vocab": tiny.base_vocab(), "merges": ["a b"]}
    data = {**tiny.tokenizer_json(), "normalizer": {"type": "NFC"}}
    text = json.dumps({**data, "model": model}, ensure_ascii=False).replace('["a b"]', '["a b" "c"]')
    tiny.write(drafter / "tokenizer.json", text)
    document = examine_tokenizers(healthy, drafter)
    (found,) = document["findings"]
    assert (document["verdict"], found["code"], found["severity"]) == ("identical", "SD105", "warning")
    assert "JSONDecodeError" in found["title"]


def test_sample_spells_no_special_token_and_covers_the_ground() -> None:
    sample = bundled_sample()
    assert not any(mark in text for text in sample.texts for mark in ("<|", "|>", "<s>", "[INST]", "<think>"))
    assert {"english", "code", "chat", "math", "languages", "emoji", "digits", "whitespace", "normal-forms"} <= set(
        sample.categories
    )
    assert any("e\u0301" in text for text in sample.texts) and any("\u200d" in text for text in sample.texts)
    assert len(set(sample.names)) == len(sample.names) > 70


def test_the_largest_vocabularies_are_compared_whole(tmp_path: Path) -> None:
    """How long it takes is a benchmark: benchmarks/check_tokenizer_260k.py."""
    document = examine_tokenizers(*tiny.large_pair(tmp_path, 262_144))
    assert (document["verdict"], document["counts"]["differing_ids"]) == ("ids-differ", 2)
    assert any(found["code"] == "SD105" for found in document["findings"])  # both sides did encode


def test_duplicate_file_is_read_the_same_through_a_link(tmp_path: Path) -> None:
    folder = tiny.model_folder(tmp_path / "model")
    (tmp_path / "link").symlink_to(folder)
    assert examine_tokenizers(folder, tmp_path / "link")["verdict"] == "identical"
    save_file({"w": np.ones(1, "f4")}, folder / "other.safetensors")
    assert examine_tokenizers(folder, folder)["verdict"] == "identical"
