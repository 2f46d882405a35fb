"""`specdoctor eval`: drafters side by side, by data set and domain."""

from pathlib import Path

import typer

from specdoctor.cli import options
from specdoctor.errors import SpecdoctorError

app = typer.Typer()

DATA, DECODE, EFFORT, OUTPUT = "What to evaluate on", "How to decode", "How much", "Output"


@app.command("eval")
def evaluate(
    drafts: list[str] = typer.Argument(..., metavar="DRAFT...", help="Drafters; NAME=FOLDER names one."),
    target: str = typer.Option(..., help="Target: folder, Hugging Face id, or a known name (smollm2-135m)."),
    prompts: list[Path] = typer.Option(
        [], help="JSONL: a data set a file, or keys dataset (or source) and category. Repeatable.", rich_help_panel=DATA
    ),
    categories: str = typer.Option("", help="Bundled prompts: code,chat,math,summarize.", rich_help_panel=DATA),
    max_prompts: int | None = typer.Option(None, min=1, help="Use N prompts of each data set.", rich_help_panel=DATA),
    template: str = options.template(DATA),
    corpus: Path | None = options.corpus(DATA),
    draft_tokens: int | None = typer.Option(
        None, "-K", "--draft-tokens", min=1, help="Tokens drafted a round (default: the most).", rich_help_panel=DECODE
    ),
    max_new_tokens: int | None = options.max_new_tokens(DECODE),
    temperature: float | None = typer.Option(
        None, help="0 is greedy; the paper's table has 1 (default: 0).", rich_help_panel=DECODE
    ),
    top_k: int = options.top_k(DECODE),
    top_p: float = options.top_p(DECODE),
    draft_temperature: str | None = options.draft_temperature(DECODE),
    confidence_threshold: float | None = typer.Option(
        None, help="Of the table: cut a draft before the first confidence below this.", rich_help_panel=DECODE
    ),
    ignore_stop: bool = options.ignore_stop(DECODE),
    seed: int = typer.Option(0, help="Seed of the texts and of the replays.", rich_help_panel=DECODE),
    device: str = options.device(DECODE),
    dtype: str = options.dtype(DECODE),
    draft_device: str = typer.Option("same", help="Device of the drafters.", rich_help_panel=DECODE),
    draft_dtype: str = typer.Option("same", help="Dtype of the drafters.", rich_help_panel=DECODE),
    attention: str = options.attention(DECODE),
    rollouts: bool = typer.Option(
        False,
        "--rollouts",
        help="Decode with the drafters: slower, with noise, for any drafter.",
        rich_help_panel=EFFORT,
    ),
    thresholds: str = typer.Option(
        "", help="Thresholds to try: 0.3,0.5; none (default: 0.1 to 0.9; none with --rollouts).", rich_help_panel=EFFORT
    ),
    repeats: int = typer.Option(1, min=1, help="Texts of a prompt, when sampling.", rich_help_panel=EFFORT),
    costs: Path | None = typer.Option(
        None,
        help="Cost table of `specdoctor profile`, or JSON with rows, seconds, draft_seconds: predicts the speed-up.",
        rich_help_panel=OUTPUT,
    ),
    markdown: str = typer.Option(
        "", metavar="PATH", help="Write the tables as Markdown; - for stdout.", rich_help_panel=OUTPUT
    ),
    json_path: str = options.json_path(OUTPUT),
) -> None:
    """Accepted length of drafters by data set and domain, as in the DSpark paper, with intervals.

    Also a sweep of confidence thresholds (drafts verified, verified in vain, predicted speed-up), paired comparisons.
    Ablations of depth, block length or losses are drafters of several recipes in one call. Exit codes: 0 measured,
    2 usage, 4 environment, 5 no prompts, 130 interrupted.
    """
    from specdoctor.measure.accept_command import AcceptRequest
    from specdoctor.measure.data_sets import load_data_sets
    from specdoctor.measure.evaluate import THRESHOLDS, evaluate_rollouts, evaluate_texts
    from specdoctor.measure.evaluate_result import evaluation_result
    from specdoctor.measure.workload import BenchRequest
    from specdoctor.reports.eval_console import print_evaluation
    from specdoctor.reports.markdown import eval_markdown, write_markdown
    from specdoctor.reports.output import refuse_unwritable, stdout_console, write_json
    from specdoctor.reports.progress import bench_progress

    refuse_unwritable(json_path, markdown)
    if rollouts and repeats > 1:
        raise SpecdoctorError(
            f"--repeats {repeats}: is for texts of the target, which --rollouts does not read; drop one"
        )
    tried = _thresholds(thresholds, () if rollouts else THRESHOLDS)
    data = load_data_sets(prompts, [word.strip() for word in categories.split(",") if word.strip()], max_prompts)
    workload = BenchRequest(
        target=target,
        drafts=drafts,
        drafts_option="",
        raw_prompts=data.prompts,
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
    request = AcceptRequest(workload, corpus=corpus, repeats=repeats, costs=costs, command="eval")
    with bench_progress() as on_progress:
        evaluation = (evaluate_rollouts if rollouts else evaluate_texts)(request, tried, on_progress)
    result = evaluation_result(evaluation, data)
    result["settings"] |= {"prompts": [str(path) for path in prompts] or "bundled", "thresholds": list(tried)}
    if json_path:
        write_json(result, json_path)
    if markdown:
        write_markdown(eval_markdown(result), markdown)
    if "-" not in (json_path, markdown):
        print_evaluation(result, stdout_console())
    raise typer.Exit(result["exit_code"])


def _thresholds(text: str, default: tuple[float, ...]) -> tuple[float, ...]:
    if not text.strip():
        return default
    if text.strip() == "none":
        return ()
    try:
        values = tuple(float(word) for word in text.split(","))
    except ValueError:
        values = (-1.0,)
    if not all(0 <= value <= 1 for value in values):
        raise SpecdoctorError(f"--thresholds {text}: expected probabilities such as 0.3,0.5, or none")
    return values
