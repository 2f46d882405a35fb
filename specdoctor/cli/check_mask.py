"""`specdoctor check-mask`: does each token of a draft tree see its own path and nothing else?"""

from pathlib import Path

import typer

from specdoctor.errors import ExitCode

app = typer.Typer()


@app.command()
def check_mask(
    target: str = typer.Option("", help="Run trees on this target too: folder, Hugging Face id, or a known name."),
    mask: Path | None = typer.Option(
        None, help="A mask dumped from your engine: .npy, .pt or .safetensors; boolean or additive."
    ),
    parents: str = typer.Option(
        "", help="The tree: [-1,0,0,...] or a file that holds such a list; -1 is a child of the anchor."
    ),
    tensor: str = typer.Option("", help="Name of the mask in a file of several tensors."),
    context: int | None = typer.Option(
        None, min=0, help="Columns of committed tokens before the tree's; by default all that come before."
    ),
    window: int | None = typer.Option(None, min=1, help="Sliding window of the layer that the mask is of, in tokens."),
    device: str = typer.Option("auto", help="auto, cpu, cuda, cuda:N, mps."),
    dtype: str = typer.Option(
        "auto", help="auto, float32, bfloat16, float16: of the target, and what the mask's engine computes in."
    ),
    attention: str = typer.Option("auto", help="Attention path of the target: auto, matmul or sdpa."),
    json_path: str = typer.Option("", "--json", metavar="PATH", help="Write the result as JSON; - for stdout."),
) -> None:
    """Check tree attention masks: specdoctor's own by hand-worked trees, a target's rows, a mask of your engine.

    Exit codes: 0 clean, 1 findings, 2 input that cannot be read, 3 a check that crashed, 4 no such model or device.
    """
    from specdoctor.checks.mask_examination import MaskRequest, examine_masks
    from specdoctor.reports.mask_console import print_mask_report
    from specdoctor.reports.output import refuse_unwritable, stdout_console, write_json
    from specdoctor.reports.progress import step_progress

    refuse_unwritable(json_path)
    request = MaskRequest(target, parents, mask, tensor, context, window, device, dtype, attention)
    document = examine_masks(request, step_progress)
    if json_path:
        write_json(document, json_path)
    if json_path != "-":
        print_mask_report(document, stdout_console())
    severities = {finding["severity"] for finding in document["findings"]}
    if severities & {"error", "warning"}:
        raise typer.Exit(int(ExitCode.FINDINGS))
    if "crash" in severities:
        raise typer.Exit(int(ExitCode.INTERNAL))
