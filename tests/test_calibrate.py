"""`specdoctor calibrate` on a golden drafter made too sure, and the file it leaves: applied, foreign, stale, shown."""

import json
import logging
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from specdoctor.checks.draft_examination import examine_draft
from specdoctor.cli.app import app as root
from specdoctor.cli.calibrate import app
from specdoctor.drafters.block import BlockDrafter
from specdoctor.drafters.load import load_drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.formats.drafts.calibration_file import calibration_path, find_calibration
from specdoctor.formats.drafts.read import open_draft, read_draft
from specdoctor.formats.drafts.weights_hash import weights_hash
from specdoctor.metrics.accept_calibration import ConfidenceRounds, scaled
from specdoctor.metrics.temperature_scaling import (
    Grid,
)
from specdoctor.scheduling.confidence import confidence_threshold
from specdoctor.training.calibrate import split_by_prompt

GOLDEN = Path(__file__).parent / "data" / "golden"
DSPARK = GOLDEN / "deepspec-dspark-vanilla"


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(GOLDEN / "target", "cpu", "float32")


def text_prompts(folder: Path, count: int) -> Path:
    words = ("The weather in ", "def area(", "12 + 30 = ", "Dear Anna, thank ", "class Tree", "Once upon ", "1, 2, 3, ")
    rows = [
        {"id": f"p{i}", "category": ("code", "chat")[i % 2], "prompt": f"{words[i % 7]}{i * 37} "} for i in range(count)
    ]
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(result.exception, SpecdoctorError):
        raise result.exception
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A golden drafter whose head was made far too sure, calibrated by the command."""
    home = tmp_path_factory.mktemp("calibrated")
    drafter = Path(copytree(DSPARK, home / "drafter", ignore=lambda *_: ["expected_first_round.safetensors"]))
    tensors = load_file(drafter / "model.safetensors")
    for name in ("confidence_head.proj.weight", "confidence_head.proj.bias"):
        tensors[name] = tensors[name] * 12
    save_file(tensors, drafter / "model.safetensors")
    options = (
        "--target",
        GOLDEN / "target",
        "--template",
        "bytes",
        "--max-new-tokens",
        80,
        "--corpus",
        home / "corpus",
    )
    prompts = text_prompts(home, 24)
    output = run(drafter, *options, "--prompts", prompts, "--json", home / "out.json")
    return drafter, json.loads((home / "out.json").read_text()), output


def test_the_command_writes_what_it_found(calibrated: tuple[Path, dict[str, Any], str]) -> None:
    drafter, result, output = calibrated
    stored = json.loads((drafter / "calibration.json").read_text())
    assert result["written"] and result["exit_code"] == 0 and result["path"] == str(drafter / "calibration.json")
    assert {key: result[key] for key in stored if key != "kind"} == {k: v for k, v in stored.items() if k != "kind"}
    assert (stored["schema_version"], stored["K"], len(stored["temperatures"])) == (1, 5, 5)
    assert stored["temperatures"][0] > 1.5, "a head made too sure"
    assert stored["draft"]["weights_hash"] == weights_hash(open_draft(drafter)[1])
    assert stored["target"]["target_hash"] and stored["sampling"]["temperature"] == 0
    assert (stored["fitted"]["prompts"], stored["held_out"]["prompts"]) == (12, 12)
    assert stored["fitted"]["texts_hash"] != stored["held_out"]["texts_hash"]
    mean = stored["held_out"]["mean_ece"]
    assert mean["after"]["value"] < mean["before"]["value"] and mean["before"]["low"] is not None
    for row in stored["held_out"]["positions"]:
        assert row["after"]["conditional_auroc"]["value"] == row["before"]["conditional_auroc"]["value"]
    assert "ECE after" in output and "written" in output and "\x1b[" not in output
    assert not list(drafter.glob(".calibration*")), "nothing half-written stays behind"


def test_a_second_run_finds_the_same_though_the_file_is_applied(calibrated: tuple[Path, dict[str, Any], str]) -> None:
    """Fitted on what the head itself says, not on what an earlier calibration made of it."""
    drafter, first, _ = calibrated
    home = drafter.parent
    options = (
        "--target",
        GOLDEN / "target",
        "--template",
        "bytes",
        "--max-new-tokens",
        80,
        "--corpus",
        home / "corpus",
    )
    run(
        drafter,
        *options,
        "--prompts",
        home / "prompts.jsonl",
        "--json",
        home / "b.json",
        "--output",
        home / "b-cal.json",
    )
    again = json.loads((home / "b.json").read_text())
    for key in ("temperatures", "fitted", "held_out"):
        assert again[key] == first[key]


def test_it_is_applied_and_changes_no_token(calibrated: tuple[Path, dict[str, Any], str], target: Target) -> None:
    folder, result, _ = calibrated
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, BlockDrafter) and drafter.temperatures is not None
    np.testing.assert_allclose(drafter.temperatures, result["temperatures"], rtol=1e-6)
    for sampling in (Sampling(), Sampling(0.9, seed=5)):
        found = {}
        for name, temperatures in (("with", result["temperatures"]), ("without", None)):
            drafter.calibrate(temperatures)
            sequences = [Sequence(list(text.encode()), max_new_tokens=40, sampling=sampling) for text in ("ab", "x = ")]
            Engine(target, drafter).generate(sequences)
            found[name] = sequences
        for one, other in zip(found["with"], found["without"], strict=True):
            assert one.ids == other.ids
            for a, b in zip(one.records, other.records, strict=True):
                assert (a.accepted, a.committed_ids, a.outcomes) == (b.accepted, b.committed_ids, b.outcomes)
                assert a.confidence != b.confidence
                raw = np.array(b.confidence)
                safe = raw < 0.999  # a float32 nearer to 1 does not hold its logit
                logit = np.log(raw[safe]) - np.log1p(-raw[safe])
                expected = scaled(logit, np.array(result["temperatures"])[: len(raw)][safe])
                np.testing.assert_allclose(np.array(a.confidence)[safe], expected, atol=2e-3)


def test_drafts_and_their_distributions_are_equal_bit_for_bit(
    calibrated: tuple[Path, dict[str, Any], str], target: Target
) -> None:
    folder, result, _ = calibrated
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, BlockDrafter)
    drafts = []
    for temperatures in (result["temperatures"], None):
        drafter.calibrate(temperatures)
        sequence = Sequence(list(b"for i in "), max_new_tokens=8, sampling=Sampling(0.8, seed=2))
        engine = Engine(target, drafter)
        with torch.inference_mode():
            engine.prefill([sequence])
            drafts.append(engine.drafts([sequence], 5)[0])
            engine.release([sequence])
    one, other = drafts
    assert torch.equal(one.tokens, other.tokens) and torch.equal(one.probs, other.probs)
    assert not torch.equal(one.confidence, other.confidence)


def test_accept_and_decoding_cut_at_the_same_drafts(
    calibrated: tuple[Path, dict[str, Any], str], target: Target, tmp_path: Path
) -> None:
    """`accept` sees the calibrated confidences that decoding sees, and still reports the head without them."""
    folder, result, _ = calibrated
    prompts = text_prompts(tmp_path, 4)
    arguments = ["accept", "--target", GOLDEN / "target", "--draft", folder, "--template", "bytes"]
    arguments += ["--prompts", prompts, "--max-new-tokens", 60, "--corpus", tmp_path / "corpus", "--no-what-if"]
    arguments += ["--confidence-threshold", 0.9, "--json", tmp_path / "a.json"]
    done = CliRunner().invoke(root, [str(a) for a in arguments])
    assert done.exit_code == 0, done.output
    (arm,) = json.loads((tmp_path / "a.json").read_text())["arms"]
    rows = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    counts = {}
    for name in ("calibrated", "raw"):
        drafter = load_drafter(folder, target)
        assert isinstance(drafter, BlockDrafter)
        if name == "raw":
            drafter.calibrate(None)
        real = [Sequence(list(text.encode()), max_new_tokens=60, stop_ids=target.stop_ids) for text in rows]
        Engine(target, drafter, schedule=confidence_threshold(0.9)).generate(real)
        counts[name] = sum(len(s.records) for s in real)
    assert arm["tau_step"]["n"] == counts["calibrated"] != counts["raw"]
    report = arm["calibration"]
    np.testing.assert_allclose(report["temperatures"], result["temperatures"], rtol=1e-6)
    assert report["before"]["mean"] > report["after"]["mean"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"K": 7}, "key K is 7 with 5 temperatures, but the drafter beside it makes 5"),
        ({"temperatures": [1.0, 2.0]}, "key K is 5 with 2 temperatures"),
        ({"draft": {"weights_hash": "0" * 32}}, "draft.weights_hash is 00000000"),
        ({"draft": None}, "draft.weights_hash is missing"),
        ({"temperatures": [1, 1, 1, 1, -2]}, "list of numbers `temperatures`, each above 0"),
        ({"temperatures": "hot"}, "list of numbers `temperatures`"),
    ],
)
def test_a_foreign_file_is_one_warning_and_one_finding(
    calibrated: tuple[Path, dict[str, Any], str],
    target: Target,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: dict[str, Any],
    words: str,
) -> None:
    folder = Path(copytree(calibrated[0], tmp_path / "drafter"))
    path = folder / "calibration.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with caplog.at_level(logging.WARNING):
        drafter = load_drafter(folder, target)
    assert isinstance(drafter, BlockDrafter) and drafter.temperatures is None
    (record,) = caplog.records
    assert words in record.getMessage() and "specdoctor calibrate" in record.getMessage()
    assert "\n" not in record.getMessage()
    document = examine_draft(str(folder))
    (finding,) = document["findings"]
    assert finding["code"] == "SD206" and finding["severity"] == "warning" and words in finding["title"]
    assert document["calibration"]["applied"] is False and document["calibration"]["problem"]


def test_retrained_weights_make_it_stale(
    calibrated: tuple[Path, dict[str, Any], str], target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One value of the smallest tensor is enough; another sharding of the same values is not."""
    folder = Path(copytree(calibrated[0], tmp_path / "drafter"))
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    save_file({name: tensors[name] for name in names[::2]}, folder / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, folder / "model-00002-of-00002.safetensors")
    assert find_calibration(read_draft(folder)).problem == ""
    tensors["confidence_head.proj.bias"] += 0.01
    save_file({name: tensors[name] for name in names[::2]}, folder / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, folder / "model-00002-of-00002.safetensors")
    with caplog.at_level(logging.WARNING):
        assert load_drafter(folder, target).temperatures is None
    assert "not fitted on these weights" in caplog.text


def test_inspect_shows_a_good_file_and_finds_nothing(calibrated: tuple[Path, dict[str, Any], str]) -> None:
    document = examine_draft(str(calibrated[0]))
    assert document["findings"] == [] and document["calibration"]["applied"]
    assert document["calibration"]["temperatures"] == calibrated[1]["temperatures"]
    shown = CliRunner().invoke(root, ["inspect", str(calibrated[0])])
    assert shown.exit_code == 0 and "calibration.json, confidence divided by temperatures" in shown.output
    assert "held-out ECE" in shown.output
    assert examine_draft(str(DSPARK))["calibration"] is None


def test_a_drafter_without_a_head_has_nothing_to_calibrate(tmp_path: Path) -> None:
    prompts = text_prompts(tmp_path, 4)
    with pytest.raises(SpecdoctorError, match="without a confidence head"):
        run(GOLDEN / "deepspec-dflash", "--target", GOLDEN / "target", "--prompts", prompts)
    folder = Path(copytree(GOLDEN / "deepspec-dflash", tmp_path / "drafter"))
    (folder / "calibration.json").write_text('{"temperatures": [1, 1, 1, 1, 1]}')
    (finding,) = examine_draft(str(folder))["findings"]
    assert "no confidence head" in finding["title"]


def test_too_few_prompts_and_bad_options_are_one_line(tmp_path: Path) -> None:
    options = ("--target", GOLDEN / "target", "--template", "bytes", "--max-new-tokens", 8, "--corpus", tmp_path / "c")
    with pytest.raises(SpecdoctorError, match="expected at least 2 on each side") as caught:
        run(DSPARK, *options, "--prompts", text_prompts(tmp_path, 3), "--output", tmp_path / "x.json")
    assert caught.value.exit_code == ExitCode.NOTHING and not (tmp_path / "x.json").exists()
    with pytest.raises(SpecdoctorError, match="--held-out"):
        run(DSPARK, *options, "--prompts", text_prompts(tmp_path, 3), "--held-out", 1.5)
    with pytest.raises(SpecdoctorError, match="folder that exists"):
        run(DSPARK, *options, "--prompts", text_prompts(tmp_path, 3), "--output", tmp_path / "no" / "x.json")


def test_nothing_is_written_when_held_out_prompts_speak_against_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdoctor.metrics.temperature_scaling import Fit
    from specdoctor.training import calibrate

    def harmful(rounds: ConfidenceRounds, grid: Grid) -> Fit:
        return Fit([0.2, 0.2, 0.2, 0.2, 1.0], [0.0] * 4 + [None])

    monkeypatch.setattr(calibrate, "fit_sequentially", harmful)
    options = ("--target", GOLDEN / "target", "--template", "bytes", "--max-new-tokens", 40, "--corpus", tmp_path / "c")
    code = int(ExitCode.INCONCLUSIVE)
    output = run(DSPARK, *options, "--prompts", text_prompts(tmp_path, 8), "--output", tmp_path / "x.json", code=code)
    assert "not written" in output and not (tmp_path / "x.json").exists()
    assert "0.200 (end)" in output and "end: at the grid's end: the head is wrong" in output
    assert "1 (too few)" in output and "too few: of the rounds fitted on, fewer than 20 had" in output


def test_the_split_is_by_prompt_within_categories_and_repeatable() -> None:
    class One:
        def __init__(self, prompt: str, category: str) -> None:
            self.prompt_id, self.category = prompt, category

    texts: Any = [One(f"{category}-{i}", category) for category in ("a", "b", "c") for i in range(10) for _ in range(2)]
    fitted, held = split_by_prompt(texts, 0.3)
    sides = [{text.prompt_id for text in side} for side in (fitted, held)]
    assert not sides[0] & sides[1] and len(sides[1]) == 9 and len(fitted) + len(held) == len(texts)
    assert {category: sum(p.startswith(category) for p in sides[1]) for category in "abc"} == dict.fromkeys("abc", 3)
    assert split_by_prompt(texts[::-1], 0.3)[1][0].prompt_id in sides[1]
    assert {t.prompt_id for t in split_by_prompt(texts, 0.3, seed=1)[1]} != sides[1]
    single: Any = [One(f"{i}", f"category {i}") for i in range(20)]  # no category has two prompts
    assert len(split_by_prompt(single, 0.5)[1]) == 10


def test_a_gguf_has_its_calibration_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "draft.Q8_0.gguf").write_bytes(b"GGUF")
    assert calibration_path(tmp_path / "draft.Q8_0.gguf") == tmp_path / "draft.Q8_0.calibration.json"
    assert calibration_path(tmp_path) == tmp_path / "draft.Q8_0.calibration.json", "the only GGUF of a folder"
    assert calibration_path(DSPARK) == DSPARK / "calibration.json"
