"""The map from draft ids to target ids (`d2t`, `t2d`) of a drafter with a reduced vocabulary, as it is stored.

Two conventions: Hugging Face checkpoints store offsets (target id = draft id + d2t[draft id]), GGUF files absolute ids.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Ids = np.ndarray[Any, np.dtype[np.int64]]

_LONG_ENOUGH = 16  # shorter maps do not show a convention by their shape


@dataclass(frozen=True)
class DraftMap:
    """`values` as stored [dV]; `kept` = ids where t2d is true, ascending, or None without t2d."""

    values: "Ids"
    kept: "Ids | None"
    expects_absolute: bool

    @property
    def expected(self) -> "Ids":
        """Target ids by the convention of the file's kind."""
        return self.values if self.expects_absolute else self._offsets

    @property
    def other(self) -> "Ids":
        """Target ids by the other convention."""
        return self._offsets if self.expects_absolute else self.values

    @property
    def _offsets(self) -> "Ids":
        import numpy as np

        return self.values + np.arange(len(self.values))

    @property
    def is_identity(self) -> bool:
        """Whether draft id i stands for target id i throughout."""
        import numpy as np

        return bool((self.expected == np.arange(len(self.values))).all())

    @property
    def wrong_convention(self) -> bool:
        """Whether the other convention explains the values and the expected one does not."""
        import numpy as np

        if self.kept is not None and len(self.kept) == len(self.values):
            return not np.array_equal(self.expected, self.kept) and np.array_equal(self.other, self.kept)
        steps = np.diff(self.values)
        if len(self.values) < _LONG_ENOUGH or self.is_identity:
            return False
        # Ids of a sorted map rise at each step. Offsets repeat wherever neighbouring ids are both kept.
        return bool((steps < 1).any() and (steps >= 0).all()) if self.expects_absolute else bool((steps >= 1).all())

    @property
    def shift(self) -> int | None:
        """The constant that all ids are off by against t2d, if they are."""
        if self.kept is None or len(self.kept) != len(self.values) or not len(self.values):
            return None
        gaps = self.expected - self.kept
        return int(gaps[0]) if gaps[0] != 0 and (gaps == gaps[0]).all() else None

    @property
    def disagreements(self) -> int | None:
        """Draft ids whose target is not the one t2d gives; None without a comparable t2d."""
        if self.kept is None or len(self.kept) != len(self.values):
            return None
        return int((self.expected != self.kept).sum())

    def outside(self, vocabulary: int) -> int:
        """How many targets are no id of a vocabulary of that size."""
        return int(((self.expected < 0) | (self.expected >= vocabulary)).sum())

    @property
    def duplicates(self) -> int:
        """How many draft ids stand for a target id that another one stands for already."""
        import numpy as np

        return len(self.expected) - len(np.unique(self.expected))
