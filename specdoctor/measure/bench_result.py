"""From a bench run to the one JSON object that every report is made from.

Contract: `bench_result` is a pure function of what was measured. Every estimate is {value, low, high, n[, reason]}.
"""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import combinations
from typing import Any

from specdoctor.measure.arms import EngineArm, HuggingFaceArm, RequestRun
from specdoctor.measure.bench import BASELINE, BenchRun, prompt_totals
from specdoctor.measure.cost_table import CostTable
from specdoctor.measure.costs import BareCosts
from specdoctor.measure.drafting import vocabulary_facts
from specdoctor.measure.environment import environment
from specdoctor.metrics.acceptance import AcceptanceSummary, summarise
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.speedup import SpeedupModel, limiting_term
from specdoctor.metrics.statistics import committed_and_rounds, paired_difference, paired_ratio, ratio_of_sums

SCHEMA_VERSION = 1
TAU_DEFINITION = "committed tokens per verify round, bonus included, cut at EOS and cap, prefill token not counted"


def bench_result(
    run: BenchRun, settings: dict[str, Any], records_path: str | None = None, table: CostTable | None = None
) -> dict[str, Any]:
    """The `--json` object of `specdoctor bench`; `settings` are the command's own, recorded as they are.

    With a cost table the expected speed-up is its prediction, else that of the bare costs sampled in the run.
    """
    costs = run.costs if table is None else _from_table(run, table)
    arms = [_arm(run, arm, costs.get(arm.name), run.settings.seed) for arm in run.arms]
    limits = {arm["name"]: arm["limiting_term"] for arm in arms if arm.get("limiting_term")}
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "bench",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment()
        | {
            "device": str(run.target.device),
            "dtype": str(run.target.dtype).removeprefix("torch."),
            "attention_path": {"name": run.target.attention.name, "reason": run.target.attention.reason},
        },
        "settings": settings,
        "interrupted": run.interrupted,
        "definitions": {"tau_step": TAU_DEFINITION, "interval": "95 %, bootstrap clustered by prompt"},
        "arms": arms,
        "comparisons": _comparisons(run),
        "limiting_term": limits,
        "divergences": [difference.to_json() for difference in run.divergences],
        "prompts": [_prompt_row(request) for request in run.requests],
        "records": records_path,
    }


def _arm(run: BenchRun, arm: Any, costs: BareCosts | None, seed: int) -> dict[str, Any]:
    requests, records = run.of(arm.name), run.records(arm.name)
    differences = [d for d in run.divergences if d.arm == arm.name]
    greedy = run.settings.temperature == 0
    row: dict[str, Any] = {
        "name": arm.name,
        "draft": _draft(arm),
        "requests": len(requests),
        "tokens_per_s": _tokens_per_s(requests, seed).to_json(),
        "request_tokens_per_s": _request_tokens_per_s(requests, seed).to_json(),
        "speedup": _speedup(run, arm.name).to_json(),
        "greedy_mismatches": sum(not d.near_tie for d in differences) if greedy else None,
        "near_ties": sum(d.near_tie for d in differences) if greedy else None,
        "prefill_share": _prefill_share(requests, seed).to_json(),
    }
    if isinstance(arm, HuggingFaceArm):
        return row | {"attention": arm.attention}
    summary = summarise(records, arm.engine.draft_tokens or None, seed)
    row |= _acceptance(summary)
    row |= _costs(run, arm, requests, summary, costs, seed)
    row["by_category"] = _by_category(run, arm.name, summary, seed)
    return row


def _draft(arm: Any) -> dict[str, Any] | None:
    drafter: Any = arm.engine.drafter if isinstance(arm, EngineArm) else None
    if drafter is None:
        return None
    spec = drafter.spec
    return {
        "name": drafter.name,
        "family": spec.family,
        "algorithm": spec.algorithm,
        "head": getattr(spec, "markov", None),
        "layers": len(spec.layers),
        "block_size": getattr(spec, "block_size", None),
        "draft_tokens": arm.engine.draft_tokens,
        "draft_vocabulary": spec.head_rows if getattr(spec, "has_vocabulary_map", False) else None,
        "tree": arm.engine.tree and asdict(arm.engine.tree),
        "device": str(drafter.device),
        "dtype": str(drafter.dtype).removeprefix("torch."),
        "quantized": getattr(drafter, "quantized", None),
        "vocabulary": vocabulary_facts(drafter),
    }


def _acceptance(summary: AcceptanceSummary) -> dict[str, Any]:
    row = summary.to_json()
    wanted = (
        "tau_step",
        "tau_request",
        "alpha_draft",
        "alpha_verified",
        "marginal",
        "conditional",
        "waste",
        "efficiency",
    )
    counts = ("rounds", "drafted", "verified", "accepted", "committed", "accepted_length_histogram", "by_context")
    return {name: row[name] for name in (*wanted, *counts)}


def _tokens_per_s(requests: Sequence[RequestRun], seed: int) -> Estimate:
    """Decoded tokens (all but the first) per second after the prefill, pooled."""
    return _pooled([r for r in requests if r.decoded], lambda r: (r.decoded, r.decode_seconds), seed)


def _request_tokens_per_s(requests: Sequence[RequestRun], seed: int) -> Estimate:
    """Completion tokens per second of the whole request, prefill included."""
    return _pooled(requests, lambda r: (len(r.completion_ids), r.prefill_seconds + r.decode_seconds), seed)


def _prefill_share(requests: Sequence[RequestRun], seed: int) -> Estimate:
    return _pooled(requests, lambda r: (r.prefill_seconds, r.prefill_seconds + r.decode_seconds), seed)


def _pooled(requests: Sequence[RequestRun], value: Any, seed: int) -> Estimate:
    totals = list(prompt_totals(requests, value).values())
    return ratio_of_sums(
        [top for top, _ in totals], [bottom for _, bottom in totals], len(totals), "nothing was decoded", seed
    )


def _speed_totals(requests: Sequence[RequestRun]) -> dict[str, Any]:
    return prompt_totals([r for r in requests if r.decoded], lambda r: (r.decoded, r.decode_seconds))


def _speedup(run: BenchRun, arm: str, category: str | None = None) -> Estimate:
    """Tokens/s over the baseline's, on the same prompts, paired."""
    mine = [r for r in run.of(arm) if category in (None, r.category)]
    if arm == BASELINE:
        return Estimate.absent("this is the baseline", len(mine))
    base = [r for r in run.of(BASELINE) if category in (None, r.category)]
    return paired_ratio(_speed_totals(mine), _speed_totals(base), run.settings.seed)


def _costs(
    run: BenchRun,
    arm: EngineArm,
    requests: list[RequestRun],
    summary: AcceptanceSummary,
    costs: BareCosts | None,
    seed: int,
) -> dict[str, Any]:
    """Shares of the round, bare costs, and the speed-up that they add up to."""

    def phase(name: str) -> Any:
        return lambda r: (sum(x.times.get(name, 0.0) for x in r.records), r.decode_seconds)

    drafting = arm.engine.drafter is not None
    decoding = [request for request in requests if request.decoded]  # the others have no round to share out
    row = {
        "draft_share": (
            _pooled(decoding, phase("draft"), seed) if drafting else Estimate.absent("no drafter")
        ).to_json(),
        "verify_share": _pooled(decoding, phase("verify"), seed).to_json(),
        "overhead_share": _pooled(decoding, _overhead, seed).to_json(),
        "phases": _phases(requests),
    }
    absent = Estimate.absent("no drafter" if not drafting else "no bare costs were measured").to_json()
    if costs is None or summary.tau_step.value is None:
        return row | {"verify_ratio": absent, "expected_speedup": absent, "bare": None, "limiting_term": None}
    model = _model(run, arm, requests, costs, summary)
    return row | {
        "verify_ratio": ratio_of_sums(
            costs.target_block, costs.target_one, len(costs.context), "no bare costs", seed
        ).to_json(),
        "expected_speedup": _expected(costs, model, seed).to_json(),
        "bare": _bare(costs, requests),
        "speedup_model": model.to_json(),
        "limiting_term": limiting_term(model).to_json(),
    }


def _from_table(run: BenchRun, table: CostTable) -> dict[str, BareCosts]:
    """Costs looked up at each request's mean context, in the place of those sampled in the run."""
    found: dict[str, BareCosts] = {}
    for arm in run.arms:
        if not isinstance(arm, EngineArm) or arm.name not in table.drafts:
            continue
        costs = found[arm.name] = BareCosts()
        for request in run.of(arm.name):
            if not request.records:
                continue
            context = sum(r.context for r in request.records) / len(request.records)
            verified = sum(r.verified for r in request.records) / len(request.records)
            costs.context.append(round(context))
            costs.target_one.append(table.target_seconds(1, context))
            costs.target_block.append(table.target_seconds(verified + 1, context))
            costs.draft.append(table.draft_seconds(arm.name, context))
    return found


def _phases(requests: list[RequestRun]) -> dict[str, float]:
    """Mean seconds a round by the engine's marks, and of the whole round."""
    records = [record for request in requests for record in request.records]
    names = dict.fromkeys(name for record in records for name in record.times)
    return {name: sum(r.times.get(name, 0.0) for r in records) / len(records) for name in names}


def _overhead(request: RequestRun) -> tuple[float, float]:
    """Time in neither forward: sampling, acceptance, cache, records, gaps between rounds."""
    busy = sum(x.times.get("draft", 0.0) + x.times.get("verify", 0.0) for x in request.records)
    return request.decode_seconds - busy, request.decode_seconds


def _model(
    run: BenchRun, arm: EngineArm, requests: list[RequestRun], costs: BareCosts, summary: AcceptanceSummary
) -> SpeedupModel:
    """Terms of the speed-up: tau and overhead from the rounds, the forwards from the bare costs."""
    rounds = max(1, summary.rounds)
    mean = {name: sum(values) / len(values) for name, values in vars_of(costs).items()}
    overhead = sum(_overhead(r)[0] for r in requests) / rounds
    base = run.of(BASELINE)
    base_overhead = sum(_overhead(r)[0] for r in base) / max(1, sum(len(r.records) for r in base))
    assert summary.tau_step.value is not None
    return SpeedupModel(
        tau=summary.tau_step.value,
        t_target=mean["target_one"] + base_overhead,
        t_draft=mean["draft"],
        t_verify=mean["target_block"],
        t_overhead=max(0.0, overhead),
        proposal_length=(0 if arm.engine.tree else summary.verified / rounds) or arm.engine.draft_tokens,
        draft_rows=summary.verified / rounds or None,
        prefill=sum(r.prefill_seconds for r in requests) / len(requests),
        tokens=sum(r.decoded for r in requests) / len(requests),
    )


def vars_of(costs: BareCosts) -> dict[str, list[float]]:
    return {name: getattr(costs, name) for name in ("target_one", "target_block", "draft")}


def _expected(costs: BareCosts, model: SpeedupModel, seed: int) -> Estimate:
    """tau T(1) / (draft + T(K+1) + overhead); the interval is that of the bare costs."""
    base_overhead = model.t_target - sum(costs.target_one) / len(costs.target_one)
    tops = [model.tau * (one + base_overhead) for one in costs.target_one]
    bottoms = [d + block + model.t_overhead for d, block in zip(costs.draft, costs.target_block, strict=True)]
    return ratio_of_sums(tops, bottoms, len(tops), "no bare costs", seed)


def _bare(costs: BareCosts, requests: list[RequestRun]) -> dict[str, Any]:
    """Medians of the bare forwards beside the round of the run."""
    rounds = [x.times["round"] for r in requests for x in r.records]

    def median(values: list[float]) -> float:
        ordered = sorted(values)
        return ordered[len(ordered) // 2]

    return {
        "samples": len(costs.context),
        "context": median([float(c) for c in costs.context]),
        **{f"{name}_seconds": median(values) for name, values in vars_of(costs).items()},
        "round_seconds": median(rounds),
    }


def _by_category(run: BenchRun, arm: str, summary: AcceptanceSummary, seed: int) -> dict[str, Any]:
    rows = {}
    for category, values in summary.to_json()["by_category"].items():
        mine = [r for r in run.of(arm) if r.category == category]
        rows[category] = values | {
            "requests": len(mine),
            "tokens_per_s": _tokens_per_s(mine, seed).to_json(),
            "speedup": _speedup(run, arm, category).to_json(),
        }
    return rows


def _comparisons(run: BenchRun) -> list[dict[str, Any]]:
    """On the same prompts: every two drafters, each by its chain, and every tree against its own drafter's chain."""
    drafting = [arm for arm in run.arms if isinstance(arm, EngineArm) and arm.engine.drafter is not None]
    chains = [arm for arm in drafting if arm.engine.tree is None]
    pairs = [(a.name, b.name) for a, b in combinations(chains, 2)]
    for tree in drafting:
        own = [arm.name for arm in chains if arm.engine.drafter is tree.engine.drafter]
        pairs += [(tree.name, chain) for chain in own if tree.engine.tree is not None]
    rows = []
    for a, b in pairs:
        if not run.of(a) or not run.of(b):
            continue
        tau = paired_difference(
            committed_and_rounds(run.records(a)), committed_and_rounds(run.records(b)), run.settings.seed
        )
        speed = paired_ratio(_speed_totals(run.of(a)), _speed_totals(run.of(b)), run.settings.seed)
        rows.append({"a": a, "b": b, "tau_difference": tau.to_json(), "tokens_per_s_ratio": speed.to_json()})
    return rows


def _prompt_row(request: RequestRun) -> dict[str, Any]:
    """Per-prompt sums, enough for paired comparisons without the records."""
    records = request.records
    return {
        "id": request.prompt_id,
        "category": request.category,
        "arm": request.arm,
        "rounds": len(records),
        "drafted": sum(r.drafted for r in records),
        "verified": sum(r.verified for r in records),
        "accepted": sum(r.accepted for r in records),
        "committed": sum(r.committed for r in records),
        "completion_tokens": len(request.completion_ids),
        "prefill_seconds": request.prefill_seconds,
        "seconds": request.decode_seconds,
        "stop": request.stop_reason,
    }
