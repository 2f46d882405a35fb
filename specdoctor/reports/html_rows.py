"""The rows that several kinds of documents share, and what every document may carry.

Contract: a key that the report uses has the type stated here; others may be anything, so that a newer file of the same
schema version still reads.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Row(BaseModel):
    """Strict: the text "1.5" is no number, and NaN is none either."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class EstimateRow(Row):
    """{value, low, high, n[, reason]} as `specdoctor.metrics.estimate` writes it."""

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    reason: str | None = None


class LimitRow(Row):
    """What limits an arm, as `specdoctor.metrics.speedup.Limit` writes it."""

    term: str
    sentence: str
    advice: str = ""


class DraftRow(Row):
    """The drafter of an arm."""

    algorithm: str | None = None
    family: str | None = None
    layers: int | None = None
    block_size: int | None = None
    draft_tokens: int


class FindingRow(Row):
    """As `specdoctor.checks.finding.Finding` writes it."""

    code: str
    severity: str
    title: str
    evidence: dict[str, Any] = Field(default_factory=dict)
    where: dict[str, Any] = Field(default_factory=dict)
    fix: str = ""


class SpsRow(Row):
    """One target forward: rows carried, tokens of context, seconds."""

    rows: int = Field(gt=0)
    context: int
    seconds: float = Field(gt=0)


class Document(Row):
    """What every kind may carry."""

    kind: str
    created: str | None = None
    command: list[str] | str | None = None
    environment: dict[str, Any] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)
    definitions: dict[str, str] = Field(default_factory=dict)
    findings: list[FindingRow] = Field(default_factory=list)
    interrupted: bool = False
    sps: list[SpsRow] = Field(default_factory=list)


class CheckDocument(Document):
    """`specdoctor check... --json`: a verdict and findings."""

    verdict: str
    summary: str | None = None
    target: dict[str, Any] = Field(default_factory=dict)
    drafter: dict[str, Any] = Field(default_factory=dict)


class CostDocument(Document):
    """A cost table: what a target forward takes."""

    target: str = ""
    device: str = ""
    dtype: str = ""
    sps: list[SpsRow] = Field(min_length=1)
