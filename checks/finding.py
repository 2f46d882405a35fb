"""A finding: what a check has to say, in numbers, with the place and the fix.

Contract: a finding is data. It goes to the console, to JSON and into baselines, so its fingerprint must not change with
the numbers measured, the order of checks or the folder that the files lie in.
"""

import hashlib
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How bad. `crash`: the check itself failed, so nothing is known."""

    ERROR = "error"  # the pair cannot work, or works with next to no acceptance
    WARNING = "warning"  # works, with less acceptance or trouble in some engine
    INFO = "info"  # good to know, nothing to do
    CRASH = "crash"


ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.CRASH: 2, Severity.INFO: 3}


@dataclass(frozen=True)
class Finding:
    """One fact found by one check."""

    code: str
    severity: Severity
    title: str  # one line, with its numbers
    evidence: dict[str, Any] = field(default_factory=dict)  # numbers, and short examples
    where: dict[str, Any] = field(default_factory=dict)  # side, file, key, layer, round, row: what applies
    fix: str = ""
    fault: str = ""  # the fault kind this is an instance of, as `tokenizer.id-map`
    subject: str = ""  # tells findings of one check in one place apart; part of the fingerprint

    @property
    def fingerprint(self) -> str:
        """16 hex digits, the same for the same trouble in the same place whatever the numbers."""
        place = "|".join(f"{key}={self.where[key]}" for key in sorted(self.where))
        return hashlib.sha256(f"{self.code}|{self.subject}|{place}".encode()).hexdigest()[:16]

    @property
    def needs_action(self) -> bool:
        """Whether a clean bill of health is out of the question."""
        return self.severity in (Severity.ERROR, Severity.WARNING)

    def as_json(self) -> dict[str, Any]:
        """JSON-able form."""
        values = asdict(self)
        del values["subject"]
        return {**values, "severity": str(self.severity), "fingerprint": self.fingerprint}


def counted(count: int, noun: str) -> str:
    """A count with its noun: `1 id`, `2,304 ids`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def by_severity(findings: list[Finding]) -> list[Finding]:
    """Worst first; the order of the checks among equals."""
    return sorted(findings, key=lambda finding: ORDER[finding.severity])
