"""The SD2 and SD3 checks: each finds what was planted, names the place, and says nothing about a healthy checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_target, write_drafter

from specdoctor.checks.draft_examination import examine_draft
from specdoctor.checks.draft_places import by_pattern
from specdoctor.checks.registry import family, run_checks
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import Remark
from specdoctor.measure.inspect import Inspection, NoTensors, inspect_draft

Change = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "draft")


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_target().save_pretrained(folder)
    return folder


def keys(**changes: Any) -> Change:
    """Set config keys; None removes one."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    return change


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        values = load_file(path)
        edit(values)
        save_file(values, path)

    return change


def found(folder: Path, target: str = "") -> list[dict[str, Any]]:
    findings: list[dict[str, Any]] = examine_draft(str(folder), target)["findings"]
    return findings


def test_a_healthy_checkpoint_has_no_finding(folder: Path, target_folder: Path) -> None:
    assert found(folder) == found(folder, str(target_folder)) == []


@pytest.mark.parametrize(
    ("change", "place", "words"),
    [
        (keys(medusa_num_heads=4), {"file": "config.json", "key": "medusa_num_heads"}, "belongs to medusa"),
        (keys(speculators_model_type="eagle3"), {"file": "config.json", "key": "Qwen3DSparkModel"}, "speculators"),
        (keys(architectures=["DFlashDraftModel"]), {"file": "model.safetensors", "key": "markov_head."}, "z-lab"),
        (keys(architectures=["LlamaForCausalLMEagle3"]), {"file": "config.json", "key": "markov_rank"}, "EAGLE-3"),
        (
            tensors(lambda t: t.update({"candidate_selector.hidden_projection.weight": torch.ones(8, 64)})),
            {"file": "model.safetensors", "key": "candidate_selector."},
            "belongs to zlab-dflash2",
        ),
        (
            tensors(lambda t: t.update({"midlayer.hidden_norm.weight": torch.ones(64)})),
            {"file": "model.safetensors", "key": "midlayer."},
            "belongs to eagle3",
        ),
    ],
    ids=["medusa key", "speculators key", "class of z-lab", "class of EAGLE-3", "selector tensor", "midlayer tensor"],
)
def test_sd201_two_families_are_a_finding_and_no_guess(
    folder: Path, change: Change, place: dict[str, str], words: str
) -> None:
    change(folder)
    document = examine_draft(str(folder))
    assert document["family"] is document["spec"] is document["algorithm"] is None and not document["runs_here"]
    assert {f["code"] for f in document["findings"]} == {"SD201"}
    (finding,) = [f for f in document["findings"] if f["where"] == place]
    assert finding["severity"] == "error" and words in finding["title"]
    assert "EAGLE" not in (document["title"] or "")


def test_sd202_an_unknown_key_is_a_warning_that_names_it(folder: Path) -> None:
    keys(aux_norm_eps=1e-3, rope_interleave={"inner": 1}, transformers_version="5", vision_config=None)(folder)
    findings = found(folder)
    assert [(f["code"], f["severity"], f["where"]["key"]) for f in findings] == [
        ("SD202", "warning", "aux_norm_eps"),
        ("SD202", "warning", "rope_interleave"),
    ]
    assert findings[0]["title"] == "key aux_norm_eps is 0.001, and this format has no such key"


def test_sd202_keys_that_are_null_or_known_are_silent_but_listed(folder: Path) -> None:
    keys(transformers_version="5")(folder)
    config = json.loads((folder / "config.json").read_text()) | {"vision_config": None}
    (folder / "config.json").write_text(json.dumps(config))
    document = examine_draft(str(folder))
    assert document["findings"] == [] and document["ignored_keys"]["vision_config"] == "null"
    assert document["ignored_keys"]["transformers_version"] == "of the writer"


@pytest.mark.parametrize(
    ("settings", "key", "drafter", "target"),
    [
        ({"hidden": 32}, "hidden_size", 32, 64),
        ({"target_layers": 3}, "num_target_layers", 3, 2),
        ({"taps": (0, 4)}, "target_layer_ids", 5, 2),
        ({"vocab": 9}, "vocab_size", 9, 5),
        ({"config_changes": {"mask_token_id": 77}}, "mask_token_id", 77, 5),
    ],
)
def test_sd203_a_pair_that_does_not_fit(
    tmp_path: Path, target_folder: Path, settings: dict, key: str, drafter: int, target: int
) -> None:
    folder = write_drafter(tmp_path / "draft", **settings)
    assert found(folder) == []  # alone it is healthy
    findings = found(folder, str(target_folder))
    assert [(f["code"], f["severity"], f["where"]["key"]) for f in findings] == [("SD203", "error", key)]
    assert findings[0]["evidence"] == {"drafter": drafter, "target": target}
    assert str(folder) not in json.dumps(findings)


def test_sd203_sizes_of_a_multimodal_target_are_those_of_its_text_part(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    text = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 5}
    (target / "config.json").write_text(json.dumps({"model_type": "some-vl", "text_config": text}))
    assert found(folder, str(target)) == []
    (target / "config.json").write_text(json.dumps({"text_config": text | {"hidden_size": 128}}))
    assert [f["where"]["key"] for f in found(folder, str(target))] == ["hidden_size"]


def test_sd204_a_default_that_writers_do_not_share_is_information(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "draft", family="zlab", target_layers=4)
    keys(block_size=None)(folder)
    (finding,) = found(folder)
    assert (finding["code"], finding["severity"]) == ("SD204", "info") and finding["evidence"]["value"] == 16
    assert "z-lab and llama.cpp take 16, speculators 8" in finding["title"]


@pytest.mark.parametrize(("subject", "severity"), [("norm_before_residual", "warning"), ("block", "info")])
def test_sd204_a_flag_that_no_tensor_tells_is_a_warning(subject: str, severity: str) -> None:
    remark = Remark("unverified", "some/config.json", f"key {subject} is missing", subject=subject)
    (finding,) = run_checks(family("SD2"), Inspection("some", NoTensors(), remarks=[remark]))
    assert (finding.code, finding.severity) == ("SD204", severity)


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        (keys(mask_token_id=None), "mask_token_id", "key mask_token_id is missing, expected a whole number"),
        (keys(block_size=0), "block_size", "key block_size is 0, expected a whole number of 1 or more"),
        (keys(markov_head_type="cubic"), "markov_head_type", "'cubic', expected one of vanilla, gated, rnn"),
        (keys(rope_parameters=None), None, "neither rope_parameters.rope_theta nor rope_theta is there"),
    ],
)
def test_sd205_settings_that_the_format_does_not_allow(folder: Path, change: Change, key: str, words: str) -> None:
    change(folder)
    document = examine_draft(str(folder))
    (finding,) = document["findings"]
    assert (finding["code"], finding["severity"]) == ("SD205", "error") and words in finding["title"]
    assert finding["where"] == {"file": "config.json", **({"key": key} if key else {})}
    assert document["family"] == "deepspec" and document["spec"] is None and document["parts"]


def test_sd301_tensors_that_nothing_uses_are_one_finding_a_kind(folder: Path) -> None:
    extra = {f"layers.{i}.self_attn.q_proj.lora.weight": torch.ones(2) for i in (0, 1)} | {"aux_norm": torch.ones(3)}
    tensors(lambda t: t.update(extra))(folder)
    findings = found(folder)
    assert [(f["code"], f["where"]["tensor"], f["evidence"]["tensors"]) for f in findings] == [
        ("SD301", "aux_norm", 1),
        ("SD301", "layers.*.self_attn.q_proj.lora.weight", 2),
    ]
    parts = {part["name"]: part["parameters"] for part in examine_draft(str(folder))["parts"]}
    assert parts["not accounted for"] == 7


def test_sd302_missing_and_misshapen_tensors(folder: Path) -> None:
    def edit(values: dict[str, torch.Tensor]) -> None:
        del values["layers.0.mlp.up_proj.weight"], values["layers.1.mlp.up_proj.weight"]
        values["fc.weight"] = torch.ones(64, 192)

    tensors(edit)(folder)
    document = examine_draft(str(folder))
    missing, shape = document["findings"]
    assert missing["title"] == "layers.*.mlp.up_proj.weight: 2 tensors missing that the config promises"
    assert shape["title"] == "fc.weight has shape [64, 192], expected [64, 128] by its config"
    assert {missing["code"], shape["code"]} == {"SD302"} and not document["runs_here"]
    assert document["spec"]["taps"]["value"] == [1, 2]  # what is known is still shown


def test_fingerprints_do_not_depend_on_the_folder_or_the_numbers(tmp_path: Path) -> None:
    prints = []
    for name, value in (("a", 1), ("b", 2)):
        folder = write_drafter(tmp_path / name)
        keys(new_key=value, medusa_num_heads=None)(folder)
        tensors(lambda t: t.update(odd=torch.ones(2)))(folder)
        prints.append([f["fingerprint"] for f in found(folder)])
    assert prints[0] == prints[1] and len(set(prints[0])) == 2


def test_what_is_no_draft_checkpoint_or_is_cut_off_is_an_error_and_no_finding(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(SpecdoctorError, match="not a complete safetensors file"):
        inspect_draft(str(folder))
    with pytest.raises(SpecdoctorError, match="no such folder"):
        inspect_draft(str(folder / "nowhere"))


def test_patterns_replace_numbers_between_dots_only() -> None:
    assert by_pattern(["layers.0.a1.w", "layers.12.a1.w", "fc2.w", "0.0.linear.weight"]) == {
        "layers.*.a1.w": ["layers.0.a1.w", "layers.12.a1.w"],
        "fc2.w": ["fc2.w"],
        "*.*.linear.weight": ["0.0.linear.weight"],
    }


def test_a_check_that_crashes_is_a_finding() -> None:
    inspection = Inspection("x", NoTensors(), checkpoint=object())  # type: ignore[arg-type]
    codes = {(f.code, f.severity) for f in run_checks(family("SD3"), inspection)}
    assert codes == {("SD301", "crash"), ("SD302", "crash")}
