"""`check-mask --target`: the rows of a real model with faults planted in attention, cache and positions."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_family, tiny_target
from torch import Tensor
from typer.testing import CliRunner

from specdoctor.checks.finding import Finding
from specdoctor.checks.hand_worked_trees import load_hand_worked_trees
from specdoctor.checks.mask_case import MaskCase
from specdoctor.checks.registry import family, run_checks
from specdoctor.checks.tree_observation import RowLayout
from specdoctor.cli.app import app
from specdoctor.engine.target import Target
from specdoctor.errors import EnvironmentMissingError, ExitCode
from specdoctor.formats.sources import resolve_model
from specdoctor.kernels.tree_mask import tree_attention_mask

PARENTS = [-1, 0, 0, 1, 1, 2, 2]
RIGHT = tree_attention_mask(PARENTS)
TREES = load_hand_worked_trees()


def layouts(*names: str) -> list[RowLayout]:
    chosen = [tree for tree in TREES if not names or tree.name in names]
    return [RowLayout.of(tree.name, tree.parents, tree.requests) for tree in chosen]


def findings_on(target: Target, *names: str) -> list[Finding]:
    return list(run_checks(family("SD5"), MaskCase(TREES, target, layouts(*names))))


def attend_otherwise(target: Target, change: Callable[[Tensor, int], None]) -> None:
    """Let `change(mask, call)` spoil the additive mask [R, 1, n, L] of every attention call."""
    compute, calls = target.attention.compute, [0]

    def spoiled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *rest: Any) -> Tensor:
        mask = mask.clone()
        change(mask, calls[0])
        calls[0] += 1
        return compute(q, k, v, mask, *rest)

    target.attention = replace(target.attention, compute=spoiled)


BINARY = "binary, depth 3"


class TestRealModel:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_a_sound_target_is_clean(self, dtype: torch.dtype) -> None:
        assert findings_on(Target(tiny_target(vocab=61).to(dtype))) == []

    @pytest.mark.parametrize("family_name", ["Gemma3Text", "GptOss"])
    def test_windows_and_experts_are_no_fault(self, family_name: str) -> None:
        assert findings_on(Target(tiny_family(family_name)), BINARY, "forest of two requests, interleaved") == []

    def test_lower_triangle_left_open(self) -> None:
        target = Target(tiny_target(vocab=61))

        def open_below(mask: Tensor, call: int) -> None:
            n = mask.shape[-2]
            start = int((mask[0, 0, 0] == 0).sum()) - 1  # column of the first row
            mask[:, :, :, start : start + n][..., torch.ones(n, n, dtype=torch.bool).tril()] = 0

        attend_otherwise(target, open_below)
        (finding,) = [f for f in findings_on(target, BINARY) if f.code == "SD502"]
        assert finding.subject == "causal instead of tree" and "row 2 of the tree 'binary, depth 3'" in finding.title

    def test_a_leak_in_a_deeper_layer_alone(self) -> None:
        target = Target(tiny_target(vocab=61, layers=3))

        def leak(mask: Tensor, call: int) -> None:
            if call % 3 == 2 and mask.shape[-2] == 8:  # the last layer
                start = int((mask[0, 0, 0] == 0).sum()) - 1
                mask[:, :, 3, start + 2] = 0  # node 2 sees node 1

        attend_otherwise(target, leak)
        (finding,) = [f for f in findings_on(target, BINARY) if f.code == "SD502"]
        assert finding.subject == "sibling visible" and "row 2 of" in finding.title and "row 1;" in finding.title

    def test_a_hidden_ancestor(self) -> None:
        target = Target(tiny_target(vocab=61))

        def hide(mask: Tensor, call: int) -> None:
            if mask.shape[-2] == 8:
                start = int((mask[0, 0, 0] == 0).sum()) - 1
                mask[:, :, 4, start + 1] = mask.min()  # node 3 loses node 0

        attend_otherwise(target, hide)
        (finding,) = [f for f in findings_on(target, BINARY) if f.code == "SD502"]
        assert finding.subject == "ancestor hidden"
        assert finding.evidence["examples"][0]["row"] == "3" and finding.evidence["examples"][0]["token of"] == "0"

    def test_stale_columns(self) -> None:
        target = Target(tiny_target(vocab=61))

        def show_beyond(mask: Tensor, call: int) -> None:
            n = mask.shape[-2]
            start = int((mask[0, 0, 0] == 0).sum()) - 1
            mask[:, :, :, start + n] = 0  # what an earlier, longer draft left there

        attend_otherwise(target, show_beyond)
        assert "stale" in {f.subject for f in findings_on(target, BINARY) if f.code == "SD503"}

    def test_stale_bits_on_the_second_use_only(self) -> None:
        target = Target(tiny_target(vocab=61))

        def stale(mask: Tensor, call: int) -> None:
            start = int((mask[0, 0, 0] == 0).sum()) - 1
            if mask.shape[-2] == 8 and start > 11:  # below a kept path
                mask[:, :, 3, start + 2] = 0

        attend_otherwise(target, stale)
        found = findings_on(target, BINARY)
        assert not [f for f in found if f.code == "SD502"]
        assert "sibling visible on reused buffers only" in next(f for f in found if f.subject == "moves").title

    def test_rows_that_are_not_the_ones_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        target = Target(tiny_target(vocab=61))
        keep = target.cache.keep
        monkeypatch.setattr(target.cache, "keep", lambda slot, rows: keep(slot, range(len(rows))))
        (finding,) = findings_on(target, BINARY)
        assert (finding.code, finding.subject, finding.fault) == ("SD503", "kept", "engine.kv-rollback")

    def test_positions_by_row_instead_of_depth(self) -> None:
        target = Target(tiny_target(vocab=61))
        forward = target.model.forward

        def by_row(*args: Any, **kwargs: Any) -> Any:
            positions = kwargs["position_ids"]
            kwargs["position_ids"] = positions[:, :1] + torch.arange(positions.shape[1])
            return forward(*args, **kwargs)

        target.model.forward = by_row  # type: ignore[method-assign]
        found = findings_on(target, BINARY)
        assert "SD502" not in {f.code for f in found}  # who sees whom is right
        (finding,) = [f for f in found if f.code == "SD506"]
        assert finding.fault == "engine.position-offset" and "look at positions first" in finding.title

    def test_slots_are_given_back(self) -> None:
        target = Target(tiny_target(vocab=61))
        findings_on(target, "chain of five")
        assert set(target.cache.lengths) == {0}

    def test_the_command_on_a_folder(self, tmp_path: Path) -> None:
        tiny_target(vocab=61).save_pretrained(tmp_path / "target")
        args = ["--target", str(tmp_path / "target"), "--device", "cpu", "--dtype", "float32"]
        args += ["--parents", str(PARENTS)]
        result = CliRunner().invoke(app, ["check-mask", *args, "--json", "-"])
        code, document = result.exit_code, json.loads(result.stdout)
        assert (code, document["findings"]) == (ExitCode.OK, [])
        (tree,) = document["target"]["trees"]
        assert tree["moved"][1:] == ["1" + "".join("1" if seen else "." for seen in row) for row in RIGHT.tolist()]
        result = CliRunner().invoke(app, ["check-mask", *args])
        assert "rows that move" in result.stdout and "       6  1 1 . 1 . . . 1 \n" in result.stdout


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hand_worked_trees_on_the_real_target(dtype: str) -> None:
    try:
        folder = resolve_model("smollm2-135m")
    except EnvironmentMissingError as error:
        pytest.skip(str(error))
    assert findings_on(Target.load(folder, "cpu", dtype)) == []
