"""A dumped mask's numbers: which entries mean visible, and which numbers are wrong whatever they mean.

Contract: boolean and 0/1 integer masks say True or 1 for visible, as torch's attention does; additive masks say 0 for
visible and a very negative number for hidden. An entry whose number is itself wrong (NaN, positive, too small to hide)
is reported for that, and read as what was most likely meant, so that one mistake is one finding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

HIDES = -1000.0  # an addend above this leaves a weight that is not zero for some scores
LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class ValueFault:
    """One kind of wrong number, its first place, and how many entries or rows have it."""

    kind: str
    row: int
    column: int
    value: float
    entries: int
    rows: tuple[int, ...]


def is_additive(values: Tensor) -> bool:
    """Whether a mask [n, columns] is added to scores; boolean masks and masks of 0 and 1 are not."""
    if values.dtype == torch.bool:
        return False
    zero_or_one = bool(((values == 0) | (values == 1)).all())
    return not zero_or_one or (values.is_floating_point() and not bool(values.any()))


def visible_entries(values: Tensor) -> Tensor:
    """Bool [n, columns]: what the mask shows, wrong numbers read as what was meant. NaN counts as hidden."""
    if not is_additive(values):
        return values.bool()
    wide = values.double()
    return wide == 0


def value_faults(values: Tensor, dtype: torch.dtype | None = None) -> list[ValueFault]:
    """Wrong numbers of a mask [n, columns]; `dtype`: what the engine computes in (None: the mask's own).

    Rows that see nothing are found in boolean masks too.
    """
    computed = dtype or (values.dtype if values.is_floating_point() else torch.float32)
    wide = values.double()
    infinite = wide < -LARGEST_HALF if computed == torch.float16 else wide == -torch.inf
    empty = ~visible_entries(values).any(-1) & ~wide.isnan().any(-1) & ~(wide > 0).any(-1)  # bool [n]
    all_infinite = empty & infinite.all(-1)
    found = {
        "all -inf row": all_infinite[:, None].expand_as(wide),
        "row sees nothing": (empty & ~all_infinite)[:, None].expand_as(wide),
    }
    if is_additive(values):
        found |= {
            "NaN": wide.isnan(),
            "sign flipped": wide > 0,
            "does not hide": (wide < 0) & (wide > HIDES),
            "dtype overflow" if computed == torch.float16 else "-inf": infinite & ~all_infinite[:, None],
        }
    elif values.is_floating_point():
        found["0/1 numbers"] = wide == 1
    return [_fault(kind, entries, wide) for kind, entries in found.items() if entries.any()]


def _fault(kind: str, entries: Tensor, wide: Tensor) -> ValueFault:
    row, column = entries.nonzero()[0].tolist()
    rows = tuple(entries.any(-1).nonzero().flatten().tolist())
    count = len(rows) if kind in ("all -inf row", "row sees nothing") else int(entries.sum())
    return ValueFault(kind, row, column, float(wide[row, column]), count, rows)
