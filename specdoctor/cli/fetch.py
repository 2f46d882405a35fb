"""`specdoctor fetch NAME`: put a model into the local cache and print its folder."""

import json

import typer

app = typer.Typer()


@app.command()
def fetch(
    name: str = typer.Argument(
        ..., help="A known name (smollm2-135m), a Hugging Face id (owner/name), or a folder to check."
    ),
    json_path: str = typer.Option("", "--json", metavar="PATH", help="Write the result as JSON ('-': stdout)."),
) -> None:
    """Put a named target model into the local cache and print its folder."""
    from specdoctor.formats.sources import SOURCE_NAME, resolve_model
    from specdoctor.reports.output import write_json

    folder = resolve_model(name).absolute()
    record = folder / SOURCE_NAME
    source = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else None
    if json_path:
        write_json({"schema_version": 1, "name": name, "folder": str(folder), "source": source}, json_path)
    if json_path != "-":
        typer.echo(folder)  # not through Rich: a path must never be wrapped
