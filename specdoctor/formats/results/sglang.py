"""SGLang: responses with `meta_info` (an object, a list, or JSONL), and the JSONL of `bench_serving`.

`meta_info` keys: `completion_tokens` (prefill token in), `spec_verify_ct` (verify forwards), and for the accepted and
proposed drafts, newest name first, `spec_num_correct_drafts`, `spec_accepted_drafts`, `spec_accept_token_num` and
`spec_num_proposed_drafts`, `spec_proposed_drafts`, `spec_draft_token_num`. `bench_serving` writes one line a run whose
`accept_length` is the server's average since it was started. Not verified: whether accepted drafts are counted before
or after the cut at EOS. A key `prompt_id` that the client adds to a row names the prompt.
"""

from collections.abc import Mapping
from typing import Any

from specdoctor.formats.results.result_set import ResultSet, count, present
from specdoctor.formats.results.source import ResultSource, Row
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.sums import Sums, total

NAME = "SGLang (responses with meta_info, or bench_serving JSONL)"
CONVENTION = (
    "accept length = completion tokens / verify forwards, the prefill token counted; converted to ours by leaving one "
    "token a request out"
)
BENCH_CONVENTION = "accept_length = the server's average since it was started: accepted drafts + 1 per verify forward"
ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
DRAFTED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
BENCH_KEYS = {"accept_length", "completed", "total_output_tokens"}


def recognises(source: ResultSource) -> bool:
    if not source.rows:
        return False
    first = source.rows[0].values
    return first.keys() >= BENCH_KEYS or any(_meta_info(row.values) is not None for row in source.rows)


def read(source: ResultSource) -> list[ResultSet]:
    if source.rows[0].values.keys() >= BENCH_KEYS:
        several = len(source.rows) > 1
        return [_bench(row, f"run {i}" if several else "") for i, row in enumerate(source.rows, 1)]
    return _responses(source.rows, str(source.path))


def _responses(rows: list[Row], path: str) -> list[ResultSet]:
    prompts: dict[str, Sums] = {}
    named = all(isinstance(row.values.get("prompt_id"), str) for row in rows)
    left_out, per_round = 0, set()
    for index, row in enumerate(rows):
        info = _meta_info(row.values)
        if info is None or not info.get("spec_verify_ct"):
            left_out += 1
            continue
        sums = _request(info, row)
        if sums.drafted and sums.rounds:
            per_round.add(sums.drafted / sums.rounds)
        key = row.values["prompt_id"] if named else str(index)
        prompts[key] = prompts[key] + sums if key in prompts else sums
    if not prompts:
        return []
    K = per_round.pop() if len(per_round) == 1 else None
    notes = [] if named else ["rows carry no prompt_id: two runs cannot be paired prompt by prompt"]
    notes += [f"{left_out} of {len(rows)} responses without verify forwards left out"] if left_out else []
    return [
        ResultSet(
            tool="SGLang responses",
            path=path,
            arm="",
            convention=CONVENTION,
            pooled=total(prompts.values()),
            prompts=prompts,
            pairable=named,
            settings=present(target=rows[0].values.get("model"), K=int(K) if K and K.is_integer() else None),
            absent={"alpha_draft": "this SGLang does not state accepted and proposed drafts"},
            notes=tuple(notes),
        )
    ]


def _request(info: Mapping[str, Any], row: Row) -> Sums:
    completion = count(_first(info, ("completion_tokens",)) or _usage(row.values), row.place, "completion_tokens")
    rounds = count(info["spec_verify_ct"], row.place, "spec_verify_ct")
    accepted = count(_first(info, ACCEPTED), row.place, ACCEPTED[0])
    return Sums.of_request(
        rounds=rounds,
        committed=completion - 1 if completion else None,
        draft_rounds=rounds,
        drafted=count(_first(info, DRAFTED), row.place, DRAFTED[0]),
        accepted=accepted,
        completion=completion,
    )


def _bench(row: Row, arm: str) -> ResultSet:
    values = row.values
    length = count(values.get("accept_length"), row.place, "accept_length")
    reason = "printed average: no interval between prompts"
    printed = {} if length is None else {"vllm_mean_acceptance_length": Estimate(length, reason=reason)}
    absent = "bench_serving states no verify forwards, which a conversion needs; keep the responses' meta_info"
    none = {"vllm_mean_acceptance_length": "accept_length is null: the server ran without speculative decoding"}
    return ResultSet(
        tool="SGLang bench_serving",
        path=row.place,
        arm=arm,
        convention=BENCH_CONVENTION,
        pooled=Sums(
            requests=count(values.get("completed"), row.place, "completed"),
            completion=count(values.get("total_output_tokens"), row.place, "total_output_tokens"),
        ),
        settings=present(
            backend=values.get("backend"),
            dataset=values.get("dataset_name"),
            max_concurrency=values.get("max_concurrency"),
            request_rate=values.get("request_rate"),
        ),
        values=printed,
        absent={"tau_step": absent, "alpha_draft": absent} | ({} if printed else none),
        notes=("the average is cumulative since the server was started: start it anew for each run",),
    )


def _meta_info(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    choices = values.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else {}
    extension = values.get("sglext")
    details = extension.get("spec_tokens_details") if isinstance(extension, Mapping) else None
    for info in (values.get("meta_info"), first.get("meta_info"), details):
        if isinstance(info, Mapping) and ("spec_verify_ct" in info or "completion_tokens" in info):
            return info
    return None


def _first(info: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((info[key] for key in keys if info.get(key) is not None), None)


def _usage(values: Mapping[str, Any]) -> Any:
    usage = values.get("usage")
    return usage.get("completion_tokens") if isinstance(usage, Mapping) else None
