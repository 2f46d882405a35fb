"""Sizes before anything is written: the paper's order, a real cache's bytes, and a disk that is too small."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from data_targets import target_folder, write_samples
from typer.testing import CliRunner

from specdoctor.cli.data import app
from specdoctor.errors import EnvironmentMissingError, ExitCode, SpecdoctorError
from specdoctor.training import estimate as module
from specdoctor.training.cache import CacheRequest, write_cache
from specdoctor.training.estimate import TOKENS_PER_SAMPLE, estimate_cache, in_words
from specdoctor.training.estimate_command import EstimateRequest, run_estimate

Usage = namedtuple("Usage", "total used free")


def small_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free * 2, free, free))


def test_the_papers_cache_of_qwen3_4b_is_some_38_terabytes() -> None:
    samples = 1_300_000
    found = estimate_cache(samples, samples * TOKENS_PER_SAMPLE, taps=5, hidden_size=2560, dtype="bfloat16")
    assert found.bytes_per_token == 6 * 2560 * 2 + 5  # six states, an id of four bytes, a flag
    assert found.bytes == pytest.approx(38e12, rel=0.01)
    assert in_words(found.bytes).endswith(" TB")
    assert found.shards == -(-found.bytes // 2**30)


def test_the_estimate_is_what_a_cache_takes(tmp_path: Path) -> None:
    folder = target_folder(tmp_path / "target")
    data = write_samples(tmp_path / "data.jsonl", 40)
    request = EstimateRequest(str(folder), taps=(0, 2), data=data, shard_bytes=200_000, out=tmp_path / "not" / "there")
    told = run_estimate(request)
    done = write_cache(CacheRequest(data, str(folder), tmp_path / "cache", (0, 2), shard_bytes=200_000))
    assert told["tokens"] == done["facts"]["tokens"] and told["samples"] == 40 and told["dtype"] == "float32"
    headers = done["bytes"] - told["bytes"]
    assert 0 < headers < 1000 * done["shards"]
    assert done["shards"] >= told["shards"] > 1, "shards are cut between samples, so there may be one more"
    assert told["fits"] and told["exit_code"] == 0


def test_more_samples_of_the_same_kind_are_extrapolated(tmp_path: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", 40)
    few = run_estimate(EstimateRequest(hidden_size=64, tap_count=2, data=data))
    many = run_estimate(EstimateRequest(hidden_size=64, tap_count=2, data=data, samples=4000))
    assert many["tokens"] == 100 * few["tokens"] and not many["tokens_assumed"]
    short = run_estimate(EstimateRequest(hidden_size=64, tap_count=2, data=data, max_length=10))
    assert short["tokens"] <= 400 < few["tokens"]


def test_a_disk_that_is_too_small_ends_it_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = target_folder(tmp_path / "target")
    data = write_samples(tmp_path / "data.jsonl", 40)
    request = EstimateRequest(str(folder), taps=(0, 2), data=data, out=tmp_path / "cache")
    needed = run_estimate(request)["bytes"]
    small_disk(monkeypatch, needed - 1000)
    told = run_estimate(request)
    assert told["fits"] is False and told["exit_code"] == ExitCode.ENVIRONMENT
    with pytest.raises(EnvironmentMissingError, match=r"the disk has .* free; give a larger disk"):
        write_cache(CacheRequest(data, str(folder), tmp_path / "cache", (0, 2)))
    assert not list(tmp_path.glob("cache/shard*")) and not list(tmp_path.glob("cache/.shard*"))
    small_disk(monkeypatch, needed)
    write_cache(CacheRequest(data, str(folder), tmp_path / "cache", (0, 2)))
    small_disk(monkeypatch, 0)
    assert write_cache(CacheRequest(data, str(folder), tmp_path / "cache", (0, 2)))["written"] == [], "nothing to write"


def test_what_is_missing_is_named() -> None:
    with pytest.raises(SpecdoctorError, match="no hidden size"):
        run_estimate(EstimateRequest(tap_count=5, samples=1))
    with pytest.raises(SpecdoctorError, match=r"no taps; give .* or --draft"):
        run_estimate(EstimateRequest(hidden_size=64, samples=1))
    with pytest.raises(SpecdoctorError, match="no samples"):
        run_estimate(EstimateRequest(hidden_size=64, tap_count=5))
    with pytest.raises(SpecdoctorError, match="--dtype int8: expected float32"):
        run_estimate(EstimateRequest(hidden_size=64, tap_count=5, samples=1, dtype="int8"))


def test_the_command_prints_and_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["estimate", "--hidden-size", "2560", "--tap-count", "5", "--samples", "1300000"]
    path = tmp_path / "estimate.json"
    run = CliRunner().invoke(app, [*options, "--json", str(path)])
    assert run.exit_code == 0 and "37.9 TB" in run.stdout and "our assumption 950" in run.stdout
    document = json.loads(path.read_text())
    assert document["schema_version"] == 1 and document["fits"] is None and document["tokens_assumed"]
    small_disk(monkeypatch, 10**12)
    run = CliRunner().invoke(app, [*options, "--out", str(tmp_path)])
    assert run.exit_code == ExitCode.ENVIRONMENT and "does not fit" in run.stdout
    assert module.free_bytes(tmp_path / "a" / "b") == 10**12
