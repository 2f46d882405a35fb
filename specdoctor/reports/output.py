"""Where output goes: results to stdout, progress and warnings to stderr, JSON to a file or stdout.

Contract: no colour and no box drawing when piped or with NO_COLOR; a JSON file appears whole or not at all.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from specdoctor.errors import SpecdoctorError

_PIPED_WIDTH = 160


class _ResultConsole(Console):
    def on_broken_pipe(self) -> None:
        """The reader has seen enough (`specdoctor ... | head`): no error, and no exit code of findings."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)


def stdout_console() -> Console:
    """Console for results. Piped output is wide: a table cut to 80 columns is of no use to grep."""
    _tolerate_any_character()
    console = _ResultConsole(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_WIDTH
    return console


def stderr_console() -> Console:
    """Console for progress, warnings and hints."""
    return Console(stderr=True, highlight=False, markup=False)


def result_table(console: Console, title: str, *columns: str, left: int = 1) -> Table:
    """A table whose first `left` columns are text and the rest numbers; without lines when piped or colourless."""
    lines = box.SIMPLE_HEAD if console.is_terminal and not console.no_color else None
    table = Table(title=title, title_justify="left", title_style="bold", box=lines, pad_edge=False)
    for index, column in enumerate(columns):
        if index < left:  # on a narrow terminal names fold, numbers are never cut
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def write_json(document: Mapping[str, Any] | list[int], path: str) -> None:
    """Write a document to a file, whole or not at all, or to stdout for `-`. NaN is refused."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if path == "-":
        _tolerate_any_character()
        sys.stdout.write(text)
        return
    target = Path(path)
    if target.is_symlink():
        target = target.resolve()  # the file that is meant, not the link
    if target.exists() and not target.is_file():  # a device or a pipe is written to, never replaced
        with target.open("w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
        return
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, "utf-8", errors="backslashreplace")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def refuse_unwritable(*paths: str | Path | None) -> None:
    """Raise before a long run if an output file could not be written after it; `-`, empty and None are no files."""
    for path in paths:
        if path in (None, "", "-"):
            continue
        target = Path(str(path))
        folder = target.parent
        if target.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            why = "is a folder" if target.is_dir() else f"{folder} is no folder that can be written"
            raise SpecdoctorError(f"{path}: cannot write the result here: {why}; give a file in a folder that exists")


def _tolerate_any_character() -> None:
    """Token texts hold any character, terminals and pipes in a C locale do not."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
