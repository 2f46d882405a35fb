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

KINDS = {
    "NaN": "the mask itself is not a number",
    "sign flipped": "positive numbers raise the scores that they should hide",
    "does not hide": "a negative number near zero lowers a weight and does not make it zero",
    "0/1 numbers": "as an additive mask it hides nothing: 1 is added to some scores, 0 to the others",
    "all -inf row": "softmax of a row of -inf is NaN, and NaN only shows as low acceptance",
    "row sees nothing": "softmax of a row of equal numbers weighs all columns alike, hidden ones included",
    "dtype overflow": "the number is beyond float16, whose smallest is -65504, and becomes -inf there",
    "-inf": "-inf is right as long as each row sees something; the most negative finite number is right always",
}


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
    found: list[tuple[str, Tensor]] = []
    if is_additive(values):
        low = wide < 0
        found += [
            ("NaN", wide.isnan()),
            ("sign flipped", wide > 0),
            ("does not hide", low & (wide > HIDES)),
        ]
        found += _beyond_the_dtype(wide, computed)
    elif values.is_floating_point():
        found.append(("0/1 numbers", wide == 1))
    found += _rows_without_a_column(values, wide, computed)
    return [_fault(kind, entries, wide) for kind, entries in found if entries.any()]


def _beyond_the_dtype(wide: Tensor, computed: torch.dtype) -> list[tuple[str, Tensor]]:
    infinite = wide == -torch.inf
    if computed == torch.float16:
        return [("dtype overflow", wide < -LARGEST_HALF)]
    return [("-inf", infinite)]


def _rows_without_a_column(values: Tensor, wide: Tensor, computed: torch.dtype) -> list[tuple[str, Tensor]]:
    empty = ~visible_entries(values).any(-1) & ~wide.isnan().any(-1) & ~(wide > 0).any(-1)
    lowest = -LARGEST_HALF if computed == torch.float16 else float("-inf")
    infinite = (wide == -torch.inf) | ((wide < lowest) if lowest > float("-inf") else torch.zeros_like(wide).bool())
    nan = empty & infinite.all(-1) if is_additive(values) else torch.zeros_like(empty)
    rows = {"all -inf row": nan, "row sees nothing": empty & ~nan}
    return [(kind, which[:, None].expand_as(wide)) for kind, which in rows.items()]


def _fault(kind: str, entries: Tensor, wide: Tensor) -> ValueFault:
    row, column = entries.nonzero()[0].tolist()
    rows = tuple(entries.any(-1).nonzero().flatten().tolist())
    count = len(rows) if kind in ("all -inf row", "row sees nothing") else int(entries.sum())
    return ValueFault(kind, row, column, float(wide[row, column]), count, rows)
