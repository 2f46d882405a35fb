"""`specdoctor data vocabulary`: the ids that the target writes most, for a drafter that proposes no others.

A reduced draft vocabulary makes the head, most of a small drafter's cost, shorter (Zhao et al. 2025, "FR-Spec").
"""

from collections import Counter
from pathlib import Path
from typing import Any

from specdoctor.training.samples import read_samples


def count_vocabulary(data: Path, size: int) -> tuple[list[int], dict[str, Any]]:
    """The `size` ids that are most frequent in the answers of `data`, rising, and what they cover.

    Of equally frequent ids the lower goes first; there are fewer where the answers have fewer. Raises `SpecdoctorError`
    where there are no samples.
    """
    counts: Counter[int] = Counter()
    for sample in read_samples(data):
        counts.update(token for token, counted in zip(sample.ids, sample.loss_mask, strict=True) if counted)
    kept = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    tokens = counts.total()
    coverage = sum(counts[token] for token in kept) / tokens
    return sorted(kept), {"ids": len(kept), "seen": len(counts), "tokens": tokens, "coverage": coverage}
