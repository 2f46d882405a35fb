"""Shared by the SD2 and SD3 checks: remarks of a reader as findings, tensors of many layers as one name."""

import re
from collections.abc import Iterable
from pathlib import Path

from specdoctor.checks.finding import Finding, Severity
from specdoctor.formats.drafts.checkpoint import Remark


def finding_of(remark: Remark, code: str, severity: Severity, fix: str, fault: str = "") -> Finding:
    """A remark as a finding. The place is the file's name without its folder: fingerprints must not depend on that."""
    return Finding(
        code=code,
        severity=severity,
        title=remark.evidence,
        where={"file": Path(remark.place).name, **({"key": remark.subject} if remark.subject else {})},
        fix=remark.fix or fix,
        fault=fault,
        subject=f"{remark.kind}-{remark.subject or remark.evidence}",
    )


def by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    """Tensor names grouped over layers: `layers.*.mlp.up_proj.weight` -> the names with numbers in its place."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"(^|(?<=\.))\d+(?=\.)", "*", name), []).append(name)
    return groups
