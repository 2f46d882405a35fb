"""What the report reads of `specdoctor profile --json`."""

from pydantic import Field

from specdoctor.reports.html_rows import Document, EstimateRow, LimitRow, Row


class PhaseRow(Row):
    """A step of a round."""

    phase: str
    seconds_per_round: float
    share: float


class RoofRow(Row):
    """One target forward against the machine's measured rates."""

    rows: int
    context: int
    memory_seconds: float
    compute_seconds: float
    measured_seconds: float
    bound: str
    efficiency: float


class BatchRow(Row):
    """Predicted speed-up when so many requests run together."""

    requests: int
    speedup_draft_per_request: float
    speedup_draft_shared: float


class MachineRow(Row):
    """Rates measured on the spot."""

    bytes_per_second: float
    operations_per_second: float


class OperatorRow(Row):
    """An operator of the trace."""

    operator: str
    calls: int
    self_seconds: float
    self_share: float


class TraceRow(Row):
    """A trace as torch-tb-profiler reads it."""

    file: str
    rounds: int
    operators: list[OperatorRow] = Field(default_factory=list)


class ModelRow(Row):
    """The terms of `specdoctor.metrics.speedup.SpeedupModel` that a reader wants."""

    speedup: float
    break_even_tau: float


class ProfileVerdict(LimitRow):
    """The limiting term, the roof, and the batch at which speculation stops paying."""

    bound_sentence: str = ""
    batch_sentence: str = ""


class ProfileDocument(Document):
    """`specdoctor profile --json`."""

    arm: str
    tau_step: EstimateRow
    speedup_model: ModelRow
    phases: list[PhaseRow]
    verdict: ProfileVerdict
    host_reads_per_round: dict[str, float] = Field(default_factory=dict)
    machine: MachineRow | None = None
    roofline: list[RoofRow] = Field(default_factory=list)
    batches: list[BatchRow] = Field(default_factory=list)
    trace: TraceRow | None = None
