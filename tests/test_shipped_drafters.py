"""The drafters that come with the package: small, whole, clean, with a card, a recipe and a log that tell the same."""

import json
import re
from pathlib import Path

import pytest
from safetensors import safe_open

from specdoctor.checks.draft_examination import examine_draft
from specdoctor.drafters.draft_vocabulary import read_vocabulary, vocabulary_file
from specdoctor.formats.drafts.calibration_file import find_calibration
from specdoctor.formats.drafts.read import read_draft
from specdoctor.formats.sources import is_known, resolve_model, shipped_drafters
from specdoctor.training.recipe_file import load_recipe

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "sample_configs" / "train"
DRAFTERS = {  # what each of them is
    "dspark-smollm2-135m": "dspark",
    "dflash-smollm2-135m": "dflash",
    "eagle3-smollm2-135m": "eagle3",
    "early-exit-smollm2-135m": "early-exit",
}
STAGES = {  # the recipes that made it, one after another
    "dspark-smollm2-135m": [f"dspark-smollm2{stage}" for stage in ("", "-more", "-wide", "-last", "-confidence")],
    "dflash-smollm2-135m": [f"dflash-smollm2{stage}" for stage in ("", "-more", "-wide", "-last")],
    "eagle3-smollm2-135m": ["eagle3-smollm2", "eagle3-smollm2-wide"],
    "early-exit-smollm2-135m": ["early-exit-smollm2"],
}
ROWS, LAYERS, MEGABYTES, IDS = 49152, 30, 80, 12288


def test_these_ship_and_are_known_by_name() -> None:
    assert set(shipped_drafters()) == set(DRAFTERS)
    assert all(resolve_model(name) == folder and is_known(name) for name, folder in shipped_drafters().items())
    assert not is_known("dspark-smollm2-135")


def test_together_they_are_small() -> None:
    root = ROOT / "specdoctor" / "data" / "drafters"
    assert sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) <= MEGABYTES * 1_000_000


@pytest.mark.parametrize("name", DRAFTERS)
def test_stored_in_bfloat16_without_embedding_and_head(name: str) -> None:
    for path in shipped_drafters()[name].glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        assert {part.get_dtype() for part in parts.values()} == {"BF16"}
        by_token = {key for key, part in parts.items() if ROWS in part.get_shape()}
        assert by_token <= {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}


@pytest.mark.parametrize(("name", "algorithm"), DRAFTERS.items())
def test_clean(name: str, algorithm: str) -> None:
    document = examine_draft(name)
    assert document["algorithm"] == algorithm and document["runs_here"]
    assert [finding for finding in document["findings"] if finding["severity"] != "info"] == []


@pytest.mark.parametrize("name", ["dspark-smollm2-135m", "dflash-smollm2-135m", "eagle3-smollm2-135m"])
def test_the_list_of_ids_beside_the_weights(name: str) -> None:
    ids = read_vocabulary(vocabulary_file("own", shipped_drafters()[name]), ROWS)
    assert len(ids) == IDS and 2 in ids  # <|im_end|>, the end of an answer


def test_the_calibration_is_that_of_the_weights() -> None:
    found = find_calibration(read_draft(resolve_model("dspark-smollm2-135m"), LAYERS))
    assert found is not None and found.stored is not None and found.problem == ""
    assert not Path(found.stored.document["data"]["prompts"]).is_absolute()
    assert found.stored.document["held_out"]["mean_ece"]["after"]["value"] <= 0.02


@pytest.mark.parametrize(("name", "algorithm"), DRAFTERS.items())
def test_recipes_logs_and_card_tell_the_same(name: str, algorithm: str) -> None:
    card = (shipped_drafters()[name] / "README.md").read_text("utf-8")
    assert "Licence: Apache-2.0" in card and re.search(r"\| all \| \d\.\d\d \[", card)
    for stage in STAGES[name]:
        recipe = load_recipe(RECIPES / f"{stage}.yaml")
        assert (recipe.algorithm, recipe.target) == (algorithm, "smollm2-135m")
        log = [json.loads(line) for line in (RECIPES / "logs" / f"{stage}.jsonl").read_text("utf-8").splitlines()]
        last = [line for line in log if "loss" in line][-1]
        assert f"| `sample_configs/train/{stage}.yaml` | {recipe.seed} | {last['step']} | {last['tokens']:,} |" in card
    assert last["step"] == recipe.length.steps
