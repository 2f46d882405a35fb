"""`specdoctor data cache`: taps and last hidden state of every token of a data set, written in shards.

Contract: never logits. A shard is made in memory, written under another name, synced and renamed, so it is whole or not
there; a killed run loses the shard it was at. Worker i of n writes the shards k with k % n == i; the index appears
when the last of them is done. Of one set of facts the result is the same bytes, however often the run was interrupted
and whatever the number of workers.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors.torch import save_file
from torch import Tensor

from specdoctor.engine.device import resolve_device, resolve_dtype
from specdoctor.engine.target import Target
from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.formats.sources import resolve_model
from specdoctor.training.answer_file import check_manifest
from specdoctor.training.cache_layout import (
    FACTS,
    INDEX,
    LOCKS,
    CacheFacts,
    Shard,
    ShardRecord,
    plan_shards,
    sha256_of,
    write_index,
)
from specdoctor.training.checkpoint_hash import checkpoint_hash
from specdoctor.training.estimate import SHARD_BYTES, bytes_per_token, refuse_full_disk
from specdoctor.training.regenerate import check_worker
from specdoctor.training.samples import SampleSet, read_samples
from specdoctor.training.target_config import TargetConfig
from specdoctor.training.target_states import check_taps, target_states


@dataclass(slots=True)
class CacheRequest:
    """The options of the command."""

    data: Path
    target: str
    out: Path
    taps: Sequence[int]
    max_length: int | None = None
    shard_bytes: int = SHARD_BYTES
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    worker: int = 0
    workers: int = 1


@dataclass(slots=True)
class CacheProgress:
    """Tokens of this worker's shards: written (by this run or an earlier one) and in all."""

    done: int
    total: int


Hear = Callable[[CacheProgress], None]


def write_cache(request: CacheRequest, on_progress: Hear | None = None) -> dict[str, Any]:
    """Write the shards of this worker that are not there; what was done, as plain values.

    Raises `SpecdoctorError` for data, target or folder that do not fit each other, `EnvironmentMissingError` when the
    disk is too small, before the target is loaded.
    """
    check_worker(request.worker, request.workers)
    folder = resolve_model(request.target)
    config = TargetConfig.read(folder)
    check_taps(request.taps, config.num_layers)
    samples = read_samples(request.data, request.max_length)
    check_samples(samples, config)
    target_hash = checkpoint_hash(folder)
    dtype = _dtype(request, folder)
    a_token = bytes_per_token(len(request.taps), config.hidden_size, dtype)
    facts = CacheFacts(
        target=folder.resolve().name,
        target_hash=target_hash,
        dtype=dtype,
        taps=list(request.taps),
        hidden_size=config.hidden_size,
        max_length=request.max_length,
        data_digest=samples.digest(),
        samples=len(samples),
        tokens=samples.tokens,
        shard_tokens=max(1, request.shard_bytes // a_token),
    )
    shards = plan_shards(samples.lengths, facts.shard_tokens)
    mine = [shard for shard in shards if shard.number % request.workers == request.worker]
    _open_folder(request.out, facts)
    missing = [shard for shard in mine if ShardRecord.find(request.out, shard) is None]
    refuse_full_disk(request.out, a_token * sum(_tokens(samples, s) for s in missing))
    written = []
    if missing:
        target = Target.load(folder, request.device, request.dtype, request.attention)
        written = _write_shards(target, samples, facts, mine, request.out, on_progress)
    with FileLock(request.out / LOCKS / "folder"):
        complete = write_index(request.out, shards)
    return {
        "schema_version": 1,
        "kind": "cache",
        "folder": str(request.out),
        "facts": facts.document,
        "shards": len(shards),
        "written": written,
        "complete": complete,
        "bytes": sum(path.stat().st_size for path in request.out.glob("shard-*.safetensors")),
        "duplicates": samples.duplicates,
        "without_answer": samples.without_answer,
    }


def _dtype(request: CacheRequest, folder: Path) -> str:
    return str(resolve_dtype(request.dtype, resolve_device(request.device), folder)).removeprefix("torch.")


def check_samples(samples: SampleSet, config: TargetConfig) -> None:
    """Raise when a sample cannot be run by the target: too long, or ids of another vocabulary."""
    for length, key in zip(samples.lengths, samples.keys, strict=True):
        if length > config.max_positions:
            raise SpecdoctorError(
                f"{samples.path}: sample {key} has {length} tokens, the target {config.max_positions} positions; give "
                f"--max-length {config.max_positions}"
            )
    if samples.largest_id >= config.vocab_size:
        raise SpecdoctorError(
            f"{samples.path}: holds the id {samples.largest_id}, expected 0 to {config.vocab_size - 1} (vocab_size of "
            "the target); was it written for another target?"
        )


def _open_folder(folder: Path, facts: CacheFacts) -> None:
    """Write or compare `cache.json`."""
    if folder.is_dir() and not (folder / FACTS).is_file() and any(folder.glob("shard-*")):
        raise SpecdoctorError(
            f"{folder}: has shards but no {FACTS}, so nobody knows what they are of; give another --out"
        )
    (folder / LOCKS).mkdir(parents=True, exist_ok=True)
    with FileLock(folder / LOCKS / "folder"):
        check_manifest(folder / FACTS, facts.document, ("target",), "--out")


def _write_shards(
    target: Target, samples: SampleSet, facts: CacheFacts, shards: Sequence[Shard], folder: Path, hear: Hear | None
) -> list[str]:
    """Names of the shards that were written now; the others are whole, or another process is at them."""
    progress = CacheProgress(0, sum(_tokens(samples, shard) for shard in shards))
    written = []
    for shard in shards:
        before = progress.done
        try:
            with FileLock(folder / LOCKS / shard.name, timeout=0):
                if ShardRecord.find(folder, shard) is None:
                    _write_shard(target, samples, facts, shard, folder, progress, hear)
                    written.append(shard.file)
        except Timeout:
            pass
        progress.done = before + _tokens(samples, shard)
        if hear:
            hear(progress)
    return written


def _tokens(samples: SampleSet, shard: Shard) -> int:
    return sum(samples.lengths[shard.first : shard.end])


def _write_shard(
    target: Target,
    samples: SampleSet,
    facts: CacheFacts,
    shard: Shard,
    folder: Path,
    progress: CacheProgress,
    hear: Hear | None,
) -> None:
    chosen = samples[shard.first : shard.end]

    def on_rows(rows: int) -> None:
        progress.done += rows
        if hear:
            hear(progress)

    tensors = shard_tensors(target, [s.ids for s in chosen], [s.loss_mask for s in chosen], facts.taps, on_rows)
    # In a folder of its own: `save_file` writes under a name of its own first, which a killed run leaves behind.
    scratch = folder / f".{shard.name}.partial"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    part = scratch / shard.file
    save_file(tensors, part)
    shutil.copymode(folder / FACTS, part)  # else only its owner could read it
    with part.open("rb") as file:
        os.fsync(file.fileno())
    record = ShardRecord.of_file(part, [len(s.ids) for s in chosen], [s.id for s in chosen], shard.file)
    part.replace(folder / shard.file)
    shutil.rmtree(scratch)
    record.write(folder / shard.record)


def shard_tensors(
    target: Target,
    ids: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]],
    taps: Sequence[int],
    on_rows: Callable[[int], None] | None = None,
) -> dict[str, Tensor]:
    """The tensors of a shard on the host: docs/training-data.md."""
    starts = [0]
    for one in ids:
        starts.append(starts[-1] + len(one))
    N, Ht = starts[-1], target.hidden_size
    tapped = torch.empty(N, len(taps) * Ht, dtype=target.dtype)
    last = torch.empty(N, Ht, dtype=target.dtype)
    with torch.no_grad():
        for i, first, states in target_states(target, ids, taps):
            at = slice(starts[i] + first, starts[i] + first + len(states))
            tapped[at] = states[:, : len(taps) * Ht]
            last[at] = states[:, len(taps) * Ht :]
            if on_rows:
                on_rows(len(states))
    return {
        "ids": torch.tensor([token for one in ids for token in one], dtype=torch.int32),
        "loss_mask": torch.tensor([flag for one in masks for flag in one], dtype=torch.bool),
        "starts": torch.tensor(starts, dtype=torch.int64),
        "taps": tapped,
        "last_hidden": last,
    }


def verify_cache(folder: Path) -> dict[str, Any]:
    """Read every byte and compare checksums; the result names the shards that differ or are missing."""
    from specdoctor.training.cache_reader import read_index

    facts, entries = CacheFacts.read(folder), read_index(folder)
    broken = [
        entry["file"]
        for entry in entries
        if not (folder / entry["file"]).is_file() or sha256_of(folder / entry["file"]) != entry["sha256"]
    ]
    for name in broken:  # the next run writes them again
        (folder / name).with_suffix(".json").unlink(missing_ok=True)
    if broken:
        (folder / INDEX).unlink(missing_ok=True)
    return {
        "schema_version": 1,
        "kind": "cache-check",
        "folder": str(folder),
        "facts": facts.document,
        "shards": len(entries),
        "broken": broken,
        "exit_code": int(ExitCode.FINDINGS if broken else ExitCode.OK),
    }
