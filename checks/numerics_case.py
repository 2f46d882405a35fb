"""What the SD4 checks look at: the facts of all weights, and the runs of a pair in several dtypes."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # listing the checks must not import torch
    from specdoctor.measure.numerics import DtypeRun
    from specdoctor.measure.weight_scan import WeightFacts

Key = TypeVar("Key")


@dataclass
class NumericsCase:
    """The context of the SD4 checks. Runs stand in the order of the dtypes asked for."""

    weights: "list[WeightFacts]"
    runs: "list[DtypeRun]" = field(default_factory=list)

    def run(self, dtype: str) -> "DtypeRun | None":
        """The run in a dtype, if it was made and did not fail."""
        return next((run for run in self.runs if run.dtype == dtype and not run.error), None)


def by_key(pairs: Iterable[tuple[Key, str]]) -> dict[Key, list[str]]:
    """Dtypes in which each thing was seen, in the order seen."""
    grouped: dict[Key, list[str]] = {}
    for key, dtype in pairs:
        known = grouped.setdefault(key, [])
        if dtype not in known:
            known.append(dtype)
    return grouped


def place(label: str) -> dict[str, str]:
    """`side: module` as a finding's place."""
    side, _, module = label.partition(": ")
    return {"side": side.rstrip(":"), "module": module or "the whole model"}
