"""The corpus of target texts: written once, reused, resumed, refused when it belongs to another target."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_target

from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.measure.corpus import TEXTS, Corpus, Manifest
from specdoctor.measure.prompts import Prompt, TemplateRecord

V = 24
TEMPLATE = TemplateRecord("ids")


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(V))


def prompts(count: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, V, (4 + i % 3,), generator=generator).tolist() for i in range(count)]
    return [Prompt(f"p{i}", "chat", ids, f"hash{i}") for i, ids in enumerate(rows)]


def corpus_in(folder: Path, target: Target, temperature: float = 0.0, seed: int = 0, stops: tuple = ()) -> Corpus:
    return Corpus(folder, Manifest.of(target, TEMPLATE, Sampling(temperature), stops, seed))


def test_greedy_texts_are_the_targets_own_with_look_ahead(target: Target, tmp_path: Path) -> None:
    wanted = [(prompt, 0) for prompt in prompts(5)]
    texts = corpus_in(tmp_path, target).ensure(target, wanted, cap=20, lookahead=6)
    for (prompt, _), text in zip(wanted, texts, strict=True):
        plain = Sequence(prompt.ids, max_new_tokens=26)
        Engine(target).generate([plain])
        assert text.ids == plain.completion_ids and text.stop is None and text.length(20) == 20
        assert (text.prompt_id, text.category, text.prompt_ids) == (prompt.id, "chat", prompt.ids)


def test_stop_tokens_end_a_text_and_the_look_ahead_goes_on(target: Target, tmp_path: Path) -> None:
    plain = Sequence(prompts(1)[0].ids, max_new_tokens=40)
    Engine(target).generate([plain])
    stop = plain.completion_ids[9]
    first = plain.completion_ids.index(stop)
    corpus = corpus_in(tmp_path, target, stops=(stop,))
    (text,) = corpus.ensure(target, [(prompts(1)[0], 0)], cap=30, lookahead=5)
    assert text.stop == first
    assert text.length(30) == first + 1 and text.length(3) == min(3, first + 1)
    assert text.ids == plain.completion_ids[: first + 1 + 5]


def test_later_runs_reuse_texts_and_write_only_what_is_missing(target: Target, tmp_path: Path) -> None:
    five = [(prompt, 0) for prompt in prompts(5)]
    first = corpus_in(tmp_path, target)
    before = first.ensure(target, five[:3], cap=12, lookahead=4)
    again = corpus_in(tmp_path, target)
    after = again.ensure(target, five, cap=12, lookahead=4)
    assert (first.written, again.written) == (3, 2)
    assert after[:3] == before
    shorter = corpus_in(tmp_path, target)
    assert shorter.ensure(target, five, cap=8, lookahead=4) == after and shorter.written == 0
    longer = corpus_in(tmp_path, target)
    grown = longer.ensure(target, five[:1], cap=20, lookahead=4)[0]
    assert longer.written == 1 and grown.ids[:16] == before[0].ids
    assert corpus_in(tmp_path, target).find(five[0][0], 0, 20) == grown, "the later line counts"


def test_an_interrupted_line_is_dropped_and_written_anew(target: Target, tmp_path: Path) -> None:
    wanted = [(prompt, 0) for prompt in prompts(3)]
    whole = corpus_in(tmp_path, target).ensure(target, wanted, cap=10, lookahead=4)
    path = tmp_path / TEXTS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:17])
    resumed = corpus_in(tmp_path, target)
    assert resumed.ensure(target, wanted, cap=10, lookahead=4) == whole
    assert resumed.written == 1
    assert [json.loads(line)["prompt_id"] for line in path.read_text().splitlines()] == ["p0", "p1", "p2"]


def test_sampled_texts_depend_on_seed_and_repeat_not_on_neighbours(target: Target, tmp_path: Path) -> None:
    prompt = prompts(4)[2]
    alone = corpus_in(tmp_path / "a", target, 0.9).ensure(target, [(prompt, 0)], cap=16, lookahead=2)
    many = corpus_in(tmp_path / "b", target, 0.9)
    together = many.ensure(target, [(p, r) for p in prompts(4) for r in (0, 1)], cap=16, lookahead=2)
    mine = [text for text in together if text.prompt_id == "p2"]
    assert mine[0].ids == alone[0].ids != mine[1].ids
    other = corpus_in(tmp_path / "c", target, 0.9, seed=1).ensure(target, [(prompt, 0)], cap=16, lookahead=2)
    assert other[0].ids != alone[0].ids


def test_the_same_prompt_under_another_name_is_the_same_text(target: Target, tmp_path: Path) -> None:
    prompt = prompts(1)[0]
    corpus = corpus_in(tmp_path, target)
    corpus.ensure(target, [(prompt, 0)], cap=8, lookahead=2)
    renamed = replace(prompt, id="other", category="code")
    (text,) = corpus.ensure(target, [(renamed, 0)], cap=8, lookahead=2)
    assert (text.prompt_id, text.category, corpus.written) == ("other", "code", 1)


@pytest.mark.parametrize(
    ("change", "key"),
    [({"temperature": 0.5}, "temperature"), ({"stops": (3,)}, "stop_ids")],
)
def test_another_manifest_is_refused_by_the_key_that_differs(
    target: Target, tmp_path: Path, change: dict, key: str
) -> None:
    corpus_in(tmp_path, target)
    with pytest.raises(SpecdoctorError, match=f"manifest.json: key {key} is .*but this run has"):
        corpus_in(tmp_path, target, **change)


def test_another_target_is_refused(target: Target, tmp_path: Path) -> None:
    corpus_in(tmp_path, target)
    with pytest.raises(SpecdoctorError, match="key target_hash"):
        corpus_in(tmp_path, Target(tiny_target(V, seed=1)))


def test_greedy_corpora_do_not_depend_on_the_seed(target: Target, tmp_path: Path) -> None:
    first = corpus_in(tmp_path, target, seed=1)
    assert corpus_in(tmp_path, target, seed=2).manifest.key == first.manifest.key
    assert corpus_in(tmp_path / "b", target, 0.5, seed=2).manifest.key != first.manifest.key


def test_damaged_folders_are_refused_with_their_place(target: Target, tmp_path: Path) -> None:
    corpus_in(tmp_path / "a", target)
    (tmp_path / "a" / TEXTS).write_text('{"prompt_id": 1}\n')
    with pytest.raises(SpecdoctorError, match=r"texts.jsonl:1: not a text of a corpus"):
        corpus_in(tmp_path / "a", target)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / TEXTS).write_text("")
    with pytest.raises(SpecdoctorError, match=r"has texts.jsonl but no manifest.json"):
        corpus_in(tmp_path / "b", target)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "manifest.json").write_text("[]")
    with pytest.raises(SpecdoctorError, match=r"manifest.json: not a JSON object"):
        corpus_in(tmp_path / "c", target)
