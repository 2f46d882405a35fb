"""What is counted per prompt, and the metrics that are ratios of such counts.

Contract: a count that a source does not state is None, and whatever needs it is absent. Counts of several requests of
one prompt add up. A metric may exist under several definitions (tau as we count it, as vLLM prints it, ...): they are
different numbers and are compared only with themselves. `DEFINITIONS` is ordered, ours first.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specdoctor.metrics.calibration import BINS
from specdoctor.metrics.conventions import CONVENTIONS, FORMULAS
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.statistics import Array, cluster_interval

Scale = Literal["excess", "relative", "absolute"]
Columns = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Sums:
    """Counts of one prompt (or pooled over all). None = not stated by the source."""

    requests: float | None = None
    rounds: float | None = None  # verify rounds; the prefill is none
    committed: float | None = None  # tokens of the rounds: bonus in, prefill token out, cut at EOS and at the cap
    draft_rounds: float | None = None  # rounds that verified at least one draft
    drafted: float | None = None
    accepted: float | None = None  # drafts that the acceptance rule took, before any cut
    completion: float | None = None  # output tokens, prefill token in
    seconds: float | None = None  # in which `committed` were made
    plain_committed: float | None = None  # the K = 0 arm of the same run
    plain_seconds: float | None = None
    tau_sum: float | None = None  # over requests: committed / rounds
    length_sum: float | None = None  # over requests: 1 + accepted / draft_rounds
    completion_length_sum: float | None = None  # over requests: completion / rounds
    confidence: tuple[float, ...] | None = None  # [2 * BINS] predictions by bin, then sums of prediction - outcome

    @classmethod
    def of_request(cls, **counts: float | tuple[float, ...] | None) -> "Sums":
        """Counts of one request; fills the three sums over requests from the rest."""
        sums = cls(requests=1, **counts)  # type: ignore[arg-type]
        return replace(
            sums,
            tau_sum=_over(sums.committed, sums.rounds),
            length_sum=_over(_plus(sums.accepted, sums.draft_rounds), sums.draft_rounds),
            completion_length_sum=_over(sums.completion, sums.rounds),
        )

    def __add__(self, other: "Sums") -> "Sums":
        values: dict[str, object] = {}
        for name in (field.name for field in fields(self) if field.name != "confidence"):
            values[name] = _plus(getattr(self, name), getattr(other, name))
        if self.confidence is not None and other.confidence is not None:
            values["confidence"] = tuple(a + b for a, b in zip(self.confidence, other.confidence, strict=True))
        return Sums(**values)  # type: ignore[arg-type]


def total(prompts: Iterable[Sums]) -> Sums:
    """All counts added; a count that one of them lacks is absent from the total. No prompts: all absent."""
    added: Sums | None = None
    for sums in prompts:
        added = sums if added is None else added + sums
    return added or Sums()


def _plus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def _over(top: float | None, bottom: float | None) -> float | None:
    return top / bottom if top is not None and bottom else None


def _ratio(sums: Array) -> Array:
    return np.asarray(sums[..., 0] / sums[..., 1])


def _double_ratio(sums: Array) -> Array:
    return np.asarray((sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3]))


def _calibration_error(sums: Array) -> Array:
    return np.asarray(np.abs(sums[..., BINS:]).sum(axis=-1) / sums[..., :BINS].sum(axis=-1))


@dataclass(frozen=True, slots=True)
class Definition:
    """One exact meaning of a metric: `value` of the added `columns`.

    `scale` says how a change is counted: of value - 1 (tau, whose floor is 1), of the value, or absolute.
    """

    name: str
    metric: str
    columns: Callable[[Sums], Columns]
    value: Callable[[Array], Array] = _ratio  # [..., C] -> [...]
    scale: Scale = "relative"
    lower_is_better: bool = False
    text: str = ""

    @property
    def formula(self) -> str:
        return self.text or FORMULAS.get(self.name) or CONVENTIONS[self.name].formula


def _tau(name: str, columns: Callable[[Sums], Columns], text: str = "") -> Definition:
    return Definition(name, "tau", columns, scale="excess", text=text)


DEFINITIONS: dict[str, Definition] = {
    definition.name: definition
    for definition in (
        _tau("tau_step", lambda s: (s.committed, s.rounds)),
        _tau("vllm_mean_acceptance_length", lambda s: (_plus(s.accepted, s.draft_rounds), s.draft_rounds)),
        _tau("sglang_accept_length", lambda s: (s.completion, s.rounds)),
        _tau(
            "llamacpp_tokens_per_forward",
            lambda s: (s.completion, _plus(s.completion, None if s.accepted is None else -s.accepted)),
            "output tokens / (output tokens - accepted drafts); counts the prefill token and its forward, and takes "
            "every accepted draft for kept, so a round cut at EOS or at the cap makes it too high",
        ),
        _tau("tau_request", lambda s: (s.tau_sum, s.requests)),
        _tau("aiperf_acceptance_length", lambda s: (s.length_sum, s.requests)),
        _tau("sglang_accept_length_per_request", lambda s: (s.completion_length_sum, s.requests)),
        Definition("alpha_draft", "alpha", lambda s: (s.accepted, s.drafted)),
        Definition("tokens_per_second", "tokens_per_s", lambda s: (s.committed, s.seconds)),
        Definition(
            "measured_speedup",
            "speedup",
            lambda s: (s.committed, s.seconds, s.plain_committed, s.plain_seconds),
            _double_ratio,
        ),
        Definition(
            "expected_calibration_error",
            "ece",
            lambda s: s.confidence or (None,) * (2 * BINS),
            _calibration_error,
            "absolute",
            lower_is_better=True,
        ),
    )
}
METRICS = tuple(dict.fromkeys(definition.metric for definition in DEFINITIONS.values()))


def columns_of(definition: Definition, prompts: Mapping[str, Sums]) -> dict[str, NDArray[np.float64]] | None:
    """[C] per prompt, without prompts that say nothing (no rounds, no drafts); None when a count is not stated."""
    rows: dict[str, NDArray[np.float64]] = {}
    for prompt, sums in prompts.items():
        columns = definition.columns(sums)
        if any(column is None for column in columns):
            if sums.rounds == 0 or sums.draft_rounds == 0:
                continue  # an empty answer lacks ratios, not counts
            return None
        row = np.array(columns, np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            if np.isfinite(definition.value(row)):
                rows[prompt] = row
    return rows or None


def estimate_of(definition: Definition, prompts: Mapping[str, Sums], seed: int = 0) -> Estimate | None:
    """The pooled value with its interval clustered by prompt; n = prompts. None when a count is not stated."""
    rows = columns_of(definition, prompts)
    if rows is None:
        return None
    table = np.array(list(rows.values()))  # [P, C]
    interval = cluster_interval(lambda weights: definition.value(weights @ table), len(table), seed)
    value = float(definition.value(table.sum(axis=0)))
    return Estimate(value, interval.low, interval.high, len(table), interval.reason)
