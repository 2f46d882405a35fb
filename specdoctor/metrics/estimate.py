"""A number, its interval, and what stands behind it.

Contract: absent (`None` and a reason), zero, and NaN (computed, and came out undefined) are three different things in
code; in JSON the first and the last are `null` with a reason, and NaN or infinity never leave.
"""

import math
from dataclasses import dataclass
from typing import Any

_NOT_FINITE = "the computation gave NaN or infinity"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval.

    `n` counts what the value was averaged over: rounds for pooled metrics (for `marginal[i]` and `conditional[i]` the
    rounds at risk), requests for means over requests, prompts for paired comparisons, predictions for calibration.
    `reason` says why the value, or only its interval, is absent, or how the interval departs from the usual one.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    reason: str | None = None

    def __post_init__(self) -> None:
        assert self.value is not None or self.reason, "an absent value needs a reason"
        for name in ("value", "low", "high"):  # numpy scalars are not JSON
            number = getattr(self, name)
            object.__setattr__(self, name, None if number is None else float(number))
        object.__setattr__(self, "n", int(self.n))

    @classmethod
    def absent(cls, reason: str, n: int = 0) -> "Estimate":
        """An estimate that does not exist, and why."""
        return cls(None, n=n, reason=reason)

    def to_json(self) -> dict[str, Any]:
        """`{value, low, high, n[, reason]}` with finite numbers or null."""
        row: dict[str, Any] = {name: _finite(getattr(self, name)) for name in ("value", "low", "high")}
        row["n"] = self.n
        reason = self.reason
        if self.value is not None and row["value"] is None:
            reason = f"{_NOT_FINITE}: {reason}" if reason else _NOT_FINITE
        if reason:
            row["reason"] = reason
        return row


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
