"""vLLM: the JSON of `vllm bench serve` (pooled), and responses with per-request metrics (a list or JSONL).

Bench keys, as of vLLM 0.33: `spec_decode_num_drafts`, `_draft_tokens`, `_accepted_tokens`, `_acceptance_length`
(1 + accepted / drafts), `_acceptance_rate` (per cent), `_per_position_acceptance_rates`; differences of the server's
counters over the run. Responses carry `metrics.speculative_decoding` when the server runs with
`--per-request-spec-decode-metrics`; the object alone is read too. A key `prompt_id` that the client adds to a row
names the prompt, and lets two runs be paired.
"""

from collections.abc import Mapping
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.results.result_set import ResultSet, count, present, rounds_behind
from specdoctor.formats.results.source import ResultSource, Row
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.sums import Sums, total

NAME = "vLLM (bench serve JSON, or responses with per-request metrics)"
CONVENTION = (
    "acceptance length = 1 + accepted / drafts, pooled, not cut at EOS or at the cap; converted to ours from the "
    "output tokens less one per request, which holds while every round had a draft"
)
UNKNOWN_ROUNDS = "output tokens and drafts do not add up: some rounds had no draft, and vLLM does not count those"


def recognises(source: ResultSource) -> bool:
    if _is_bench(source.document):
        return True
    return bool(source.rows) and _metrics(source.rows[0].values) is not None


def read(source: ResultSource) -> list[ResultSet]:
    if _is_bench(source.document):
        return [_bench(source.document, str(source.path))]
    return [_responses(source.rows, str(source.path))]


def request_sums(stats: Mapping[str, Any], completion: float | None, place: str) -> Sums:
    """Counts of one request from vLLM's (and AIPerf's) per-request record."""
    keys = {"draft_rounds": "num_spec_steps", "accepted": "num_accepted_draft_tokens", "drafted": "num_draft_tokens"}
    counts = {name: count(stats.get(key), place, key) for name, key in keys.items()}
    accepted, draft_rounds = counts["accepted"], counts["draft_rounds"]
    if accepted is None or draft_rounds is None:
        raise SpecdoctorError(f"{place}: has no num_spec_steps and num_accepted_draft_tokens; is the record complete?")
    committed = rounds = None
    if completion:
        most = count(stats.get("num_spec_tokens"), place, "num_spec_tokens") or counts["drafted"] or 0
        rounds = rounds_behind(accepted, draft_rounds, completion - 1, most)
        committed = None if rounds is None else completion - 1
    return Sums.of_request(rounds=rounds, committed=committed, completion=completion, **counts)


def _is_bench(document: Mapping[str, Any]) -> bool:
    if not document.keys() >= {"total_output_tokens", "completed", "duration"} or "accept_length" in document:
        return False
    return "tokenizer_id" in document or any(key.startswith("spec_decode_") for key in document)


def _metrics(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    metrics = values.get("metrics")
    stats = metrics.get("speculative_decoding") if isinstance(metrics, Mapping) else values.get("speculative_decoding")
    if stats is None and "mean_acceptance_length" in values and "num_spec_steps" in values:
        stats = values
    return stats if isinstance(stats, Mapping) else None


def _bench(document: Mapping[str, Any], path: str) -> ResultSet:
    def number(key: str) -> float | None:
        return count(document.get(key), path, key)

    requests, completion = number("completed"), number("total_output_tokens")
    drafts, drafted = number("spec_decode_num_drafts"), number("spec_decode_draft_tokens")
    accepted = number("spec_decode_accepted_tokens")
    absent: dict[str, str] = {}
    rounds = committed = K = None
    if drafts is None or drafted is None or accepted is None:
        missing = "no spec_decode_* keys: the server ran without speculative decoding, or its metrics were not reached"
        absent |= dict.fromkeys(("tau_step", "vllm_mean_acceptance_length", "alpha_draft"), missing)
    else:
        K = int(drafted / drafts) if drafts and drafted % drafts == 0 else None
        if requests and completion:
            rounds = rounds_behind(accepted, drafts, completion - requests, requests * (K or drafted))
        committed = None if rounds is None or completion is None or requests is None else completion - requests
        absent |= {} if committed is not None else {"tau_step": UNKNOWN_ROUNDS}
    speed = "whole-server throughput over wall time, prefill and waiting included; not the speed of one sequence"
    return ResultSet(
        tool="vLLM bench serve",
        path=path,
        arm="",
        convention=CONVENTION,
        pooled=Sums(requests, rounds, committed, drafts, drafted, accepted, completion),
        settings=present(
            target=document.get("model_id"),
            K=K,
            num_prompts=document.get("num_prompts"),
            max_concurrency=document.get("max_concurrency"),
            request_rate=document.get("request_rate"),
        ),
        values=_printed(document, path),
        absent=absent | {"tokens_per_second": speed},
        marginal=document.get("spec_decode_per_position_acceptance_rates") or None,
        notes=("pooled over the server: requests of others during the run are in the counts",),
        date=document.get("date"),
    )


def _printed(document: Mapping[str, Any], path: str) -> dict[str, Estimate]:
    length = count(document.get("spec_decode_acceptance_length"), path, "spec_decode_acceptance_length")
    reason = "printed value of pooled counters: no interval between prompts"
    return {} if length is None else {"vllm_mean_acceptance_length": Estimate(length, reason=reason)}


def _responses(rows: list[Row], path: str) -> ResultSet:
    prompts: dict[str, Sums] = {}
    named = all(isinstance(row.values.get("prompt_id"), str) for row in rows)
    left_out, most = 0, 0.0
    for index, row in enumerate(rows):
        stats = _metrics(row.values)
        if stats is None:
            left_out += 1
            continue
        usage = row.values.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, Mapping) else stats.get("completion_tokens")
        sums = request_sums(stats, count(tokens, row.place, "completion_tokens"), row.place)
        most = max(most, count(stats.get("num_spec_tokens"), row.place, "num_spec_tokens") or 0)
        key = row.values["prompt_id"] if named else str(index)
        prompts[key] = prompts[key] + sums if key in prompts else sums
    notes = [] if named else ["rows carry no prompt_id: two runs cannot be paired prompt by prompt"]
    notes += [f"{left_out} of {len(rows)} responses without speculative metrics left out"] if left_out else []
    pooled = total(prompts.values())
    return ResultSet(
        tool="vLLM responses",
        path=path,
        arm="",
        convention=CONVENTION,
        pooled=pooled,
        prompts=prompts,
        pairable=named,
        settings=present(target=rows[0].values.get("model"), K=int(most) or None),
        absent={} if pooled.committed is not None else {"tau_step": UNKNOWN_ROUNDS},
        notes=tuple(notes),
    )
