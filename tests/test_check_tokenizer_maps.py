"""`check-tokenizer` on maps of reduced draft vocabularies: each fault named, coverage of the good ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers as tiny
from test_check_tokenizer import finding, run, serious

from specdoctor.checks.tokenizer_pair import TokenizerPair
from specdoctor.formats.tokenizer_files import TokenizerSide
from specdoctor.formats.tokenizer_json import vocabulary_from_data


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny.model_folder(tmp_path / "target")


# Faults: vocab.d2t-map


def reduced_drafter(folder: Path, d2t: Any = None, t2d: Any = None, **config: Any) -> Path:
    """An EAGLE-3 head over 64 of the target's ids."""
    tensors: dict[str, np.ndarray[Any, Any]] = {"lm_head.weight": np.ones((64, 8), "f4")}
    tensors |= {name: np.asarray(values) for name, values in (("d2t", d2t), ("t2d", t2d)) if values is not None}
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 64,
        "mask_token_id": "absent",
        **config,
    }
    return tiny.block_drafter(folder, settings, tensors)


def most_used_ids(count: int) -> np.ndarray[Any, Any]:
    """What a trainer would keep: the ids that texts use most, in ascending order."""
    side = TokenizerSide(Path(), vocabulary_from_data(tiny.tokenizer_json(), Path("tokenizer.json"), "tokenizer.json"))
    encoded = TokenizerPair(side, side).target_encoded
    assert encoded is not None
    return np.sort([token_id for token_id, _ in encoded.counts().most_common(count)]).astype("i8")


KEPT = most_used_ids(64)
OFFSETS = KEPT - np.arange(64)
MARKS = np.isin(np.arange(tiny.ROWS), KEPT)
TWICE = np.where(np.arange(64) == 30, KEPT[29], KEPT) - np.arange(64)


@pytest.mark.parametrize("marks", [MARKS, None], ids=["with t2d", "without t2d"])
@pytest.mark.parametrize(
    ("d2t", "words"),
    [
        (None, "no d2t"),
        (np.zeros(64, "i8"), "maps each draft id to itself"),
        (KEPT, "holds absolute ids where this kind of file holds offsets"),
        (OFFSETS + 1, "off by +1"),
        (TWICE, "repeat"),
        (OFFSETS + 300, "stand for no id of the target"),
        (OFFSETS.astype("f4"), "expected a list of integers"),
        (OFFSETS[:60], "60 entries"),
    ],
)
def test_bad_maps_are_named(target: Path, tmp_path: Path, d2t: Any, words: str, marks: Any) -> None:
    code, document = run(target, reduced_drafter(tmp_path / "drafter", d2t, marks))
    titles = " / ".join(f["title"] for f in serious(document) if f["code"] == "SD107")
    if words == "stand for no id of the target" and marks is not None:
        words = "off by +300"  # t2d shows the cause
    assert code == 1 and words in titles
    assert {f["fault"] for f in serious(document) if f["code"] == "SD107"} == {"vocab.d2t-map"}


@pytest.mark.parametrize("marks", [MARKS, None], ids=["with t2d", "without t2d"])
def test_good_map_reports_its_coverage(target: Path, tmp_path: Path, marks: Any) -> None:
    code, document = run(target, reduced_drafter(tmp_path / "drafter", OFFSETS, marks))
    assert (code, serious(document)) == (0, [])
    evidence = finding(document, "SD107")["evidence"]
    assert 0.5 < evidence["coverage"] < 1 and evidence["by_category"]["english"] > evidence["by_category"]["languages"]


def test_maps_that_do_not_fit_each_other(target: Path, tmp_path: Path) -> None:
    fewer = MARKS.copy()
    fewer[KEPT[0]] = False
    code, document = run(target, reduced_drafter(tmp_path / "drafter", OFFSETS, fewer))
    assert code == 1 and finding(document, "SD107")["evidence"] == {"t2d_marked": 63, "d2t_entries": 64}


def test_gguf_map_holds_absolute_ids(target: Path, tmp_path: Path) -> None:
    for d2t, expected in ((KEPT, 0), (OFFSETS, 1)):
        path = tmp_path / f"{expected}.gguf"
        tiny.gguf_file(path, architecture="eagle3", tensors={"output.weight": np.ones((64, 8), "f4"), "d2t": d2t})
        code, document = run(target, path)
        assert code == expected, document["findings"]
    assert "offsets where this kind of file holds absolute ids" in finding(document, "SD107")["title"]
