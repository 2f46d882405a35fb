"""`specdoctor inspect DRAFT`: what a draft checkpoint is, and whether it is whole."""

import typer

from specdoctor.errors import ExitCode

app = typer.Typer()


@app.command()
def inspect(
    draft: str = typer.Argument(..., help="Draft checkpoint: a folder, a GGUF file, or a Hugging Face id."),
    target: str = typer.Option("", "--target", help="Compare sizes with this target: folder, GGUF, name or id."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Also list what is known and not used, with reasons."),
    json_path: str = typer.Option("", "--json", metavar="PATH", help="Write the result as JSON; - for stdout."),
) -> None:
    """Describe a draft checkpoint from its config and tensor headers: no weights are read, no code of it runs.

    Exit codes: 0 clean, 1 findings, 2 no draft checkpoint or one that cannot be read, 3 a check that crashed, 4 a hub
    that cannot be asked.
    """
    from specdoctor.checks.draft_examination import examine_draft
    from specdoctor.reports.inspect_console import print_inspection
    from specdoctor.reports.output import refuse_unwritable, stdout_console, write_json

    refuse_unwritable(json_path)
    document = examine_draft(draft, target)
    if json_path:
        write_json(document, json_path)
    if json_path != "-":
        print_inspection(document, stdout_console(), verbose=verbose)
    severities = {finding["severity"] for finding in document["findings"]}
    if severities & {"error", "warning"}:
        raise typer.Exit(int(ExitCode.FINDINGS))
    if "crash" in severities:
        raise typer.Exit(int(ExitCode.INTERNAL))
