"""Options that several commands share, worded once; the panel of the help is each command's own."""

from typing import Any

import typer


def template(panel: str) -> Any:
    return typer.Option("auto", help="auto (the target's chat template), none, or bytes.", rich_help_panel=panel)


def corpus(panel: str) -> Any:
    return typer.Option(
        None,
        help="Folder of the target's texts; grows by what is missing (default: in the cache).",
        rich_help_panel=panel,
    )


def max_new_tokens(panel: str) -> Any:
    return typer.Option(None, min=1, help="Longest answer (default: 128).", rich_help_panel=panel)


def top_k(panel: str) -> Any:
    return typer.Option(0, help="0 is off.", rich_help_panel=panel)


def top_p(panel: str) -> Any:
    return typer.Option(1.0, help="1 is off.", rich_help_panel=panel)


def draft_temperature(panel: str) -> Any:
    return typer.Option(None, help="0.5, or a factor of the target's: 0.7x (default: 1x).", rich_help_panel=panel)


def draft_vocabulary(panel: str | None = None) -> Any:
    return typer.Option(
        None,
        help="JSON list of the only ids that DSpark, DFlash and EAGLE-3 propose (`data vocabulary`); own: beside them.",
        rich_help_panel=panel,
    )


def ignore_stop(panel: str) -> Any:
    return typer.Option(False, "--ignore-stop", help="Do not end at the target's stop tokens.", rich_help_panel=panel)


def device(panel: str) -> Any:
    return typer.Option("auto", help="auto, cpu, cuda, cuda:N, mps.", rich_help_panel=panel)


def dtype(panel: str) -> Any:
    return typer.Option("auto", help="auto, float32, bfloat16, float16.", rich_help_panel=panel)


def attention(panel: str) -> Any:
    return typer.Option("auto", help="auto, matmul, sdpa (see `specdoctor env`).", rich_help_panel=panel)


def json_path(panel: str) -> Any:
    return typer.Option(
        "", "--json", metavar="PATH", help="Write the result as JSON; - for stdout.", rich_help_panel=panel
    )
