"""`inspect` as data: the checkpoint's facts, the SD2 and SD3 checks and their findings in one document.

The document is what `--json` writes and what the console report is drawn from.
"""

import time
from typing import Any

from specdoctor import __version__
from specdoctor.checks.finding import by_severity
from specdoctor.checks.registry import family, run_checks
from specdoctor.measure.inspect import facts, inspect_draft

SCHEMA_VERSION = 1


def examine_draft(name: str, target: str = "") -> dict[str, Any]:
    """The whole result of `inspect`. Raises what `inspect_draft` raises."""
    began = time.perf_counter()
    inspection = inspect_draft(name, target)
    checks = [*family("SD2"), *family("SD3")]
    findings = by_severity(list(run_checks(checks, inspection)))
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "specdoctor", "version": __version__},
        "command": "inspect",
        **facts(inspection),
        "checks": [{"code": check.code, "title": check.title} for check in checks],
        "findings": [finding.as_json() for finding in findings],
        "seconds": round(time.perf_counter() - began, 3),
    }
