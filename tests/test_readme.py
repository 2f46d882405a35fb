"""The documentation against the program: exit codes, commands and options, keys of the JSON result."""

import json
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from specdoctor.cli.app import COMMANDS, app
from specdoctor.errors import ExitCode

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GLOBAL_OPTIONS = {"--debug", "--offline", "--cache-dir", "--version", "--help", "-h"}


def table(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head."""
    below = README.split(f"\n{heading}\n", 1)[1]
    rows = re.search(r"(?:^\|.*\n)+", below, re.M)
    assert rows is not None
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows[0].splitlines()[2:]]


def shown_commands() -> Iterator[tuple[str, str]]:
    """Each line of a fenced block that calls specdoctor, continuations joined, and the page it stands on."""
    for page in PAGES:
        for block in re.findall(r"^```[^\n]*\n(.*?)^```", page.read_text("utf-8"), re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                if re.match(r"specdoctor [a-z-]", line):
                    yield page.name, line


def test_the_exit_codes_are_those_of_the_program() -> None:
    documented = {int(code): text for code, text in table("## Exit codes")}
    assert list(documented) == [int(code) for code in ExitCode]
    assert all(documented.values())


@pytest.mark.parametrize(("page", "line"), shown_commands())
def test_a_shown_command_and_its_options_exist(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    name = next((word for word in words if not word.startswith("-")), None)
    options = {word.partition("=")[0] for word in words if word.startswith("-") and word != "-"}
    if name is None:
        assert options <= GLOBAL_OPTIONS
        return
    assert name in COMMANDS
    command: Any = typer.main.get_command(import_module(f"specdoctor.cli.{COMMANDS[name].module}").app)
    for word in words[words.index(name) + 1 :]:  # a group: `gate record`
        command = getattr(command, "commands", {}).get(word, command)
    known = {option for parameter in command.params for option in parameter.opts}
    assert options - known - GLOBAL_OPTIONS == set()


def test_the_commands_of_the_first_screen_are_make_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    shown = set(re.findall(r"^make ([a-z]+)", README, re.M))
    assert shown == {"bench", "test"}
    assert shown <= targets
    assert re.search(r"^make test\b", (ROOT / ".ci" / "run").read_text("utf-8"), re.M)


def keys(heading: str) -> set[str]:
    """The names in backquotes in the first column of the table below a line."""
    return {key for cells in table(heading) for key in re.findall(r"`(\w+)`", cells[0])}


def test_the_keys_of_a_bench_result_are_all_documented(golden: Path) -> None:
    pair = ["--target", str(golden / "target"), "--draft", str(golden / "deepspec-dflash"), "--template", "bytes"]
    done = CliRunner().invoke(app, ["bench", *pair, "--max-prompts", "1", "--max-new-tokens", "8", "--json", "-"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert keys("### The JSON result") == set(result)
    assert keys("Each arm:") == set().union(*result["arms"])
