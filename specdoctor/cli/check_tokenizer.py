"""`specdoctor check-tokenizer TARGET DRAFT`: do both sides mean the same tokens by the same ids?"""

from pathlib import Path

import typer

from specdoctor.errors import ExitCode

app = typer.Typer()


@app.command()
def check_tokenizer(
    target: Path = typer.Argument(
        ..., help="Target: model folder, GGUF, tokenizer.json, tekken.json, tiktoken or SentencePiece file."
    ),
    draft: Path = typer.Argument(..., help="Drafter: the same, or a folder without a tokenizer of its own."),
    json_path: str = typer.Option("", "--json", metavar="PATH", help="Write the result as JSON; - for stdout."),
) -> None:
    """Compare the tokenizers of a target and a drafter, from their files alone: no weights, no network.

    Exit codes: 0 clean (identical, or padding only), 1 findings, 2 a side that cannot be read, 3 a check that crashed.
    """
    from specdoctor.checks.tokenizer_examination import examine_tokenizers
    from specdoctor.reports.findings import print_tokenizer_report
    from specdoctor.reports.output import stdout_console, write_json

    document = examine_tokenizers(target, draft)
    if json_path:
        write_json(document, json_path)
    if json_path != "-":
        print_tokenizer_report(document, stdout_console())
    severities = {finding["severity"] for finding in document["findings"]}
    if severities & {"error", "warning"}:
        raise typer.Exit(int(ExitCode.FINDINGS))
    if "crash" in severities:
        raise typer.Exit(int(ExitCode.INTERNAL))
