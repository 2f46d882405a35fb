"""A drafter cut to a part of its vocabulary when it is loaded, and the list of ids to cut it to."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from data_targets import target_folder, write_samples
from test_early_exit import LAYERS, write_head
from test_lossless_sampling import SIZES
from test_lossless_sampling import V as TINY
from tiny_models import tiny_target, write_drafter
from typer.testing import CliRunner

from specdoctor.cli.app import app
from specdoctor.drafters.load import load_drafter
from specdoctor.engine.draft import Draft
from specdoctor.engine.engine import Engine
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError

GOLDEN = Path(__file__).parent / "data" / "golden"
KINDS = ["dspark-vanilla", "dspark-gated", "dspark-rnn", "dflash", "eagle3"]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(GOLDEN / "target", "cpu", "float32")


def decode(target: Target, kind: str, ids: Path | None = None) -> tuple[list[list[int]], Counter[int]]:
    """Accepted lengths by prompt and round, and the ids that were drafted; the text has to be the target's."""
    prompts = json.loads((GOLDEN / f"deepspec-{kind}" / "expected_greedy.json").read_text())["prompts"]
    sequences = [Sequence(prompt["prompt_ids"], max_new_tokens=48) for prompt in prompts]
    drafter = load_drafter(GOLDEN / f"deepspec-{kind}", target, draft_vocabulary=ids)
    propose, drafted = drafter.propose, Counter[int]()

    def note(*args: Any) -> list[Draft]:
        drafts = propose(*args)
        drafted.update(token for draft in drafts for token in draft.tokens.tolist())
        return drafts

    drafter.propose = note
    Engine(target, drafter).generate(sequences)
    assert [sequence.ids for sequence in sequences] == [prompt["output_ids"] for prompt in prompts]
    return [[record.accepted for record in sequence.records] for sequence in sequences], drafted


def listed(path: Path, ids: object) -> Path:
    path.write_text(json.dumps(ids))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_stays_and_nothing_is_lost_that_was_not_drafted(target: Target, tmp_path: Path, kind: str) -> None:
    lengths, drafted = decode(target, kind)
    assert 2 < len(drafted) < target.vocab_size
    assert decode(target, kind, listed(tmp_path / "used.json", list(drafted))) == (lengths, drafted)
    few = [token for token, _ in drafted.most_common(len(drafted) // 3)]
    fewer, of_few = decode(target, kind, listed(tmp_path / "few.json", few))
    assert set(of_few) <= set(few) and fewer != lengths


def test_the_whole_list_is_no_cut(target: Target, tmp_path: Path) -> None:
    everything = listed(tmp_path / "all.json", list(range(target.vocab_size)))
    drafter = load_drafter(GOLDEN / "deepspec-dspark-vanilla", target, draft_vocabulary=everything)
    assert drafter.d2t is None and drafter.head.data_ptr() == target.lm_head.weight.data_ptr()


def test_the_head_is_cut(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(
        GOLDEN / "deepspec-dspark-vanilla", target, draft_vocabulary=listed(tmp_path / "v.json", [7, 3, 65])
    )
    assert drafter.d2t.tolist() == [3, 7, 65]
    assert torch.equal(drafter.head, target.lm_head.weight[[3, 7, 65]])
    assert drafter.markov.markov_w1.weight.shape[0] == target.vocab_size
    assert drafter.markov.markov_w2.weight.shape[0] == 3


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "different target ids, 0 to"),
        ([1, 1], "different target ids, 0 to"),
        ([True], "different target ids, 0 to"),
        ([100_000], "different target ids, 0 to"),
        ({"ids": [1]}, "different target ids, 0 to"),
        (None, "cannot be read as a draft vocabulary"),
    ],
)
def test_a_wrong_list_is_refused(target: Target, tmp_path: Path, ids: object, message: str) -> None:
    path = tmp_path / "v.json"
    if ids is not None:
        listed(path, ids)
    with pytest.raises(SpecdoctorError, match=message):
        load_drafter(GOLDEN / "deepspec-dflash", target, draft_vocabulary=path)


def test_own_is_the_list_beside_the_weights(tmp_path: Path) -> None:
    folder, small = write_drafter(tmp_path / "draft", vocab=64), Target(tiny_target(64))
    with pytest.raises(SpecdoctorError, match=r"own: there is no .*draft_vocabulary\.json"):
        load_drafter(folder, small, draft_vocabulary="own")
    listed(folder / "draft_vocabulary.json", [5, 6])
    assert load_drafter(folder, small, draft_vocabulary="own").d2t.tolist() == [5, 6]
    assert load_drafter(folder, small).d2t is None


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    early = Target(tiny_target(TINY, layers=LAYERS, **SIZES))
    with pytest.raises(SpecdoctorError, match="algorithm early-exit, expected one of dspark, dflash, eagle3"):
        load_drafter(write_head(tmp_path / "head"), early, draft_vocabulary=listed(tmp_path / "v.json", [1]))


def bench(tmp_path: Path, *options: str) -> tuple[int, str, dict]:
    out = tmp_path / "result.json"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt_ids": [1, 2, 3]}\n{"id": "b", "prompt_ids": [4, 5]}\n')
    tiny_target(64).save_pretrained(tmp_path / "target")
    arguments = ["bench", "--target", str(tmp_path / "target"), "--prompts", str(prompts), "--max-new-tokens", "8"]
    arguments += ["--template", "none", "--dtype", "float32", "--json", str(out), *options]
    result = CliRunner().invoke(app, arguments)
    found = json.loads(out.read_text()) if out.is_file() else {}
    return result.exit_code, f"{result.output}{result.exception}", found


def test_bench_says_what_it_cut(tmp_path: Path) -> None:
    write_drafter(tmp_path / "draft", vocab=64)
    ids = str(listed(tmp_path / "v.json", list(range(0, 64, 2))))
    code, text, result = bench(tmp_path, "--draft", str(tmp_path / "draft"), "--draft-vocabulary", ids)
    assert code == 0, text
    assert result["settings"]["draft_vocabulary"] == ids
    assert result["arms"][1]["draft"]["draft_vocabulary"] == 32
    assert "draft: 32 ids of the target's vocabulary" in text


@pytest.mark.parametrize(("options", "message"), [(["--draft", "ngram"], "ngram proposes"), ([], "no drafter")])
def test_bench_refuses_it_where_nothing_can_be_cut(tmp_path: Path, options: list[str], message: str) -> None:
    ids = str(listed(tmp_path / "v.json", [1, 2]))
    code, text, _ = bench(tmp_path, *options, "--draft-vocabulary", ids)
    assert code and message in text


def test_data_vocabulary_counts_answers_alone(tmp_path: Path) -> None:
    samples, out = tmp_path / "samples.jsonl", tmp_path / "v.json"
    rows = [{"ids": [9, 9, 9, 5, 7, 7], "answer": [[3, 6]]}, {"ids": [9, 5, 2, 2], "answer": [[1, 4]]}]
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = CliRunner().invoke(
        app, ["data", "vocabulary", str(samples), "--size", "2", "--out", str(out), "--json", str(tmp_path / "r.json")]
    )
    assert result.exit_code == 0 and json.loads(out.read_text()) == [2, 5]  # 2, 5 and 7 twice each: the lower ids
    facts = json.loads((tmp_path / "r.json").read_text())
    assert (facts["ids"], facts["seen"], facts["tokens"], facts["coverage"]) == (2, 3, 6, pytest.approx(4 / 6))
    assert "2 of 3 ids seen, 66.7 % of 6 answer tokens" in result.output


def test_data_vocabulary_of_few_ids_says_so(tmp_path: Path) -> None:
    write_samples(tmp_path / "s.jsonl", 5)
    target_folder(tmp_path / "t")
    result = CliRunner().invoke(
        app, ["data", "vocabulary", str(tmp_path / "s.jsonl"), "--out", str(tmp_path / "v.json")]
    )
    assert result.exit_code == 0 and "fewer than 8,192 ids" in result.output
