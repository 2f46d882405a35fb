"""NVIDIA Model-Optimizer `speculation_profile.json`, read and written.

Schema 1.0 (examples/specdec_bench, 2026): vectors indexed by draft position, `marginal_accept_rates[i]` = P(first i + 1
drafts all kept) and `conditional_accept_rates[i]` = marginal[i] / marginal[i - 1]; `acceptance_length_histogram` counts
decode steps by emitted tokens, bonus included, so its key 1 means that no draft was kept; `mean_accept_length` is per
step, `mean_accept_length_per_request` the mean over requests; 1 + sum(marginals) must equal the former within 0.02.
Not verified: whether its engines report the prefill token as a step of its own, and the keys inside
`draft_checkpoint` and `target_model` (objects; we write {"id": ...}).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.results.result_set import ResultSet, count, present
from specdoctor.formats.results.source import ResultSource
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.sums import Sums

NAME = "Model-Optimizer speculation_profile.json"
CONVENTION = (
    "tokens emitted per decode step, pooled over steps: bonus in, cut where the engine cut its output; a step ended by "
    "EOS counts as fewer kept drafts"
)
TOLERANCE = 0.02  # of its own consistency check
# Drafts of K are a prefix of those of K + 1 only for chains, so only there may acceptance be read off for smaller K.
CHAINS = ("eagle", "eagle1", "eagle2", "eagle3", "draft_model")


def recognises(source: ResultSource) -> bool:
    document = source.document
    vectors = "marginal_accept_rates" in document or "conditional_accept_rates" in document
    return "schema_version" in document and (vectors or "measured" in document)


def read(source: ResultSource) -> list[ResultSet]:
    document, path = source.document, str(source.path)
    if document.get("measured") is False:
        return []
    histogram = _histogram(document.get("acceptance_length_histogram"), path)
    rounds = float(sum(histogram)) if histogram else None
    committed = float(sum(n * steps for n, steps in enumerate(histogram))) if histogram else None
    K = document.get("num_speculative_tokens")
    conditions = document.get("measurement_conditions")
    temperature = conditions.get("temperature") if isinstance(conditions, Mapping) else None
    rates = {key: _rates(document.get(key), path, key) for key in ("marginal_accept_rates", "conditional_accept_rates")}
    return [
        ResultSet(
            tool="Model-Optimizer profile",
            path=path,
            arm=str(document.get("method") or ""),
            convention=CONVENTION,
            pooled=Sums(rounds=rounds, committed=committed),
            settings=present(
                target=_identity(document.get("target_model")),
                draft=_identity(document.get("draft_checkpoint")),
                K=K if isinstance(K, int) else None,
                temperature=temperature,
            ),
            values=_means(document, path),
            absent={
                "vllm_mean_acceptance_length": "a step ended by EOS hides how many drafts were accepted",
                "alpha_draft": "a step ended by EOS hides how many drafts were accepted",
            },
            histogram=histogram,
            marginal=rates["marginal_accept_rates"] or _running_product(rates["conditional_accept_rates"]),
            notes=("pooled over steps: no interval between prompts",),
            version=str(document["schema_version"]),
        )
    ]


def write(result: ResultSet, path: Path) -> None:
    """Write a profile of one result; the file appears whole or not at all.

    Needs K and either the rounds by committed tokens (records, or a baseline of them) or marginal rates.
    """
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(profile(result), indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def profile(result: ResultSet) -> dict[str, Any]:
    """The object of the file. Vectors are counted from emitted tokens, as its readers define them."""
    K = result.settings.get("K")
    if not isinstance(K, int) or K < 1:
        raise SpecdoctorError(f"{result.path}: K is {K!r}, expected the proposal length; a profile is made at one K")
    if result.histogram:
        steps = sum(result.histogram)
        marginals = [sum(result.histogram[i + 2 :]) / steps for i in range(K)]
        mean: float | None = sum(n * number for n, number in enumerate(result.histogram)) / steps
    elif result.marginal:
        marginals = [*result.marginal, *[0.0] * K][:K]
        mean = result.estimate("tau_step").value
    else:
        raise SpecdoctorError(
            f"{result.path}: has neither rounds by length nor marginal rates, which a profile needs; "
            "give the --records file of a bench run"
        )
    if mean is None:
        raise SpecdoctorError(f"{result.path}: has no tau_step ({result.estimate('tau_step').reason})")
    method = result.settings.get("algorithm") or result.arm or None
    per_request = result.estimate("tau_request").value
    implied = 1 + sum(marginals)
    rising = [i for i in range(1, K) if marginals[i] > marginals[i - 1] + 1e-9]
    return {
        "schema_version": "1.0",
        "measured": True,
        "method": method,
        "draft_checkpoint": _object(result.settings.get("draft")),
        "target_model": _object(result.settings.get("target")),
        "num_speculative_tokens": K,
        "block_size": result.settings.get("block_size"),
        "max_supported_k": K,
        "verification_method": "longest_prefix",
        "conditional_accept_rates": [round(rate, 6) for rate in _conditional(marginals)],
        "marginal_accept_rates": [round(rate, 6) for rate in marginals],
        "mean_accept_length": round(mean, 6),
        "mean_accept_length_per_request": None if per_request is None else round(per_request, 6),
        "accept_length_model": "chain_analytic" if str(method).lower() in CHAINS else "measured_per_k",
        "accept_length_by_k": {str(K): round(mean, 6)},
        "acceptance_length_histogram": {str(n): number for n, number in enumerate(result.histogram or []) if number}
        or None,
        "per_category": None,
        "measurement_conditions": {"tool": result.tool, "convention": result.convention} | result.settings,
        "validation": {
            "mean_consistency": {
                "implied_mean_accept_length": round(implied, 6),
                "reported_mean_accept_length": round(mean, 6),
                "abs_delta": round(abs(implied - mean), 6),
                "tolerance": TOLERANCE,
                "passed": abs(implied - mean) <= TOLERANCE,
            },
            "marginal_monotonicity": {
                "passed": not rising,
                "violations": [{"position": i, "value": marginals[i], "previous": marginals[i - 1]} for i in rising],
            },
        },
    }


def _means(document: Mapping[str, Any], path: str) -> dict[str, Estimate]:
    keys = {"tau_step": "mean_accept_length", "tau_request": "mean_accept_length_per_request"}
    means = {name: count(document.get(key), path, key) for name, key in keys.items()}
    return {
        name: Estimate(mean, reason="printed mean: no interval") for name, mean in means.items() if mean is not None
    }


def _histogram(value: Any, path: str) -> list[int] | None:
    """[longest + 1] steps by emitted tokens."""
    if not value:
        return None
    try:
        steps = {
            int(length): int(count(number, path, "acceptance_length_histogram") or 0)
            for length, number in value.items()
        }
    except (AttributeError, ValueError):
        raise SpecdoctorError(
            f"{path}: key acceptance_length_histogram is {value!r}, expected {{length: steps}}"
        ) from None
    if min(steps) < 1:
        raise SpecdoctorError(f"{path}: key acceptance_length_histogram has length {min(steps)}, expected 1 or more")
    return [steps.get(length, 0) for length in range(max(steps) + 1)]


def _rates(value: Any, path: str, key: str) -> list[float]:
    if value is None:
        return []
    good = isinstance(value, list) and all(isinstance(rate, int | float) and 0 <= rate <= 1 for rate in value)
    if not good:
        raise SpecdoctorError(f"{path}: key {key} is {value!r}, expected a list of rates from 0 to 1")
    return [float(rate) for rate in value]


def _running_product(conditional: list[float]) -> list[float] | None:
    marginals, survival = [], 1.0
    for rate in conditional:
        survival *= rate
        marginals.append(survival)
    return marginals or None


def _conditional(marginals: list[float]) -> list[float]:
    before = [1.0, *marginals]
    return [rate / earlier if earlier > 0 else 0.0 for rate, earlier in zip(marginals, before, strict=False)]


def _identity(value: Any) -> Any:
    if isinstance(value, Mapping):
        return next((value[key] for key in ("id", "name", "model", "path") if value.get(key)), None)
    return value


def _object(identity: Any) -> dict[str, str] | None:
    """Only the last two parts of a path: a profile is published beside a checkpoint."""
    if not identity:
        return None
    parts = [part for part in str(identity).replace("\\", "/").split("/") if part]
    return {"id": "/".join(parts[-2:])}
