"""Acceptance by dtype: a dtype must not cost the drafter its acceptance.

## What it checks
tau_step over a few prompts, greedy, in each dtype: that what goes beyond one token a round is at least half of what it
is in float32 (or in the best dtype that was run).

## Why it matters
Numbers that are finite and wrong - saturated, flushed to zero, summed in too few bits - leave no NaN behind. What they
cost shows here.

## How it is measured
The same prompts and the same engine, target and drafter both in the dtype, rounds pooled over prompts. Below 10 rounds,
or where the best dtype accepts less than 0.1 tokens a round, nothing is said. Rounding alone moves tau by a few percent
either way.

## Fix
Run in the dtype that accepts most. If a finding of SD402 to SD404 names the same dtype, mend that first.

## References
- 0 % in float16, 37 to 41 % in bfloat16: https://github.com/vllm-project/vllm/issues/55250
"""

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.numerics_case import NumericsCase
from specdoctor.checks.registry import Check

LEAST_ROUNDS = 10
LEAST_GAIN = 0.1  # accepted tokens a round in the best dtype
LOST = 0.5  # of that gain


def run(case: NumericsCase) -> list[Finding]:
    """One finding for each dtype that loses half of the acceptance."""
    taus: dict[str, float] = {}
    for result in case.runs:
        if result.acceptance is not None and result.acceptance.rounds >= LEAST_ROUNDS:
            taus[result.dtype] = result.acceptance.tau_step or 0.0
    if not taus:
        return []
    best = max(taus, key=taus.__getitem__)
    best = best if "float32" not in taus or taus[best] - 1 < LEAST_GAIN else _reference(taus, best)
    gain = taus[best] - 1
    if gain < LEAST_GAIN:
        return []
    return [_finding(dtype, tau, best, taus[best]) for dtype, tau in taus.items() if tau - 1 < LOST * gain]


def _reference(taus: dict[str, float], best: str) -> str:
    """float32 unless it is itself the one that lost."""
    return "float32" if taus["float32"] - 1 >= LOST * (taus[best] - 1) else best


def _finding(dtype: str, tau: float, best: str, best_tau: float) -> Finding:
    title = f"in {dtype} tau is {tau:.2f}, in {best} {best_tau:.2f}: the dtype costs more than half of the acceptance"
    evidence = {"tau_step": tau, "reference": best, "reference_tau_step": best_tau}
    where = {"side": "drafter", "dtype": dtype}
    fix = f"Run drafter and target in {best}; the other findings on {dtype} say why."
    return Finding("SD405", Severity.ERROR, title, evidence, where, fix, "numerics.dtype-overflow", "acceptance")


CHECK = Check("SD405", "Acceptance in each dtype", "bench", run)
