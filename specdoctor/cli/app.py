"""The root command: a table of commands, each loaded only when it is called.

`specdoctor --help` must stay instant, so nothing here may import torch, transformers, numpy, pandas or scipy. A command
module exposes `app`, a `typer.Typer` with one command (or several, for a group); its heavy imports stand inside the
function body.
"""

import logging
import os
import signal
import sys
from importlib import import_module
from typing import Any, NamedTuple

import typer
import typer.core
import typer.main

from specdoctor import __version__
from specdoctor.errors import ExitCode, SpecdoctorError


class Entry(NamedTuple):
    module: str
    panel: str
    help: str


COMMANDS = {
    "inspect": Entry("inspect", "Diagnose", "What a draft checkpoint is, where each setting comes from, is it whole."),
    "check-tokenizer": Entry(
        "check_tokenizer", "Diagnose", "Do target and drafter mean the same tokens by the same ids?"
    ),
    "check-mask": Entry("check_mask", "Diagnose", "Does each token of a draft tree see its own path and nothing else?"),
    "check-nan": Entry("check_nan", "Diagnose", "Where NaN and infinity are born, in each dtype, and what they cost."),
    "rule": Entry("rule", "Diagnose", "Explain a finding code, or list all codes."),
    "env": Entry("env", "Diagnose", "Versions, devices and the attention path taken, to paste into an issue."),
    "bench": Entry("bench", "Measure", "Run drafters against plain decoding: tau, speed-up and what limits it."),
    "profile": Entry("profile", "Measure", "Phases of a round, cost of a forward, and what would help most."),
    "accept": Entry("accept", "Measure", "Exact acceptance in one pass over the target's own text, no decoding."),
    "compare": Entry("compare", "Measure", "Results side by side, with paired differences."),
    "gate": Entry("gate", "Measure", "Judge a run against a baseline: pass, regression, or too little evidence."),
    "report": Entry("report", "Measure", "One self-contained HTML page from saved results."),
    "data": Entry("data", "Build", "Training data: answers by the target, and a cache of its hidden states."),
    "train": Entry("train", "Build", "Train a drafter for a target, from a recipe."),
    "calibrate": Entry("calibrate", "Build", "Make a drafter's confidence mean what it says."),
    "eval": Entry("eval", "Build", "Accepted length by data set and domain, and what confidence thresholds do to it."),
    "export": Entry("export", "Build", "Write a drafter in the format that another engine loads."),
    "fetch": Entry("fetch", "Use", "Put a named target model into the local cache."),
    "generate": Entry("generate", "Use", "Complete one prompt with a target and, if given, a drafter."),
}

GLOBAL_FLAGS = ("--debug", "--offline")
# transformers imports torchao where it is installed, which warns of every kernel that was built for another machine.
CHATTY = ("torchao", "torch.utils._pytree")


class LazyGroup(typer.core.TyperGroup):
    """Lists commands from the table and imports a command's module only to run it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        return typer.core.TyperCommand(
            name=cmd_name, help=entry.help, rich_help_panel=entry.panel, callback=lambda: None
        )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, entry = args[0], COMMANDS.get(args[0])
        if entry is None:
            self.commands = {known: self.get_command(ctx, known) for known in COMMANDS}  # for the near misses
            return super().resolve_command(ctx, args)  # exits 2
        sub_app = import_module(f"specdoctor.cli.{entry.module}").app
        sub_app._add_completion = False
        command = typer.main.get_command(sub_app)
        command.name = name
        return name, command, args[1:]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Global flags may stand after the command as well: people add --debug at the end of the line that failed.
        own, rest = _split_global_flags(args)
        return super().parse_args(ctx, own + rest)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SpecdoctorError as error:
            if ctx.params.get("debug"):
                raise
            _complain(str(error))
            raise typer.Exit(int(error.exit_code)) from None
        except KeyboardInterrupt:
            _complain("interrupted")
            raise typer.Exit(int(ExitCode.INTERRUPTED)) from None
        except OSError as error:
            if ctx.params.get("debug") or isinstance(error, BrokenPipeError):
                raise
            _complain(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
            raise typer.Exit(int(ExitCode.ENVIRONMENT)) from None
        except Exception as error:
            if ctx.params.get("debug") or type(error).__module__.startswith("typer"):
                raise
            _complain(f"internal error: {type(error).__name__}: {error} (a bug in specdoctor; run again with --debug)")
            raise typer.Exit(int(ExitCode.INTERNAL)) from None


def _split_global_flags(args: list[str]) -> tuple[list[str], list[str]]:
    own, rest, literal = [], [], False
    values = iter(args)
    for arg in values:
        literal = literal or arg == "--"
        if not literal and arg in GLOBAL_FLAGS:
            own.append(arg)
        elif not literal and arg == "--cache-dir":
            own += [arg, *([v] if (v := next(values, None)) is not None else [])]
        elif not literal and arg.startswith("--cache-dir="):
            own.append(arg)
        else:
            rest.append(arg)
    return own, rest


def _complain(message: str) -> None:
    print(f"specdoctor: {message}", file=sys.stderr)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="--debug, --offline and --cache-dir may stand before or after the command. "
    "Exit codes: 0 clean, 1 findings or regression, 2 usage, 3 internal error, 4 environment, 5 nothing to do, "
    "6 inconclusive, 130 interrupted.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"specdoctor {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),
    offline: bool = typer.Option(False, "--offline", help="Use only what is in the local caches."),
    cache_dir: str = typer.Option("", "--cache-dir", help="Where fetched models are kept.", envvar="SPECDOCTOR_HOME"),
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """The doctor for LLM speculative decoding: measure a drafter, and name what is wrong with it."""
    # huggingface_hub reads these when it is imported, which happens only inside commands.
    if offline:
        os.environ["SPECDOCTOR_OFFLINE"] = "1"
        os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    if cache_dir:
        os.environ["SPECDOCTOR_HOME"] = cache_dir
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    """Entry point of the `specdoctor` script."""
    # What a job scheduler sends to end a job ends it as Ctrl-C does: partial results kept, nothing half-written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except BrokenPipeError:  # `specdoctor ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(int(ExitCode.OK))
    except SystemExit:
        # Typer makes exit code 1 of a closed pipe, which here means findings; it leaves this wrapper behind.
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":
            sys.exit(int(ExitCode.OK))
        raise


if __name__ == "__main__":
    main()
