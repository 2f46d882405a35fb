"""Births of NaN and infinity: the first module, operation and row whose result is not finite.

## What it checks
Target and drafter, in each dtype asked for, on prompts, on drafting rounds and on a draft tree: that every module
passes on finite numbers. The first that does not is named, with the operation that made it, the row, and whether it was
overflow, NaN from finite or infinite numbers, or a weight that is itself not finite. Overflow inside a module whose
output hides it (an infinite mean square makes a norm's output zero) is a warning.

## Why it matters
Drafters inherit the target's dtype. In float16, whose largest number is 65504, one that was trained in bfloat16 may
overflow; its logits are NaN, its drafts the first ids of the vocabulary, and nothing is accepted - without an error.

## How it is measured
Every operation is watched, and every module's inputs and outputs. An infinity that an operation makes on purpose (a
mask, the logarithm of 0) and that no module passes on is left alone. On a CPU, operations without a float16 kernel are
computed in float32 and rounded to float16 after each one; which ones is in the result.

## Fix
Overflow: run that side in bfloat16 or float32. A weight: see SD401. NaN out of softmax: see SD404.

## References
- 0 of 1100 drafts accepted in float16, 37 to 41 % in bfloat16: https://github.com/vllm-project/vllm/pull/55294
- Overflow on a draft branch turns into NaN under a norm: https://github.com/sgl-project/sglang/pull/27883
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.numerics_case import NumericsCase, by_key, place
from specdoctor.checks.registry import Check

if TYPE_CHECKING:  # listing the checks must not import torch
    from specdoctor.measure.numeric_probe import Birth, Suspect
    from specdoctor.measure.numerics import DtypeRun

_FIXES = {
    "overflow": "Run this side in bfloat16 (--dtype bfloat16), or in float32.",
    "weight": "The weight itself is not finite: `SD401` names its file; fetch or convert it again.",
    "nan": "See SD404 if it comes from a softmax; else look for a division by 0 or infinity less infinity.",
    "unknown": "What comes in is not finite already: look at what this module is given.",
}


def run(case: NumericsCase) -> list[Finding]:
    """One finding a place and cause, with the dtypes that show it."""
    return [*_births(case), *_swallowed(case)]


def _births(case: NumericsCase) -> Iterator[Finding]:
    seen = [(run, birth) for run in case.runs for birth in _own(run)]
    groups = by_key(((birth.module, birth.cause, birth.weight), run.dtype) for run, birth in seen)
    for key, dtypes in groups.items():
        birth = next(birth for _, birth in seen if (birth.module, birth.cause, birth.weight) == key)
        yield _finding(birth, dtypes, [r.dtype for r in case.runs if not r.error and r.dtype not in dtypes])


def _own(run: "DtypeRun") -> "list[Birth]":
    """Births without those of a drafter that only took what the target gave it."""
    births = run.record.births
    given = "target" in births
    return [birth for side, birth in births.items() if side == "target" or birth.cause != "unknown" or not given]


def _finding(birth: "Birth", dtypes: list[str], healthy: list[str]) -> Finding:
    what = {
        "overflow": "overflows",
        "weight": f"takes NaN or infinity from the weight {birth.weight.partition(': ')[2]}",
        "nan": "gives NaN",
        "unknown": "is given NaN or infinity",
    }[birth.cause]
    operation = f" in {birth.operation}" if birth.operation else ""
    row = "" if birth.row is None else f", row {birth.row}"
    title = f"{birth.module} {what}{operation} ({', '.join(dtypes)}){row} of the {birth.phase}"
    evidence = {
        "dtypes": dtypes,
        "finite_in": healthy,
        "cause": birth.cause,
        "operation": birth.operation or None,
        "first_seen_at": birth.seen_at,
        "row": birth.row,
        "rows": birth.rows,
        "phase": birth.phase,
        "weight": birth.weight or None,
    }
    fault = "numerics.dtype-overflow" if birth.cause == "overflow" else "weights.nan-inf" if birth.weight else ""
    subject = f"{birth.cause} {birth.weight}"
    return Finding(
        "SD402", Severity.ERROR, title, evidence, dict(place(birth.module)), _FIXES[birth.cause], fault, subject
    )


def _swallowed(case: NumericsCase) -> Iterator[Finding]:
    groups = by_key(
        ((side, suspect.operation), run.dtype) for run in case.runs for side, suspect in _first_by_side(run).items()
    )
    for (side, operation), dtypes in groups.items():
        run = next(run for run in case.runs if run.dtype == dtypes[0])
        hidden = [s for s in run.record.swallowed.values() if s.module.partition(":")[0] == side]
        title = f"{hidden[0].module} overflows in {operation} ({', '.join(dtypes)}) and gives finite, wrong numbers"
        evidence = {"dtypes": dtypes, "operation": operation, "modules": len(hidden)}
        where = dict(place(hidden[0].module))
        fault = "numerics.dtype-overflow"
        yield Finding(
            "SD402", Severity.WARNING, title, evidence, where, _FIXES["overflow"], fault, f"swallowed {operation}"
        )


def _first_by_side(run: "DtypeRun") -> "dict[str, Suspect]":
    first: dict[str, Suspect] = {}
    for suspect in run.record.swallowed.values():
        first.setdefault(suspect.module.partition(":")[0], suspect)
    return first


CHECK = Check("SD402", "Where NaN and infinity are born", "forward", run)
