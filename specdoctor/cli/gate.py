"""`specdoctor gate`: did a change make a drafter worse? And `specdoctor gate record`: keep a baseline for it."""

import os
import sys
from pathlib import Path
from typing import Any

import typer

from specdoctor.errors import SpecdoctorError

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})

DECIDE, OUTPUT = "How to decide", "Output"


@app.callback(invoke_without_command=True)
def gate(
    context: typer.Context,
    run: Path | None = typer.Option(None, metavar="FILE", help="Results to judge, of specdoctor or another tool."),
    baseline: Path | None = typer.Option(None, metavar="FILE", help="What to judge against: a baseline, or results."),
    arm: str | None = typer.Option(None, help="Arm of a file that has several."),
    config: Path | None = typer.Option(None, metavar="FILE", help="gate.yaml; options given here win over it."),
    metric: list[str] = typer.Option(
        [], help="tau, alpha, tokens_per_s, speedup, ece. Repeatable (default: tau).", rich_help_panel=DECIDE
    ),
    margin: list[str] = typer.Option(
        [],
        metavar="NUMBER",
        help="Largest relative drop that does not matter (of tau: of tau - 1), or METRIC=NUMBER. Repeatable "
        "(default: 0.05; ece 0.02, absolute).",
        rich_help_panel=DECIDE,
    ),
    allow: list[str] = typer.Option(
        [],
        metavar="KEY",
        help="Compare even if this differs: target, template, K, temperature, prompts. Repeatable.",
        rich_help_panel=DECIDE,
    ),
    inconclusive: str | None = typer.Option(
        None, help="What an undecided gate means: fail (exit 6), pass, warn (default: fail).", rich_help_panel=DECIDE
    ),
    seed: int | None = typer.Option(None, help="Seed of the bootstrap (default: 0).", rich_help_panel=DECIDE),
    explain: bool = typer.Option(
        False, "--explain", help="Print the rule and all formulas, and stop.", rich_help_panel=DECIDE
    ),
    json_path: str | None = typer.Option(
        None, "--json", metavar="PATH", help="Write the report as JSON; - for stdout.", rich_help_panel=OUTPUT
    ),
    junit: Path | None = typer.Option(None, metavar="PATH", help="Write JUnit XML.", rich_help_panel=OUTPUT),
    markdown: str | None = typer.Option(
        None, metavar="PATH", help="Write Markdown; - for stdout.", rich_help_panel=OUTPUT
    ),
    github: bool = typer.Option(
        False, "--github", help="Print annotations and fill $GITHUB_STEP_SUMMARY.", rich_help_panel=OUTPUT
    ),
) -> None:
    """Judge a run against a baseline, paired by prompt: pass, regression, or too little evidence.

    Exit codes: 0 pass, 1 regression, 2 usage or runs that must not be compared, 3 internal, 4 environment,
    5 nothing to compare, 6 inconclusive.

    Example: specdoctor gate --run new.json --baseline baseline.json --margin 0.05
    """
    if context.invoked_subcommand is not None:
        return
    if explain:
        from specdoctor.reports.gate_console import print_rule
        from specdoctor.reports.output import stdout_console

        print_rule(stdout_console())
        return
    given = {
        "run": str(run) if run else None,
        "baseline": str(baseline) if baseline else None,
        "arm": arm,
        "metric": metric or None,
        "allow": allow or None,
        "inconclusive": inconclusive,
        "seed": seed,
        "json_path": json_path,
        "junit": str(junit) if junit else None,
        "markdown": markdown,
        "github": github or None,
    }
    options = _options(config, given, margin)
    if not options.run or not options.baseline:
        missing = "--run" if not options.run else "--baseline"
        raise SpecdoctorError(
            f"{missing} is missing; give --run FILE and --baseline FILE, or both in --config gate.yaml"
        )
    _judge(options)


@app.command()
def record(
    run: Path = typer.Argument(..., metavar="RUN", help="Results of specdoctor or of another tool."),
    output: Path = typer.Option(..., "-o", "--output", metavar="FILE", help="Where to write."),
    arm: str | None = typer.Option(None, help="Arm of a file that has several."),
    form: str = typer.Option(
        "baseline", "--format", help="baseline, or speculation-profile (Model-Optimizer's speculation_profile.json)."
    ),
) -> None:
    """Keep a run as a baseline small enough for git: counts per prompt, settings, no text.

    Example: specdoctor gate record bench.json -o baseline.json
    """
    from specdoctor.formats.results import baseline, model_optimizer
    from specdoctor.formats.results.load import read_results, select_arm
    from specdoctor.measure.prompt_file import did_you_mean

    writers = {"baseline": baseline.write, "speculation-profile": model_optimizer.write}
    if form not in writers:
        raise SpecdoctorError(
            f"--format: found {form!r}, expected one of {', '.join(writers)}{did_you_mean(form, writers)}"
        )
    result = select_arm(read_results(run), arm)
    writers[form](result, output)
    counted = f"{len(result.prompts)} prompts" if result.prompts else "pooled counts, no prompts"
    typer.echo(f"{output}: {counted} of {result.label} ({result.tool}), {output.stat().st_size:,} bytes")


def _options(config: Path | None, given: dict[str, Any], margin: list[str]) -> Any:
    """The file's options under those of the command line; both are checked by the same model."""
    from specdoctor.measure.gate_config import GateConfig, load_config, parse_margins, with_options

    base = load_config(config) if config else GateConfig()
    values = {key: value for key, value in given.items() if value is not None}
    if margin:
        values["margin"] = base.margin | parse_margins(margin)
    return with_options(base, values)


def _judge(options: Any) -> None:
    from specdoctor.formats.results.load import PLAIN_ARMS, read_results, select_arm
    from specdoctor.measure.gate import gate as judge
    from specdoctor.reports.gate_console import print_gate
    from specdoctor.reports.gate_words import headline
    from specdoctor.reports.output import stderr_console, stdout_console, write_json

    runs, bases = read_results(Path(options.run)), read_results(Path(options.baseline))
    drafted = [result.arm for result in bases if result.arm not in PLAIN_ARMS]
    run = select_arm(runs, options.arm, also=drafted[0] if len(drafted) == 1 else None)
    named = options.arm if options.arm in [result.arm for result in bases] else None
    report = judge(
        run, select_arm(bases, named, also=run.arm), options.metric, options.margin, options.allow, options.seed
    )
    taken = "-" in (options.json_path, options.markdown)
    if options.json_path:
        write_json(report.to_json(options.inconclusive), options.json_path)
    if options.junit:
        from specdoctor.reports.junit import write_gate_junit

        write_gate_junit(report, Path(options.junit), options.inconclusive)
    if options.markdown:
        from specdoctor.reports.markdown import gate_markdown, write_markdown

        write_markdown(gate_markdown(report), options.markdown)
    if not taken:
        print_gate(report, stdout_console())
    if options.github:
        _github(report, options.inconclusive, taken)
    if report.outcome == "inconclusive" and options.inconclusive == "warn":
        stderr_console().print(f"warning: {headline(report)}", soft_wrap=True)
    raise typer.Exit(int(report.exit_code(options.inconclusive)))


def _github(report: Any, inconclusive: str, stdout_is_taken: bool) -> None:
    from specdoctor.reports.github import annotations, append_summary

    for line in annotations(report, inconclusive):
        print(line, file=sys.stderr if stdout_is_taken else sys.stdout)  # the runner reads both
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        append_summary(report, Path(summary))
