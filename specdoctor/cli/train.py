"""`specdoctor train`: a drafter for a target, from a recipe."""

from pathlib import Path

import typer

app = typer.Typer()


@app.command()
def train(
    recipe: Path = typer.Argument(..., metavar="RECIPE.yaml", help="What to train; examples in sample_configs/train/."),
    resume: bool = typer.Option(False, "--resume", help="Go on from the last state in the output folder, if any."),
    output: Path | None = typer.Option(None, help="Folder of the run, instead of the recipe's."),
    data: Path | None = typer.Option(None, help="Samples of `data regenerate`, instead of the recipe's data."),
    cache: Path | None = typer.Option(None, help="Folder of `data cache`, instead of the recipe's data."),
    json_path: str = typer.Option("", "--json", metavar="PATH", help="Write the result as JSON; - for stdout."),
) -> None:
    """Train a drafter: DSpark, DFlash, EAGLE-3, MTP, Medusa, early exit, or a small causal LM.

    SIGTERM and Ctrl-C save the state and exit 130; --resume goes on. For several GPUs or machines:
    accelerate launch -m specdoctor train RECIPE.yaml

    Exit codes: 0 trained, 1 not finite, 2 usage, 4 environment, 5 no data, 130 interrupted.
    """
    from specdoctor.errors import SpecdoctorError
    from specdoctor.reports.output import refuse_unwritable, stdout_console, write_json
    from specdoctor.reports.train_console import print_train, train_progress
    from specdoctor.training.recipe_file import load_recipe
    from specdoctor.training.run_folder import LOG
    from specdoctor.training.train_command import train as run

    refuse_unwritable(json_path)
    wanted = load_recipe(recipe)
    if data is not None and cache is not None:
        raise SpecdoctorError("--data and --cache: found both, expected one; the features come from one place")
    if data is not None or cache is not None:
        own = wanted.data.model_copy(update={"samples": data, "cache": cache})
        wanted = wanted.model_copy(update={"data": own})
    if output is not None:
        wanted = wanted.model_copy(update={"output": output})
    with train_progress(wanted.length.steps, wanted.output / LOG) as on_step:
        result = run(wanted, resume, on_step)
    if json_path:
        write_json(result, json_path)
    if json_path != "-":
        print_train(result, stdout_console())
    raise typer.Exit(result["exit_code"])
