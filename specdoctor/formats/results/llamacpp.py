"""llama.cpp: responses with `timings` (an object, a list, or JSONL), and the log of llama-server.

`timings`: `predicted_n` (output tokens, prefill token in), `predicted_ms`, `draft_n`, `draft_n_accepted`; without
`draft_n` nothing was drafted. They count no rounds: predicted_n - draft_n_accepted forwards hold only when no round was
cut. The log does: `draft acceptance = 0.61538 (16 accepted / 26 generated), mean len = 3.29` per task, and the
cumulative `statistics` line with `#gen drafts`, so there the conversion to ours is exact or refused. Layouts of 2025
and 2026 are read. A key `prompt_id` that the client adds to a response names the prompt; task numbers do not.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specdoctor.formats.results.result_set import ResultSet, count, present, rounds_behind
from specdoctor.formats.results.source import ResultSource, Row
from specdoctor.metrics.sums import Sums, total

NAME = "llama.cpp (responses with timings, or a llama-server log)"
TIMINGS_CONVENTION = (
    "output tokens / (output tokens - accepted drafts): the prefill token and its forward are counted, and no round is "
    "taken as cut"
)
LOG_CONVENTION = (
    "mean len = 1 + accepted / drafts, not cut at EOS or at the cap; converted to ours from the output tokens less "
    "one, which holds while every round had a draft"
)
NO_ROUNDS = "timings count no rounds, and a round cut at EOS or at the cap hides them; read the server's log instead"
UNDRAFTED = "output tokens and drafts do not add up: some rounds had no draft, and the log does not count those"

TASK = re.compile(r"\btask\s+(\d+)\s*\|")
EVAL = re.compile(r"(?<!prompt )eval time\s*=\s*([\d.]+) ms /\s*(\d+) (?:tokens|runs)")
ACCEPTANCE = re.compile(
    r"draft acceptance(?: rate)? = [\d.]+ \(\s*(\d+) accepted /\s*(\d+) generated\)"
    r"(?:, mean (?:acceptance length|len) =\s*([\d.]+))?"
)
STATISTICS = re.compile(
    r"statistics\s+([\w-]+):.*?#gen drafts =\s*(\d+),.*?#gen tokens =\s*(\d+), #acc tokens =\s*(\d+)"
)
TARGET = re.compile(r"load_model: loading model '([^']+)'")
DRAFT = re.compile(r"loading draft model '([^']+)'")
LENGTH = re.compile(r"\bn_max=(\d+)")
SYNTHETIC = "synthetic speculative acceptance is enabled"


@dataclass(slots=True)
class _Task:
    predicted: float = 0
    milliseconds: float = 0
    accepted: float = 0
    generated: float = 0
    mean_length: float | None = None


def recognises(source: ResultSource) -> bool:
    if source.rows:
        return any(isinstance(row.values.get("timings"), Mapping) for row in source.rows)
    return bool(ACCEPTANCE.search(source.text) or STATISTICS.search(source.text))


def read(source: ResultSource) -> list[ResultSet]:
    path = str(source.path)
    return [_responses(source.rows, path) if source.rows else _log(source.text, path)]


def _responses(rows: list[Row], path: str) -> ResultSet:
    rows = [row for row in rows if isinstance(row.values.get("timings"), Mapping)]
    named = all(isinstance(row.values.get("prompt_id"), str) for row in rows)
    prompts: dict[str, Sums] = {}
    for index, row in enumerate(rows):
        sums = _timings(row.values["timings"], row.place)
        key = row.values["prompt_id"] if named else str(index)
        prompts[key] = prompts[key] + sums if key in prompts else sums
    notes = [] if named else ["rows carry no prompt_id: two runs cannot be paired prompt by prompt"]
    return ResultSet(
        tool="llama.cpp responses",
        path=path,
        arm="",
        convention=TIMINGS_CONVENTION,
        pooled=total(prompts.values()),
        prompts=prompts,
        pairable=named,
        settings=present(target=rows[0].values.get("model")),
        absent={"tau_step": NO_ROUNDS, "vllm_mean_acceptance_length": NO_ROUNDS},
        notes=tuple(notes),
    )


def _timings(timings: Mapping[str, Any], place: str) -> Sums:
    keys = ("predicted_n", "predicted_ms", "draft_n", "draft_n_accepted")
    predicted, milliseconds, drafted, accepted = (count(timings.get(key), place, key) for key in keys)
    plain = drafted is None  # the key is left out when nothing was drafted
    committed = predicted - 1 if predicted else None
    return Sums.of_request(
        rounds=committed if plain else None,
        draft_rounds=0 if plain else None,
        drafted=drafted or 0,
        accepted=accepted or 0,
        committed=committed,
        completion=predicted,
        seconds=None if milliseconds is None else milliseconds / 1000,
    )


def _log(text: str, path: str) -> ResultSet:
    tasks = _tasks(text)
    K = _only(LENGTH.findall(text))
    prompts = {name: _task_sums(task, int(K) if K else None) for name, task in tasks.items()}
    pooled = total(prompts.values())
    notes = ["task numbers are no prompt ids: two logs cannot be paired prompt by prompt"]
    if SYNTHETIC in text:
        notes.insert(
            0, "the server drew acceptance at random (synthetic, for benchmarks): it says nothing of a drafter"
        )
    statistics = _statistics(text)
    if statistics:
        pooled, note = _exact(pooled, statistics, len(prompts), int(K) if K else None)
        notes += [note] if note else []
    return ResultSet(
        tool="llama.cpp server log",
        path=path,
        arm="",
        convention=LOG_CONVENTION,
        pooled=pooled,
        prompts=prompts or None,
        pairable=False,
        settings=present(target=_only(TARGET.findall(text)), draft=_only(DRAFT.findall(text)), K=int(K) if K else None),
        absent={} if pooled.committed is not None and pooled.rounds is not None else {"tau_step": UNDRAFTED},
        notes=tuple(notes),
    )


def _tasks(text: str) -> dict[str, _Task]:
    """Finished requests. Old logs print a task's lines without its number, at best under a line that has it."""
    tasks: dict[str, _Task] = {}
    name, unnumbered = "", ""
    for line in text.splitlines():
        if (number := TASK.search(line)) and "print_timing" in line:
            name = number.group(1)
        times, drafts = EVAL.search(line), ACCEPTANCE.search(line)
        if not times and not drafts:
            continue
        key = name or unnumbered
        entry = tasks.get(key)
        if not name and (entry is None or (times and entry.predicted) or (drafts and entry.generated)):
            key = unnumbered = f"request {len(tasks)}"  # this kind of line came already: the next request
        entry = tasks.setdefault(key, _Task())
        if times:
            entry.milliseconds, entry.predicted = float(times.group(1)), float(times.group(2))
        if drafts:
            entry.accepted, entry.generated = float(drafts.group(1)), float(drafts.group(2))
            entry.mean_length = float(drafts.group(3)) if drafts.group(3) else None
    return {key: task for key, task in tasks.items() if task.predicted}


def _task_sums(task: _Task, K: int | None) -> Sums:
    committed = task.predicted - 1
    if not task.generated:
        draft_rounds: float | None = 0
    elif task.mean_length is not None and task.mean_length > 1 and task.accepted:
        draft_rounds = round(task.accepted / (task.mean_length - 1))
    else:  # nothing accepted, or an old log without the mean: the number of drafts is not in the line
        draft_rounds = task.generated / K if K and task.generated % K == 0 else None
    rounds = committed if draft_rounds == 0 else None
    if draft_rounds:
        rounds = rounds_behind(task.accepted, draft_rounds, committed, K or task.generated)
    return Sums.of_request(
        rounds=rounds,
        committed=committed,
        draft_rounds=draft_rounds,
        drafted=task.generated,
        accepted=task.accepted,
        completion=task.predicted,
        seconds=task.milliseconds / 1000 or None,
    )


def _statistics(text: str) -> tuple[float, float, float] | None:
    """(drafts, draft tokens, accepted) since the start: the last line of each implementation, added up."""
    last: dict[str, tuple[float, float, float]] = {}
    for name, drafts, generated, accepted in STATISTICS.findall(text):
        last[name] = (float(drafts), float(generated), float(accepted))
    if not last:
        return None
    drafts, generated, accepted = (sum(column) for column in zip(*last.values(), strict=True))
    return drafts, generated, accepted


def _exact(
    pooled: Sums, statistics: tuple[float, float, float], requests: int, K: int | None
) -> tuple[Sums, str | None]:
    """Pooled counts with the number of drafts from the statistics line, where both speak of the same requests."""
    drafts, generated, accepted = statistics
    if not requests:
        return Sums(draft_rounds=drafts, drafted=generated, accepted=accepted), "no finished request in the log"
    if (pooled.drafted, pooled.accepted) != (generated, accepted):
        counted = (
            f"{pooled.accepted:.0f} of {pooled.drafted:.0f} drafts by task, {accepted:.0f} of {generated:.0f} in all"
        )
        return pooled, f"tasks and the statistics line differ ({counted}): the log begins or ends amid a request"
    rounds = None
    if pooled.committed is not None:
        rounds = rounds_behind(accepted, drafts, pooled.committed, requests * K if K else generated)
    return replace(pooled, draft_rounds=drafts, rounds=rounds, tau_sum=None, completion_length_sum=None), None


def _only(found: list[str]) -> str | None:
    """The one value that all lines agree upon."""
    return found[0] if len(set(found)) == 1 else None
