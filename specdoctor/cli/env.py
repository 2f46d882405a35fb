"""`specdoctor env`: what a result depends on, to paste into an issue."""

import typer

app = typer.Typer()


@app.command()
def env(
    json_path: str = typer.Option("", "--json", metavar="PATH", help="Write the result as JSON; - for stdout."),
) -> None:
    """Versions, machine and devices, and the attention path that each device and dtype takes here, with the reason."""
    from specdoctor.formats.sources import cache_root
    from specdoctor.measure.environment import attention_paths, environment
    from specdoctor.reports.env_console import print_env
    from specdoctor.reports.output import stdout_console, write_json

    document = {
        "schema_version": 1,
        "environment": environment(),
        "attention_paths": attention_paths(),
        "cache": str(cache_root()),
    }
    if json_path:
        write_json(document, json_path)
    if json_path != "-":
        print_env(document, stdout_console())
