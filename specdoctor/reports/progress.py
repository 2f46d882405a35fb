"""Progress on stderr: a bar with tokens/s and tau on a terminal, nothing elsewhere."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specdoctor.reports.output import stderr_console

Step = TypeVar("Step")


@contextmanager
def bench_progress() -> Iterator[Callable[[Any], None]]:
    """A callback for `run_bench` that draws a bar while the block runs."""
    console = stderr_console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rates]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("loading and warming up", total=None, rates="")

        def on_progress(state: Any) -> None:
            speed = "" if state.tokens_per_s is None else f"{state.tokens_per_s:.1f} tokens/s"
            tau = "" if state.tau is None else f"tau {state.tau:.2f}"
            bar.update(task, total=state.total, completed=state.done, description=state.arm, rates=f"{speed} {tau}")

        yield on_progress


def step_progress(steps: Iterable[Step]) -> Iterator[Step]:
    """The steps, with a bar on a terminal while they last."""
    console = stderr_console()
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        yield from bar.track(list(steps), description="running")
