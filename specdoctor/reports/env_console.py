"""The environment for a person: lines to copy into an issue."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from specdoctor.reports.output import result_table


def print_env(document: Mapping[str, Any], console: Console) -> None:
    """Versions and machine as `name: value` lines, then the attention paths."""
    env = document["environment"]
    for name, version in env["packages"].items():
        console.print(f"{name}: {version}", soft_wrap=True)
    for name in ("python", "platform", "processor", "cores", "threads"):
        console.print(f"{name}: {env[name]}", soft_wrap=True)
    for device in env["cuda_devices"]:
        console.print(f"cuda: {device['name']}, {device['memory'] / 2**30:.0f} GiB", soft_wrap=True)
    for name, value in env["variables"].items():
        console.print(f"{name}={value}", soft_wrap=True)
    console.print(f"cache: {document['cache']}", soft_wrap=True)
    table = result_table(console, "Attention", "device", "dtype", "path", "why", left=4)
    for row in document["attention_paths"]:
        table.add_row(row["device"], row["dtype"], row["path"], row["reason"])
    table.columns[-1].no_wrap = False
    console.print(table)
