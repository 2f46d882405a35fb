"""Prompts that the shipped drafters learnt from: none is a bundled bench prompt, and what is held out stays out."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from specdoctor.measure.prompt_file import RawPrompt
from specdoctor.measure.prompts import load_bundled, load_jsonl

ROOT = Path(__file__).parents[1]
OTHERS = ROOT.parent / "shared" / "prompts" / "train.jsonl"
OWN = ROOT / "sample_configs" / "train" / "prompts"
WRITTEN, HELD_OUT, CALIBRATION = OWN / "written.jsonl", OWN / "held_out.jsonl", OWN / "calibration.jsonl"


def contents(prompt: RawPrompt) -> str:
    return "\n".join([*(message["content"] for message in prompt.messages), *prompt.later_turns])


def grams(prompts: Iterable[RawPrompt], n: int) -> set[tuple[str, ...]]:
    """All runs of n words."""
    found = set()
    for prompt in prompts:
        words = re.findall(r"\w+", contents(prompt).lower())
        found |= {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}
    return found


def test_bundled_prompts_share_no_eight_words_with_those_of_public_data_sets() -> None:
    if not OTHERS.exists():
        pytest.skip("no training prompts beside the repository")
    trained = grams(load_jsonl(OTHERS), 8)
    assert len(trained) > 10_000
    assert not grams(load_bundled(), 8) & trained


@pytest.mark.parametrize("path", [WRITTEN, HELD_OUT, CALIBRATION], ids=lambda path: path.stem)
def test_bundled_prompts_share_no_ten_words_with_our_own(path: Path) -> None:
    # Nine they may: an error message of a compiler is the same wherever it is quoted.
    trained = grams(load_jsonl(path), 10)
    assert len(trained) > 1_000
    assert not grams(load_bundled(), 10) & trained


def test_nothing_that_is_held_out_was_trained_on() -> None:
    files = [load_jsonl(path) for path in (WRITTEN, HELD_OUT, CALIBRATION)]
    everything = [prompt for file in files for prompt in file]
    assert len({prompt.id for prompt in everything}) == len({contents(prompt) for prompt in everything})
    assert len(everything) == len({contents(prompt) for prompt in everything}) > 3_000
    assert all({prompt.category for prompt in file} == {"code", "math", "chat"} for file in files)


def test_a_copied_sentence_is_found() -> None:
    prompts = load_bundled(["math"])
    assert grams(prompts, 10) & grams(prompts[:1], 10)
