"""`specdoctor calibrate`: make a drafter's confidence mean what it says."""

from pathlib import Path

import typer

from specdoctor.cli import options

app = typer.Typer()

DATA, DECODE, OUTPUT = "What to fit on", "How the texts are decoded", "Output"


@app.command()
def calibrate(
    draft: str = typer.Argument(..., help="Drafter with a confidence head: a folder or a GGUF file."),
    target: str = typer.Option(..., help="Target: folder, Hugging Face id, or a known name (smollm2-135m)."),
    prompts: Path | None = typer.Option(
        None, help="JSONL: prompt, messages, turns or prompt_ids a line.", rich_help_panel=DATA
    ),
    categories: str = typer.Option("", help="Bundled prompts: code,chat,math,summarize.", rich_help_panel=DATA),
    max_prompts: int | None = typer.Option(
        None, min=1, help="Use the first N prompts, categories in turn.", rich_help_panel=DATA
    ),
    template: str = options.template(DATA),
    corpus: Path | None = options.corpus(DATA),
    repeats: int = typer.Option(1, min=1, help="Texts of a prompt, when sampling.", rich_help_panel=DATA),
    held_out: float = typer.Option(0.5, help="Share of the prompts to judge by, not to fit on.", rich_help_panel=DATA),
    budget: float | None = typer.Option(None, help="Stop after so many seconds of texts.", rich_help_panel=DATA),
    max_new_tokens: int | None = options.max_new_tokens(DECODE),
    temperature: float | None = typer.Option(
        None, help="0 is greedy; calibrate for what will be decoded (default: 0).", rich_help_panel=DECODE
    ),
    top_k: int = options.top_k(DECODE),
    top_p: float = options.top_p(DECODE),
    draft_temperature: str | None = options.draft_temperature(DECODE),
    ignore_stop: bool = options.ignore_stop(DECODE),
    seed: int = typer.Option(0, help="Seed of the texts, the replays and the split.", rich_help_panel=DECODE),
    device: str = options.device(DECODE),
    dtype: str = options.dtype(DECODE),
    draft_device: str = typer.Option("same", help="Device of the drafter.", rich_help_panel=DECODE),
    draft_dtype: str = typer.Option("same", help="Dtype of the drafter.", rich_help_panel=DECODE),
    attention: str = options.attention(DECODE),
    output: Path | None = typer.Option(
        None, help="File to write (default: calibration.json beside the weights).", rich_help_panel=OUTPUT
    ),
    json_path: str = options.json_path(OUTPUT),
) -> None:
    """Fit one temperature a draft position, so that the product of confidences is the chance to get so far.

    Sequential temperature scaling on texts of the target, judged on prompts that were not fitted on. No token choice
    depends on it, only how much of a draft is verified. Exit codes: 0 written, 2 usage, 4 environment, 5 too few
    prompts, 6 not written because held-out prompts got no better, 130 interrupted.
    """
    from specdoctor.measure.workload import BenchRequest
    from specdoctor.reports.calibrate_console import print_calibration
    from specdoctor.reports.output import refuse_unwritable, stdout_console, write_json
    from specdoctor.reports.progress import bench_progress
    from specdoctor.training.calibrate import CalibrateRequest, run_calibrate_request

    refuse_unwritable(json_path, output)
    workload = BenchRequest(
        target=target,
        drafts=[draft],
        drafts_option="",
        prompts=prompts,
        categories=[word.strip() for word in categories.split(",") if word.strip()],
        max_prompts=max_prompts,
        template=template,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        draft_temperature=draft_temperature,
        ignore_stop=ignore_stop,
        seed=seed,
        device=device,
        dtype=dtype,
        draft_device=draft_device,
        draft_dtype=draft_dtype,
        attention=attention,
    )
    request = CalibrateRequest(workload, corpus, repeats, budget, held_out, output)
    with bench_progress() as on_progress:
        result = run_calibrate_request(request, on_progress)
    if json_path:
        write_json(result, json_path)
    if json_path != "-":
        print_calibration(result, stdout_console())
    raise typer.Exit(result["exit_code"])
