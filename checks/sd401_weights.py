"""Weights in numbers: no NaN, no infinity, no mass of denormals, and none far from its siblings in other layers.

## What it checks
Every float tensor of target and drafter, straight from the files: NaN and infinity; numbers below the smallest normal
one of the stored dtype; a root mean square a hundred times above or below that of the same tensor in other layers; a
matrix of zeros whose siblings are not; and numbers that float16 cannot hold.

## Why it matters
One NaN in a norm makes every draft token 0 and acceptance zero, while text and speed look like a weak drafter. A tensor
that was scaled twice, or never filled, does the same without NaN.

## How it is measured
Each tensor is read once. Denormals: more than 1 % of a tensor in bfloat16 and float32, where they are never trained
values; more than 20 % in float16, whose normal numbers end at 6.1e-5. Siblings: names that differ in the layer's
number; of two alone a factor of 1000 is asked for. Biases are compared with nothing. Quantised tensors are left out.

## Fix
Fetch the file again and compare its checksum. If it is what was published, the export is at fault: convert again from
the training checkpoint, and check the tensor there.

## References
- NaN and infinity in a published drafter's scales, biases and norms: https://github.com/Blaizzy/mlx-vlm/issues/1931
"""

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from specdoctor.checks.finding import Finding, Severity, counted
from specdoctor.checks.numerics_case import NumericsCase
from specdoctor.checks.registry import Check

if TYPE_CHECKING:  # listing the checks must not import torch
    from specdoctor.measure.weight_scan import WeightFacts

DENORMAL_SHARE = {"float16": 0.2}
USUAL_DENORMAL_SHARE = 0.01
SIBLING_FACTOR = 100.0
PAIR_FACTOR = 1000.0
LARGEST_HALF = 65504.0
_FIX = "Fetch the file again; if it is as published, convert again from the training checkpoint."


def run(case: NumericsCase) -> list[Finding]:
    """A finding for each kind of trouble and side, naming the first tensor that has it."""
    found: dict[tuple[str, str], list[tuple[WeightFacts, str]]] = {}
    for facts, kind, what in (*_alone(case.weights), *_beside_siblings(case.weights)):
        found.setdefault((facts.side, kind), []).append((facts, what))
    return [_finding(kind, tensors) for (_, kind), tensors in found.items()]


def _alone(weights: "Iterable[WeightFacts]") -> "Iterator[tuple[WeightFacts, str, str]]":
    for facts in weights:
        if facts.nan or facts.inf:
            yield facts, "nan-inf", f"holds {facts.nan} NaN and {facts.inf} infinite numbers of {facts.numbers:,}"
        if facts.denormal > DENORMAL_SHARE.get(facts.dtype, USUAL_DENORMAL_SHARE) * facts.numbers:
            share = facts.denormal / facts.numbers
            yield facts, "denormal", f"holds {share:.1%} denormal numbers of {facts.dtype}"
        if facts.largest > LARGEST_HALF:
            yield facts, "beyond-float16", f"reaches {facts.largest:.3g}, which float16 makes infinite"


def _beside_siblings(weights: "Iterable[WeightFacts]") -> "Iterator[tuple[WeightFacts, str, str]]":
    families: dict[tuple[str, str], list[WeightFacts]] = {}
    for facts in weights:
        if not facts.name.endswith("bias") and facts.kind != facts.name:
            families.setdefault((facts.side, facts.kind), []).append(facts)
    typical = {side: _typical([f for f in weights if f.side == side]) for side in {f.side for f in weights}}
    for family in families.values():
        for facts in family:
            others = sorted(other.rms for other in family if other is not facts)
            if not others:
                continue
            middle = others[len(others) // 2]
            if facts.rms == 0 and middle > 0 and len(facts.shape) > 1:
                yield facts, "all-zero", f"is all zero, its {counted(len(others), 'sibling')} in other layers are not"
            elif facts.rms and middle and _absurd(facts.rms, middle, len(others), typical[facts.side]):
                yield (
                    facts,
                    "norm",
                    f"has a root mean square of {facts.rms:.3g}, its siblings in other layers {middle:.3g}",
                )


def _absurd(own: float, middle: float, others: int, typical: float) -> bool:
    if others > 1:
        return not 1 / SIBLING_FACTOR <= own / middle <= SIBLING_FACTOR
    # Of two, the one to blame is the one further from what the model's weights are like.
    further = abs(math.log(own / typical)) > abs(math.log(middle / typical)) if typical else own > middle
    return further and not 1 / PAIR_FACTOR <= own / middle <= PAIR_FACTOR


def _typical(weights: "list[WeightFacts]") -> float:
    sizes = sorted(facts.rms for facts in weights if len(facts.shape) > 1)
    return sizes[len(sizes) // 2] if sizes else 0.0


def _finding(kind: str, tensors: "list[tuple[WeightFacts, str]]") -> Finding:
    facts, what = tensors[0]
    more = f" ({len(tensors)} tensors in all)" if len(tensors) > 1 else ""
    evidence = {
        "nan": facts.nan,
        "inf": facts.inf,
        "denormal": facts.denormal,
        "largest": facts.largest,
        "rms": facts.rms,
        "examples": [{"tensor": f.name, "file": f.file.name, "why": words} for f, words in tensors],
    }
    where = {"side": facts.side, "file": str(facts.file), "tensor": facts.name}
    severity = Severity.ERROR if kind == "nan-inf" else Severity.WARNING
    fault = "numerics.dtype-overflow" if kind == "beyond-float16" else "weights.nan-inf"
    fix = "Run in bfloat16 or float32." if kind == "beyond-float16" else _FIX
    title = f"{facts.name} of {facts.file.name} {what}{more}"
    return Finding("SD401", severity, title, evidence, where, fix, fault, kind)


CHECK = Check("SD401", "Weights: NaN, infinity, denormals, absurd norms", "static", run)
