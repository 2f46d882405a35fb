"""A target cache opened for reading: any sample's states, straight from the mapped files.

Contract: nothing is read before it is asked for, beyond the index. Opening compares each shard's size with the index;
`specdoctor data cache --verify` compares every byte.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from specdoctor.errors import SpecdoctorError
from specdoctor.training.cache_layout import INDEX, CacheFacts

OPEN_SHARDS = 256  # mapped at once


class CachedSample(NamedTuple):
    """n tokens of one sequence, on the host."""

    ids: Tensor  # [n] int64
    loss_mask: Tensor  # [n] bool
    taps: Tensor  # [n, n_taps * Ht]
    last_hidden: Tensor  # [n, Ht]


class TargetCache:
    """Samples by number, 0 .. len - 1, in the order of the data set."""

    def __init__(self, folder: Path) -> None:
        """Raises `SpecdoctorError` when the cache is not complete, or a shard has not the size it was written with."""
        self.folder, self.facts = folder, CacheFacts.read(folder)
        self.lengths: list[int] = []
        self._places: list[tuple[int, int]] = []  # (shard, first row)
        self._files: list[Path] = []
        self._open: OrderedDict[int, Any] = OrderedDict()
        for number, entry in enumerate(read_index(folder)):
            path = folder / entry["file"]
            size = path.stat().st_size if path.is_file() else None
            if size != entry["bytes"]:
                found = "is missing" if size is None else f"has {size} bytes, expected {entry['bytes']}"
                raise SpecdoctorError(f"{path}: {found}; run `specdoctor data cache` again, it writes what is missing")
            self._files.append(path)
            row = 0
            for length in entry["lengths"]:
                self.lengths.append(length)
                self._places.append((number, row))
                row += length

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, sample: int, columns: Sequence[int] | None = None) -> CachedSample:
        """One sample; of its taps those at `columns` (places in the cache's own list), in that order."""
        number, first = self._places[sample]
        shard, end = self._shard(number), first + self.lengths[sample]
        taps: Tensor = shard.get_slice("taps")[first:end]
        if columns is not None:
            Ht = self.facts.hidden_size
            taps = torch.cat([taps[:, c * Ht : (c + 1) * Ht] for c in columns], dim=-1)
        return CachedSample(
            shard.get_slice("ids")[first:end].long(),
            shard.get_slice("loss_mask")[first:end],
            taps,
            shard.get_slice("last_hidden")[first:end],
        )

    def _shard(self, number: int) -> Any:
        """The mapped file; the one used longest ago is closed when there are too many."""
        if number not in self._open:
            self._open[number] = safe_open(self._files[number], framework="pt")
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]


def read_index(folder: Path) -> list[dict[str, Any]]:
    """Entries of the shards. Raises `SpecdoctorError` when the cache is not complete yet."""
    path = folder / INDEX
    if not path.is_file():
        raise SpecdoctorError(
            f"{path}: missing, so the cache is not complete; run `specdoctor data cache` (all workers) to its end"
        )
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))["shards"])
    except (ValueError, KeyError, TypeError):
        raise SpecdoctorError(
            f"{path}: not an index of shards; delete it and run `specdoctor data cache` again"
        ) from None
