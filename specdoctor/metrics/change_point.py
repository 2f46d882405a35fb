"""Does acceptance break at some context length, and which number of a configuration lies there?

A sliding window, a position limit or a RoPE scaling that target and drafter do not share shows as a step of acceptance
over context length, and as nothing else. The test looks for one step anywhere.

Contract: a text gives the context length and a value (expected accepted drafts) of each anchor. At a length that many
texts reach over, they are compared with themselves, which takes the prompt's difficulty out; where too few do, texts on
either side are compared. The statistic at a length is the sum of the prompts' scores over its root sum of squares; the
largest over all lengths is judged against the same with random signs per prompt (wild bootstrap; a sup-statistic, so no
correction for looking everywhere is needed). Prompts are the unit of chance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdoctor.metrics.renewal import Array

Contrast = Literal["within prompts", "between prompts"]

CANDIDATES = 64
RESAMPLES = 999
SPANNING = 8  # prompts that must reach over a length for a contrast within them
SIGNIFICANT = 0.01
NEAR = 0.15  # a number this near to the length found is worth naming


class ContextCurve(NamedTuple):
    """One text: context length and value of its anchors, and the prompt that it belongs to."""

    prompt: str
    context: NDArray[np.int64]  # [A]
    value: Array  # [A]


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """The likeliest step. `step` = mean value beyond less before; `low`..`high` where 95 % of resamples put it."""

    found: bool
    p: float | None
    context: int | None = None
    low: int | None = None
    high: int | None = None
    step: float | None = None
    contrast: Contrast | None = None
    prompts: int = 0
    matches: tuple[str, ...] = ()  # names of configuration numbers that lie there
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        row = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "reason"}
        return row | {"matches": list(self.matches)} | ({"reason": self.reason} if self.reason else {})


def find_change_point(curves: Sequence[ContextCurve], landmarks: Mapping[str, int], seed: int = 0) -> ChangePoint:
    """The step test over all lengths; `landmarks` name the configuration numbers that could explain one."""
    curves = [curve for curve in curves if len(curve.context)]
    prompts = {curve.prompt: i for i, curve in enumerate({c.prompt: c for c in curves}.values())}
    if len(prompts) < SPANNING:
        reason = f"{len(prompts)} prompts, expected at least {SPANNING}"
        return ChangePoint(False, None, prompts=len(prompts), reason=reason)
    lengths = _candidates(curves, landmarks)
    scores = _scores(curves, prompts, lengths)
    if not len(scores.lengths):
        reason = "all contexts are about equally long: no length has texts on either side"
        return ChangePoint(False, None, prompts=len(prompts), reason=reason)
    best = _judge(curves, scores, seed)
    if not best.found:
        return best
    names = [
        (abs(number - (best.context or 0)), f"{name} = {number}")
        for name, number in landmarks.items()
        if (best.low or 0) <= number <= (best.high or 0) or abs(number - (best.context or 0)) <= NEAR * number
    ]
    matches = tuple(name for _, name in sorted(names))
    return ChangePoint(True, best.p, best.context, best.low, best.high, best.step, best.contrast, best.prompts, matches)


class _Scores(NamedTuple):
    lengths: NDArray[np.int64]  # [L] candidate lengths that can be judged
    within: NDArray[np.bool_]  # [L] by texts that reach over the length
    values: Array  # [P, L]


def _candidates(curves: Sequence[ContextCurve], landmarks: Mapping[str, int]) -> NDArray[np.int64]:
    """Quantiles of all contexts, and the landmarks among them."""
    contexts = np.concatenate([curve.context for curve in curves])
    inner = np.quantile(contexts, np.linspace(0.02, 0.98, CANDIDATES)).astype(np.int64)
    named = [n for n in landmarks.values() if contexts.min() < n <= contexts.max()]
    return np.unique(np.concatenate([inner, np.array(named, np.int64)]))


def _scores(curves: Sequence[ContextCurve], prompts: Mapping[str, int], lengths: NDArray[np.int64]) -> _Scores:
    """[P, L] covariance of value and "beyond this length", by prompt; lengths with too few prompts are left out."""
    values = np.concatenate([curve.value for curve in curves])
    contexts = np.concatenate([curve.context for curve in curves])
    mean, share = values.mean(), (contexts[:, None] >= lengths).mean(axis=0)
    inside, across = np.zeros((2, len(prompts), len(lengths)))
    reaching = np.zeros((len(prompts), len(lengths)), np.bool_)
    sides = np.zeros((2, len(lengths)))
    for curve in curves:
        beyond = (curve.context[:, None] >= lengths).astype(np.float64)  # [A, L]
        row = prompts[curve.prompt]
        inside[row] += (curve.value - curve.value.mean()) @ (beyond - beyond.mean(axis=0))
        across[row] += (curve.value - mean) @ (beyond - share)
        reaching[row] |= beyond.any(axis=0) & ~beyond.all(axis=0)
        sides += np.stack([beyond.any(axis=0), ~beyond.all(axis=0)])
    within = reaching.sum(axis=0) >= SPANNING
    usable = within | (sides.min(axis=0) >= SPANNING)
    return _Scores(lengths[usable], within[usable], np.where(within, inside, across)[:, usable])


def _judge(curves: Sequence[ContextCurve], scores: _Scores, seed: int) -> ChangePoint:
    rng = np.random.default_rng(seed)
    spread = np.sqrt((scores.values**2).sum(axis=0))
    spread = np.where(spread > 0, spread, np.inf)
    observed = np.abs(scores.values.sum(axis=0)) / spread
    signs = rng.choice([-1.0, 1.0], size=(RESAMPLES, len(scores.values)))
    null = (np.abs(signs @ scores.values) / spread).max(axis=1)  # squares, so the spread, ignore the signs
    p = float((1 + (null >= observed.max()).sum()) / (1 + RESAMPLES))
    at = int(observed.argmax())
    # Where the step lies: the same search in resampled prompts.
    weights = rng.multinomial(len(scores.values), np.full(len(scores.values), 1 / len(scores.values)), size=RESAMPLES)
    resampled = np.sqrt(weights @ scores.values**2)
    places = (np.abs(weights @ scores.values) / np.where(resampled > 0, resampled, np.inf)).argmax(axis=1)
    low, high = np.quantile(scores.lengths[places], [0.025, 0.975])
    context, within = int(scores.lengths[at]), bool(scores.within[at])
    return ChangePoint(
        found=p <= SIGNIFICANT,
        p=p,
        context=context,
        low=int(low),
        high=int(high),
        step=_step(curves, context, within),
        contrast="within prompts" if within else "between prompts",
        prompts=int((scores.values[:, at] != 0).sum()),
        reason=None if p <= SIGNIFICANT else f"no step: p = {p:.3f}, expected at most {SIGNIFICANT}",
    )


def _step(curves: Sequence[ContextCurve], context: int, within: bool) -> float:
    """Least-squares height of the step, with a level for each text or one for all."""
    all_values = np.concatenate([curve.value for curve in curves])
    share = np.concatenate([curve.context >= context for curve in curves]).mean()
    top = bottom = 0.0
    for curve in curves:
        beyond = (curve.context >= context).astype(np.float64)
        side = beyond - (beyond.mean() if within else share)
        top += float((curve.value - (curve.value.mean() if within else all_values.mean())) @ side)
        bottom += float(side @ side)
    return top / bottom if bottom else 0.0
