"""`specdoctor data vocabulary`: the ids that the target writes most, for a drafter that proposes no others.

A reduced draft vocabulary makes the head, most of a small drafter's cost, shorter (Zhao et al. 2025, "FR-Spec").
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.training.samples import read_samples


def count_vocabulary(data: Path, size: int, out: Path) -> dict[str, Any]:
    """Write to `out` the `size` ids that are most frequent in the answers of `data`, rising, as a JSON list.

    Of equally frequent ids the lower goes first; fewer are written where the answers have fewer. Raises
    `SpecdoctorError` where there are no samples or `out` cannot be written.
    """
    counts: Counter[int] = Counter()
    for sample in read_samples(data):
        counts.update(token for token, counted in zip(sample.ids, sample.loss_mask, strict=True) if counted)
    kept = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    try:
        out.write_text(json.dumps(sorted(kept)) + "\n", encoding="utf-8")
    except OSError as error:
        raise SpecdoctorError(f"{out}: cannot be written ({error.strerror}); give another --out") from None
    tokens = counts.total()
    return {
        "file": str(out),
        "ids": len(kept),
        "seen": len(counts),
        "tokens": tokens,
        "coverage": sum(counts[token] for token in kept) / tokens,
    }
