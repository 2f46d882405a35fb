"""What the report reads of `specdoctor accept --json`."""

from typing import Any

from pydantic import Field, model_validator

from specdoctor.reports.html_rows import Document, DraftRow, EstimateRow, Row


class AcceptCategory(Row):
    """One drafter on the texts of one category."""

    prompts: int
    requests: int
    tau_step: EstimateRow
    tau_anchor: EstimateRow
    alpha_draft: EstimateRow


class SplitRow(Row):
    """Rounds that start in one bin."""

    tau: EstimateRow
    alpha_draft: EstimateRow


class WhatIfRow(Row):
    """One setting tried, and what acceptance would be with it."""

    tau_step: EstimateRow
    alpha_draft: EstimateRow
    verified_per_round: EstimateRow
    tokens_per_s: EstimateRow | None = None
    speedup: EstimateRow | None = None
    K: int | None = None
    threshold: float | None = None
    draft_temperature: str | None = None
    rule: str | None = None
    formula: str = ""


class TreeRow(Row):
    """True tokens among the `width` likeliest drafts, down to each position."""

    width: int
    marginal: list[EstimateRow]
    tau_ceiling: EstimateRow | None = None


class VocabularyRow(Row):
    """A draft vocabulary of the most frequent ids."""

    vocabulary: int
    coverage: float | None
    tau_step: EstimateRow
    tau_ceiling: EstimateRow


class BestLength(Row):
    """The draft length of the highest predicted speed; 0: none beats plain decoding; None: not known."""

    K: int | None
    reason: str | None = None
    tokens_per_s: EstimateRow | None = None
    speedup: EstimateRow | None = None


class WhatIf(Row):
    """The curves of one drafter."""

    reason: str | None = None
    draft_tokens: list[WhatIfRow] = Field(default_factory=list)
    confidence_threshold: list[WhatIfRow] = Field(default_factory=list)
    cumulative_threshold: list[WhatIfRow] = Field(default_factory=list)
    draft_temperature: list[WhatIfRow] = Field(default_factory=list)
    length_rule: list[WhatIfRow] = Field(default_factory=list)
    tree_coverage: list[TreeRow] = Field(default_factory=list)
    vocabulary: list[VocabularyRow] = Field(default_factory=list)
    best_K: BestLength | None = None  # noqa: N815 - the key of the file


class ReliabilityRow(Row):
    """Predictions of one bin and what happened."""

    low: float
    high: float
    count: int
    mean_prediction: float | None
    label: EstimateRow


class ConfidenceRow(Row):
    """Confidence at one position."""

    ece: EstimateRow
    debiased_rms: EstimateRow
    brier: EstimateRow
    auroc: EstimateRow
    mean_prediction: float | None
    mean_label: float | None
    reliability: list[ReliabilityRow] = Field(default_factory=list)


class ConfidenceSet(Row):
    """Both questions, by position."""

    conditional: list[ConfidenceRow]
    cumulative: list[ConfidenceRow]


class Calibration(Row):
    """A confidence head against what happened, before and after stored temperatures; or why not."""

    reason: str | None = None
    rounds: int = 0
    before: ConfidenceSet | None = None
    after: ConfidenceSet | None = None
    temperatures: list[float] = Field(default_factory=list)


class ChangePoint(Row):
    """A context length at which acceptance jumps."""

    found: bool
    context: float | None = None
    low: float | None = None
    high: float | None = None
    step: float | None = None
    p: float | None = None
    matches: list[str] = Field(default_factory=list)


class AcceptArm(Row):
    """One drafter on the texts."""

    name: str
    draft: DraftRow
    requests: int
    tau_step: EstimateRow
    tau_anchor: EstimateRow
    alpha_draft: EstimateRow
    marginal: list[EstimateRow]
    conditional: list[EstimateRow]
    accepted_length_histogram: list[float] | None = None
    by_category: dict[str, AcceptCategory] = Field(default_factory=dict)
    by_context: dict[str, SplitRow] = Field(default_factory=dict)
    by_answer_position: dict[str, SplitRow] = Field(default_factory=dict)
    by_token_class: dict[str, EstimateRow | str] = Field(default_factory=dict)
    splits_average: str = "round"
    change_point: ChangePoint | None = None
    what_if: WhatIf | None = None
    calibration: Calibration | None = None

    @model_validator(mode="after")
    def _same_depth(self) -> "AcceptArm":
        if len(self.marginal) != len(self.conditional):
            found = f"{len(self.marginal)} marginal and {len(self.conditional)} conditional rates"
            raise ValueError(f"{found}, expected one of each a position")
        return self

    @property
    def token_classes(self) -> dict[str, EstimateRow]:
        """Conditional acceptance by class of the true token; empty where no tokenizer told."""
        return {name: row for name, row in self.by_token_class.items() if isinstance(row, EstimateRow)}


class TauDifference(Row):
    """Drafter a against drafter b on the same texts."""

    a: str
    b: str
    tau_difference: EstimateRow


class AcceptDocument(Document):
    """`specdoctor accept --json`."""

    arms: list[AcceptArm]
    comparisons: list[TauDifference] = Field(default_factory=list)
    stopped: str = "prompts"
    corpus: dict[str, Any] = Field(default_factory=dict)
