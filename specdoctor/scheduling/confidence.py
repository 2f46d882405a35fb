"""Static confidence threshold: cut a chain at the first conditional confidence below it (formats.md 2.1).

Lossless: the confidence of draft k depends on the tokens before k only, so whether k is verified does not depend on k.
"""

from collections.abc import Sequence as Seq

import torch

from specdoctor.engine.draft import Draft, Schedule
from specdoctor.engine.sequence import Sequence
from specdoctor.errors import SpecdoctorError


def confidence_threshold(threshold: float) -> Schedule:
    """A schedule that keeps the drafts before the first confidence below `threshold`, possibly none."""
    if not 0 <= threshold <= 1:
        raise SpecdoctorError(f"--confidence-threshold {threshold}: expected a probability between 0 and 1")

    def schedule(sequences: Seq[Sequence], drafts: Seq[Draft]) -> list[Draft]:
        values = [draft.confidence for draft in drafts if draft.confidence is not None]  # an empty draft has none
        if not values:
            return list(drafts)
        sure = iter((torch.cat(values) >= threshold).tolist())
        trimmed = []
        for draft in drafts:
            row = [next(sure) for _ in range(0 if draft.confidence is None else len(draft))]
            trimmed.append(draft.prefix([*row, False].index(False)))
        return trimmed

    return schedule
