"""`specdoctor calibrate`: make a drafter's confidence mean what it says."""

from pathlib import Path

import typer

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
    template: str = typer.Option(
        "auto", help="auto (the target's chat template), none, or bytes.", rich_help_panel=DATA
    ),
    corpus: Path | None = typer.Option(
        None,
        help="Folder of the target's texts; grows by what is missing (default: in the cache).",
        rich_help_panel=DATA,
    ),
    repeats: int = typer.Option(1, min=1, help="Texts of a prompt, when sampling.", rich_help_panel=DATA),
    held_out: float = typer.Option(0.5, help="Share of the prompts to judge by, not to fit on.", rich_help_panel=DATA),
    budget: float | None = typer.Option(None, help="Stop after so many seconds of texts.", rich_help_panel=DATA),
    max_new_tokens: int | None = typer.Option(
        None, min=1, help="Longest answer (default: 128).", rich_help_panel=DECODE
    ),
    temperature: float | None = typer.Option(
        None, help="0 is greedy; calibrate for what will be decoded (default: 0).", rich_help_panel=DECODE
    ),
    top_k: int = typer.Option(0, help="0 is off.", rich_help_panel=DECODE),
    top_p: float = typer.Option(1.0, help="1 is off.", rich_help_panel=DECODE),
    draft_temperature: str | None = typer.Option(
        None, help="0.5, or a factor of the target's: 0.7x (default: 1x).", rich_help_panel=DECODE
    ),
    ignore_stop: bool = typer.Option(
        False, "--ignore-stop", help="Do not end at the target's stop tokens.", rich_help_panel=DECODE
    ),
    seed: int = typer.Option(0, help="Seed of the texts, the replays and the split.", rich_help_panel=DECODE),
    device: str = typer.Option("auto", help="auto, cpu, cuda, cuda:N, mps.", rich_help_panel=DECODE),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16, float16.", rich_help_panel=DECODE),
    draft_device: str = typer.Option("same", help="Device of the drafter.", rich_help_panel=DECODE),
    draft_dtype: str = typer.Option("same", help="Dtype of the drafter.", rich_help_panel=DECODE),
    attention: str = typer.Option("auto", help="auto, matmul, sdpa (see `specdoctor env`).", rich_help_panel=DECODE),
    output: Path | None = typer.Option(
        None, help="File to write (default: calibration.json beside the weights).", rich_help_panel=OUTPUT
    ),
    json_path: str = typer.Option(
        "", "--json", metavar="PATH", help="Write the result as JSON; - for stdout.", rich_help_panel=OUTPUT
    ),
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
