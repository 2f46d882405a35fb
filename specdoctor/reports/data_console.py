"""What `specdoctor data` says on the console."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specdoctor.reports.output import stderr_console
from specdoctor.training.estimate import TOKENS_PER_SAMPLE, in_words


@contextmanager
def data_progress(unit: str) -> Iterator[Callable[[Any], None]]:
    """A callback that draws a bar of `done` out of `total` on a terminal while the block runs."""
    console = stderr_console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[more]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(unit, total=None, more="")

        def hear(state: Any) -> None:
            tokens = getattr(state, "tokens", None)
            bar.update(task, total=state.total, completed=state.done, more="" if tokens is None else f"{tokens} tokens")

        yield hear


def print_regenerated(result: Mapping[str, Any], out: Console, notes: Console) -> None:
    there = result["wanted"] - result["written"]
    kept = f" ({there} were there already)" if there else ""
    out.print(f"{result['written']} answers written{kept}, {result['tokens']} tokens: {result['folder']}")
    if result["equal_prompts"]:
        notes.print(f"note: {result['equal_prompts']} prompts are equal to an earlier one and were answered once")
    if result["too_long"]:
        notes.print(
            f"warning: {len(result['too_long'])} prompts fill all positions of the target and were left out, the first "
            f"is {result['too_long'][0]}"
        )


def print_vocabulary(result: Mapping[str, Any], wanted: int, out: Console, notes: Console) -> None:
    out.print(
        f"{result['ids']:,} of {result['seen']:,} ids seen, {100 * result['coverage']:.1f} % of {result['tokens']:,} "
        f"answer tokens: {result['file']}"
    )
    if result["ids"] < wanted:
        notes.print(f"note: the answers have fewer than {wanted:,} ids; what they lack a drafter would not propose")


def print_estimate(result: Mapping[str, Any], out: Console) -> None:
    each = f"{result['tokens_per_sample']:.0f} a sample"
    assumed = f", our assumption {TOKENS_PER_SAMPLE}" if result["tokens_assumed"] else ""
    out.print(f"samples          {result['samples']:,}")
    out.print(f"tokens           {result['tokens']:,} ({each}{assumed})")
    out.print(
        f"bytes a token    {result['bytes_per_token']:,} ({result['taps']} taps and the last state, "
        f"{result['hidden_size']} values, {result['dtype']})"
    )
    out.print(f"cache            {in_words(result['bytes'])} in {_shards(result['shards'])}")
    if result["fits"] is not None:
        instead = "give a larger disk or less data, or train from the samples: --data FOLDER"
        verdict = "fits" if result["fits"] else f"does not fit: {instead}"
        out.print(f"free             {in_words(result['free_bytes'])}: {verdict}")


def print_cache(result: Mapping[str, Any], out: Console, notes: Console) -> None:
    facts = result["facts"]
    state = "complete" if result["complete"] else "not complete yet: other workers' shards are missing"
    out.print(
        f"{len(result['written'])} of {_shards(result['shards'])} written, {facts['samples']} samples, "
        f"{facts['tokens']} tokens, {in_words(result['bytes'])}, {state}: {result['folder']}"
    )
    if result["duplicates"]:
        notes.print(f"note: {result['duplicates']} samples are equal to another and were left out")
    if result["without_answer"]:
        notes.print(f"note: {result['without_answer']} samples have no answer within --max-length and were left out")


def print_cache_check(result: Mapping[str, Any], out: Console, notes: Console) -> None:
    for name in result["broken"]:
        out.print(f"broken: {result['folder']}/{name}")
    whole = result["shards"] - len(result["broken"])
    out.print(f"{whole} of {_shards(result['shards'])} {'is' if result['shards'] == 1 else 'are'} whole")
    if result["broken"]:
        notes.print("hint: run `specdoctor data cache` with the same options again; it writes the broken shards anew")


def _shards(count: int) -> str:
    return f"{count:,} shard{'' if count == 1 else 's'}"
