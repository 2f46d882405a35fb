"""`check-nan`: planted rows of -inf, overflow and NaN weights are named with their module; a healthy pair is silent."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from specdoctor.checks.finding import Finding
from specdoctor.checks.numerics_case import NumericsCase
from specdoctor.checks.registry import family, run_checks
from specdoctor.cli.app import app
from specdoctor.drafters.load import load_drafter
from specdoctor.engine.target import Target
from specdoctor.errors import ExitCode
from specdoctor.kernels.tree_mask import additive_mask, tree_attention_mask
from specdoctor.measure.numerics import NumericsPlan, run_numerics
from specdoctor.measure.prompts import Prompt

PROMPTS = [Prompt("a", "code", list(b"def add(a, b):\n    "), ""), Prompt("b", "chat", list(b"Once upon a time "), "")]
DRAFTER = "deepspec-dspark-vanilla"
PARENTS = [-1, 0, 0, 1, 1, 2, 2]
NORM = "layers.1.input_layernorm.weight"


def run_cli(*args: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["check-nan", *args, "--json", "-"])
    return result.exit_code, json.loads(result.stdout) if result.stdout.startswith("{") else {"error": result.output}


def edited(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def of_code(document: dict[str, Any], code: str) -> list[dict[str, Any]]:
    return [finding for finding in document["findings"] if finding["code"] == code]


def options(target: Path, draft: Path | None = None, *more: str, dtypes: str = "float32,float16") -> list[str]:
    pair = ["--target", str(target), *(["--draft", str(draft)] if draft else [])]
    few = ["--max-prompts", "2", "--max-new-tokens", "16", "--device", "cpu"]
    return [*pair, "--template", "bytes", *few, "--dtypes", dtypes, *more]


class TestHealthyPair:
    @pytest.mark.parametrize("drafter", [DRAFTER, "deepspec-eagle3", "zlab-dflash"])
    def test_nothing_is_found(self, golden: Path, drafter: str) -> None:
        code, document = run_cli(*options(golden / "target", golden / drafter, dtypes="float32,bfloat16,float16"))
        assert (code, document["findings"]) == (ExitCode.OK, [])
        assert [run["dtype"] for run in document["dtypes"]] == ["float32", "bfloat16", "float16"]
        for run in document["dtypes"]:
            assert run["births"] == {} and run["rows_that_see_nothing"] == [] and run["error"] is None
            assert run["tau_step"] > 1.0 and run["rounds"] > 10 and run["overflow_hidden_in"] == []
        layers = {row["layer"]: row for row in document["headroom"]["layers"]}
        assert document["headroom"]["measured_in"] == "float32"
        assert {f"target: model.layers.{i}" for i in range(6)} < set(layers) and "drafter" in "".join(layers)
        assert all(row["headroom_in_float16"] > 100 for row in layers.values())

    def test_the_target_alone_and_the_report(self, golden: Path) -> None:
        result = CliRunner().invoke(app, ["check-nan", *options(golden / "target", dtypes="float32")])
        assert result.exit_code == ExitCode.OK
        assert "nothing found" in result.stdout and "Headroom in float16, measured in float32" in result.stdout

    def test_weights_only_runs_nothing(self, golden: Path) -> None:
        code, document = run_cli("--target", str(golden / "target"), "--weights-only")
        assert (code, document["findings"], document["dtypes"]) == (0, [], [])
        assert [check["code"] for check in document["checks"]] == ["SD401"]


class TestPlantedFaults:
    def test_a_nan_weight_of_the_drafter(self, golden: Path, tmp_path: Path) -> None:
        def plant(tensors: dict[str, Tensor]) -> None:
            tensors[NORM][3] = torch.nan

        folder = edited(golden / DRAFTER, tmp_path / "drafter", plant)
        code, document = run_cli(*options(golden / "target", folder))
        assert code == ExitCode.FINDINGS
        (static,) = of_code(document, "SD401")
        assert static["where"]["tensor"] == NORM and static["where"]["file"].endswith("model.safetensors")
        assert static["evidence"]["nan"] == 1 and static["severity"] == "error"
        (birth,) = of_code(document, "SD402")
        assert birth["where"] == {"side": "drafter", "module": "backbone.layers.1.input_layernorm"}
        assert birth["evidence"]["weight"] == f"drafter: backbone.{NORM}" and birth["evidence"]["cause"] == "weight"
        assert birth["evidence"]["dtypes"] == ["float32", "float16"] and birth["evidence"]["finite_in"] == []
        assert [run["tau_step"] for run in document["dtypes"]] == [1.0, 1.0]  # what it costs

    def test_a_nan_weight_of_the_target(self, golden: Path, tmp_path: Path) -> None:
        def plant(tensors: dict[str, Tensor]) -> None:
            tensors["model.layers.2.mlp.down_proj.weight"][5, 7] = torch.inf

        folder = edited(golden / "target", tmp_path / "target", plant)
        _, document = run_cli(*options(folder, golden / DRAFTER, dtypes="float32"))
        (birth,) = of_code(document, "SD402")  # the drafter, which is given NaN, is not blamed
        assert birth["where"] == {"side": "target", "module": "model.layers.2.mlp.down_proj"}
        assert birth["evidence"]["row"] == 0 and "prefill" in birth["evidence"]["phase"]
        assert of_code(document, "SD401")[0]["evidence"]["inf"] == 1

    def test_an_overflow_layer_of_the_drafter(self, golden: Path, tmp_path: Path) -> None:
        """Scaled before a norm: the same numbers in float32 and bfloat16, infinity in float16."""

        def plant(tensors: dict[str, Tensor]) -> None:
            tensors["fc.weight"] *= 3e4

        folder = edited(golden / DRAFTER, tmp_path / "drafter", plant)
        code, document = run_cli(*options(golden / "target", folder, dtypes="float32,bfloat16,float16"))
        assert code == ExitCode.FINDINGS
        (birth,) = of_code(document, "SD402")
        assert birth["where"] == {"side": "drafter", "module": "backbone.fc"}
        evidence = birth["evidence"]
        assert (evidence["cause"], evidence["dtypes"]) == ("overflow", ["float16"])
        assert evidence["finite_in"] == ["float32", "bfloat16"] and birth["fault"] == "numerics.dtype-overflow"
        (lost,) = of_code(document, "SD405")
        assert lost["where"]["dtype"] == "float16" and lost["evidence"]["reference"] == "float32"
        taus = {run["dtype"]: run["tau_step"] for run in document["dtypes"]}
        assert taus["float16"] < min(taus["float32"], taus["bfloat16"])

    def test_an_overflow_layer_of_the_target(self, golden: Path, tmp_path: Path) -> None:
        def plant(tensors: dict[str, Tensor]) -> None:
            tensors["model.layers.4.mlp.down_proj.weight"] *= 2e5

        folder = edited(golden / "target", tmp_path / "target", plant)
        _, document = run_cli(*options(folder))
        (birth,) = of_code(document, "SD402")
        assert birth["where"]["side"] == "target" and birth["where"]["module"].startswith("model.layers.4.mlp")
        assert birth["evidence"]["dtypes"] == ["float16"]
        kinds = {finding["evidence"]["examples"][0]["tensor"] for finding in of_code(document, "SD401")}
        assert kinds == {"model.layers.4.mlp.down_proj.weight"}  # far from its siblings

    def test_too_near_to_overflow(self, golden: Path, tmp_path: Path) -> None:
        _, sound = run_cli(*options(golden / "target", golden / DRAFTER, dtypes="float32"))
        rows = {row["module"]: row["largest"] for row in sound["headroom"]["layers"]}
        peak = rows["drafter: backbone.fc"]

        def plant(tensors: dict[str, Tensor]) -> None:
            tensors["fc.weight"] *= 45000 / peak

        folder = edited(golden / DRAFTER, tmp_path / "drafter", plant)
        code, document = run_cli(*options(golden / "target", folder, dtypes="float32"))
        (finding,) = document["findings"]
        assert (code, finding["code"], finding["severity"]) == (1, "SD403", "warning")
        assert finding["where"] == {"side": "drafter", "module": "backbone.fc"}
        assert finding["evidence"]["headroom"] == pytest.approx(65504 / 45000, rel=0.01)

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_a_row_of_infinity_in_the_mask_of_one_layer(self, golden: Path, dtype: str) -> None:
        def make(dtype: str) -> tuple[Target, None]:
            target = Target.load(golden / "target", "cpu", dtype)
            compute, calls = target.attention.compute, [0]

            def spoiled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *rest: Any) -> Tensor:
                calls[0] += 1
                if calls[0] % 6 == 4:  # layer 3
                    mask = mask.clone()
                    mask[:, :, -1] = -torch.inf
                return compute(q, k, v, mask, *rest)

            target.attention = replace(target.attention, compute=spoiled)
            return target, None

        found = findings_of(make, [dtype])
        assert [f.code for f in found] == ["SD402", "SD404"]
        birth, masked = found
        module = {"side": "target", "module": "model.layers.3.self_attn"}
        assert birth.where == module and birth.evidence["operation"] == "softmax"
        assert birth.evidence["row"] == len(PROMPTS[0].ids) - 1  # the last row of the prefill
        assert masked.where == module and masked.evidence["gives"] == "nan"
        assert masked.evidence["cured_by_-65504"] is True and "with -65504 in place of -inf" in masked.title


def findings_of(make: Callable[[str], Any], dtypes: list[str]) -> list[Finding]:
    plan = NumericsPlan(PROMPTS, probed=1, max_new_tokens=8)
    return list(run_checks(family("SD4"), NumericsCase([], list(run_numerics(make, dtypes, plan)))))


class TestOwnMask:
    def saved(self, values: Tensor, folder: Path) -> list[str]:
        torch.save(values, folder / "mask.pt")
        return ["--mask", str(folder / "mask.pt"), "--parents", str(PARENTS)]

    def test_a_right_mask_is_silent(self, golden: Path, tmp_path: Path) -> None:
        right = torch.cat([torch.ones(7, 4, dtype=torch.bool), tree_attention_mask(PARENTS)], dim=1)
        for values in (right, additive_mask(right, torch.float16), torch.zeros(7, 11).masked_fill_(~right, -torch.inf)):
            code, document = run_cli(*options(golden / "target", None, *self.saved(values, tmp_path)))
            assert (code, document["findings"]) == (0, [])

    def test_a_row_of_infinity_is_named_and_cured(self, golden: Path, tmp_path: Path) -> None:
        values = additive_mask(tree_attention_mask(PARENTS), torch.float32)
        values[4] = -torch.inf
        code, document = run_cli(*options(golden / "target", None, *self.saved(values, tmp_path), dtypes="float16"))
        assert code == ExitCode.FINDINGS
        (birth,), (masked,) = of_code(document, "SD402"), of_code(document, "SD404")
        assert birth["where"]["module"] == masked["where"]["module"] == "model.layers.0.self_attn"
        assert birth["evidence"]["row"] == masked["evidence"]["row"] == 4
        assert birth["evidence"]["phase"] == "tree with the mask given"
        assert masked["evidence"]["cured_by_-65504"] is True

    def test_a_row_hidden_by_1e9_is_infinite_in_float16_only(self, golden: Path, tmp_path: Path) -> None:
        values = torch.zeros(7, 7).masked_fill_(~tree_attention_mask(PARENTS), -1e9)
        values[2] = -1e9
        _, document = run_cli(*options(golden / "target", None, *self.saved(values, tmp_path)))
        gives = {f["evidence"]["gives"]: f["evidence"]["dtypes"] for f in of_code(document, "SD404")}
        assert gives == {"all columns alike": ["float32"], "nan": ["float16"]}


class TestBadInput:
    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (["--dtypes", "float8"], "--dtypes float8: expected some of float32, bfloat16, float16"),
            (["--dtypes", ","], "--dtypes: names none"),
            (["--mask", "m.pt"], "--mask: expected --parents beside it"),
            (["--mask", "m.pt", "--parents", "[-1]", "--weights-only"], "--weights-only makes none"),
            (["--mask", "m.pt", "--parents", "[-1]", "--template", "bytes"], "m.pt: no such file"),
            (["--draft", "nowhere/at/all"], "nowhere/at/all: no such folder"),
            ([], "the target has no tokenizer files"),
        ],
    )
    def test_one_line(self, more: list[str], message: str, golden: Path) -> None:
        code, document = run_cli("--target", str(golden / "target"), *more)
        assert code == ExitCode.USAGE and message in document["error"] and document["error"].count("\n") == 1

    def test_no_such_device(self, golden: Path) -> None:
        code, _ = run_cli("--target", str(golden / "target"), "--device", "cuda:99")
        assert code == ExitCode.ENVIRONMENT

    def test_a_dtype_that_cannot_be_run_leaves_the_others(self, golden: Path) -> None:
        def make(dtype: str) -> Any:
            if dtype == "float16":
                raise NotImplementedError("\"addmm\" not implemented for 'Half'")
            target = Target.load(golden / "target", "cpu", dtype)
            return target, load_drafter(golden / DRAFTER, target)

        plan = NumericsPlan(PROMPTS[:1], probed=1, max_new_tokens=4)
        refused, fine = run_numerics(make, ["float16", "float32"], plan)
        assert "addmm" in refused.error and fine.error == "" and fine.acceptance is not None
