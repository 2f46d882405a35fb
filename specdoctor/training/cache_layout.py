"""The target cache on disk: which samples lie in which shard, and the files that say so.

Contract (docs/training-data.md): `cache.json` holds the facts of the cache and is written first; `shard-K.safetensors`
holds the states and `shard-K.json` its checksum and samples; `index.json` appears when all shards are there. The plan
follows from samples and facts alone, never from how many processes write, so any two complete caches of the same facts
are equal byte for byte.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.training.answer_file import write_whole

FACTS, INDEX = "cache.json", "index.json"
FORMAT = 1
LOCKS = ".locks"  # a folder of lock files


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """What a cache is of. Two runs write the same cache iff all of it is equal."""

    target: str  # name, for people
    target_hash: str
    dtype: str
    taps: list[int]
    hidden_size: int
    max_length: int | None
    data_digest: str
    samples: int
    tokens: int
    shard_tokens: int
    format: int = FORMAT

    @classmethod
    def read(cls, folder: Path) -> "CacheFacts":
        """Of a cache folder. Raises `SpecdoctorError` when it is none."""
        path = folder / FACTS
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except OSError:
            raise SpecdoctorError(f"{path}: missing; expected a folder that `specdoctor data cache` wrote") from None
        except (ValueError, TypeError):
            raise SpecdoctorError(
                f"{path}: not the facts of a cache of format {FORMAT}; write it anew with `specdoctor data cache`"
            ) from None

    @property
    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Shard:
    """Samples [first, end) of the set, in order."""

    number: int
    count: int  # shards in all
    first: int
    end: int

    @property
    def name(self) -> str:
        return f"shard-{self.number:05d}-of-{self.count:05d}"

    @property
    def file(self) -> str:
        return f"{self.name}.safetensors"

    @property
    def record(self) -> str:
        return f"{self.name}.json"


def plan_shards(lengths: Sequence[int], shard_tokens: int) -> list[Shard]:
    """Cut samples of `lengths` tokens into shards of at most `shard_tokens` (a longer sample has its own)."""
    edges, tokens = [0], 0
    for i, length in enumerate(lengths):
        if tokens and tokens + length > shard_tokens:
            edges.append(i)
            tokens = 0
        tokens += length
    edges.append(len(lengths))
    count = len(edges) - 1
    return [Shard(k, count, edges[k], edges[k + 1]) for k in range(count)]


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """What `shard-K.json` says of a shard that is whole."""

    file: str
    bytes: int
    sha256: str
    lengths: list[int]  # tokens of each sample
    keys: list[str]

    @classmethod
    def of_file(cls, path: Path, lengths: list[int], keys: list[str], name: str) -> "ShardRecord":
        return cls(name, path.stat().st_size, sha256_of(path), lengths, keys)

    @classmethod
    def find(cls, folder: Path, shard: Shard) -> "ShardRecord | None":
        """The record of a shard that is whole by its size; None when it has to be written."""
        try:
            found = cls(**json.loads((folder / shard.record).read_text(encoding="utf-8")))
            return found if (folder / shard.file).stat().st_size == found.bytes else None
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps(asdict(self), separators=(",", ":")) + "\n")


def write_index(folder: Path, shards: Sequence[Shard]) -> bool:
    """Write `index.json` when every shard is whole; whether it is. The caller holds a lock."""
    entries = []
    for shard in shards:
        record = ShardRecord.find(folder, shard)
        if record is None:
            return False
        entry = asdict(record)
        del entry["keys"]  # half of its size, and in the shard's own record
        entries.append(entry)
    text = json.dumps({"format": FORMAT, "shards": entries}, separators=(",", ":")) + "\n"
    path = folder / INDEX
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_whole(path, text)
    return True


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
