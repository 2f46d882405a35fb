"""`check-mask`: hand-worked trees, and masks dumped from an engine with mistakes planted in them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from specdoctor.checks import sd501_hand_worked_trees
from specdoctor.checks.hand_worked_trees import engine_acceptance, load_hand_worked_trees
from specdoctor.checks.mask_case import MaskCase
from specdoctor.cli.app import app
from specdoctor.errors import ExitCode
from specdoctor.kernels.tree_mask import additive_mask, checked_parents, tree_attention_mask

PARENTS = [-1, 0, 0, 1, 1, 2, 2]
SHUFFLED = [3, 6, 0, -1, 6, 0, 3]
RIGHT = tree_attention_mask(PARENTS)
N, CONTEXT = len(PARENTS), 5
TREES = load_hand_worked_trees()


def run_cli(*args: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["check-mask", *args, "--json", "-"])
    return result.exit_code, json.loads(result.stdout) if result.stdout.startswith("{") else {"error": result.output}


def kinds(document: dict[str, Any]) -> list[str]:
    return [finding["evidence"]["kind"] for finding in document["findings"] if finding["severity"] != "info"]


def with_context(mask: Tensor, columns: int = CONTEXT) -> Tensor:
    return torch.cat([torch.ones(len(mask), columns, dtype=torch.bool), mask], dim=1)


def changed(mask: Tensor, row: int, column: int) -> Tensor:
    mask = mask.clone()
    mask[row, column] ^= True
    return mask


def saved(mask: Tensor, path: Path) -> Path:
    if path.suffix == ".npy":
        np.save(path, mask.numpy())
    elif path.suffix == ".pt":
        torch.save(mask, path)
    else:
        save_file({"attn_mask": mask.contiguous()}, path)
    return path


class TestHandWorkedTrees:
    def test_every_required_shape_is_there(self) -> None:
        parents = {tree.name: list(tree.parents) for tree in TREES}
        assert parents["binary, depth 3"] == PARENTS and parents["binary, depth 3, shuffled"] == SHUFFLED
        assert sum("chain" in name for name in parents) == 2 and sum("star" in name for name in parents) == 2
        assert [max(tree.requests) + 1 for tree in TREES if "forest" in tree.name] == [2, 3]
        for tree in TREES:
            checked_parents(tree.parents)
            n = len(tree.parents)
            assert tree.visible.shape == (n, n) and len(tree.positions) == len(tree.tokens) == n and tree.acceptance

    def test_the_command_is_clean(self) -> None:
        code, document = run_cli()
        assert (code, document["findings"]) == (ExitCode.OK, [])
        assert [check["code"] for check in document["checks"]] == ["SD501"]
        assert len(document["hand_worked_trees"]) == len(TREES) >= 10

    @pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
    def test_any_changed_entry_is_found(self, tree: Any) -> None:
        """Negative control: the comparison sees every single entry, in every form of the mask."""
        for row in range(len(tree.parents)):
            wrong = replace(tree, visible=changed(tree.visible, row, (row + 1) % len(tree.parents)))
            findings = sd501_hand_worked_trees.run(MaskCase([wrong]))
            forms = {finding.subject for finding in findings}
            assert forms >= {"boolean mask", "ancestor bits", "mask of flex attention", "additive mask of float16"}

    def test_wrong_positions_and_paths_are_found(self) -> None:
        tree = TREES[0]
        moved = replace(tree, positions=tuple(p + 1 for p in tree.positions))
        assert [f.subject for f in sd501_hand_worked_trees.run(MaskCase([moved]))] == ["positions"]
        case = tree.acceptance[0]
        other = replace(tree, acceptance=(replace(case, path=[[0]]),))
        (finding,) = sd501_hand_worked_trees.run(MaskCase([other]))
        assert finding.subject == "acceptance 0" and finding.code == "SD501"

    def test_acceptance_of_a_shuffled_tree(self) -> None:
        tree = next(tree for tree in TREES if tree.parents == tuple(SHUFFLED))
        paths, committed = engine_acceptance(tree, tree.acceptance[0])
        assert paths == [[3, 0, 5]] and committed == [[5, 8, 11, 3]]


WRONG_BOOLEANS: dict[str, tuple[Tensor, str, int, int]] = {
    "sibling": (changed(RIGHT, 2, 1), "sibling visible", 2, 1),
    "ancestor": (changed(RIGHT, 5, 0), "ancestor hidden", 5, 0),
    "parents only": (RIGHT & ~changed(RIGHT.new_zeros(N, N), 3, 0), "ancestor hidden", 3, 0),
    "self": (changed(RIGHT, 4, 4), "self hidden", 4, 4),
    "every self": (RIGHT & ~torch.eye(N, dtype=torch.bool), "self hidden", 0, 0),
    "descendant": (changed(RIGHT, 0, 3), "descendant visible", 0, 3),
    "cousin": (changed(RIGHT, 3, 5), "other branch visible", 3, 5),
    "transposed": (RIGHT.T, "transposed", 0, 1),
    "causal": (torch.ones(N, N, dtype=torch.bool).tril(), "causal instead of tree", 2, 1),
    "everything": (torch.ones(N, N, dtype=torch.bool), "everything visible", 0, 1),
    "inverted": (~RIGHT, "inverted boolean", 0, 0),
    "shifted rows": (torch.cat([RIGHT[:1], RIGHT[:-1]]), "shifted by one row", 1, 1),
    "shifted columns": (torch.cat([RIGHT[:, 1:], RIGHT[:, :1]], dim=1), "shifted by one column", 0, 0),
}


class TestDumpedMask:
    @pytest.mark.parametrize("name", WRONG_BOOLEANS)
    @pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
    def test_planted_mistakes_are_named(self, name: str, suffix: str, tmp_path: Path) -> None:
        mask, kind, row, column = WRONG_BOOLEANS[name]
        path = saved(mask, tmp_path / f"mask{suffix}")
        code, document = run_cli("--mask", str(path), "--parents", str(PARENTS))
        assert (code, kinds(document)) == (ExitCode.FINDINGS, [kind])
        (finding,) = document["findings"]
        evidence = finding["evidence"]
        assert (finding["code"], evidence["row"], evidence["column"]) == ("SD504", row, column)
        assert evidence["value"] == bool(mask[row, column])
        assert evidence["expected"] == ("hidden" if mask[row, column] else "visible")

    @pytest.mark.parametrize("name", WRONG_BOOLEANS)
    def test_the_same_with_context_and_additive(self, name: str, tmp_path: Path) -> None:
        mask, kind, row, column = WRONG_BOOLEANS[name]
        whole = ~with_context(RIGHT) if name == "inverted" else with_context(mask)
        values = torch.zeros(whole.shape).masked_fill_(~whole, torch.finfo(torch.float32).min)
        path = saved(values.expand(1, 3, -1, -1).contiguous(), tmp_path / "mask.pt")
        code, document = run_cli("--mask", str(path), "--parents", str(PARENTS))
        assert (code, kinds(document)) == (ExitCode.FINDINGS, [kind])
        place = (0, 0) if name == "inverted" else (row, column + CONTEXT)
        assert (document["findings"][0]["evidence"]["row"], document["findings"][0]["evidence"]["column"]) == place
        assert document["mask"]["context_columns"] == CONTEXT

    @pytest.mark.parametrize("parents", [PARENTS, SHUFFLED, [-1, 0, 1, 2], [-1, -1, -1, -1], [-1]], ids=str)
    def test_right_masks_are_clean_in_every_form(self, parents: list[int], tmp_path: Path) -> None:
        right = tree_attention_mask(parents)
        forms: dict[str, Tensor] = {
            "square.npy": right,
            "context.npy": with_context(right),
            "integers.npy": with_context(right).to(torch.uint8),
            "four.npy": with_context(right)[None, None],
            "half.npy": additive_mask(with_context(right), torch.float16),
            "infinite.pt": torch.zeros(right.shape).masked_fill_(~right, -torch.inf),
            "bfloat.pt": additive_mask(with_context(right), torch.bfloat16)[None],
            "usual.safetensors": torch.zeros(right.shape).masked_fill_(~right, -1e4),
        }
        for name, mask in forms.items():
            code, document = run_cli("--mask", str(saved(mask, tmp_path / name)), "--parents", str(parents))
            assert (code, kinds(document)) == (ExitCode.OK, []), (name, document)
            assert {finding["severity"] for finding in document["findings"]} <= {"info"}

    def test_context_cut_and_padding(self, tmp_path: Path) -> None:
        mask = with_context(RIGHT)
        mask[:, 1] = False
        mask[3:, 2] = False
        path = saved(mask, tmp_path / "mask.npy")
        code, document = run_cli("--mask", str(path), "--parents", str(PARENTS))
        assert (code, kinds(document)) == (1, ["context cut"])
        assert document["findings"][0]["evidence"]["wrong_entries"] == N + N - 3
        assert "context token 1" in document["findings"][0]["title"]
        padded = torch.cat([with_context(RIGHT), torch.zeros(N, 4, dtype=torch.bool)], dim=1)
        padded[4, -3] = True
        path = saved(padded, tmp_path / "padded.npy")
        code, document = run_cli("--mask", str(path), "--parents", str(PARENTS), "--context", str(CONTEXT))
        assert (code, kinds(document)) == (1, ["padding visible"])
        assert "padding 1" in document["findings"][0]["title"]

    def test_context_off_by_one_is_a_shift(self, tmp_path: Path) -> None:
        whole = with_context(RIGHT)
        shifted = torch.cat([whole[:, :1], whole[:, :-1]], dim=1)
        code, document = run_cli("--mask", str(saved(shifted, tmp_path / "m.npy")), "--parents", str(PARENTS))
        assert (code, kinds(document)) == (1, ["shifted by one column"])

    def test_window(self, tmp_path: Path) -> None:
        whole = with_context(tree_attention_mask([-1, 0, 1]))
        position = torch.arange(whole.shape[1])
        whole &= torch.arange(CONTEXT, CONTEXT + 3)[:, None] - position[None, :] < 4
        path = str(saved(whole, tmp_path / "m.npy"))
        code, document = run_cli("--mask", path, "--parents", "-1,0,1", "--window", "4")
        assert (code, document["findings"]) == (0, [])
        code, document = run_cli("--mask", path, "--parents", "-1,0,1")
        assert (code, kinds(document)) == (1, ["context cut"])
        code, document = run_cli("--mask", path, "--parents", "-1,0,1", "--window", "3")
        assert (code, kinds(document)) == (1, ["beyond the window visible"])

    def test_a_row_for_the_anchor(self, tmp_path: Path) -> None:
        lifted = tree_attention_mask([-1, *(parent + 1 for parent in PARENTS)])
        path = str(saved(lifted, tmp_path / "mask.npy"))
        code, document = run_cli("--mask", path, "--parents", str(PARENTS))
        assert (code, document["findings"], document["mask"]["anchor_row"]) == (0, [], True)
        path = str(saved(changed(lifted, 3, 2), tmp_path / "mask.npy"))
        _, document = run_cli("--mask", path, "--parents", str(PARENTS))
        assert kinds(document) == ["sibling visible"] and "row 3 (node 2)" in document["findings"][0]["title"]

    def test_several_mistakes_are_several_findings(self, tmp_path: Path) -> None:
        mask = changed(changed(RIGHT, 2, 1), 5, 2)
        _, document = run_cli("--mask", str(saved(mask, tmp_path / "m.npy")), "--parents", str(PARENTS))
        assert kinds(document) == ["sibling visible", "ancestor hidden"]


class TestNumbers:
    @staticmethod
    def examine(values: Tensor, folder: Path, *more: str) -> tuple[int, list[str], dict[str, Any]]:
        path = saved(values, folder / "mask.pt")
        code, document = run_cli("--mask", str(path), "--parents", str(PARENTS), *more)
        return code, kinds(document), document

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
    def test_a_row_of_infinity(self, dtype: torch.dtype, tmp_path: Path) -> None:
        values = additive_mask(RIGHT, dtype)
        values[4] = -torch.inf
        code, found, document = self.examine(values, tmp_path)
        assert code == 1 and found[0] == "all -inf row"
        assert document["findings"][0]["code"] == "SD505" and document["findings"][0]["evidence"]["row"] == 4

    def test_an_empty_row_of_finite_numbers_and_of_booleans(self, tmp_path: Path) -> None:
        values = additive_mask(RIGHT, torch.float32)
        values[4] = torch.finfo(torch.float32).min
        assert self.examine(values, tmp_path)[:2] == (1, ["row sees nothing"])
        mask = RIGHT.clone()
        mask[6] = False
        assert self.examine(mask, tmp_path)[:2] == (1, ["row sees nothing"])

    def test_a_number_beyond_float16(self, tmp_path: Path) -> None:
        values = torch.zeros(N, N).masked_fill_(~RIGHT, -1e9)
        assert self.examine(values, tmp_path)[:2] == (0, [])
        code, found, document = self.examine(values, tmp_path, "--dtype", "float16")
        assert (code, found) == (1, ["dtype overflow"]) and document["findings"][0]["severity"] == "warning"
        assert self.examine(values.half(), tmp_path)[:2] == (1, ["dtype overflow"])
        values[4] = -1e9
        assert self.examine(values, tmp_path, "--dtype", "float16")[1] == ["all -inf row", "dtype overflow"]

    def test_numbers_that_hide_nothing(self, tmp_path: Path) -> None:
        assert self.examine(torch.zeros(N, N).masked_fill_(~RIGHT, -10.0), tmp_path)[:2] == (1, ["does not hide"])
        assert self.examine(torch.zeros(N, N).masked_fill_(~RIGHT, 1e9), tmp_path)[:2] == (1, ["sign flipped"])
        assert self.examine(RIGHT.float(), tmp_path)[:2] == (1, ["0/1 numbers"])
        values = additive_mask(RIGHT, torch.float32)
        values[3, 1] = torch.nan
        assert self.examine(values, tmp_path)[:2] == (1, ["NaN"])


class TestBadInput:
    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            ((5, 5), "5 rows for the 7 nodes of --parents, expected 7, or 8"),
            ((7, 6), "6 columns, expected 7 and more"),
            ((7,), "shape [7], expected [rows, columns]"),
            ((1, 1, 1, 7, 7), "shape [1, 1, 1, 7, 7]"),
            ((0, 7), "shape [0, 7]"),
        ],
    )
    def test_shapes(self, shape: tuple[int, ...], message: str, tmp_path: Path) -> None:
        path = saved(torch.ones(shape, dtype=torch.bool), tmp_path / "mask.npy")
        code, document = run_cli("--mask", str(path), "--parents", str(PARENTS))
        assert code == ExitCode.USAGE and message in document["error"]
        assert document["error"].count("\n") == 1

    def test_files(self, tmp_path: Path) -> None:
        (tmp_path / "cut.npy").write_bytes(b"\x93NUMPY")
        (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04")
        (tmp_path / "cut.safetensors").write_bytes(b"abc")
        np.save(tmp_path / "objects.npy", np.array([{}, 1], dtype=object), allow_pickle=True)
        torch.save({"code": Path("x")}, tmp_path / "code.pt")
        torch.save({"a": RIGHT, "b": RIGHT}, tmp_path / "two.pt")
        saved(torch.stack([RIGHT, ~RIGHT])[None], tmp_path / "heads.pt")
        names = [path.name for path in tmp_path.iterdir()] + ["absent.npy", "mask.txt"]
        for name in names:
            code, document = run_cli("--mask", str(tmp_path / name), "--parents", str(PARENTS))
            assert code == ExitCode.USAGE and name in document["error"], name
            assert document["error"].startswith("specdoctor: ") and document["error"].count("\n") == 1, document
        code, document = run_cli("--mask", str(tmp_path / "two.pt"), "--tensor", "b", "--parents", str(PARENTS))
        assert code == ExitCode.OK and document["mask"]["tensor"] == "b"
        code, document = run_cli("--mask", str(tmp_path / "two.pt"), "--tensor", "c", "--parents", str(PARENTS))
        assert code == ExitCode.USAGE and "no tensor called c, expected one of a, b" in document["error"]

    @pytest.mark.parametrize("parents", ["[0]", "[-1,x]", "nowhere.txt", "[]", "[-1,9]"])
    def test_parents(self, parents: str) -> None:
        code, document = run_cli("--parents", parents)
        assert code == ExitCode.USAGE and document["error"].count("\n") == 1 and parents in document["error"]

    def test_a_mask_needs_its_parents(self, tmp_path: Path) -> None:
        code, document = run_cli("--mask", str(saved(RIGHT, tmp_path / "m.npy")))
        assert code == ExitCode.USAGE and "expected --parents beside it" in document["error"]

    def test_parents_from_a_file_are_drawn(self, tmp_path: Path) -> None:
        (tmp_path / "parents.json").write_text(json.dumps(PARENTS))
        result = CliRunner().invoke(app, ["check-mask", "--parents", str(tmp_path / "parents.json")])
        assert result.exit_code == ExitCode.OK and "  node 5  1 . 1 . . 1 . \n" in result.stdout
        assert "start + 0 1 1 2 2 2 2" in result.stdout

    def test_no_such_target(self) -> None:
        assert run_cli("--target", "no/such/folder")[0] == ExitCode.USAGE
        assert run_cli("--target", "smollm2-135m", "--device", "cuda:99")[0] == ExitCode.ENVIRONMENT
