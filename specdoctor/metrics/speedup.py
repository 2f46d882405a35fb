"""The speed-up that the measured parts of a round add up to, and the part that limits it.

Contract: pure arithmetic; times in seconds. With T(n) = time of a target forward over n rows,

    speed-up            = tau * T(1) / (t_draft + T(K+1) + t_overhead)
    end-to-end speed-up = (p + n * T(1)) / (p + n / tau * (t_draft + T(K+1) + t_overhead))

where p is the prefill time and n the decoded tokens of a request, both the same in the two arms.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from specdoctor.errors import SpecdoctorError
from specdoctor.metrics.record import RoundRecord
from specdoctor.metrics.statistics import one_arm

Term = Literal["draft", "verify", "overhead", "tau", "prefill", "none"]

DRAFT_SHARE_LIMIT = 0.30  # of a round
OVERHEAD_SHARE_LIMIT = 0.10  # of a round
VERIFY_GROWTH_LIMIT = 1.5  # T(K+1) / T(1); near 1 while the forward is bound by reading the weights
PREFILL_SHARE_LIMIT = 0.20  # of the speculative request
ALPHA_LIMIT = 0.60  # below it speculation may lose, whatever the drafter costs
# What better training data is reported to give (drafter trained on the target's own output): 10 to 15 points.
ALPHA_STEP = 0.10

ADVICE: dict[Term, str] = {
    "draft": "shrink or quantise the drafter, use fewer layers or a parallel drafter, or draft fewer tokens",
    "verify": "verify fewer tokens (smaller K, a confidence threshold, a scheduler), or make the forward over K+1 rows "
    "as cheap as over one (attention backend, batch size, fixed shapes)",
    "overhead": "look at sampling, cache bookkeeping and host synchronisation between the forwards",
    "tau": "raise acceptance: check tokenizer and prompt template, then train on the target's own output",
    "prefill": "speculation cannot help the prompt: reuse prefixes, batch the prefill, or measure longer outputs",
    "none": "no single part is worth attacking first",
}


@dataclass(frozen=True, slots=True)
class SpeedupModel:
    """The terms. Times are means per round, except `prefill` per request. Raises on values that cannot be.

    `t_target` is T(1): one whole round of the same engine with K = 0. `proposal_length` is K, the mean number of draft
    levels verified: of a chain its rows, of a tree its depth, since that bounds tau.
    """

    tau: float
    t_target: float
    t_draft: float
    t_verify: float
    t_overhead: float
    proposal_length: float
    prefill: float = 0.0
    tokens: float = 0.0  # decoded tokens per request; needed when prefill is given
    draft_rows: float | None = None  # draft rows verified, where they are more than levels: a tree

    def __post_init__(self) -> None:
        times = {name: getattr(self, name) for name in ("t_draft", "t_overhead", "prefill", "tokens")}
        for name, value in times.items():
            if not value >= 0:
                raise SpecdoctorError(f"speed-up model: {name}: found {value}, expected 0 or more")
        for name in ("tau", "t_target", "t_verify"):
            if not getattr(self, name) > 0:
                raise SpecdoctorError(f"speed-up model: {name}: found {getattr(self, name)}, expected more than 0")
        if self.prefill and not self.tokens:
            raise SpecdoctorError(
                "speed-up model: tokens: found 0, expected the tokens per request beside a prefill time"
            )

    @classmethod
    def from_records(
        cls, records: Sequence[RoundRecord], baseline: Sequence[RoundRecord], prefill: float = 0.0
    ) -> "SpeedupModel":
        """The terms of an arm against the K = 0 arm of the same run; needs `times` with draft, verify and round.

        `t_overhead` is what a round takes beside draft and verify; where drafting overlaps verification it is zero.
        `prefill` is the mean per request, not in the records.
        """
        if not one_arm(records) or not one_arm(baseline):
            raise SpecdoctorError(
                "speed-up model: an arm without rounds; it takes the records of an arm and of its baseline"
            )
        n = len(records)
        whole, draft, verify = (_seconds(records, phase) / n for phase in ("round", "draft", "verify"))
        return cls(
            tau=sum(r.committed for r in records) / n,
            t_target=_seconds(baseline, "round") / sum(r.committed for r in baseline),
            t_draft=draft,
            t_verify=verify,
            t_overhead=max(0.0, whole - draft - verify),
            proposal_length=sum(r.verified if r.depth is None else r.depth for r in records) / n,
            draft_rows=sum(r.verified for r in records) / n,
            prefill=prefill,
            tokens=sum(r.committed for r in records) / len({(r.prompt_id, r.repeat) for r in records}),
        )

    @property
    def round_time(self) -> float:
        return self.t_draft + self.t_verify + self.t_overhead

    @property
    def speedup(self) -> float:
        """Expected decode speed-up."""
        return self.tau * self.t_target / self.round_time

    @property
    def end_to_end_speedup(self) -> float:
        """Expected speed-up of a whole request, prefill included."""
        if not self.prefill:
            return self.speedup
        return (self.prefill + self.tokens * self.t_target) / (self.prefill + self.tokens / self.tau * self.round_time)

    @property
    def break_even_tau(self) -> float:
        """The tau at which decoding is as fast as without speculation."""
        return self.round_time / self.t_target

    @property
    def draft_share(self) -> float:
        return self.t_draft / self.round_time

    @property
    def overhead_share(self) -> float:
        return self.t_overhead / self.round_time

    @property
    def verify_growth(self) -> float:
        """T(K+1) / T(1)."""
        return self.t_verify / self.t_target

    @property
    def prefill_share(self) -> float:
        """Part of the speculative request that is prefill."""
        if not self.prefill:
            return 0.0
        return self.prefill / (self.prefill + self.tokens / self.tau * self.round_time)

    @property
    def alpha(self) -> float:
        """The constant acceptance per draft that gives this tau."""
        return equivalent_alpha(self.tau, self.proposal_length)

    def to_json(self) -> dict[str, Any]:
        derived = ("round_time", "speedup", "end_to_end_speedup", "break_even_tau", "draft_share", "overhead_share")
        more = (*derived, "verify_growth", "prefill_share", "alpha")
        return asdict(self) | {name: getattr(self, name) for name in more}


def expected_tau(alpha: float, proposal_length: float) -> float:
    """tau of a chain of K drafts that are each accepted with chance alpha: Leviathan et al. 2023, equation 1."""
    if alpha >= 1:
        return proposal_length + 1
    return (1 - alpha ** (proposal_length + 1)) / (1 - alpha)


def equivalent_alpha(tau: float, proposal_length: float) -> float:
    """The alpha for which `expected_tau(alpha, K) == tau`, held within 0 and 1."""
    if tau <= 1:
        return 0.0
    if tau >= proposal_length + 1:
        return 1.0
    from scipy.optimize import brentq

    return float(brentq(lambda alpha: expected_tau(alpha, proposal_length) - tau, 0.0, 1.0))


@dataclass(frozen=True, slots=True)
class Limit:
    """What costs most. `gain` = end-to-end speed-up if that were cured, over the one now (1.25 = a quarter faster)."""

    term: Term
    sentence: str
    gain: float
    speedup: float  # end to end, now
    speedup_if_cured: float
    advice: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def limiting_term(model: SpeedupModel) -> Limit:
    """The term whose cure raises the end-to-end speed-up most, among those beyond their limit; else `none`.

    | term | beyond its limit when | cure |
    |---|---|---|
    | draft | over 30 % of the round | drafting is free |
    | verify | T(K+1) is over 1.5 x T(1) | K+1 rows cost as much as one |
    | overhead | over 10 % of the round | no overhead |
    | tau | below break-even, or alpha below 0.60 | alpha ten points higher (perfect drafts are out of reach) |
    | prefill | over 20 % of the request | no prefill in either arm |

    alpha is the constant acceptance per draft that gives the measured tau. Raises for an arm that drafts nothing.
    """
    if not model.proposal_length > 0:
        raise SpecdoctorError(
            "speed-up model: proposal_length: found 0, expected an arm that drafts; this is the baseline"
        )
    cured = _cured(model)
    beyond = [term for term in cured if _beyond_limit(model, term)]
    best = max(beyond or cured, key=lambda term: cured[term])
    now = model.end_to_end_speedup
    sentence = (
        _finding(model, best) if beyond else f"No part of the round stands out. The largest: {_finding(model, best)}"
    )
    cure = f"{sentence} {_CURES[best]}, the end-to-end speed-up would go from {now:.2f}x to {cured[best]:.2f}x."
    term = best if beyond else "none"
    return Limit(term, cure, cured[best] / now, now, cured[best], ADVICE[term])


_CURES: dict[Term, str] = {
    "draft": "With a free drafter",
    "verify": "If K+1 rows cost as much as one",
    "overhead": "Without that overhead",
    "tau": f"With acceptance {ALPHA_STEP * 100:.0f} points higher",
    "prefill": "Without the prefill",
}


def _cured(model: SpeedupModel) -> dict[Term, float]:
    """End-to-end speed-up after each cure."""
    higher = expected_tau(min(1.0, model.alpha + ALPHA_STEP), model.proposal_length)
    cures: dict[Term, SpeedupModel] = {
        "draft": replace(model, t_draft=0.0),
        "verify": replace(model, t_verify=min(model.t_verify, model.t_target)),
        "overhead": replace(model, t_overhead=0.0),
        "tau": replace(model, tau=max(model.tau, higher)),
        "prefill": replace(model, prefill=0.0),
    }
    return {term: cure.end_to_end_speedup for term, cure in cures.items()}


def _beyond_limit(model: SpeedupModel, term: Term) -> bool:
    if term == "tau":
        return model.tau < model.break_even_tau or model.alpha < ALPHA_LIMIT
    value, limit = {
        "draft": (model.draft_share, DRAFT_SHARE_LIMIT),
        "verify": (model.verify_growth, VERIFY_GROWTH_LIMIT),
        "overhead": (model.overhead_share, OVERHEAD_SHARE_LIMIT),
        "prefill": (model.prefill_share, PREFILL_SHARE_LIMIT),
    }[term]
    return value > limit


def _finding(model: SpeedupModel, term: Term) -> str:
    """The numbers behind a term, in one sentence."""
    if term == "draft":
        return f"Drafting takes {_share(model, model.t_draft)} (limit {DRAFT_SHARE_LIMIT:.0%})."
    if term == "overhead":
        share = _share(model, model.t_overhead)
        return f"Work beside drafting and verifying takes {share} (limit {OVERHEAD_SHARE_LIMIT:.0%})."
    if term == "verify":
        times = f"{1000 * model.t_verify:.2f} ms against {1000 * model.t_target:.2f} ms for one token"
        growth = f"{model.verify_growth:.2f}x (limit {VERIFY_GROWTH_LIMIT:g}x)"
        return f"Verifying {(model.draft_rows or model.proposal_length) + 1:.3g} rows takes {times}: {growth}."
    if term == "prefill":
        share = f"{model.prefill_share:.0%} of a request (limit {PREFILL_SHARE_LIMIT:.0%})"
        return f"Prefill takes {share}, and drafts cannot shorten it."
    even = f"breaks even at {model.break_even_tau:.2f}"
    alpha = f"acceptance about {model.alpha:.2f} per draft; limit {ALPHA_LIMIT:.2f}"
    return f"A round commits {model.tau:.2f} tokens and {even} ({alpha})."


def _share(model: SpeedupModel, seconds: float) -> str:
    part, whole = 1000 * seconds, 1000 * model.round_time
    return f"{seconds / model.round_time:.0%} of a round, {part:.2f} of {whole:.2f} ms"


def _seconds(records: Sequence[RoundRecord], phase: str) -> float:
    """Summed seconds of a phase; a round without drafts may lack the draft time."""
    total = 0.0
    for r in records:
        if phase in r.times:
            total += r.times[phase]
        elif phase != "draft" or r.drafted:
            raise SpecdoctorError(
                f"record of arm {r.arm!r}, prompt {r.prompt_id!r}, round {r.round}: times has no {phase!r} "
                f"(found {sorted(r.times) or 'nothing'}); the speed-up model needs records of a timed run"
            )
    return total
