"""`specdoctor data regenerate`: from a prompt file to a data folder that the target wrote.

Contract: what is there by its key is not asked for again, so a run goes on where an earlier one ended, with more
prompts or more samples of each in the same folder; prompts of equal ids are answered once. See `answer_file` for what
lies in the folder.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specdoctor.engine.target import Target
from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.formats.sources import resolve_model
from specdoctor.measure.prompt_file import RawPrompt
from specdoctor.measure.prompts import Prompt, check_ids, load_jsonl, load_tokenizer, render, template_record
from specdoctor.servers.openai_client import OpenAIClient
from specdoctor.training.answer_file import AnswerFile
from specdoctor.training.answers import BATCH, Answer, AnswerSettings, Job, ServerAnswers, engine_answers
from specdoctor.training.checkpoint_hash import checkpoint_hash
from specdoctor.training.target_config import TargetConfig


@dataclass(slots=True)
class RegenerateRequest:
    """The options of the command."""

    prompts: Path
    target: str
    out: Path
    settings: AnswerSettings = field(default_factory=AnswerSettings)
    samples: int = 1
    max_prompts: int | None = None
    template: str = "auto"
    batch: int = BATCH
    device: str = "auto"
    dtype: str = "auto"
    server: str = ""
    server_model: str = ""
    server_api: str = "completions"
    concurrency: int = 16
    worker: int = 0
    workers: int = 1


@dataclass(slots=True)
class RegenerateProgress:
    done: int
    total: int
    tokens: int  # decoded by this run so far


Notes = Callable[[str], None]


def regenerate(
    request: RegenerateRequest,
    on_progress: Callable[[RegenerateProgress], None] | None = None,
    on_note: Notes | None = None,
) -> dict[str, Any]:
    """Write the answers that are missing; what was found and done, as plain values.

    Raises `SpecdoctorError` for bad input before anything is decoded; `EnvironmentMissingError` when a server fails.
    """
    _check(request)
    raw = load_jsonl(request.prompts)[: request.max_prompts]
    folder = resolve_model(request.target)
    config = TargetConfig.read(folder)
    tokenizer = load_tokenizer(folder)
    prompts = render(raw, tokenizer, request.template)
    check_ids(prompts, config.vocab_size)
    wanted, too_long = _fitting(raw, prompts, config.max_positions)
    writer = _writer(request, folder, config, tokenizer, on_note)
    facts = {
        "target": folder.resolve().name,
        "target_hash": checkpoint_hash(folder),
        "template": asdict(template_record(tokenizer, request.template)),
        "stop_ids": sorted(config.stop_ids),
        **request.settings.facts,
        **writer.facts,
    }
    with AnswerFile(request.out, facts, request.worker, request.workers) as file:
        jobs, equal = _jobs(wanted, request, file)
        mine = [job for job in jobs if int(job.key, 16) % request.workers == request.worker]
        missing = [job for job in mine if job.key not in file.keys]
        progress = RegenerateProgress(len(mine) - len(missing), len(mine), 0)

        def on_tokens(count: int) -> None:
            progress.tokens += count
            if on_progress:
                on_progress(progress)

        for job, answer in writer.answers(missing, on_tokens):
            file.append(answer.line(job))
            progress.done += 1
    return {
        "schema_version": 1,
        "kind": "regenerate",
        "folder": str(request.out),
        "file": file.path.name,
        "facts": facts,
        "prompts": len(wanted),
        "equal_prompts": equal,
        "too_long": [prompt.id for prompt in too_long],
        "wanted": len(mine),
        "written": len(missing),
        "tokens": progress.tokens,
    }


@dataclass(slots=True)
class _Writer:
    """Who answers, and the facts about it that belong into the manifest."""

    facts: dict[str, Any]
    answers: Callable[[Sequence[Job], Callable[[int], None]], Iterator[tuple[Job, Answer]]]


def _writer(
    request: RegenerateRequest, folder: Path, config: TargetConfig, tokenizer: Any, on_note: Notes | None
) -> _Writer:
    if not request.server:
        # Fused attention: at the widths of a batch four times as fast as matmul on a CPU, and plans last many steps.
        target = Target.load(folder, request.device, request.dtype, "sdpa")
        facts = {"writer": "engine", "dtype": str(target.dtype).removeprefix("torch.")}
        return _Writer(facts, lambda jobs, hear: engine_answers(target, jobs, request.settings, request.batch, hear))
    if tokenizer is None and request.template != "bytes":
        raise SpecdoctorError(f"{folder}: no tokenizer files, which the texts of --server need; add the tokenizer")
    client = OpenAIClient(request.server, request.server_model, on_note=on_note)
    server = ServerAnswers(
        client,
        encode=_encoder(tokenizer),
        stop_ids=config.stop_ids,
        end_id=_end_of_answer(tokenizer, config.stop_ids),
        max_positions=config.max_positions,
        chat=request.server_api == "chat",
        concurrency=request.concurrency,
    )
    facts = {"writer": f"server/{request.server_api}", "server": client.base, "server_model": client.model}
    return _Writer(facts, lambda jobs, hear: server.answers(jobs, request.settings, hear))


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    if tokenizer is None:
        return lambda text: list(text.encode())
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def _end_of_answer(tokenizer: Any, stop_ids: frozenset[int]) -> int | None:
    """The stop token that an answer ends with: the tokenizer's own end token if the target stops at it."""
    own = getattr(tokenizer, "eos_token_id", None)
    return own if own in stop_ids else min(stop_ids, default=None)


def _jobs(
    wanted: Sequence[tuple[RawPrompt, Prompt]], request: RegenerateRequest, file: AnswerFile
) -> tuple[list[Job], int]:
    """The answers wanted, first samples first, and how many prompts were equal to an earlier one."""
    jobs: dict[str, Job] = {}
    for sample in range(request.samples):
        for raw, prompt in wanted:
            key = file.key(prompt.ids, sample)
            jobs.setdefault(key, Job(prompt, raw.messages, sample, key))
    return list(jobs.values()), len(wanted) - len(jobs) // request.samples


def _fitting(
    raw: Sequence[RawPrompt], prompts: Sequence[Prompt], positions: int
) -> tuple[list[tuple[RawPrompt, Prompt]], list[Prompt]]:
    """Prompts that leave the target a position to answer at, and those that do not."""
    pairs = list(zip(raw, prompts, strict=True))
    fitting = [pair for pair in pairs if len(pair[1].ids) < positions]
    too_long = [prompt for _, prompt in pairs if len(prompt.ids) >= positions]
    if not fitting:
        raise SpecdoctorError(
            f"{too_long[0].source}: {len(too_long[0].ids)} tokens, but the target has {positions} positions; no prompt "
            "fits, shorten them",
            ExitCode.NOTHING,
        )
    return fitting, too_long


def _check(request: RegenerateRequest) -> None:
    request.settings.sampling((), 0)  # refuses a bad temperature, top-k or top-p
    if request.samples > 1 and request.settings.temperature == 0:
        raise SpecdoctorError(
            f"--samples {request.samples}: greedy answers are all the same; give --temperature above 0, or 1 sample"
        )
    if request.server_api not in ("completions", "chat"):
        raise SpecdoctorError(f"--server-api {request.server_api}: expected completions or chat")
    check_worker(request.worker, request.workers)


def check_worker(worker: int, workers: int) -> None:
    """Raise unless `worker` is one of 0 .. `workers` - 1."""
    if not 0 <= worker < workers:
        raise SpecdoctorError(f"--worker {worker}: expected 0 to {workers - 1}, as there are --workers {workers}")
