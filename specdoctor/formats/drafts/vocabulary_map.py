"""The map from a reduced draft vocabulary to the target's ids: `d2t` offsets to absolute ids (formats page 1.7, 1.8).

HF-side writers store offsets: target id = draft id + d2t[draft id]. What the map says is checked when it is loaded:
ids in range, none twice, and the same ids as the mask `t2d` where that is in the file (formats page 3.10).
"""

from typing import TYPE_CHECKING

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import Stored, TensorSource

if TYPE_CHECKING:
    from torch import Tensor

T2D = {"t2d": "says again what d2t says"}
IDENTITY = "the draft vocabulary is the target's, so the map is the identity"


def offsets_to_ids(offsets: "Tensor") -> "Tensor":
    """Offsets [dV] to target ids [dV]: draft id + offset."""
    return offsets.long() + offsets.new_ones(len(offsets)).long().cumsum(0) - 1


def vocabulary_map_tensors(
    tensors: TensorSource, draft_rows: int, vocab: int
) -> tuple[dict[str, Stored], dict[str, str]]:
    """The canonical `d2t` (empty for a full vocabulary), and which of `d2t` and `t2d` are set aside and why."""
    if draft_rows == vocab:
        return {}, {name: IDENTITY for name in ("d2t", "t2d") if name in tensors}
    change = OffsetsToIds(tensors, vocab)
    return {"d2t": Stored("d2t", (draft_rows,), change)}, T2D


class OffsetsToIds:
    """Offsets [dV] to absolute target ids [dV], refused when they cannot be a map into `vocab` ids."""

    def __init__(self, tensors: TensorSource, vocab: int) -> None:
        self.tensors, self.vocab = tensors, vocab

    def __call__(self, offsets: "Tensor") -> "Tensor":
        if offsets.is_floating_point() or offsets.dtype.itemsize < 4:
            raise SpecdoctorError(f"{self._place()} has dtype {self.tensors.dtype('d2t')}, expected int64 offsets")
        ids = offsets_to_ids(offsets)
        kept = self._kept()
        if kept is not None:
            if ids.sort().values.equal(kept):
                return ids
            if offsets.long().sort().values.equal(kept):
                raise SpecdoctorError(
                    f"{self._place()} holds target ids (t2d has the same), expected offsets from the draft id: engines "
                    "add the draft id and would draft wrong tokens; subtract 0, 1, 2, ... from it"
                )
            raise SpecdoctorError(
                f"{self._place()} and t2d name different tokens; one of them is of another drafter, get both again"
            )
        low, high, twice = int(ids.min()), int(ids.max()), len(ids) - len(ids.unique())
        if low < 0 or high >= self.vocab or twice:
            raise SpecdoctorError(
                f"{self._place()} plus the draft id gives ids {low} to {high}, {twice} of them twice, expected "
                f"{len(ids)} different ids below {self.vocab}; it holds absolute ids or is of another drafter"
            )
        return ids

    def _kept(self) -> "Tensor | None":
        """The target ids [dV] that t2d marks, rising."""
        if "t2d" not in self.tensors:
            return None
        if self.tensors.shape("t2d") != (self.vocab,):
            raise SpecdoctorError(
                f"{self.tensors.file_of('t2d')}: t2d has shape {list(self.tensors.shape('t2d'))}, expected "
                f"[{self.vocab}], one mark for each target id"
            )
        return self.tensors.load(["t2d"])["t2d"].nonzero().flatten()

    def _place(self) -> str:
        return f"{self.tensors.file_of('d2t')}: d2t"
