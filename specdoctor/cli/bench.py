"""`specdoctor bench`: run drafters against plain decoding of the same target."""

import sys
from pathlib import Path

import typer

from specdoctor.cli import options

app = typer.Typer()

SETUP, DECODE, OUTPUT = "What to run", "How to decode", "Output"


@app.command()
def bench(
    target: str = typer.Option(..., help="Target: folder, Hugging Face id, or a known name (smollm2-135m)."),
    draft: list[str] = typer.Option(
        [],
        help="Drafter folder, or ngram[:N] for prompt lookup; NAME=FOLDER names the arm. Repeatable.",
        rich_help_panel=SETUP,
    ),
    arms: str = typer.Option("", help="Run only these arms, comma-separated (ar always runs).", rich_help_panel=SETUP),
    hf_baseline: bool = typer.Option(
        False, "--hf-baseline", help="Add transformers' generate as an arm.", rich_help_panel=SETUP
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
    draft_tokens: int | None = typer.Option(
        None,
        "-K",
        "--draft-tokens",
        min=1,
        help="Tokens drafted a round, the most where it varies (default: the drafter's own).",
        rich_help_panel=DECODE,
    ),
    tree: list[str] = typer.Option(
        [],
        metavar="SHAPE",
        help="Also draft trees: 2,2,1 children a level; [-1,-1,0] parents; nodes=16,depth=5,top_k=4. Repeatable.",
        rich_help_panel=DECODE,
    ),
    siblings: str = typer.Option(
        "sampled", help="Of a tree of fixed shape: sampled (without replacement) or likeliest.", rich_help_panel=DECODE
    ),
    max_new_tokens: int | None = options.max_new_tokens(DECODE),
    temperature: float | None = typer.Option(None, help="0 is greedy (default: 0).", rich_help_panel=DECODE),
    top_k: int = options.top_k(DECODE),
    top_p: float = options.top_p(DECODE),
    draft_temperature: str | None = options.draft_temperature(DECODE),
    dynamic_k: str = typer.Option(
        "constant", help="constant, threshold (of the confidence), or adaptive.", rich_help_panel=DECODE
    ),
    confidence_threshold: float | None = typer.Option(
        None, help="End a draft before the first confidence below this.", rich_help_panel=DECODE
    ),
    vocabulary: str = typer.Option(
        "auto",
        help="Of a causal LM drafter with another tokenizer: auto, intersection, retokenize.",
        rich_help_panel=DECODE,
    ),
    draft_quantize: str | None = typer.Option(
        None, help="Weights of a causal LM drafter: int8 (needs torchao).", rich_help_panel=DECODE
    ),
    draft_vocabulary: str | None = options.draft_vocabulary(DECODE),
    lossy_typical_acceptance: bool = typer.Option(
        False,
        "--lossy-typical-acceptance",
        help="LOSSY: accept sampled drafts by Medusa's rule; the text is no longer the target's.",
        rich_help_panel=DECODE,
    ),
    ignore_stop: bool = options.ignore_stop(DECODE),
    seed: int = typer.Option(0, help="Seed of the first prompt; the next ones count up.", rich_help_panel=DECODE),
    device: str = options.device(DECODE),
    dtype: str = options.dtype(DECODE),
    draft_device: str = typer.Option("same", help="Device of the drafters.", rich_help_panel=DECODE),
    draft_dtype: str = typer.Option("same", help="Dtype of the drafters.", rich_help_panel=DECODE),
    attention: str = options.attention(DECODE),
    costs: Path | None = typer.Option(
        None, help="Cost table of `specdoctor profile`, for the expected speed-up.", rich_help_panel=OUTPUT
    ),
    report: Path | None = typer.Option(
        None, metavar="FILE.html", help="Write the result as one HTML page.", rich_help_panel=OUTPUT
    ),
    json_path: str = options.json_path(OUTPUT),
    records: Path | None = typer.Option(None, help="Write one JSON line a round.", rich_help_panel=OUTPUT),
) -> None:
    """Measure drafters against plain decoding: tau, acceptance by position, speed-up, and what limits it.

    Exit codes: 0 measured, 1 greedy text differs beyond near ties, 2 usage, 4 environment, 5 no prompts,
    130 interrupted.
    """
    from specdoctor.measure.bench_command import BenchRequest, run_bench_request
    from specdoctor.reports.bench_console import print_bench
    from specdoctor.reports.html import write_report
    from specdoctor.reports.output import refuse_unwritable, stderr_console, stdout_console, write_json
    from specdoctor.reports.progress import bench_progress

    refuse_unwritable(json_path, report, records)
    request = BenchRequest(
        target=target,
        drafts=draft,
        arms=[name.strip() for name in arms.split(",") if name.strip()],
        hf_baseline=hf_baseline,
        prompts=prompts,
        categories=[name.strip() for name in categories.split(",") if name.strip()],
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
        dynamic_k=dynamic_k,
        trees=tree,
        siblings=siblings,
        vocabulary=vocabulary,
        draft_quantize=draft_quantize,
        draft_vocabulary=draft_vocabulary,
        lossy_typical_acceptance=lossy_typical_acceptance,
        ignore_stop=ignore_stop,
        seed=seed,
        device=device,
        dtype=dtype,
        draft_device=draft_device,
        draft_dtype=draft_dtype,
        attention=attention,
        records=records,
    )
    with bench_progress() as on_progress:
        result = run_bench_request(request, on_progress, costs)
    for arm in result["arms"]:
        how = (arm.get("draft") or {}).get("vocabulary")
        if how and how["note"]:
            stderr_console().print(f"note: {arm['name']}: {how['note']}")
    if json_path:
        write_json(result, json_path)
    if report is not None:
        write_report(report, [result], sys.argv, [report.stem])
    if json_path != "-":
        print_bench(result, stdout_console())
    raise typer.Exit(result["exit_code"])
