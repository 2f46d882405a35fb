"""`specdoctor check-nan`: where NaN and infinity are born, in each dtype, and what they cost."""

from pathlib import Path

import typer

from specdoctor.errors import ExitCode

app = typer.Typer()


@app.command()
def check_nan(
    target: str = typer.Option(..., help="Target: folder, Hugging Face id, or a known name (smollm2-135m)."),
    draft: str = typer.Option("", help="Drafter folder, to look at it too and to measure its acceptance."),
    dtypes: str = typer.Option("float32,bfloat16,float16", help="What to run in, one after another."),
    prompts: Path | None = typer.Option(None, help="JSONL file of prompts; by default some that ship."),
    max_prompts: int = typer.Option(3, min=1, help="Prompts that are decoded; the first two are watched."),
    max_new_tokens: int = typer.Option(24, min=1, help="Tokens decoded for each, for the acceptance."),
    template: str = typer.Option("auto", help="auto (the target's chat template), none, or bytes."),
    mask: Path | None = typer.Option(None, help="Run a tree with this mask, dumped from your engine, too."),
    parents: str = typer.Option("", help="The tree of --mask: [-1,0,0,...] or a file that holds such a list."),
    tensor: str = typer.Option("", help="Name of the mask in a file of several tensors."),
    weights_only: bool = typer.Option(False, "--weights-only", help="Scan the weights and run nothing."),
    device: str = typer.Option("auto", help="auto, cpu, cuda, cuda:N, mps."),
    attention: str = typer.Option("auto", help="Attention path of the target: auto, matmul or sdpa."),
    json_path: str = typer.Option("", "--json", metavar="PATH", help="Write the result as JSON; - for stdout."),
) -> None:
    """Find the first module and row that NaN or infinity comes from, in float32, bfloat16 and float16.

    Exit codes: 0 clean, 1 findings, 2 input that cannot be read, 3 a check that crashed, 4 no such model or device.
    """
    from specdoctor.checks.numerics_examination import NumericsRequest, examine_numerics
    from specdoctor.reports.numerics_console import print_numerics_report
    from specdoctor.reports.output import refuse_unwritable, stdout_console, write_json
    from specdoctor.reports.progress import step_progress

    refuse_unwritable(json_path)
    request = NumericsRequest(
        target,
        draft,
        tuple(word.strip() for word in dtypes.split(",") if word.strip()),
        prompts,
        max_prompts,
        max_new_tokens,
        template,
        mask,
        parents,
        tensor,
        device,
        attention,
        weights_only,
    )
    document = examine_numerics(request, step_progress)
    if json_path:
        write_json(document, json_path)
    if json_path != "-":
        print_numerics_report(document, stdout_console())
    severities = {finding["severity"] for finding in document["findings"]}
    if severities & {"error", "warning"}:
        raise typer.Exit(int(ExitCode.FINDINGS))
    if "crash" in severities:
        raise typer.Exit(int(ExitCode.INTERNAL))
