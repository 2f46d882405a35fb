"""Baselines: small, without text, the same bytes each time, and read back as what was recorded. And the profile."""

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gate_runs
import numpy as np
import pytest

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.results import baseline, model_optimizer
from specdoctor.formats.results.load import read_results, select_arm
from specdoctor.formats.results.result_set import ResultSet
from specdoctor.metrics.sums import DEFINITIONS

DATA = Path(__file__).parent / "data" / "results"
NOON = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def two_requests(name: str) -> ResultSet:
    return select_arm(read_results(DATA / f"two_requests.{name}"), None)


@pytest.mark.parametrize(
    "name",
    sorted(path.name.removeprefix("two_requests.") for path in DATA.glob("two_requests.*")),
)
def test_what_is_recorded_reads_back_the_same(tmp_path: Path, name: str) -> None:
    before = two_requests(name)
    path = tmp_path / "baseline.json"
    baseline.write(before, path, NOON)
    (after,) = read_results(path)
    for definition in DEFINITIONS:
        old, new = before.estimate(definition), after.estimate(definition)
        assert new.value == pytest.approx(old.value, rel=1e-6) if old.value is not None else new.value is None
        assert new.low == pytest.approx(old.low, rel=1e-6) if old.low is not None else new.low is None
    kept = ("arm", "settings", "convention", "pairable", "tool", "histogram", "marginal", "absent")
    assert {key: getattr(after, key) for key in kept} == {key: getattr(before, key) for key in kept}
    assert after.date == "2026-11-29T12:00:00Z"
    if before.prompts:
        hashes = before.hashes if before.hashes.keys() >= before.prompts.keys() else {}
        assert after.hashes == hashes


def test_a_baseline_is_sorted_one_line_a_prompt_and_the_same_each_time(tmp_path: Path) -> None:
    run, _ = gate_runs.simulate(np.random.default_rng(0), 80, 1.0)
    shuffled = dict(sorted(run.items(), key=lambda item: hash(item[0])))
    texts = []
    for name, counts in (("a", run), ("b", shuffled)):
        (result,) = read_results(gate_runs.write_bench(tmp_path / f"{name}.json", counts))
        path = tmp_path / f"{name}.baseline.json"
        baseline.write(replace(result, path="bench.json"), path, NOON)
        texts.append(path.read_text())
    assert texts[0] == texts[1]
    assert len(texts[0]) < 10_000  # eighty prompts
    prompt_lines = re.findall(r'^    "(p\d+)": \[.*\],?$', texts[0], flags=re.MULTILINE)
    assert prompt_lines == sorted(run) and len(prompt_lines) == 80
    later = tmp_path / "later.json"
    baseline.write(replace(result, path="bench.json"), later, NOON.replace(hour=13))
    changed = [a for a, b in zip(texts[0].splitlines(), later.read_text().splitlines(), strict=True) if a != b]
    assert len(changed) == 1 and "recorded" in changed[0]


def test_a_baseline_holds_no_text_and_no_paths(tmp_path: Path) -> None:
    document = json.loads((DATA / "two_requests.bench.json").read_text())
    document["settings"]["target"] = "/home/somebody/models/org/target"
    document["settings"]["template"] = {"kind": "chat", "sha256": "f" * 64, "options": {"system": "secret " * 40}}
    source = tmp_path / "bench.json"
    source.write_text(json.dumps(document))
    path = tmp_path / "baseline.json"
    baseline.write(select_arm(read_results(source), None), path)
    text = path.read_text()
    assert "somebody" not in text and "secret" not in text and '"target": "org/target"' in text


def test_nothing_half_written(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text("old")
    broken = replace(two_requests("bench.json"), settings={"K": float("nan")})
    with pytest.raises(ValueError):
        baseline.write(broken, path)
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 9}, "key schema_version is 9, expected 1; record the baseline again"),
        ({"columns": ["rounds", "mystery"]}, "key columns is"),
        ({"prompts": {"A": [1]}}, r"prompts.A: is \[1\], expected"),
    ],
)
def test_a_damaged_baseline_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "baseline.json"
    baseline.write(two_requests("sglang.jsonl"), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SpecdoctorError, match=message):
        read_results(path)


def test_the_profile_we_write_is_the_one_we_read(tmp_path: Path) -> None:
    result = select_arm(read_results(DATA / "two_requests.records.jsonl"), None)
    path = tmp_path / "speculation_profile.json"
    model_optimizer.write(replace(result, settings={"K": 3, "target": "models/tiny-target"}), path)
    written = json.loads(path.read_text())
    assert written["acceptance_length_histogram"] == {"1": 2, "2": 2, "4": 2}
    assert written["marginal_accept_rates"] == pytest.approx([2 / 3, 1 / 3, 1 / 3], abs=1e-6)
    assert written["conditional_accept_rates"] == pytest.approx([2 / 3, 1 / 2, 1.0], abs=1e-6)
    assert (written["mean_accept_length"], written["mean_accept_length_per_request"]) == (2.333333, 2.125)
    assert written["validation"]["mean_consistency"]["passed"]
    assert written["validation"]["marginal_monotonicity"] == {"passed": True, "violations": []}
    expected = json.loads((DATA / "two_requests.speculation_profile.json").read_text())
    assert written.keys() == expected.keys()
    (back,) = read_results(path)
    assert (back.pooled.rounds, back.pooled.committed, back.histogram) == (6, 14, [0, 2, 2, 0, 2])
    assert back.estimate("tau_step").value == pytest.approx(7 / 3, abs=1e-6)


def test_a_profile_whose_vector_is_too_short_for_its_mean_says_so() -> None:
    result = select_arm(read_results(DATA / "two_requests.records.jsonl"), None)
    written = model_optimizer.profile(replace(result, settings={"K": 2}))
    assert not written["validation"]["mean_consistency"]["passed"]


def test_a_profile_from_marginal_rates_alone() -> None:
    result = two_requests("bench.json")
    written = model_optimizer.profile(result)
    assert (written["method"], written["block_size"]) == ("dspark", 3)
    assert written["marginal_accept_rates"] == pytest.approx([5 / 6, 3 / 6, 2 / 6], abs=1e-6)
    # The marginals are not cut at EOS while the mean is: its own check notices, and a reader is warned.
    assert written["acceptance_length_histogram"] is None
    assert not written["validation"]["mean_consistency"]["passed"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": {}}, "K is None, expected the proposal length"),
        ({"histogram": None, "marginal": None}, "has neither rounds by length nor marginal rates"),
    ],
)
def test_a_profile_that_cannot_be_made_is_refused(change: dict[str, Any], message: str) -> None:
    result = select_arm(read_results(DATA / "two_requests.records.jsonl"), None)
    with pytest.raises(SpecdoctorError, match=message):
        model_optimizer.profile(replace(result, **change))
