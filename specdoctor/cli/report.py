"""`specdoctor report FILES... -o OUT.html`: the HTML report, made again from saved JSON."""

import sys
from pathlib import Path

import typer

app = typer.Typer()


@app.command()
def report(
    files: list[Path] = typer.Argument(
        ..., help="JSON that specdoctor wrote with --json (bench, accept, profile, ...)."
    ),
    output: Path = typer.Option(..., "-o", "--output", metavar="FILE.html", help="The page to write."),
    json_path: str = typer.Option("", "--json", metavar="PATH", help="Write the verdicts as JSON; - for stdout."),
) -> None:
    """Draw saved results as one self-contained HTML page: several files, one page.

    Exit codes: 0 written, 2 a file that no report can be made of.
    """
    from specdoctor.reports.html import load_documents, verdicts, write_report
    from specdoctor.reports.output import stdout_console, write_json

    documents, names = load_documents(files), [str(file) for file in files]
    write_report(output, documents, sys.argv, names)
    found = verdicts(documents, names)
    if json_path:
        rows = [{"file": name, **verdict._asdict()} for name, verdict in zip(names, found, strict=True)]
        write_json({"schema_version": 1, "kind": "report", "output": str(output), "verdicts": rows}, json_path)
    if json_path != "-":
        console = stdout_console()
        for name, verdict in zip(names, found, strict=True):
            for line in (*verdict.alerts, verdict.headline):
                console.print(f"{name}: {line}", soft_wrap=True)
        console.print(f"written: {output}", soft_wrap=True)
