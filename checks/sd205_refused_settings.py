"""Refused settings: config.json has a key missing or a value that its format does not allow.

## What it checks
Whether the reader of the recognised format can make a complete description from config.json: every key it needs is
there, of the right type, and the values fit together.

## Why it matters
Some writers' code asserts such keys, others fall back to a default and go on. A drafter whose block size, taps or mask
id were guessed is not the one that was trained.

## How it is measured
The reader stops at the first key that it cannot accept and says which value it found and which it expected.

## Fix
Take config.json from the original repository again. If it is the original, the format may be newer than this version:
please report it.

## References
- Keys without a default in DeepSpec: https://github.com/deepseek-ai/DeepSpec
- Config classes of speculators: https://github.com/vllm-project/speculators
"""

import re
from pathlib import Path

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.registry import Check
from specdoctor.measure.inspect import Inspection


def run(inspection: Inspection) -> list[Finding]:
    """One error where the reader refused."""
    if not inspection.refusal:
        return []
    place, colon, said = inspection.refusal.partition(": ")
    key = re.search(r"\bkey ([\w.]+)", said)
    return [
        Finding(
            code="SD205",
            severity=Severity.ERROR,
            title=said if colon else inspection.refusal,
            where={"file": Path(place).name, **({"key": key[1]} if key else {})},
            fix="Take the file from the original repository again, or correct the key.",
            fault="config.refused",
            subject=f"refused-{key[1] if key else ''}",
        )
    ]


CHECK = Check("SD205", "Settings that a draft format does not allow", "static", run)
