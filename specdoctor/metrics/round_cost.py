"""What a round costs: a measured table of target forward times, and the drafter's time.

Contract: a cost table is JSON `{"rows": [...], "seconds": [...], "draft_seconds": x}`, optionally `overhead_seconds`:
T(N) of a target forward over N rows for some N, and what drafting and the rest of a round take. Between measured N the
time is interpolated; beyond them there is none, for the curve bends where the hardware decides.
"""

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specdoctor.errors import SpecdoctorError


@dataclass(frozen=True, slots=True)
class RoundCost:
    """T(N) at `rows`, rising; seconds of a draft and of everything else in a round."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    draft_seconds: float = 0.0
    overhead_seconds: float = 0.0

    @classmethod
    def read(cls, path: Path | str) -> "RoundCost":
        """Raises `SpecdoctorError` that names the key of whatever cannot be a cost table."""
        path = Path(path)
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SpecdoctorError(f"{path}: {error.strerror or error}; give the JSON file of a cost table") from None
        except ValueError as error:
            raise SpecdoctorError(f"{path}: not JSON: {error}; give the file of a cost table") from None
        return cls.parse(table, str(path))

    @classmethod
    def parse(cls, table: Any, where: str = "cost table") -> "RoundCost":
        if not isinstance(table, dict):
            raise SpecdoctorError(f"{where}: found a {type(table).__name__}, expected an object with rows and seconds")
        rows, seconds = (_numbers(table, key, where) for key in ("rows", "seconds"))
        if len(rows) != len(seconds):
            raise SpecdoctorError(
                f"{where}: rows has {len(rows)} entries and seconds has {len(seconds)}, expected as many of each"
            )
        if any(n != int(n) for n in rows) or any(b <= a for a, b in pairwise(rows)):
            raise SpecdoctorError(f"{where}: key rows is {rows}, expected rising whole numbers")
        draft = _number(table, "draft_seconds", where)
        overhead = _number({"overhead_seconds": 0.0} | table, "overhead_seconds", where)
        return cls(tuple(int(n) for n in rows), tuple(seconds), draft, overhead)

    def target_seconds(self, rows: ArrayLike) -> NDArray[np.float64]:
        """T(N), NaN outside of what was measured."""
        wanted = np.asarray(rows, np.float64)
        return np.interp(wanted, self.rows, self.seconds, left=np.nan, right=np.nan)

    def round_seconds(self, verified: int) -> NDArray[np.float64]:
        """[verified + 1] seconds of a round that verifies 0, 1, ... drafts. Drafting costs the same however many."""
        return self.target_seconds(np.arange(1, verified + 2)) + self.draft_seconds + self.overhead_seconds

    @property
    def plain_seconds(self) -> float:
        """Seconds of a round without a drafter: one token."""
        return float(self.target_seconds(1)) + self.overhead_seconds


def _numbers(table: dict[str, Any], key: str, where: str) -> list[float]:
    values = table.get(key)
    if not isinstance(values, list) or not values or not all(_is_positive(v) for v in values):
        raise SpecdoctorError(f"{where}: key {key} is {_shown(values)}, expected a list of numbers above 0")
    return [float(v) for v in values]


def _number(table: dict[str, Any], key: str, where: str) -> float:
    value = table.get(key)
    if _is_positive(value) or (value == 0 and not isinstance(value, bool)):
        return float(value or 0)
    raise SpecdoctorError(f"{where}: key {key} is {_shown(value)}, expected seconds, 0 or more")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
