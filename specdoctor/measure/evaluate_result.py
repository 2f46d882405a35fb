"""From an evaluation to its JSON object.

Contract: a pure function of what was measured. Every estimate is {value, low, high, n[, reason]}.
"""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdoctor.errors import ExitCode
from specdoctor.measure.accept_whatif import variant_figures
from specdoctor.measure.data_sets import EvaluationPrompts
from specdoctor.measure.environment import environment
from specdoctor.measure.evaluate import EvaluatedDrafter, Evaluation, Threshold
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.statistics import paired_difference, paired_ratio, ratio_of_sums
from specdoctor.metrics.whatif import Totals

SCHEMA_VERSION = 1
NO_ROUNDS = "no rounds"
DEFINITIONS = {
    "tau_step": "committed tokens per verify round, bonus included, cut at EOS and at the length cap, prefill token "
    "not counted; sums pooled over the prompts of a data set",
    "alpha_verified": "committed tokens / rows sent to the target: the paper's acceptance rate",
    "waste": "drafted and not accepted, per committed token",
    "verified_waste": "verified and not accepted, per verified draft",
    "interval": "95 %, bootstrap clustered by prompt",
}


def evaluation_result(evaluation: Evaluation, data: EvaluationPrompts) -> dict[str, Any]:
    """The `--json` object of `specdoctor eval`."""
    load, seed = evaluation.load, evaluation.load.settings.seed
    places = _places(evaluation.prompts, data)
    domains = list(dict.fromkeys(one.domain for one in data.columns()))
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "eval",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "exit_code": int(ExitCode.INTERRUPTED if evaluation.interrupted else ExitCode.OK),
        "environment": environment()
        | {"device": str(load.target.device), "dtype": str(load.target.dtype).removeprefix("torch.")},
        "settings": load.described,
        "definitions": DEFINITIONS,
        "method": evaluation.method,
        "interrupted": evaluation.interrupted,
        "corpus": evaluation.corpus,
        "data_sets": [
            {"name": one.name, "domain": one.domain, "prompts": len(places.get(("set", one), []))}
            for one in data.columns()
        ],
        "domains": domains,
        "drafters": [
            _drafter(one, evaluation.headline, data, places, list(domains), seed) for one in evaluation.drafters
        ],
        "comparisons": _comparisons(evaluation, seed),
        "prompts": _prompt_rows(evaluation, data),
    }


Places = dict[tuple[str, Any], list[int]]


def _places(prompts: Sequence[str], data: EvaluationPrompts) -> Places:
    """Rows of the sums by data set and by domain."""
    places: Places = {}
    for i, prompt in enumerate(prompts):
        one = data.sets[prompt]
        places.setdefault(("set", one), []).append(i)
        places.setdefault(("domain", one.domain), []).append(i)
    return places


def _drafter(
    one: EvaluatedDrafter,
    headline: Threshold,
    data: EvaluationPrompts,
    places: Places,
    domains: Sequence[str],
    seed: int,
) -> dict[str, Any]:
    totals = one.totals[headline]
    return {
        "name": one.name,
        "draft": one.facts,
        "threshold": headline,
        "tau_step": _tau(totals, None, seed),
        "by_data_set": [
            {"name": c.name, "domain": c.domain, "tau_step": _tau(totals, places.get(("set", c), []), seed)}
            for c in data.columns()
        ],
        "by_domain": {d: {"tau_step": _tau(totals, places.get(("domain", d), []), seed)} for d in domains},
        "thresholds": _sweep(one, places, domains, seed) if len(one.totals) > 1 else None,
    }


def _sweep(one: EvaluatedDrafter, places: Places, domains: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """A row a threshold, no threshold first."""
    rows = []
    for threshold in sorted(one.totals, key=lambda t: -1.0 if t is None else t):
        totals = one.totals[threshold]
        figures = variant_figures(totals, one.cost, seed) | _rates(totals, seed)
        rows.append(
            {
                "threshold": threshold,
                **{name: value.to_json() for name, value in figures.items()},
                "by_domain": {d: _in_domain(totals, places.get(("domain", d), []), seed) for d in domains},
            }
        )
    return rows


def _in_domain(totals: Totals, rows: Sequence[int], seed: int) -> dict[str, Any]:
    rate = _rates(_rows(totals, rows), seed)["alpha_verified"]
    return {"tau_step": _tau(totals, rows, seed), "alpha_verified": rate.to_json()}


def _rates(totals: Totals, seed: int) -> dict[str, Estimate]:
    verified, n = _verified(totals), round(float(totals.rounds.sum()))
    return {
        "alpha_verified": ratio_of_sums(totals.committed, verified + totals.rounds, n, NO_ROUNDS, seed),
        "waste": ratio_of_sums(totals.drafted - totals.accepted, totals.committed, n, NO_ROUNDS, seed),
        "verified_waste": ratio_of_sums(verified - totals.accepted, verified, n, "no draft was verified", seed),
    }


def _verified(totals: Totals) -> NDArray[np.float64]:
    return np.asarray(totals.lengths @ np.arange(totals.lengths.shape[1]))


def _rows(totals: Totals, rows: Sequence[int]) -> Totals:
    at = np.array(rows, np.int64)
    return Totals(totals.rounds[at], totals.committed[at], totals.accepted[at], totals.drafted[at], totals.lengths[at])


def _tau(totals: Totals, rows: Sequence[int] | None, seed: int) -> dict[str, Any]:
    part = totals if rows is None else _rows(totals, rows)
    n = round(float(part.rounds.sum()))
    return ratio_of_sums(part.committed, part.rounds, n, "no prompt of it was run", seed).to_json()


def _comparisons(evaluation: Evaluation, seed: int) -> list[dict[str, Any]]:
    """Every two drafters on the same prompts."""
    sums = {}
    for one in evaluation.drafters:
        totals = one.totals[evaluation.headline]
        pairs = zip(totals.committed.tolist(), totals.rounds.tolist(), strict=True)
        sums[one.name] = {p: pair for p, pair in zip(evaluation.prompts, pairs, strict=True) if pair[1] > 0}
    return [
        {
            "a": a,
            "b": b,
            "tau_ratio": paired_ratio(sums[a], sums[b], seed).to_json(),
            "tau_difference": paired_difference(sums[a], sums[b], seed).to_json(),
        }
        for a, b in combinations(sums, 2)
    ]


def _prompt_rows(evaluation: Evaluation, data: EvaluationPrompts) -> list[dict[str, Any]]:
    """The sums behind every figure without a threshold sweep."""
    rows = []
    for one in evaluation.drafters:
        totals = one.totals[evaluation.headline]
        verified = _verified(totals)
        for i, prompt in enumerate(evaluation.prompts):
            values = {name: float(getattr(totals, name)[i]) for name in ("rounds", "committed", "accepted", "drafted")}
            where = {"data_set": data.sets[prompt].name, "domain": data.sets[prompt].domain}
            rows.append({"id": prompt, **where, "drafter": one.name, **values, "verified": float(verified[i])})
    return rows
