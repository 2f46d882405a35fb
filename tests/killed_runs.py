"""Commands killed half-way: `specdoctor data` in a process of its own, killed with signal 9 at a given moment.

The processes are forked from a server that has the heavy modules loaded, so that one starts in milliseconds.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 120.0  # seconds
PRELOADED = ["torch", "transformers", "specdoctor.training.regenerate", "specdoctor.training.cache"]


def _command(arguments: list[str]) -> None:
    import torch

    from specdoctor.cli.data import app

    torch.set_num_threads(1)
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    app(arguments)  # exits


def start(*arguments: object) -> multiprocessing.process.BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_command, args=([str(argument) for argument in arguments],), daemon=True)
    process.start()
    return process


def run(*arguments: object) -> None:
    """Run to the end."""
    process = start(*arguments)
    process.join(PATIENCE)
    assert process.exitcode == 0


def killed_at(size: Callable[[], int], wanted: float, delay: float, *arguments: object) -> bool:
    """Kill the command `delay` seconds after `size()` reaches `wanted`; False if it came to its end before."""
    process = start(*arguments)
    deadline = time.monotonic() + PATIENCE
    while size() < wanted and process.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    time.sleep(delay)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def bytes_below(folder: Path) -> int:
    """Bytes of all files, unfinished ones too; 0 where there is no folder yet."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except FileNotFoundError:  # renamed meanwhile
                continue
    return total


def visible_files(folder: Path) -> dict[str, bytes]:
    """Contents by name, without lock files and unfinished files."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}
