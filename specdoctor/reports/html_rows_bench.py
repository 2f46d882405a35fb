"""What the report reads of `specdoctor bench --json`."""

from pydantic import Field, model_validator

from specdoctor.reports.html_rows import Document, DraftRow, EstimateRow, LimitRow, Row


class CategoryRow(Row):
    """One arm on the prompts of one category."""

    requests: int
    tau_step: EstimateRow
    alpha_draft: EstimateRow | None = None
    tokens_per_s: EstimateRow
    speedup: EstimateRow


class BenchArm(Row):
    """One arm of a bench. What transformers' own `generate` (arm `hf`) cannot have is None or empty."""

    name: str
    draft: DraftRow | None
    requests: int
    tokens_per_s: EstimateRow
    speedup: EstimateRow
    request_tokens_per_s: EstimateRow | None = None
    prefill_share: EstimateRow | None = None
    greedy_mismatches: int | None = None
    near_ties: int | None = None
    tau_step: EstimateRow | None = None
    tau_request: EstimateRow | None = None
    alpha_draft: EstimateRow | None = None
    alpha_verified: EstimateRow | None = None
    waste: EstimateRow | None = None
    efficiency: EstimateRow | None = None
    marginal: list[EstimateRow] = Field(default_factory=list)
    conditional: list[EstimateRow] = Field(default_factory=list)
    accepted_length_histogram: list[int] = Field(default_factory=list)
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    committed: int | None = None
    phases: dict[str, float] | None = None  # mean seconds of a round by phase; `round` is all of them
    draft_share: EstimateRow | None = None
    verify_share: EstimateRow | None = None
    overhead_share: EstimateRow | None = None
    verify_ratio: EstimateRow | None = None
    expected_speedup: EstimateRow | None = None
    limiting_term: LimitRow | None = None
    by_category: dict[str, CategoryRow] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _same_depth(self) -> "BenchArm":
        if len(self.marginal) != len(self.conditional):
            found = f"{len(self.marginal)} marginal and {len(self.conditional)} conditional rates"
            raise ValueError(f"{found}, expected one of each a position")
        return self


class ComparisonRow(Row):
    """Arm a against arm b on the same prompts."""

    a: str
    b: str
    tau_difference: EstimateRow
    tokens_per_s_ratio: EstimateRow


class DivergenceRow(Row):
    """The first token at which a greedy text left that of plain decoding; ids only."""

    arm: str
    prompt_id: str
    position: int
    expected: int
    found: int
    gap: float | None
    noise: float | None
    near_tie: bool


class PromptRow(Row):
    """Sums of one request; the prompt's text is not in the file."""

    id: str
    category: str
    arm: str
    rounds: int
    completion_tokens: int
    prefill_seconds: float
    seconds: float


class BenchDocument(Document):
    """`specdoctor bench --json`."""

    arms: list[BenchArm]
    comparisons: list[ComparisonRow] = Field(default_factory=list)
    divergences: list[DivergenceRow] = Field(default_factory=list)
    prompts: list[PromptRow] = Field(default_factory=list)

    @property
    def drafting(self) -> list[BenchArm]:
        """Arms with a drafter."""
        return [arm for arm in self.arms if arm.draft]
