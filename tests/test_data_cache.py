"""The target cache: the states transformers gives, whole or not there, the same bytes however it was written."""

import json
import random
from pathlib import Path

import pytest
import torch
from data_targets import V, target_folder, write_samples
from killed_runs import bytes_below, killed_at, run, visible_files
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specdoctor.engine.target import FINAL_NORMED, Target
from specdoctor.errors import SpecdoctorError
from specdoctor.training.batch import TrainingBatch
from specdoctor.training.cache import CacheRequest, verify_cache, write_cache
from specdoctor.training.cache_layout import plan_shards
from specdoctor.training.cache_reader import TargetCache
from specdoctor.training.checkpoint_hash import checkpoint_hash
from specdoctor.training.features import BatchPlan, CachedFeatures, OnlineFeatures
from specdoctor.training.samples import read_samples
from specdoctor.training.target_states import target_states

TAPS = (0, 1, 2)  # embeddings, a middle layer, the raw output of the last


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("data") / "samples.jsonl", 30)


def request_of(folder: Path, data: Path, out: Path, **more: object) -> CacheRequest:
    settings = {"shard_bytes": 150_000, "device": "cpu", "dtype": "float32"} | more
    return CacheRequest(data, str(folder), out, settings.pop("taps", TAPS), **settings)  # type: ignore[arg-type]


def reference(folder: Path, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Taps, last hidden state after the final norm, and logits, as transformers computes them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    raw: list[torch.Tensor] = []
    model.model.layers[-1].register_forward_hook(
        lambda module, args, out: raw.append(out if torch.is_tensor(out) else out[0])
    )
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    states = [*out.hidden_states[:-1], raw[0]]
    return torch.cat([states[tap][0] for tap in TAPS], -1), out.hidden_states[-1][0], out.logits[0]


def test_states_are_those_of_transformers_and_logits_follow(folder: Path, data: Path, tmp_path: Path) -> None:
    result = write_cache(request_of(folder, data, tmp_path))
    assert result["complete"] and result["shards"] > 2
    cache, samples = TargetCache(tmp_path), read_samples(data)
    target = Target.load(folder, "cpu", "float32")
    assert len(cache) == len(samples) == 30
    for i in range(0, 30, 7):
        sample, found = samples[i], cache.read(i)
        taps, last, logits = reference(folder, sample.ids)
        torch.testing.assert_close(found.taps, taps, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.last_hidden, last, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(target.lm_head(found.last_hidden).detach(), logits, atol=1e-3, rtol=1e-3)
        assert found.ids.tolist() == sample.ids and found.ids.dtype == torch.int64
        assert found.loss_mask.tolist() == sample.loss_mask and found.loss_mask.dtype == torch.bool
    names = set(load_file(next(tmp_path.glob("shard-*.safetensors"))))
    assert names == {"ids", "loss_mask", "starts", "taps", "last_hidden"}, "never logits"


def test_long_sequences_run_in_chunks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [[i * 7 % V for i in range(n)] for n in (40, 3, 17, 33)]
    target = Target.load(folder, "cpu", "float32")

    def collected() -> list[torch.Tensor]:
        out = [torch.full((len(one), 64 * 4), torch.nan) for one in ids]
        for i, first, states in target_states(target, ids, TAPS):
            out[i][first : first + len(states)] = states
        return out

    whole = collected()
    monkeypatch.setattr("specdoctor.training.target_states.PREFILL_ROWS", 8)
    monkeypatch.setattr("specdoctor.training.target_states.PACKED_ROWS", 20)
    for one, other in zip(whole, collected(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-4)  # states reach 100
    assert target.cache.bytes() == 0, "the target's own cache is untouched"


def test_equal_bytes_whatever_the_workers_and_the_order_of_lines(folder: Path, data: Path, tmp_path: Path) -> None:
    write_cache(request_of(folder, data, tmp_path / "one"))
    shuffled = tmp_path / "shuffled.jsonl"
    rows = data.read_text().splitlines()
    random.Random(3).shuffle(rows)
    shuffled.write_text("\n".join([*rows, rows[0]]) + "\n")
    for worker in (2, 0, 1):
        done = write_cache(request_of(folder, shuffled, tmp_path / "three", worker=worker, workers=3))
        assert done["complete"] == (worker == 1), "the last worker writes the index"
        assert done["duplicates"] == 1
        if worker == 0:
            with pytest.raises(SpecdoctorError, match=r"index.json: missing, so the cache is not complete"):
                TargetCache(tmp_path / "three")
    assert visible_files(tmp_path / "one") == visible_files(tmp_path / "three")


def test_a_cut_file_is_written_again_and_a_flipped_bit_is_found(folder: Path, data: Path, tmp_path: Path) -> None:
    write_cache(request_of(folder, data, tmp_path))
    before = visible_files(tmp_path)
    shards = sorted(tmp_path.glob("shard-*.safetensors"))
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    with pytest.raises(SpecdoctorError, match=r"has \d+ bytes, expected \d+; run `specdoctor data cache` again"):
        TargetCache(tmp_path)
    assert write_cache(request_of(folder, data, tmp_path))["written"] == [shards[0].name]
    assert visible_files(tmp_path) == before and verify_cache(tmp_path)["broken"] == []
    flipped = bytearray(shards[1].read_bytes())
    flipped[-5] ^= 1
    shards[1].write_bytes(flipped)
    found = verify_cache(tmp_path)
    assert found["broken"] == [shards[1].name] and found["exit_code"] == 1
    assert write_cache(request_of(folder, data, tmp_path))["written"] == [shards[1].name]
    assert visible_files(tmp_path) == before


def test_other_facts_are_refused(folder: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "cache"
    write_cache(request_of(folder, data, out))
    with pytest.raises(SpecdoctorError, match=r"cache.json: key taps is \[0, 1, 2\], but this run has \[1\]"):
        write_cache(request_of(folder, data, out, taps=(1,)))
    with pytest.raises(SpecdoctorError, match="key data_digest"):
        write_cache(request_of(folder, write_samples(tmp_path / "other.jsonl", 30, seed=1), out))
    with pytest.raises(SpecdoctorError, match="key target_hash"):
        write_cache(request_of(target_folder(tmp_path / "other", seed=5), data, out))
    with pytest.raises(SpecdoctorError, match=r"--taps: found 3, expected 0 .* to 2"):
        write_cache(request_of(folder, data, out, taps=(3,)))
    (out / "cache.json").unlink()
    with pytest.raises(SpecdoctorError, match=r"has shards but no cache.json"):
        write_cache(request_of(folder, data, out))


def test_data_that_the_target_cannot_run_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"ids": [1, V], "answer": [[1, 2]]}) + "\n")
    with pytest.raises(SpecdoctorError, match=f"holds the id {V}, expected 0 to {V - 1}"):
        write_cache(request_of(folder, path, tmp_path / "cache"))
    path.write_text(json.dumps({"ids": [1] * 600, "answer": [[1, 600]]}) + "\n")
    with pytest.raises(SpecdoctorError, match="has 600 tokens, the target 512 positions; give --max-length 512"):
        write_cache(request_of(folder, path, tmp_path / "cache"))
    for row, said in (
        ({"ids": [1, -2], "answer": []}, "key ids is not a list of token ids"),
        ({"ids": [1, 2], "answer": [[1, 3]]}, r"key answer is \[\[1, 3\]\], expected spans"),
        ({"prompt": "Hello"}, r"key ids .*, but prompt is: these look like prompts; run `specdoctor data regenerate`"),
        ([1], "not a JSON object"),
    ):
        path.write_text(json.dumps(row) + "\n")
        with pytest.raises(SpecdoctorError, match=f"data.jsonl:1: {said}"):
            read_samples(path)


def test_max_length_cuts_and_leaves_out_what_has_no_answer_left(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows = [{"key": "b", "ids": [1, 2, 3, 4, 5], "answer": [[2, 5]]}, {"key": "a", "ids": [5] * 9, "answer": [[7, 9]]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_samples(path).keys == ["a", "b"]
    cut = read_samples(path, 4)
    assert cut.without_answer == 1 and cut.tokens == 4
    assert cut[0].ids == [1, 2, 3, 4] and cut[0].loss_mask == [False, False, True, True]
    assert cut.digest() != read_samples(path).digest()


def close(one: TrainingBatch, other: TrainingBatch) -> None:
    assert (
        one.starts == other.starts and torch.equal(one.ids, other.ids) and torch.equal(one.loss_mask, other.loss_mask)
    )
    torch.testing.assert_close(one.taps, other.taps, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(one.last_hidden, other.last_hidden, atol=1e-5, rtol=1e-5)


def test_online_and_cached_features_are_the_same_batches(folder: Path, data: Path, tmp_path: Path) -> None:
    write_cache(request_of(folder, data, tmp_path))
    target, samples = Target.load(folder, "cpu", "float32"), read_samples(data)
    for taps in (TAPS, (2, 0)):
        online = OnlineFeatures(target, samples, taps, tokens_per_batch=150)
        cached = CachedFeatures(tmp_path, 150, taps, checkpoint_hash(folder))
        pairs = list(zip(online.batches(1, 5), cached.batches(1, 5), strict=True))
        assert len(pairs) == online.count(1, 5) == cached.count(1, 5) > 3
        for one, other in pairs:
            close(one, other)
            assert len(one.ids) == one.starts[-1] <= 150 and one.taps.shape == (len(one.ids), 64 * len(taps))
    seen = sorted(i for one, _ in pairs for i in one.ids.tolist())
    assert seen == sorted(token for sample in samples for token in sample.ids), "each token once an epoch"


def test_batches_can_be_trained_on(folder: Path, data: Path) -> None:
    """Autograd may save them: no inference tensors, and no gradient into the target."""
    target = Target.load(folder, "cpu", "float32")
    batch = next(OnlineFeatures(target, read_samples(data), TAPS, 100).batches(0, 0))
    fc = torch.nn.Linear(64 * 3, 64)
    loss = (fc(batch.taps) * batch.last_hidden).square().mean()
    loss.backward()
    assert fc.weight.grad is not None and fc.weight.grad.abs().sum() > 0
    assert not batch.taps.requires_grad and not batch.last_hidden.requires_grad
    assert all(parameter.grad is None for parameter in target.model.parameters())


def test_order_is_fixed_by_epoch_and_seed_and_skip_goes_on_bit_exact(folder: Path, data: Path) -> None:
    def source() -> OnlineFeatures:
        return OnlineFeatures(Target.load(folder, "cpu", "float32"), read_samples(data), TAPS, 150)

    first, again = list(source().batches(0, 7)), list(source().batches(0, 7))
    resumed = list(source().batches(0, 7, skip=3))
    assert len(resumed) == len(first) - 3
    for one, other in [*zip(first, again, strict=True), *zip(first[3:], resumed, strict=True)]:
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.taps, other.taps) and torch.equal(one.last_hidden, other.last_hidden)
    plan = BatchPlan(read_samples(data).lengths, 150)
    orders = [plan.batches(epoch, seed) for epoch, seed in ((0, 7), (1, 7), (0, 8))]
    assert orders[0] != orders[1] and orders[0] != orders[2] and orders[1] != orders[2]


def test_processes_share_an_epoch(data: Path) -> None:
    lengths = read_samples(data).lengths
    whole = BatchPlan(lengths, 100).batches(2, 3)
    parts = [BatchPlan(lengths, 100, rank, 3).batches(2, 3) for rank in range(3)]
    assert {len(part) for part in parts} == {len(whole) // 3}
    mixed = [batch for group in zip(*parts, strict=True) for batch in group]
    assert mixed == whole[: len(mixed)]
    with pytest.raises(SpecdoctorError, match="cannot be shared by 50 processes"):
        BatchPlan(lengths, 100, 0, 50).batches(0, 0)


def test_taps_and_target_of_a_cache_are_checked(folder: Path, data: Path, tmp_path: Path) -> None:
    write_cache(request_of(folder, data, tmp_path, taps=(1, FINAL_NORMED)))
    with pytest.raises(SpecdoctorError, match=r"has the taps \[1, -1\], the drafter reads 2 too"):
        CachedFeatures(tmp_path, 100, (1, 2))
    with pytest.raises(SpecdoctorError, match=r"was written by target.* but this target has the hash 00"):
        CachedFeatures(tmp_path, 100, (1,), target_hash="00")
    batch = next(CachedFeatures(tmp_path, 100, (FINAL_NORMED,)).batches(0, 0))
    assert torch.equal(batch.taps, batch.last_hidden)


def test_shards_are_cut_between_samples() -> None:
    shards = plan_shards([5, 5, 5, 20, 1, 1], 10)
    assert [(shard.first, shard.end) for shard in shards] == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert shards[3].file == "shard-00003-of-00004.safetensors"


def test_bfloat16_is_kept_as_it_is(folder: Path, data: Path, tmp_path: Path) -> None:
    write_cache(request_of(folder, data, tmp_path, dtype="bfloat16"))
    assert TargetCache(tmp_path).read(0).taps.dtype == torch.bfloat16


@pytest.mark.slow
def test_killed_at_ten_moments_the_end_is_byte_equal(folder: Path, tmp_path: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", 400, longest=400)
    command = ("cache", data, "--target", folder, "--taps", "0,1,2", "--shard-mb", 3, "--dtype", "float32")
    command = (*command, "--device", "cpu", "--out")
    run(*command, tmp_path / "whole")
    whole, out, chooser = visible_files(tmp_path / "whole"), tmp_path / "killed", random.Random(11)
    assert len(whole) > 20
    size, killed = bytes_below(tmp_path / "whole"), 0
    for part in range(10):
        reached = max(size * (part + chooser.random()) / 11, bytes_below(out) + 1)
        killed += killed_at(lambda: bytes_below(out), reached, chooser.random() * 0.02, *command, out)
        assert not (out / "index.json").exists()
    assert killed >= 8, "most kills hit a running process"
    run(*command, out)
    assert visible_files(out) == whole
    assert {path.name for path in out.iterdir() if path.name not in whole} == {".locks"}, "nothing unfinished is left"
