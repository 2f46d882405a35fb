"""`specdoctor train` for people: a bar with the time left while it runs, a few lines at its end."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from specdoctor.reports.output import stderr_console

SPEED_WINDOW = 600.0  # seconds from which the time left is estimated


@contextmanager
def train_progress(steps: int | None, log: Path) -> Iterator[Callable[[Any], None]]:
    """A callback for the loop that draws a bar on a terminal while the block runs; elsewhere a line says where to look.

    Of several processes the first one says it.
    """
    console = stderr_console()
    if not console.is_terminal and os.environ.get("RANK", "0") == "0":
        console.print(f"training; losses go to {log}", soft_wrap=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(
        *columns,
        console=console,
        disable=not console.is_terminal,
        transient=True,
        speed_estimate_period=SPEED_WINDOW,
    ) as bar:
        task = bar.add_task("loading", total=None, figures="")

        def on_step(state: Any) -> None:
            tau = "" if state.tau is None else f"tau {state.tau:.2f} "
            figures = f"loss {state.loss:.3f} {tau}{state.tokens_per_s:.0f} tokens/s"
            name = f"step {state.step}" + ("" if steps is None else f"/{steps}")
            bar.update(task, total=1.0, completed=state.share, description=name, figures=figures)

        yield on_step


def print_train(result: Mapping[str, Any], console: Console) -> None:
    """What was trained, how far, and what to do next."""
    took = timedelta(seconds=round(result["seconds"]))
    console.print(f"{result['algorithm']}, {result['parameters'] / 1e6:.2f} M parameters: {result['stopped']}")
    loss = "" if result["loss"] is None else f", last loss {result['loss']:.4f}"
    console.print(f"{result['steps']} steps, {took} of training{loss}")
    if result["held_out"]:
        named = {name.removeprefix("tau_"): value for name, value in result["held_out"].items()}
        taus = (f"{'all' if name == 'held_out' else name} {value:.3f}" for name, value in named.items())
        console.print(f"tau on held-out prompts, greedy: {', '.join(taus)}")
    if result["drafter"] is None:
        console.print(f"state saved in {result['output']}; go on with --resume")
    else:
        console.print(f"drafter: {result['drafter']}")
        for note in result["notes"]:
            console.print(f"note: {note}")
        target = f"--target {result['target']}"
        if result["confidence"]:
            console.print(f"next: specdoctor calibrate {result['drafter']} {target}", soft_wrap=True)
        length = "" if result["draft_tokens"] is None else f" -K {result['draft_tokens']}"
        name = "then" if result["confidence"] else "next"
        console.print(f"{name}: specdoctor bench --draft {result['drafter']} {target}{length}", soft_wrap=True)
