"""`specdoctor data`: training data by the target itself, and the cache of its states."""

from pathlib import Path

import typer

ABOUT = "Training data: answers by the target, and a cache of its hidden states. Each command has --json PATH."
app = typer.Typer(no_args_is_help=True, help=ABOUT)

TARGET = "Target: folder, Hugging Face id, or a known name (smollm2-135m)."
JSON = typer.Option("", "--json", metavar="PATH", help="Write the result as JSON; - for stdout.")
HOW, WHERE = "How to answer", "Who answers"


@app.command()
def regenerate(
    prompts: Path = typer.Argument(..., help="JSONL: prompt, messages, turns or prompt_ids a line."),
    target: str = typer.Option(..., help=TARGET),
    out: Path = typer.Option(..., help="Data folder; grows by what is missing."),
    samples: int = typer.Option(1, min=1, help="Answers of each prompt, when sampling."),
    max_prompts: int | None = typer.Option(None, min=1, help="Use the first N prompts of the file."),
    template: str = typer.Option("auto", help="auto (the target's chat template), none, or bytes."),
    max_new_tokens: int = typer.Option(512, min=1, help="Longest answer.", rich_help_panel=HOW),
    temperature: float = typer.Option(0.0, help="0 is greedy.", rich_help_panel=HOW),
    top_k: int = typer.Option(0, help="0 is off.", rich_help_panel=HOW),
    top_p: float = typer.Option(1.0, help="1 is off.", rich_help_panel=HOW),
    seed: int = typer.Option(0, help="Each answer has its own, made from this.", rich_help_panel=HOW),
    batch: int = typer.Option(32, min=1, help="Requests decoded together by our engine.", rich_help_panel=WHERE),
    device: str = typer.Option("auto", help="auto, cpu, cuda, cuda:N, mps.", rich_help_panel=WHERE),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16, float16.", rich_help_panel=WHERE),
    server: str = typer.Option(
        "",
        help="An OpenAI-compatible server that runs the target: http://localhost:8000/v1. Its key: $OPENAI_API_KEY.",
        rich_help_panel=WHERE,
    ),
    server_model: str = typer.Option("", help="Model name at the server (default: its first).", rich_help_panel=WHERE),
    server_api: str = typer.Option(
        "completions", help="completions (our template, token ids) or chat (the server's own).", rich_help_panel=WHERE
    ),
    concurrency: int = typer.Option(16, min=1, help="Requests in flight at the server.", rich_help_panel=WHERE),
    worker: int = typer.Option(0, min=0, help="This process's number, from 0.", rich_help_panel=WHERE),
    workers: int = typer.Option(1, min=1, help="Processes that share the prompts.", rich_help_panel=WHERE),
    json_path: str = JSON,
) -> None:
    """Have the target answer prompts: training data in its own words. Goes on where an earlier run ended."""
    from specdoctor.reports.data_console import data_progress, print_regenerated
    from specdoctor.reports.output import refuse_unwritable, stderr_console, stdout_console, write_json
    from specdoctor.training.answers import AnswerSettings
    from specdoctor.training.regenerate import RegenerateRequest, regenerate

    refuse_unwritable(json_path)
    request = RegenerateRequest(
        prompts,
        target,
        out,
        AnswerSettings(max_new_tokens, temperature, top_k, top_p, seed),
        samples=samples,
        max_prompts=max_prompts,
        template=template,
        batch=batch,
        device=device,
        dtype=dtype,
        server=server,
        server_model=server_model,
        server_api=server_api,
        concurrency=concurrency,
        worker=worker,
        workers=workers,
    )
    with data_progress("answers") as hear:
        result = regenerate(request, hear, lambda text: stderr_console().print(f"note: {text}"))
    if json_path:
        write_json(result, json_path)
    if json_path != "-":
        print_regenerated(result, stdout_console(), stderr_console())


@app.command()
def vocabulary(
    data: Path = typer.Argument(..., help="Data folder of `data regenerate`, or a JSONL file of samples."),
    size: int = typer.Option(8192, min=1, help="How many ids."),
    out: Path = typer.Option(..., metavar="FILE.json", help="JSON list of the ids."),
    json_path: str = JSON,
) -> None:
    """Ids that the answers have most, for --draft-vocabulary and for `draft.vocabulary` of an EAGLE-3 recipe."""
    from specdoctor.reports.data_console import print_vocabulary
    from specdoctor.reports.output import refuse_unwritable, stderr_console, stdout_console, write_json
    from specdoctor.training.count_vocabulary import count_vocabulary

    refuse_unwritable(json_path, out)
    ids, facts = count_vocabulary(data, size)
    write_json(ids, str(out))
    result = {"file": str(out)} | facts
    if json_path:
        write_json(result, json_path)
    if json_path != "-":
        print_vocabulary(result, size, stdout_console(), stderr_console())


@app.command()
def estimate(
    target: str = typer.Option("", help=TARGET + " Only its config.json is read."),
    hidden_size: int | None = typer.Option(None, min=1, help="Instead of --target."),
    taps: str = typer.Option("", help="Hidden states that the drafter reads: 1,9,17."),
    tap_count: int | None = typer.Option(None, min=1, help="Instead of --taps: only how many."),
    draft: Path | None = typer.Option(None, help="Instead of --taps: a drafter whose taps to take."),
    data: Path | None = typer.Option(None, help="Data folder to count."),
    samples: int | None = typer.Option(None, min=1, help="Number of samples (default: those of --data)."),
    tokens_per_sample: float | None = typer.Option(
        None, min=1, help="Prompt and answer together (default: as in --data, else 950)."
    ),
    max_length: int | None = typer.Option(None, min=2, help="Longest sequence, of --data."),
    dtype: str = typer.Option("auto", help="auto (the target's), float32, bfloat16, float16."),
    shard_mb: int = typer.Option(1024, min=1, help="Size of a shard in MiB."),
    out: Path | None = typer.Option(None, help="Where the cache would be: is there room?"),
    json_path: str = JSON,
) -> None:
    """Size of a target cache before anything is written. Exit code 4 when the disk of --out is too small."""
    from specdoctor.reports.data_console import print_estimate
    from specdoctor.reports.output import refuse_unwritable, stdout_console, write_json
    from specdoctor.training.estimate_command import EstimateRequest, run_estimate
    from specdoctor.training.tap_choice import chosen_taps

    refuse_unwritable(json_path)
    request = EstimateRequest(
        target,
        hidden_size,
        chosen_taps(taps, draft, None),
        tap_count,
        data,
        samples,
        tokens_per_sample,
        max_length,
        dtype,
        shard_mb << 20,
        out,
    )
    result = run_estimate(request)
    if json_path:
        write_json(result, json_path)
    if json_path != "-":
        print_estimate(result, stdout_console())
    raise typer.Exit(result["exit_code"])


@app.command()
def cache(
    data: Path | None = typer.Argument(None, help="Data folder of `data regenerate`, or a JSONL file of samples."),
    target: str = typer.Option("", help=TARGET),
    out: Path = typer.Option(..., help="Cache folder; grows by what is missing."),
    taps: str = typer.Option("", help="Hidden states to keep: 1,9,17 (0: embeddings, i + 1: output of layer i)."),
    draft: Path | None = typer.Option(None, help="Instead of --taps: a drafter whose taps to take."),
    max_length: int | None = typer.Option(None, min=2, help="Cut sequences here."),
    shard_mb: int = typer.Option(1024, min=1, help="Size of a shard in MiB; it is made in memory."),
    device: str = typer.Option("auto", help="auto, cpu, cuda, cuda:N, mps."),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16, float16: of the target and of what is kept."),
    attention: str = typer.Option("auto", help="auto, matmul, sdpa (see `specdoctor env`)."),
    worker: int = typer.Option(0, min=0, help="This process's number, from 0."),
    workers: int = typer.Option(1, min=1, help="Processes that share the shards."),
    verify: bool = typer.Option(False, "--verify", help="Write nothing; compare the checksums of a complete cache."),
    json_path: str = JSON,
) -> None:
    """Keep taps and last hidden state of every token. Goes on where an earlier run ended.

    Exit codes: 0 written or whole, 1 --verify found a broken shard, 2 usage, 4 no room on the disk, 130 interrupted.
    """
    from specdoctor.errors import SpecdoctorError
    from specdoctor.formats.sources import resolve_model
    from specdoctor.reports.data_console import data_progress, print_cache, print_cache_check
    from specdoctor.reports.output import refuse_unwritable, stderr_console, stdout_console, write_json
    from specdoctor.training.cache import CacheRequest, verify_cache, write_cache
    from specdoctor.training.tap_choice import chosen_taps
    from specdoctor.training.target_config import TargetConfig

    refuse_unwritable(json_path)
    if verify:
        result = verify_cache(out)
    else:
        if data is None or not target:
            raise SpecdoctorError("data cache: DATA and --target are needed (only --verify works without)")
        layers = TargetConfig.read(resolve_model(target)).num_layers
        chosen = chosen_taps(taps, draft, layers)
        if not chosen:
            raise SpecdoctorError("data cache: no taps; give --taps 1,9,17 (-1: the last state) or --draft DRAFTER")
        request = CacheRequest(
            data, target, out, chosen, max_length, shard_mb << 20, device, dtype, attention, worker, workers
        )
        with data_progress("tokens") as hear:
            result = write_cache(request, hear)
    if json_path:
        write_json(result, json_path)
    if json_path != "-":
        show = print_cache_check if verify else print_cache
        show(result, stdout_console(), stderr_console())
    raise typer.Exit(result.get("exit_code", 0))
