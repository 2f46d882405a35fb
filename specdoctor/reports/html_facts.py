"""How a run was made: command, settings and environment as lines of key and value."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdoctor.reports.html_rows import Document

_LONG_TABLE = 12  # entries of a list that would bury the other settings


def run_facts(document: Document) -> dict[str, Any]:
    """What `run.html.j2` shows; prompts by id and hash."""
    settings = dict(document.settings)
    hashes = settings.pop("prompt_hashes", None)
    return {
        # A check names its subcommand only, which is not what was typed.
        "command": command_words(document.command) if isinstance(document.command, list) else "",
        "settings": facts(settings),
        "prompts": list(hashes.items()) if isinstance(hashes, Mapping) else [],
        "environment": facts(document.environment),
    }


def command_words(command: Sequence[str] | str | None) -> str:
    """A command as one would type it; the program by its name, wherever it lay."""
    if command is None or isinstance(command, str):
        return command or ""
    return shlex.join([Path(command[0]).name, *command[1:]]) if command else ""


def facts(values: Mapping[str, Any], within: str = "") -> list[tuple[str, str]]:
    """Nested settings as lines of dotted key and value; absent ones say so."""
    lines: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{within}{key}"
        if isinstance(value, Mapping) and value:
            lines += facts(value, f"{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for place, item in enumerate(value[:_LONG_TABLE]):
                lines += (
                    facts(item, f"{name}.{place}.") if isinstance(item, Mapping) else [(f"{name}.{place}", str(item))]
                )
            if len(value) > _LONG_TABLE:
                lines.append((name, f"{len(value) - _LONG_TABLE} more in the JSON"))
        else:
            lines.append((name, _plain(value)))
    return lines


def _plain(value: Any) -> str:
    if value is None or value == {} or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value)
    return str(value)
