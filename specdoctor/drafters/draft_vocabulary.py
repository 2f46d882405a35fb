"""A draft vocabulary that is a part of the target's: its map is checked once, when a drafter is bound."""

import torch
from torch import Tensor

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.spec import DraftSpec


def checked_map(d2t: Tensor | None, spec: DraftSpec) -> Tensor | None:
    """`d2t` [dV], absolute target ids, unless it cannot be that; None for a full vocabulary.

    Raises `SpecdoctorError` for ids outside the target's vocabulary and for two draft rows with one id: q would not be
    the law that drafts are drawn from. A map of the wrong form (offsets or ids, formats page 3.10) ends here too.
    """
    if d2t is None:
        return None
    low, high = int(d2t.min()), int(d2t.max())
    if low < 0 or high >= spec.vocab_size:
        raise SpecdoctorError(
            f"tensor d2t maps draft ids to {low}..{high}, expected target ids 0..{spec.vocab_size - 1}; a map stored "
            "as offsets where ids are expected, or the reverse, looks like this"
        )
    counts = torch.bincount(d2t, minlength=spec.vocab_size)
    if int(counts.max()) > 1:
        twice = int(counts.argmax())
        raise SpecdoctorError(
            f"tensor d2t maps {int(counts[twice])} draft ids to target id {twice}, expected each id once; a map of ids "
            "where offsets are expected, or the reverse, looks like this"
        )
    return d2t


def over_target_vocabulary(values: Tensor, d2t: Tensor | None, rows: int, elsewhere: float = 0.0) -> Tensor:
    """Values over draft ids [..., dV] to values over target ids [..., rows], `elsewhere` where no draft row is."""
    if d2t is None:
        return values
    return values.new_full((*values.shape[:-1], rows), elsewhere).index_copy_(-1, d2t, values)
