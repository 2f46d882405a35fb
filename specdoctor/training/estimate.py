"""How large a target cache will be, before anything of it is written; and whether the disk has the room.

Sizes follow docs/training-data.md: of each token every tap and the last hidden state, an id and a flag.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdoctor.errors import EnvironmentMissingError, SpecdoctorError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ID_BYTES, FLAG_BYTES, START_BYTES = 4, 1, 8
SHARD_BYTES = 1 << 30
# Prompt and answer together, where nothing better is known. The DSpark paper's 38 TB for 1.3 million samples of
# Qwen3-4B (6 states of 2560 bf16 values a token) come to this many.
TOKENS_PER_SAMPLE = 950


@dataclass(frozen=True, slots=True)
class CacheEstimate:
    """Size of a cache. Bytes are of the tensors; file headers add some hundred a shard."""

    samples: int
    tokens: int
    taps: int
    hidden_size: int
    dtype: str
    bytes_per_token: int
    bytes: int
    shards: int

    def document(self, folder: Path | None = None) -> dict[str, Any]:
        """As plain values, with the free space where `folder` would be."""
        free = None if folder is None else free_bytes(folder)
        fits = None if free is None else self.bytes <= free
        return {"schema_version": 1, "kind": "cache-estimate", **asdict(self), "free_bytes": free, "fits": fits}


def estimate_cache(
    samples: int, tokens: int, taps: int, hidden_size: int, dtype: str, shard_bytes: int = SHARD_BYTES
) -> CacheEstimate:
    """Bytes of a cache of `tokens` tokens in all. Raises `SpecdoctorError` for a dtype that states are not kept in."""
    if dtype not in DTYPE_BYTES:
        raise SpecdoctorError(f"--dtype {dtype}: expected {', '.join(DTYPE_BYTES)}")
    for name, value in (("--samples", samples), ("--taps", taps), ("--hidden-size", hidden_size)):
        if value < 1:
            raise SpecdoctorError(f"{name} {value}: expected 1 or more")
    a_token = bytes_per_token(taps, hidden_size, dtype)
    total = tokens * a_token + (samples + 1) * START_BYTES
    return CacheEstimate(samples, tokens, taps, hidden_size, dtype, a_token, total, max(1, -(-total // shard_bytes)))


def bytes_per_token(taps: int, hidden_size: int, dtype: str) -> int:
    return (taps + 1) * hidden_size * DTYPE_BYTES[dtype] + ID_BYTES + FLAG_BYTES


def free_bytes(folder: Path) -> int:
    """Free space of the disk where `folder` is or would be."""
    there = folder.resolve()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def refuse_full_disk(folder: Path, needed: int) -> None:
    """Raise `EnvironmentMissingError` when `needed` further bytes do not fit."""
    free = free_bytes(folder)
    if needed > free:
        raise EnvironmentMissingError(
            f"{folder}: the cache needs {in_words(needed)} more, the disk has {in_words(free)} free; give a larger "
            "disk, fewer samples, a shorter --max-length or fewer taps, or train from the samples: --data FOLDER"
        )


def in_words(count: int) -> str:
    """Bytes in decimal units: 38.0 TB."""
    value, units = float(count), ["bytes", "kB", "MB", "GB", "TB", "PB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{count} bytes" if units[0] == "bytes" else f"{value:.1f} {units[0]}"
