"""Answers by the target: its own text, whatever the batch; resumed after a kill at any byte; refused when unlike."""

import json
import random
from pathlib import Path

import pytest
import torch
from data_targets import STOP, V, target_folder, write_prompts
from killed_runs import killed_at, run
from tiny_models import tiny_target

from specdoctor.engine.engine import Engine
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.training.answer_file import AnswerFile
from specdoctor.training.answers import AnswerSettings
from specdoctor.training.regenerate import RegenerateRequest, regenerate
from specdoctor.training.samples import read_samples

CAP = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("target"))


def request_of(
    folder: Path, tmp_path: Path, count: int = 6, temperature: float = 0.0, **more: object
) -> RegenerateRequest:
    prompts = write_prompts(tmp_path / f"prompts{count}.jsonl", count)
    settings = AnswerSettings(CAP, temperature)
    return RegenerateRequest(prompts, str(folder), tmp_path / "data", settings, dtype="float32", device="cpu", **more)  # type: ignore[arg-type]


def lines(folder: Path) -> list[dict]:
    return [
        json.loads(line) for path in sorted(folder.glob("samples*.jsonl")) for line in path.read_text().splitlines()
    ]


def test_greedy_answers_are_the_targets_own(folder: Path, tmp_path: Path) -> None:
    result = regenerate(request_of(folder, tmp_path, batch=4))
    rows = lines(tmp_path / "data")
    assert result["written"] == len(rows) == 6
    target = Target.load(folder, "cpu", "float32")
    for row in rows:
        [[start, end]] = row["answer"]
        plain = Sequence(row["ids"][:start], max_new_tokens=CAP, stop_ids={STOP})
        Engine(target).generate([plain])
        assert row["ids"] == plain.ids and end == len(plain.ids) and row["stop"] == plain.stop_reason
    assert {row["stop"] for row in rows} == {"stop", "length"}, "both ends are exercised"
    assert result["tokens"] == sum(row["answer"][0][1] - row["answer"][0][0] for row in rows)


def test_loss_mask_is_on_the_answer_only_with_its_stop_token(folder: Path, tmp_path: Path) -> None:
    regenerate(request_of(folder, tmp_path))
    rows = {row["key"]: row for row in lines(tmp_path / "data")}
    samples = read_samples(tmp_path / "data")
    assert samples.keys == sorted(rows)
    for sample in samples:
        [[start, end]] = rows[sample.id]["answer"]
        assert sample.ids == rows[sample.id]["ids"] and end == len(sample.ids)
        assert sample.loss_mask == [False] * start + [True] * (end - start)
    assert samples.lengths == [len(sample.ids) for sample in samples]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batch_and_order_do_not_matter(folder: Path, tmp_path: Path, temperature: float) -> None:
    sampled = {"samples": 3} if temperature else {}
    written = []
    for name, batch in (("one", 1), ("five", 5), ("all", 64)):
        request = request_of(folder, tmp_path, temperature=temperature, batch=batch, **sampled)
        request.out = tmp_path / name
        regenerate(request)
        written.append(sorted((tmp_path / name / "samples.jsonl").read_text().splitlines()))
    assert written[0] == written[1] == written[2]


def test_samples_of_a_prompt_differ_and_more_can_be_added(folder: Path, tmp_path: Path) -> None:
    request = request_of(folder, tmp_path, temperature=1.0, samples=2)
    regenerate(request)
    before = lines(tmp_path / "data")
    request.samples = 4
    assert regenerate(request)["written"] == 12
    after = lines(tmp_path / "data")
    assert after[:12] == before and len({row["key"] for row in after}) == 24
    assert all(len({tuple(row["ids"]) for row in after if row["prompt_id"] == f"p{i}"}) > 1 for i in range(6))
    request.settings = AnswerSettings(CAP, 1.0, seed=1)
    request.out = tmp_path / "other"
    regenerate(request)
    other_seed = {(row["prompt_id"], row["sample"]): row["ids"] for row in lines(tmp_path / "other")}
    assert any(other_seed[row["prompt_id"], row["sample"]] != row["ids"] for row in after), "the seed counts"


def test_equal_prompts_are_answered_once_and_more_prompts_are_added(folder: Path, tmp_path: Path) -> None:
    request = request_of(folder, tmp_path)
    twice = request.prompts.read_text().splitlines()
    rows = [json.loads(line) | {"id": f"again{i}"} for i, line in enumerate(twice[:2])]
    request.prompts.write_text("\n".join([*twice, *map(json.dumps, rows)]))
    result = regenerate(request)
    assert (result["written"], result["equal_prompts"]) == (6, 2)
    extra = {"id": "new", "prompt_ids": [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]}
    request.prompts.write_text("\n".join([*twice, json.dumps(extra)]))
    assert regenerate(request)["written"] == 1
    assert regenerate(request)["written"] == 0


def test_a_torn_last_line_is_dropped_and_answered_anew(folder: Path, tmp_path: Path) -> None:
    request = request_of(folder, tmp_path)
    regenerate(request)
    path = tmp_path / "data" / "samples.jsonl"
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    chooser = random.Random(1)
    for cut in sorted(
        {0, 1, ends[0] - 1, ends[0], ends[0] + 1, len(whole) - 1} | set(chooser.sample(range(len(whole)), 4))
    ):
        path.write_bytes(whole[:cut])
        kept = sum(end <= cut for end in ends)
        assert len(list(read_samples_or_none(path))) == kept, "half a line is never read"
        assert regenerate(request)["written"] == 6 - kept
        assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())


def read_samples_or_none(path: Path) -> list:
    try:
        return list(read_samples(path))
    except SpecdoctorError as error:
        assert error.exit_code is ExitCode.NOTHING
        return []


def test_workers_share_the_prompts_and_write_what_one_writes(folder: Path, tmp_path: Path) -> None:
    request = request_of(folder, tmp_path, count=12)
    regenerate(request)
    alone = {row["key"]: row for row in lines(tmp_path / "data")}
    request.out = tmp_path / "shared"
    written = []
    for worker in range(3):
        request.worker, request.workers = worker, 3
        written.append(regenerate(request)["written"])
    assert sum(written) == 12 and max(written) < 12
    assert {row["key"]: row for row in lines(tmp_path / "shared")} == alone
    request.worker, request.workers = 0, 1
    assert regenerate(request)["written"] == 0, "one process reads what the workers wrote"


def test_other_settings_or_another_target_are_refused(folder: Path, tmp_path: Path) -> None:
    request = request_of(folder, tmp_path)
    regenerate(request)
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert manifest["template"]["kind"] == "ids" and manifest["temperature"] == 0 and manifest["dtype"] == "float32"
    before = (tmp_path / "data" / "samples.jsonl").read_bytes()
    request.settings = AnswerSettings(CAP, 0.5)
    with pytest.raises(SpecdoctorError, match=r"manifest.json: key temperature is 0.0, but this run has 0.5"):
        regenerate(request)
    request.settings = AnswerSettings(CAP)
    request.target = str(target_folder(tmp_path / "other", seed=1))
    with pytest.raises(SpecdoctorError, match="key target_hash"):
        regenerate(request)
    assert (tmp_path / "data" / "samples.jsonl").read_bytes() == before


def test_the_target_hash_knows_weights_not_names(folder: Path, tmp_path: Path) -> None:
    from specdoctor.training.checkpoint_hash import checkpoint_hash

    copy = target_folder(tmp_path / "copy")
    assert checkpoint_hash(copy) == checkpoint_hash(folder)
    model = tiny_target(V, eos_token_id=STOP, initializer_range=0.4)
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    model.save_pretrained(tmp_path / "tuned")
    assert checkpoint_hash(tmp_path / "tuned") != checkpoint_hash(folder)


def test_bad_requests_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecdoctorError, match="--samples 2: greedy answers are all the same"):
        regenerate(request_of(folder, tmp_path, samples=2))
    with pytest.raises(SpecdoctorError, match="--worker 3: expected 0 to 1"):
        regenerate(request_of(folder, tmp_path, worker=3, workers=2))
    with pytest.raises(SpecdoctorError, match="--server-api soap"):
        regenerate(request_of(folder, tmp_path, server_api="soap"))
    with pytest.raises(SpecdoctorError, match="--temperature -1"):
        regenerate(request_of(folder, tmp_path, temperature=-1.0))
    request = request_of(folder, tmp_path)
    request.prompts.write_text(json.dumps({"id": "big", "prompt_ids": [V]}))
    with pytest.raises(SpecdoctorError, match=f"has id {V}, expected 0 to {V - 1}"):
        regenerate(request)
    assert not (tmp_path / "data").exists()


def test_a_prompt_that_fills_the_context_is_left_out_and_named(folder: Path, tmp_path: Path) -> None:
    request = request_of(folder, tmp_path)
    long = [4 + i % 20 for i in range(520)]
    nearly = long[:505]
    rows = [{"id": "long", "prompt_ids": long}, {"id": "nearly", "prompt_ids": nearly}]
    request.prompts.write_text("\n".join(map(json.dumps, rows)))
    result = regenerate(request)
    assert result["too_long"] == ["long"] and result["written"] == 1
    (row,) = lines(tmp_path / "data")
    assert row["prompt_id"] == "nearly" and len(row["ids"]) <= 513
    assert row["stop"] in ("context", "stop")


def test_a_second_run_at_the_same_file_is_refused(folder: Path, tmp_path: Path) -> None:
    request = request_of(folder, tmp_path)
    regenerate(request)
    facts = json.loads((tmp_path / "data" / "manifest.json").read_text())
    with AnswerFile(tmp_path / "data", facts), pytest.raises(SpecdoctorError, match="another run is writing here"):
        regenerate(request)


def bytes_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


@pytest.mark.slow
def test_killed_at_ten_moments_the_end_equals_the_undisturbed_run(folder: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 40, longest=20)
    command = ("regenerate", prompts, "--target", folder, "--max-new-tokens", 60, "--temperature", 1)
    command = (*command, "--samples", 3, "--batch", 4, "--dtype", "float32", "--device", "cpu", "--out")
    run(*command, tmp_path / "whole")
    whole = (tmp_path / "whole" / "samples.jsonl").read_bytes()
    assert whole.count(b"\n") == 120
    path, chooser = tmp_path / "killed" / "samples.jsonl", random.Random(7)
    # Ten places of the file, spread so that each kill finds work left to do.
    killed = 0
    for part in range(10):
        size = int(len(whole) * (part + chooser.random()) / 11)
        reached = max(size, bytes_of(path) + 1)
        killed += killed_at(lambda: bytes_of(path), reached, chooser.random() * 0.01, *command, tmp_path / "killed")
        if part % 2:  # and what a kill inside a write would leave
            with path.open("r+b") as file:
                file.truncate(max(0, path.stat().st_size - chooser.randrange(1, 40)))
    assert killed >= 8, "most kills hit a running process"
    run(*command, tmp_path / "killed")
    assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())
    assert (tmp_path / "killed" / "manifest.json").read_bytes() == (tmp_path / "whole" / "manifest.json").read_bytes()
