"""What any results file says, in one shape: settings, counts per prompt or pooled, and how its source counts.

Contract: counts keep our meaning (`metrics.sums.Sums`); what a source cannot give is None there, and `absent` says why.
Values that a source only prints, without the counts behind them, stand in `values` under the name of their definition,
so that numbers of two conventions never meet.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.sums import DEFINITIONS, Sums, estimate_of

POOLED = "counts are pooled over all requests: no interval between prompts can be given"
TEXT_LIMIT = 64  # a longer setting (a chat template) is kept as its hash: results carry no text


@dataclass(frozen=True, slots=True)
class ResultSet:
    """One arm of one file.

    `prompts` is None when the source pools. `pairable` says whether its keys name prompts, so that another run's keys
    mean the same; row numbers and request ids do not. `histogram[n]` counts rounds that committed n tokens.
    """

    tool: str
    path: str
    arm: str
    convention: str  # how the source counts, in one line
    pooled: Sums
    prompts: dict[str, Sums] | None = None
    pairable: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)  # prompt id -> hash of what was asked
    values: dict[str, Estimate] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    histogram: list[int] | None = None
    marginal: list[float] | None = None  # [K] P(drafts 0..i all accepted), as the source has it
    notes: tuple[str, ...] = ()
    version: str | None = None  # of the tool
    date: str | None = None

    @property
    def label(self) -> str:
        """Short name for tables and messages."""
        return f"{Path(self.path).name}@{self.arm}" if self.arm else Path(self.path).name

    def estimate(self, definition: str, seed: int = 0) -> Estimate:
        """The value of one definition: from counts per prompt, else as published, else from pooled counts."""
        known = DEFINITIONS[definition]
        if self.prompts and (counted := estimate_of(known, self.prompts, seed)):
            return counted
        published = self.values.get(definition)
        if published is not None and published.value is not None:
            return published
        pooled = estimate_of(known, {"": self.pooled}, seed)
        if pooled is not None:
            return Estimate(pooled.value, n=0, reason=POOLED)
        reason = self.absent.get(definition) or (published.reason if published else None)
        return Estimate.absent(reason or f"{self.tool} does not state what {definition} needs")

    def describe(self) -> dict[str, Any]:
        """For JSON: where the numbers come from and how they were counted."""
        return {
            "file": self.path,
            "tool": self.tool,
            "version": self.version,
            "date": self.date,
            "arm": self.arm,
            "convention": self.convention,
            "prompts": None if self.prompts is None else len(self.prompts),
            "settings": self.settings,
            "notes": list(self.notes),
        }


def rounds_behind(accepted: float, draft_rounds: float, committed: float, most_cut: float) -> float | None:
    """Verify rounds when only those with drafts were counted: the same number, if every round had a draft.

    Then the tokens offered (accepted + one a round) exceed the committed ones by what was cut at EOS or at the cap,
    which is at most `most_cut`. Outside of that some rounds had no draft, and None says that the number is unknown.
    """
    return draft_rounds if 0 <= accepted + draft_rounds - committed <= most_cut else None


def count(value: Any, place: str, key: str) -> float | None:
    """A count of a file: 0 or more, or None when absent. Raises on anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise SpecdoctorError(f"{place}: key {key} is {value!r}, expected a number of 0 or more; is the file damaged?")
    return value


def estimate_from(value: Any, place: str, key: str) -> Estimate | None:
    """An estimate `{value, low, high, n}` of our own JSON; None when absent."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or "value" not in value:
        raise SpecdoctorError(
            f"{place}: key {key} is {value!r}, expected {{value, low, high, n}}; is the file damaged?"
        )
    numbers = {name: value.get(name) for name in ("value", "low", "high")}
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
            raise SpecdoctorError(f"{place}: key {key}.{name} is {number!r}, expected a number or null")
    reason = value.get("reason")
    if numbers["value"] is None:
        return Estimate.absent(str(reason or "null in the file"), int(value.get("n") or 0))
    return Estimate(numbers["value"], numbers["low"], numbers["high"], int(value.get("n") or 0), reason)


def setting(value: Any) -> Any:
    """A setting as it is kept and compared: short plain values as they are, anything long as its hash."""
    if isinstance(value, Mapping | list | tuple):
        text = json.dumps(value, sort_keys=True, default=str)
    elif isinstance(value, str):
        text = value
    else:
        return value
    return value if len(text) <= TEXT_LIMIT else f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def present(**settings: Any) -> dict[str, Any]:
    """Settings without the unknown ones."""
    return {key: setting(value) for key, value in settings.items() if value is not None}
