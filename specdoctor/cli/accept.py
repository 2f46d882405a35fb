"""`specdoctor accept`: exact acceptance from texts of the target, without decoding with the drafter."""

import sys
from pathlib import Path

import typer

from specdoctor.cli import options

app = typer.Typer()

SETUP, DECODE, EFFORT, OUTPUT = "What to look at", "How to decode", "How much", "Output"


@app.command()
def accept(
    target: str = typer.Option(..., help="Target: folder, Hugging Face id, or a known name (smollm2-135m)."),
    draft: list[str] = typer.Option(
        [], help="Drafter folder; NAME=FOLDER names it. Repeatable.", rich_help_panel=SETUP
    ),
    prompts: Path | None = typer.Option(
        None, help="JSONL: prompt, messages, turns or prompt_ids a line.", rich_help_panel=SETUP
    ),
    categories: str = typer.Option("", help="Bundled prompts: code,chat,math,summarize.", rich_help_panel=SETUP),
    max_prompts: int | None = typer.Option(
        None, min=1, help="Use the first N prompts, categories in turn.", rich_help_panel=SETUP
    ),
    scenario: str = typer.Option("", help="Preset code, chat, summarize, or a YAML file.", rich_help_panel=SETUP),
    template: str = options.template(SETUP),
    corpus: Path | None = options.corpus(SETUP),
    draft_tokens: int | None = typer.Option(
        None, "-K", "--draft-tokens", min=1, help="Tokens drafted a round (default: the most).", rich_help_panel=DECODE
    ),
    max_new_tokens: int | None = options.max_new_tokens(DECODE),
    temperature: float | None = typer.Option(None, help="0 is greedy (default: 0).", rich_help_panel=DECODE),
    top_k: int = options.top_k(DECODE),
    top_p: float = options.top_p(DECODE),
    draft_temperature: str | None = options.draft_temperature(DECODE),
    confidence_threshold: float | None = typer.Option(
        None, help="Cut a draft before the first confidence below this.", rich_help_panel=DECODE
    ),
    ignore_stop: bool = options.ignore_stop(DECODE),
    seed: int = typer.Option(0, help="Seed of the texts and of the replays.", rich_help_panel=DECODE),
    device: str = options.device(DECODE),
    dtype: str = options.dtype(DECODE),
    draft_device: str = typer.Option("same", help="Device of the drafters.", rich_help_panel=DECODE),
    draft_dtype: str = typer.Option("same", help="Dtype of the drafters.", rich_help_panel=DECODE),
    attention: str = options.attention(DECODE),
    precision: float | None = typer.Option(
        None, help="Stop when the interval of tau_step is within this share of it: 0.05.", rich_help_panel=EFFORT
    ),
    budget: float | None = typer.Option(None, help="Stop after so many seconds.", rich_help_panel=EFFORT),
    repeats: int = typer.Option(1, min=1, help="Texts of a prompt, when sampling.", rich_help_panel=EFFORT),
    anchors: int | None = typer.Option(
        None, min=1, help="Only so many positions of a text, stratified (no tau_step then).", rich_help_panel=EFFORT
    ),
    what_if: bool = typer.Option(
        True, help="Curves over K, thresholds, temperatures, rules, trees, vocabularies.", rich_help_panel=EFFORT
    ),
    confidence: bool = typer.Option(
        True, help="Follow rejected drafts to judge the confidence head.", rich_help_panel=EFFORT
    ),
    draft_temperatures: str = typer.Option(
        "", help="Draft temperatures to try: 0,0.5x,0.7x,1x.", rich_help_panel=EFFORT
    ),
    costs: Path | None = typer.Option(
        None,
        help="Cost table of `specdoctor profile`, or JSON with rows, seconds, draft_seconds: predicts tokens/s.",
        rich_help_panel=OUTPUT,
    ),
    calibration: Path | None = typer.Option(
        None,
        help="JSON with `temperatures` of the confidence (default: calibration.json of the drafter).",
        rich_help_panel=OUTPUT,
    ),
    report: Path | None = typer.Option(
        None, metavar="FILE.html", help="Write the result as one HTML page.", rich_help_panel=OUTPUT
    ),
    json_path: str = options.json_path(OUTPUT),
) -> None:
    """Measure acceptance exactly, from texts that the target wrote: no decoding with the drafter, no sampling noise.

    Exit codes: 0 measured, 2 usage, 4 environment, 5 no prompts, 6 --precision not reached, 130 interrupted.
    """
    from specdoctor.measure.accept_command import AcceptRequest, run_accept_request
    from specdoctor.measure.workload import BenchRequest
    from specdoctor.reports.accept_console import print_accept
    from specdoctor.reports.html import write_report
    from specdoctor.reports.output import refuse_unwritable, stdout_console, write_json
    from specdoctor.reports.progress import bench_progress

    refuse_unwritable(json_path, report)
    workload = BenchRequest(
        target=target,
        drafts=draft,
        prompts=prompts,
        categories=_words(categories),
        max_prompts=max_prompts,
        scenario=scenario,
        template=template,
        draft_tokens=draft_tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        draft_temperature=draft_temperature,
        confidence_threshold=confidence_threshold,
        ignore_stop=ignore_stop,
        seed=seed,
        device=device,
        dtype=dtype,
        draft_device=draft_device,
        draft_dtype=draft_dtype,
        attention=attention,
    )
    request = AcceptRequest(
        workload=workload,
        corpus=corpus,
        precision=precision,
        budget=budget,
        what_if=what_if,
        confidence=confidence,
        draft_temperatures=tuple(_words(draft_temperatures)) or None,
        anchors=anchors,
        repeats=repeats,
        costs=costs,
        calibration=calibration,
    )
    with bench_progress() as on_progress:
        result = run_accept_request(request, on_progress)
    if json_path:
        write_json(result, json_path)
    if report is not None:
        write_report(report, [result], sys.argv, [report.stem])
    if json_path != "-":
        print_accept(result, stdout_console())
    raise typer.Exit(result["exit_code"])


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
