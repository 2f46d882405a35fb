"""Scenarios: presets are valid and stay in their stated ranges, files are refused with place, key and remedy."""

from pathlib import Path

import pytest
import yaml

from specdoctor.errors import SpecdoctorError
from specdoctor.measure.prompts import load_bundled
from specdoctor.measure.scenarios import Scenario, load_scenario, scenario_names

VALID = "categories: [code]\nK: 7\ntemperature: 0.8\nmax_new_tokens: 10\n"
PRESET_FOLDER = Path(__file__).parents[1] / "sample_configs" / "scenarios"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "k", "k_range", "coldest", "hottest"),
    [
        ("code", 7, [6, 8], 0.3, 0.5),
        ("chat", 4, [3, 5], 0.7, 0.9),
        ("summarize", 5, [4, 6], 0.5 * 0.7, 0.7 * 0.7),  # half to seven tenths of the target's
    ],
)
def test_presets_keep_to_their_ranges(name: str, k: int, k_range: list[int], coldest: float, hottest: float) -> None:
    scenario = load_scenario(name)
    assert (scenario.name, scenario.K, scenario.K_range) == (name, k, k_range)
    assert coldest <= scenario.draft_temperature_at(scenario.temperature) <= hottest
    assert load_bundled(scenario.categories)


def test_the_listed_presets_are_those_in_the_folder_and_can_be_copied(tmp_path: Path) -> None:
    assert (
        scenario_names() == sorted(path.stem for path in PRESET_FOLDER.glob("*.yaml")) == ["chat", "code", "summarize"]
    )
    for name in scenario_names():
        text = (PRESET_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
        copied = load_scenario(write(tmp_path, text))
        assert copied == load_scenario(name).model_copy(update={"name": "mine"})
        # the optional line that is commented out must be valid too once a user takes the comment sign away
        with_threshold = load_scenario(write(tmp_path, text.replace("# confidence_threshold", "confidence_threshold")))
        assert with_threshold.confidence_threshold is not None


def test_every_key_of_the_model_is_shown_in_the_presets() -> None:
    for name in scenario_names():
        text = (PRESET_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
        assert all(f"{key}:" in text for key in Scenario.model_fields if key != "name")


def test_a_short_file_takes_the_defaults_and_its_name_from_the_file(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path, "\ufeff" + VALID.replace("\n", "\r\n")))
    assert (scenario.name, scenario.K_range, scenario.confidence_threshold) == ("mine", None, None)
    assert scenario.draft_temperature_at(0.8) == 0.8


@pytest.mark.parametrize(("entry", "expected"), [("{absolute: 0.4}", 0.4), ("{factor: 0.5}", 0.6)])
def test_draft_temperature_is_absolute_or_a_factor_and_none_beside_greedy(
    tmp_path: Path, entry: str, expected: float
) -> None:
    scenario = load_scenario(write(tmp_path, VALID + f"draft_temperature: {entry}\n"))
    assert scenario.draft_temperature_at(1.2) == pytest.approx(expected)
    assert scenario.draft_temperature_at(0) == 0


def test_results_carry_plain_data(tmp_path: Path) -> None:
    dumped = load_scenario("code").model_dump()
    assert load_scenario(write(tmp_path, yaml.safe_dump(dumped))).model_dump() == dumped


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("k: 3\n", r":5: unknown key k \(did you mean 'K'\?\), expected one of name, .*; rename it"),
        ("confidence: 0.3\n", r":5: unknown key confidence \(did you mean 'confidence_threshold'\?\)"),
        ("banana: 1\n", r":5: unknown key banana, expected one of"),
        ("banana: 1\nk: 3\n", r"\(and 1 more\)$"),
        ("draft_temperature: {absolut: 1}\n", r":5: unknown key draft_temperature\.absolut \(did you mean 'absolute'"),
        ("draft_temperature: {}\n", r":5: draft_temperature: expected exactly one of absolute and factor"),
        ("draft_temperature: {absolute: 1, factor: 0.5}\n", r":5: draft_temperature: expected exactly one of"),
        ("draft_temperature: 0.4\n", r":5: draft_temperature is 0\.4, expected a mapping; write \{absolute: 0\.4\}"),
        ("draft_temperature: {factor: .inf}\n", r":5: draft_temperature\.factor is inf, expected a finite number"),
        ("confidence_threshold: 1.2\n", r":5: confidence_threshold is 1\.2, expected less than or equal to 1"),
        ("K: 5\n", r":5: K is given twice, first at line 2; keep one"),
        ("K_range: [8, 9]\n", r"expected K within K_range, found K 7 and K_range \[8, 9\]"),
        ("K_range: [8]\n", r":5: K_range is \[8\], expected at least 2 items"),
        ("K_range: [a, 9]\n", r":5: K_range\.0 is 'a', expected a valid integer"),
        ("1: 2\n", r":5: .*Keys should be strings"),
        ("x: [\n", r":6: not YAML"),
        ("---\n", r":5: not YAML"),
    ],
)
def test_a_bad_addition_is_refused_in_one_line_with_its_place(tmp_path: Path, extra: str, message: str) -> None:
    path = write(tmp_path, VALID + extra)
    with pytest.raises(SpecdoctorError, match=message) as caught:
        load_scenario(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("K: 7\n", "", r"mine\.yaml: K is missing; add it"),
        ("K: 7", "K: '7'", r":2: K is '7', expected a valid integer"),
        ("K: 7", "K: true", r":2: K is True, expected a valid integer"),
        ("K: 7", "K: 0", r":2: K is 0, expected greater than or equal to 1"),
        ("0.8", "-0.1", r":3: temperature is -0\.1, expected greater than or equal to 0"),
        ("0.8", ".nan", r":3: temperature is nan, expected a finite number"),
        ("10", "1.5", r":4: max_new_tokens is 1\.5, expected a valid integer"),
        ("[code]", "code", r":1: categories is 'code', expected a valid list"),
        ("[code]", "[]", r":1: categories is \[\], expected at least 1 item"),
        ("[code]", "[cod]", r":1: categories: expected one of code, .*, found 'cod' \(did you mean 'code'\?\)"),
        (VALID, "", r"mine\.yaml: found None, expected 'key: value' lines"),
        (VALID, "- code\n", r"mine\.yaml: found \['code'\], expected 'key: value' lines"),
    ],
)
def test_a_bad_value_is_refused_in_one_line_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(SpecdoctorError, match=message) as caught:
        load_scenario(write(tmp_path, VALID.replace(old, new)))
    assert "\n" not in str(caught.value)


def test_unknown_names_list_the_presets(tmp_path: Path) -> None:
    with pytest.raises(SpecdoctorError, match=r"'summarise' is neither .* chat, code, summarize \(did you mean 'summ"):
        load_scenario("summarise")
    with pytest.raises(SpecdoctorError, match="neither a file nor one of"):
        load_scenario(tmp_path)


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(VALID.encode("utf-16"))
    with pytest.raises(SpecdoctorError, match="not UTF-8"):
        load_scenario(path)
