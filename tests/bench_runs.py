"""Runs of `specdoctor bench` through its command line, on the tiny trained pairs."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from specdoctor.cli.app import app
from specdoctor.errors import ExitCode

GOLDEN = Path(__file__).parent / "data" / "golden"
VANILLA, DFLASH, ZLAB = GOLDEN / "deepspec-dspark-vanilla", GOLDEN / "deepspec-dflash", GOLDEN / "zlab-dflash"


def write_prompts(folder: Path) -> Path:
    """Three prompts in two categories, as a JSONL file."""
    rows = json.loads((DFLASH / "expected_greedy.json").read_text())["prompts"]
    lines = [
        json.dumps({"id": f"p{i}", "prompt_ids": row["prompt_ids"], "category": "even" if i % 2 == 0 else "odd"})
        for i, row in enumerate(rows[:3])
    ]
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def invoke(prompts: Path, *more: object, target: Path = GOLDEN / "target") -> Result:
    arguments = ["bench", "--target", target, "--prompts", prompts, "--max-new-tokens", 14, "--dtype", "float32", *more]
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def bench(
    prompts: Path, *more: object, code: ExitCode = ExitCode.OK, target: Path = GOLDEN / "target"
) -> dict[str, Any]:
    """Run, and read the JSON that it wrote."""
    path = prompts.parent / "result.json"
    result = invoke(prompts, *more, "--json", path, target=target)
    assert result.exit_code == code, result.output
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def arm(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in result["arms"] if row["name"] == name)


def records(path: Path, name: str | None = None) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if name in (None, row["arm"])]
