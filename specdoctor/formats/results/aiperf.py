"""NVIDIA AIPerf: `profile_export.jsonl` (one record a request) and `profile_export_aiperf.json` (aggregates).

The per-request record stands under `spec_decode_acceptance` when the run used `--export-level records`; its fields are
vLLM's. Aggregates: `spec_decode_acceptance_length` {avg, std} is a mean over requests of 1 + accepted / steps,
`spec_decode_token_weighted_acceptance_length` the same pooled, rates are per cent, and
`pooled_spec_decode_acceptance_histogram` counts steps by accepted drafts (bonus excluded). As of AIPerf 0.14.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.results.result_set import ResultSet, count, present, rounds_behind
from specdoctor.formats.results.source import ResultSource, Row
from specdoctor.formats.results.vllm import UNKNOWN_ROUNDS, request_sums
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.sums import Sums, total

NAME = "AIPerf (profile_export.jsonl or profile_export_aiperf.json)"
RECORD_CONVENTION = (
    "per request 1 + accepted / steps, not cut at EOS or at the cap; converted to ours from the output tokens less one"
)
AGGREGATE_CONVENTION = (
    "headline = mean over requests of 1 + accepted / steps, token-weighted = the same pooled; neither is cut at EOS or "
    "at the cap"
)
TAGS = ("spec_decode_acceptance_length", "total_spec_decode_steps", "pooled_spec_decode_acceptance_histogram")
Z = 1.959963984540054


def inside(folder: Path) -> Path:
    """The most detailed export of an artifact folder."""
    for name in ("profile_export.jsonl", "profile_export_aiperf.json"):
        path = folder / name
        if path.is_file() and (name.endswith(".json") or recognises(ResultSource(path))):
            return path
    raise SpecdoctorError(f"{folder}: a folder without profile_export.jsonl or profile_export_aiperf.json; give a file")


def recognises(source: ResultSource) -> bool:
    if source.first.keys() >= {"metadata", "metrics"}:
        return True
    document = source.document
    # vLLM writes a bare number under the first of these names.
    return any(isinstance(document.get(tag), Mapping) for tag in TAGS) or "aiperf_version" in document


def read(source: ResultSource) -> list[ResultSet]:
    if source.document and not source.document.keys() >= {"metadata", "metrics"}:
        return [_aggregate(source.document, str(source.path))]
    return _records(source.rows, str(source.path))


def _records(rows: list[Row], path: str) -> list[ResultSet]:
    prompts: dict[str, Sums] = {}
    ids = [_prompt_id(row.values.get("metadata")) for row in rows]
    named, left_out, most = all(ids), 0, 0.0
    for index, (row, name) in enumerate(zip(rows, ids, strict=True)):
        stats = row.values.get("spec_decode_acceptance")
        metadata = row.values.get("metadata")
        warmup = isinstance(metadata, Mapping) and metadata.get("benchmark_phase", "profiling") != "profiling"
        if not isinstance(stats, Mapping) or warmup:
            left_out += 1
            continue
        tokens = stats.get("completion_tokens")
        tokens = _metric(row.values["metrics"], "output_sequence_length") if tokens is None else tokens
        sums = request_sums(stats, count(tokens, row.place, "completion_tokens"), row.place)
        most = max(most, count(stats.get("num_spec_tokens"), row.place, "num_spec_tokens") or 0)
        key = name if named and name else str(index)
        prompts[key] = prompts[key] + sums if key in prompts else sums
    if not prompts:
        return []
    pooled = total(prompts.values())
    notes = [] if named else ["records carry no conversation id: two runs cannot be paired prompt by prompt"]
    notes += [f"{left_out} of {len(rows)} records (warm-up, or without acceptance) left out"] if left_out else []
    return [
        ResultSet(
            tool="AIPerf records",
            path=path,
            arm="",
            convention=RECORD_CONVENTION,
            pooled=pooled,
            prompts=prompts,
            pairable=named,
            settings=present(K=int(most) or None),
            absent={} if pooled.committed is not None else {"tau_step": UNKNOWN_ROUNDS},
            notes=tuple(notes),
        )
    ]


def _aggregate(document: Mapping[str, Any], path: str) -> ResultSet:
    def number(tag: str) -> float | None:
        return count(_metric(document, tag), path, tag)

    steps, accepted = number("total_spec_decode_steps"), number("total_accepted_draft_tokens")
    drafted, requests = number("total_draft_tokens"), number("request_count")
    completion = number("total_output_tokens") or number("total_osl")
    rounds = committed = None
    if steps is not None and accepted is not None and drafted is not None and completion and requests:
        rounds = rounds_behind(accepted, steps, completion - requests, drafted)
        committed = None if rounds is None else completion - requests
    values = {}
    per_request = _mean(document.get("spec_decode_acceptance_length"), requests, path)
    if per_request is not None:
        values["aiperf_acceptance_length"] = per_request
    weighted = number("spec_decode_token_weighted_acceptance_length")
    if weighted is not None:
        reason = "printed value of pooled counts: no interval between prompts"
        values["vllm_mean_acceptance_length"] = Estimate(weighted, reason=reason)
    config = document.get("input_config")
    return ResultSet(
        tool="AIPerf aggregate",
        path=path,
        arm="",
        convention=AGGREGATE_CONVENTION,
        pooled=Sums(requests, rounds, committed, steps, drafted, accepted, completion),
        settings=present(target=_model(config)),
        values=values,
        absent={"tau_step": "the aggregate does not state output tokens, which a conversion needs; use the records"}
        if committed is None
        else {},
        marginal=_survival(document.get("pooled_spec_decode_acceptance_histogram"), path),
        notes=("aggregates over requests: export with --export-level records to pair prompts",),
        version=document.get("aiperf_version"),
        date=document.get("start_time"),
    )


def _metric(metrics: Any, tag: str) -> Any:
    """A metric of a record ({value}) or of the aggregate ({avg})."""
    entry = metrics.get(tag) if isinstance(metrics, Mapping) else None
    if isinstance(entry, Mapping):
        return entry.get("value", entry.get("avg"))
    return entry


def _mean(entry: Any, requests: float | None, path: str) -> Estimate | None:
    """A mean over requests, with the interval that its standard deviation gives."""
    if not isinstance(entry, Mapping):
        return None
    average, spread = (count(entry.get(key), path, f"spec_decode_acceptance_length.{key}") for key in ("avg", "std"))
    if average is None:
        return None
    n = count(entry.get("count"), path, "spec_decode_acceptance_length.count") or requests
    if spread is None or not n or n < 2:
        return Estimate(average, n=int(n or 0), reason="no standard deviation over requests: no interval")
    half = Z * spread / math.sqrt(n - 1)  # the exported deviation divides by n
    return Estimate(average, average - half, average + half, int(n), "normal approximation over requests")


def _survival(histogram: Any, path: str) -> list[float] | None:
    """Steps by accepted drafts -> P(more than i accepted)."""
    if not isinstance(histogram, Mapping) or not histogram:
        return None
    steps = {int(key): count(value, path, "pooled histogram") or 0 for key, value in histogram.items()}
    everything = sum(steps.values())
    return [sum(n for length, n in steps.items() if length > i) / everything for i in range(max(steps))] or None


def _prompt_id(metadata: Any) -> str | None:
    """Conversation and turn: the same prompt in every run over one dataset. Other ids are new in each run."""
    if not isinstance(metadata, Mapping) or metadata.get("conversation_id") is None:
        return None
    turn = metadata.get("turn_index") or 0
    return f"{metadata['conversation_id']}:{turn}" if turn else str(metadata["conversation_id"])


def _model(config: Any) -> Any:
    """The served model, where the configuration names exactly one."""
    endpoint = config.get("endpoint") if isinstance(config, Mapping) else None
    names = endpoint.get("model_names") if isinstance(endpoint, Mapping) else None
    return names[0] if isinstance(names, list) and len(names) == 1 else None
