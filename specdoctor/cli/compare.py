"""`specdoctor compare`: results side by side, with paired differences."""

from pathlib import Path

import typer

from specdoctor.errors import SpecdoctorError

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def compare(
    files: list[str] = typer.Argument(
        ..., metavar="FILE[@ARM]...", help="Results; the first is what others differ from."
    ),
    conventions: bool = typer.Option(
        False, "--conventions", help="Also print the acceptance length as vLLM, SGLang, AIPerf and DeepSpec would."
    ),
    seed: int = typer.Option(0, help="Seed of the bootstrap."),
    json_path: str = typer.Option("", "--json", metavar="PATH", help="Write the comparison as JSON; - for stdout."),
    markdown: str = typer.Option("", metavar="PATH", help="Write Markdown; - for stdout."),
) -> None:
    """Print each metric of two or more results, with intervals and paired differences from the first.

    Reads results of specdoctor (bench, accept, records, baselines), vLLM, SGLang, llama.cpp, AIPerf, Model-Optimizer
    and DeepSpec; numbers of two conventions are never mixed. FILE@ARM chooses one arm of a file.

    Exit codes: 0 compared, 2 usage, 5 nothing to compare.

    Example: specdoctor compare bench.json@dflash bench.json@dspark
    """
    from specdoctor.formats.results.load import PLAIN_ARMS, read_results, select_arm
    from specdoctor.measure.compare import compare as side_by_side
    from specdoctor.reports.compare_console import print_comparison
    from specdoctor.reports.output import stdout_console, write_json

    results = []
    for text in files:
        name, at, arm = text.rpartition("@")
        path, chosen = (Path(name), arm) if at and not Path(text).exists() else (Path(text), None)
        found = read_results(path)
        if chosen is not None:
            results.append(select_arm(found, chosen))
        else:
            results += [result for result in found if result.arm not in PLAIN_ARMS] or found
    if len(results) < 2:
        raise SpecdoctorError(
            f"{files[0]}: only one result ({results[0].label}), expected two or more; give a second file"
        )
    comparison = side_by_side(results, seed)
    if json_path:
        write_json(comparison.to_json(), json_path)
    if markdown:
        from specdoctor.reports.markdown import compare_markdown, write_markdown

        write_markdown(compare_markdown(comparison), markdown)
    if "-" not in (json_path, markdown):
        print_comparison(comparison, stdout_console(), conventions)
