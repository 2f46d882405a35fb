"""Where the training loop gets its batches: from the target while training, or from a cache on disk.

Contract: both give the same batches for the same samples, taps, epoch and seed. The order is fixed by epoch and seed,
and known from the lengths alone, so `skip` costs nothing. With `world` processes, process `rank` gets every world-th
batch, each the same number of them.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.training.batch import TrainingBatch
from specdoctor.training.cache_reader import TargetCache
from specdoctor.training.samples import Sample, SampleSet
from specdoctor.training.target_states import check_taps, target_states


class FeatureSource(Protocol):
    """A data set with the target's states."""

    def batches(self, epoch: int, seed: int, skip: int = 0) -> Iterator[TrainingBatch]:
        """Batches of one epoch in an order that follows from epoch and seed; without the first `skip`."""
        ...

    def count(self, epoch: int, seed: int) -> int:
        """Batches of that epoch."""
        ...


class OnlineFeatures:
    """The target runs in the loop, in inference mode; nothing is kept. Batches lie on the target's device."""

    def __init__(
        self,
        target: Target,
        samples: Sequence[Sample],
        taps: Sequence[int],
        tokens_per_batch: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """`taps` as in `TrainingBatch`; -1 is the state after the final norm."""
        check_taps(taps, target.num_layers, "taps")
        self.target, self.samples, self.taps = target, samples, tuple(taps)
        lengths = samples.lengths if isinstance(samples, SampleSet) else [len(sample.ids) for sample in samples]
        if max(lengths) > target.max_positions:
            raise SpecdoctorError(
                f"a sample has {max(lengths)} tokens, the target {target.max_positions} positions; cut samples there"
            )
        self._plan = BatchPlan(lengths, tokens_per_batch, rank, world)

    def count(self, epoch: int, seed: int) -> int:
        return len(self._plan.batches(epoch, seed))

    def batches(self, epoch: int, seed: int, skip: int = 0) -> Iterator[TrainingBatch]:
        for chosen in self._plan.batches(epoch, seed)[skip:]:
            yield self._batch([self.samples[i] for i in chosen])

    def _batch(self, samples: Sequence[Sample]) -> TrainingBatch:
        target, ids = self.target, [sample.ids for sample in samples]
        starts = _starts([len(one) for one in ids])
        N, Ht, width = starts[-1], target.hidden_size, len(self.taps) * target.hidden_size
        # Made outside inference mode, and filled: autograd may save them, as it may no inference tensor.
        taps = torch.empty(N, width, dtype=target.dtype, device=target.device)
        last = torch.empty(N, Ht, dtype=target.dtype, device=target.device)
        with torch.no_grad():
            for i, first, states in target_states(target, ids, self.taps):
                at = slice(starts[i] + first, starts[i] + first + len(states))
                taps[at], last[at] = states[:, :width], states[:, width:]
        flat_ids = torch.tensor([token for one in ids for token in one], device=target.device)
        mask = torch.tensor([flag for sample in samples for flag in sample.loss_mask], device=target.device)
        return TrainingBatch(flat_ids, mask, starts, taps, last)


class CachedFeatures:
    """Batches from a cache that `specdoctor data cache` wrote, read from the mapped files."""

    def __init__(
        self,
        folder: Path,
        tokens_per_batch: int,
        taps: Sequence[int] | None = None,
        target_hash: str | None = None,
        device: str | torch.device = "cpu",
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """`taps`: those of the drafter, any of the cache's in any order (None: all). `target_hash`: as of
        `checkpoint_hash`, to be sure that target and cache belong together.

        Raises `SpecdoctorError` when the cache is not complete, lacks a tap or is of another target.
        """
        self.cache, self.device = TargetCache(folder), torch.device(device)
        facts = self.cache.facts
        self.taps = tuple(facts.taps if taps is None else taps)
        for tap in self.taps:
            if tap not in facts.taps:
                raise SpecdoctorError(
                    f"{folder}: the cache has the taps {facts.taps}, the drafter reads {tap} too; write another cache, "
                    "or train from the samples: --data FOLDER"
                )
        if target_hash is not None and target_hash != facts.target_hash:
            raise SpecdoctorError(
                f"{folder}: the cache was written by {facts.target} (hash {facts.target_hash}), but this target has "
                f"the hash {target_hash}; write a cache with this target"
            )
        self._columns = None if self.taps == tuple(facts.taps) else [facts.taps.index(tap) for tap in self.taps]
        self._plan = BatchPlan(self.cache.lengths, tokens_per_batch, rank, world)

    def count(self, epoch: int, seed: int) -> int:
        return len(self._plan.batches(epoch, seed))

    def batches(self, epoch: int, seed: int, skip: int = 0) -> Iterator[TrainingBatch]:
        for chosen in self._plan.batches(epoch, seed)[skip:]:
            read = [self.cache.read(i, self._columns) for i in chosen]
            parts = [torch.cat(tensors).to(self.device) for tensors in zip(*read, strict=True)]
            ids, mask, taps, last = parts
            yield TrainingBatch(ids, mask, _starts([len(sample.ids) for sample in read]), taps, last)


class BatchPlan:
    """Which samples make which batch: shuffled, then packed in order, at most `tokens` in a batch."""

    def __init__(self, lengths: Sequence[int], tokens: int, rank: int = 0, world: int = 1) -> None:
        """A sample longer than `tokens` makes a batch of its own. Raises `SpecdoctorError` when a process gets none."""
        if tokens < 1:
            raise SpecdoctorError(f"tokens_per_batch is {tokens}, expected 1 or more")
        self.lengths, self.tokens, self.rank, self.world = lengths, tokens, rank, world

    def batches(self, epoch: int, seed: int) -> list[list[int]]:
        """This process's batches of an epoch, as numbers of samples."""
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) & 0x7FFFFFFFFFFFFFFF)
        packed: list[list[int]] = []
        room = 0
        for i in torch.randperm(len(self.lengths), generator=generator).tolist():
            if not packed or self.lengths[i] > room:
                packed.append([])
                room = self.tokens
            packed[-1].append(i)
            room -= self.lengths[i]
        if len(packed) < self.world:
            raise SpecdoctorError(
                f"{len(packed)} batches in an epoch cannot be shared by {self.world} processes; give more samples or "
                "fewer tokens_per_batch"
            )
        even = len(packed) // self.world * self.world
        return packed[:even][self.rank :: self.world]


def _starts(lengths: Sequence[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts
