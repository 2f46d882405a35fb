"""`specdoctor profile`: where the time of a pair goes."""

import sys
from pathlib import Path

import typer

from specdoctor.cli import options

app = typer.Typer()


@app.command()
def profile(
    target: str = typer.Option(..., help="Target: folder, Hugging Face id, or a known name (smollm2-135m)."),
    draft: str = typer.Option(..., help="Drafter folder, or ngram[:N] for prompt lookup; NAME=FOLDER names it."),
    prompts: Path | None = typer.Option(None, help="JSONL: prompt, messages, turns or prompt_ids a line."),
    categories: str = typer.Option("", help="Bundled prompts: code,chat,math,summarize."),
    max_prompts: int = typer.Option(6, min=1, help="Use the first N prompts, categories in turn."),
    max_new_tokens: int = typer.Option(64, min=2, help="Longest answer."),
    temperature: float = typer.Option(0.0, help="0 is greedy."),
    draft_tokens: int | None = typer.Option(None, "-K", "--draft-tokens", min=1, help="Tokens drafted a round."),
    draft_vocabulary: str | None = options.draft_vocabulary(),
    template: str = typer.Option("auto", help="auto (the target's chat template), none, or bytes."),
    device: str = typer.Option("auto", help="auto, cpu, cuda, cuda:N, mps."),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16, float16."),
    attention: str = typer.Option("auto", help="auto, matmul, sdpa (see `specdoctor env`)."),
    seed: int = typer.Option(0, help="Seed of the first prompt; the next ones count up."),
    trace: Path | None = typer.Option(
        None, metavar="DIR", help="Write a torch.profiler trace for TensorBoard and Perfetto."
    ),
    costs: Path | None = typer.Option(None, help="Write the cost table, to use with `specdoctor bench --costs`."),
    report: Path | None = typer.Option(None, metavar="FILE.html", help="Write the result as one HTML page."),
    json_path: str = typer.Option("", "--json", metavar="PATH", help="Write the result as JSON; - for stdout."),
) -> None:
    """Phases of a round, cost of a forward by rows, roofline, batch crossover, and what would help most.

    Exit codes: 0 measured, 2 usage, 4 environment, 5 no prompts, 130 interrupted.
    """
    from specdoctor.measure.profile import run_profile
    from specdoctor.measure.workload import BenchRequest
    from specdoctor.reports.html import write_report
    from specdoctor.reports.output import refuse_unwritable, stderr_console, stdout_console, write_json
    from specdoctor.reports.profile_console import print_profile

    refuse_unwritable(json_path, report, costs)
    request = BenchRequest(
        target=target,
        drafts=[draft],
        prompts=prompts,
        categories=[name.strip() for name in categories.split(",") if name.strip()],
        max_prompts=max_prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        draft_tokens=draft_tokens,
        draft_vocabulary=draft_vocabulary,
        template=template,
        device=device,
        dtype=dtype,
        attention=attention,
        seed=seed,
    )
    with stderr_console().status("loading") as status:
        result = run_profile(request, trace, status.update)
    if costs is not None:
        write_json(result["cost_table"], str(costs))
    if json_path:
        write_json(result, json_path)
    if report is not None:
        write_report(report, [result], sys.argv, [report.stem])
    if json_path != "-":
        print_profile(result, stdout_console())
