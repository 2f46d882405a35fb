"""The target's hidden states of whole sequences: what drafters are trained on.

Contract: the states of a sequence depend on the list it is given in and nothing else: keys and values start empty, so
earlier calls leave no trace, not even through the shape of a cache, and equal calls give equal bytes on one machine.
Sequences of similar length share a forward; long ones run in chunks, so memory is bounded by `PACKED_ROWS` rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from specdoctor.engine.kv import KVCache
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.target import FINAL_NORMED, PREFILL_ROWS, Target
from specdoctor.errors import SpecdoctorError

PACKED_ROWS = 2048  # rows of one forward over several sequences, the shorter ones' padding in attention included


def target_states(
    target: Target, sequences: Sequence[Sequence[int]], taps: Sequence[int]
) -> Iterator[tuple[int, int, Tensor]]:
    """(sequence, first row, states [n, (len(taps) + 1) * Ht]) in pieces that cover every row of every sequence once.

    The last Ht columns are the states after the final norm, those before them HS[taps]. They are inference tensors:
    copy what is kept. Each sequence must fit the target's positions.
    """
    wanted = (*taps, FINAL_NORMED)
    for group in _groups([len(ids) for ids in sequences]):
        longest = max(len(sequences[i]) for i in group)
        # One for each group: many short sequences and then a long one would make it as wide as long.
        with _own_cache(target):
            slots = [target.open() for _ in group]
            for start in range(0, longest, PREFILL_ROWS):
                yield from _piece(target, sequences, group, slots, start, wanted)


def _piece(
    target: Target,
    sequences: Sequence[Sequence[int]],
    group: list[int],
    slots: list[int],
    start: int,
    wanted: Sequence[int],
) -> Iterator[tuple[int, int, Tensor]]:
    """One forward over the rows from `start` on of a group, at most `PREFILL_ROWS` of each."""
    going = [(i, slot) for i, slot in zip(group, slots, strict=True) if len(sequences[i]) > start]
    parts = [sequences[i][start : start + PREFILL_ROWS] for i, _ in going]
    counts = [len(part) for part in parts]
    rows = PackedRows([slot for _, slot in going], [start] * len(going), counts, target.device)
    ids = torch.tensor([token for part in parts for token in part], device=target.device)
    # One row of logits: the model wants some, and nobody reads them.
    output = target.forward(rows, ids, logit_rows=torch.zeros(1, dtype=torch.long, device=target.device), taps=wanted)
    assert output.taps is not None
    for (i, slot), count, states in zip(going, counts, output.taps.split(counts), strict=True):
        target.cache.keep(slot, range(count))
        yield i, start, states


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices in groups of similar length, at most `PACKED_ROWS` rows in a group's first forward."""
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        widest = min(lengths[i], PREFILL_ROWS)
        if group and (len(group) + 1) * widest > PACKED_ROWS:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


@contextmanager
def _own_cache(target: Target) -> Iterator[None]:
    """An empty KV cache for the time being; its memory is given back."""
    kept, target.cache = target.cache, KVCache(target.device)
    try:
        yield
    finally:
        target.cache = kept


def check_taps(taps: Sequence[int], layers: int, where: str = "--taps") -> None:
    """Raise unless every tap is an index of HS[0..L] (L = `layers`), or -1 for the state after the final norm."""
    for tap in taps:
        if not FINAL_NORMED <= tap <= layers:
            raise SpecdoctorError(
                f"{where}: found {tap}, expected 0 (the embeddings) to {layers} (the last layer's output, before the "
                "final norm), or -1 (after it)"
            )
    if not taps or len(set(taps)) < len(taps):
        raise SpecdoctorError(f"{where}: found {list(taps)}, expected one index or more, each once")
