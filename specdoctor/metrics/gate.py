"""Did a metric get worse by more than a margin? Pass, regression, or not enough evidence.

The rule. The change of the metric has a 95 % interval from a bootstrap over prompts, widened for few prompts, and the
margin is the largest drop that does not matter.

    pass          the whole interval lies above -margin: the drop, if any, is smaller than the margin
    regression    the whole interval lies below -margin: the drop is larger than the margin
    inconclusive  the interval holds -margin, or there are fewer than 10 prompts, or there is no interval

So a run that did not change fails in far less than 5 % of cases, a drop of the margin itself is passed or failed in at
most 2.5 % each, and too few prompts give no verdict instead of a pass. The prompts asked for are those with which
both no change passes and a drop of twice the margin is caught with 95 % probability: either lies one margin away from
the border, so the standard error s must satisfy (1.96 + 1.645) * s <= margin. As s is itself uncertain, its upper
90 % bound is used.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from specdoctor.errors import SpecdoctorError
from specdoctor.metrics.change import Change, Z, scale_text, widening

Outcome = Literal["pass", "regression", "inconclusive"]

MINIMUM_PROMPTS = 10  # below this any bootstrap interval is optimistic
POWER = 0.95
Z_POWER = 1.6448536269514722
ASSURANCE = 0.90  # with which the prompts asked for suffice, given that s was estimated
SENSIBLE_GROWTH = 50  # a change so near the margin that more prompts than this many times are needed

# Relative, or for the calibration error absolute.
MARGINS = {"tau": 0.05, "alpha": 0.05, "tokens_per_s": 0.05, "speedup": 0.05, "ece": 0.02}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`minimum_detectable_effect`: the smallest true drop that this many prompts would call a regression with 95 %
    probability, in the unit of the change. `further_prompts`: None when it cannot be said, and `reason` says why."""

    outcome: Outcome
    reason: str
    margin: float
    minimum_detectable_effect: float | None = None
    further_prompts: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome,
            "reason": self.reason,
            "margin": self.margin,
            "minimum_detectable_effect": self.minimum_detectable_effect,
            "further_prompts": self.further_prompts,
        }


def judge(change: Change, margin: float) -> Verdict:
    """Apply the rule of this module to one change. Raises when the margin is not above zero."""
    if not 0 < margin < math.inf:
        raise SpecdoctorError(
            f"margin of {change.definition.metric}: found {margin}, expected a number above 0; "
            "give the largest drop that does not matter"
        )
    estimate, error = change.change, change.standard_error
    if estimate.value is None or estimate.low is None or estimate.high is None or error is None:
        reason = estimate.reason or "no interval"
        further = max(0, MINIMUM_PROMPTS - estimate.n) if change.evidence in ("paired", "independent") else None
        return Verdict("inconclusive", reason, margin, further_prompts=further)
    n = estimate.n
    widest = widening(n) if n else 1.0
    detectable = (Z * widest + Z_POWER) * error
    if change.evidence != "intervals" and n < MINIMUM_PROMPTS:
        needed = prompts_needed(error, n, margin)
        reason = f"{n} prompts are too few for an interval to be trusted (at least {MINIMUM_PROMPTS})"
        return Verdict("inconclusive", reason, margin, detectable, needed - n)
    if estimate.low > -margin:
        return Verdict("pass", _words(change, margin), margin, detectable, 0)
    if estimate.high < -margin:
        return Verdict("regression", _words(change, margin), margin, detectable, 0)
    if not n:
        growth = ((Z + Z_POWER) * error / margin) ** 2
        reason = f"{_words(change, margin)}; about {max(growth, 1.1):.1f} times as many prompts would be needed"
        return Verdict("inconclusive", reason, margin, detectable)
    needed = prompts_needed(error, n, margin)
    reason = _words(change, margin)
    if needed <= n:  # enough to tell no change from twice the margin, but the truth lies near the margin
        distance = abs(estimate.value + margin)
        growth = (Z * widest * error / distance) ** 2 if distance else math.inf
        if growth > SENSIBLE_GROWTH:
            return Verdict("inconclusive", f"{reason}; too near the margin to tell", margin, detectable)
        needed = math.ceil(n * growth) + 1
    return Verdict("inconclusive", reason, margin, detectable, needed - n)


def prompts_needed(standard_error: float, prompts: int, margin: float) -> int:
    """Prompts with which no change passes and twice the margin is caught with 95 % probability each.

    `standard_error` of the change was seen on `prompts` prompts like these; it falls with the square root of them.
    """
    from scipy.stats import chi2

    if prompts < 2 or not standard_error:
        return max(prompts, MINIMUM_PROMPTS)
    safe = standard_error * math.sqrt((prompts - 1) / float(chi2.ppf(1 - ASSURANCE, prompts - 1)))
    needed = 30
    for _ in range(20):  # the widening depends on the answer; it settles within a few steps
        previous = needed
        needed = math.ceil(prompts * ((Z * widening(previous) + Z_POWER) * safe / margin) ** 2)
        needed = max(needed, MINIMUM_PROMPTS)
        if needed == previous:
            break
    return needed


def overall(outcomes: list[Outcome]) -> Outcome:
    """The worst of several: a regression, else anything undecided, else a pass."""
    if "regression" in outcomes:
        return "regression"
    return "inconclusive" if "inconclusive" in outcomes else "pass"


def _words(change: Change, margin: float) -> str:
    """The change and where its interval lies against the margin, in one line."""
    estimate = change.change
    assert estimate.value is not None and estimate.low is not None and estimate.high is not None
    absolute = change.definition.scale == "absolute"
    size, limit, low, high = (
        f"{number:.3f}" if absolute else f"{number:.1%}"
        for number in (abs(estimate.value), margin, estimate.low, estimate.high)
    )
    changed = float(size.rstrip("%")) > 0
    verb = "unchanged at" if not changed else "worse by" if estimate.value < 0 else "better by"
    side = "within" if estimate.low > -margin else "beyond" if estimate.high < -margin else "not settled against"
    of = "" if absolute else f" of {scale_text(change.definition)}"
    return f"{verb} {size}{of}, 95 % interval [{low}, {high}], {side} the margin of {limit}"
