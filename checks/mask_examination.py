"""`check-mask` as data: hand-worked trees, a target's own rows, a dumped mask, and the findings on all three.

The document is what `--json` writes and what the console report is drawn from.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from specdoctor import __version__
from specdoctor.checks.finding import by_severity
from specdoctor.checks.hand_worked_trees import load_hand_worked_trees
from specdoctor.checks.mask_case import DumpedMask, MaskCase
from specdoctor.checks.registry import family, run_checks
from specdoctor.checks.tree_observation import RowLayout, TreeObservation
from specdoctor.engine.device import DTYPES, resolve_device
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.mask_dump import read_mask_dump, read_parents_text
from specdoctor.formats.sources import resolve_model
from specdoctor.kernels.tree_mask import checked_parents, tree_attention_mask, tree_depths

SCHEMA_VERSION = 1
MOST_NODES = 1024
OFFLINE_CODES = ("SD501", "SD504", "SD505")


@dataclass(frozen=True)
class MaskRequest:
    """What the command line asked for; empty is not asked."""

    target: str = ""
    parents: str = ""
    mask: Path | None = None
    tensor: str = ""
    context: int | None = None
    window: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"


Progress = Callable[[Iterable[RowLayout]], Iterable[RowLayout]]


def examine_masks(request: MaskRequest, progress: Progress = iter) -> dict[str, Any]:
    """The whole result of `check-mask`. Raises `SpecdoctorError` for what cannot be read or run."""
    began = time.perf_counter()
    parents = _parents(request)
    mask = None if request.mask is None else _dumped(request, request.mask, parents)
    case = MaskCase(load_hand_worked_trees(), mask=mask, progress=progress)
    if request.target:
        resolve_device(request.device)  # before anything is loaded
        case.target = Target.load(
            resolve_model(request.target), request.device, request.dtype, attention=request.attention
        )
        case.layouts = _layouts(case, parents)
    checks = [check for check in family("SD5") if case.target is not None or check.code in OFFLINE_CODES]
    if mask is None:
        checks = [check for check in checks if check.cost == "forward" or check.code == OFFLINE_CODES[0]]
    findings = by_severity(list(run_checks(checks, case)))
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "specdoctor", "version": __version__},
        "command": "check-mask",
        "hand_worked_trees": [{"name": tree.name, "nodes": len(tree.parents)} for tree in case.trees],
        "tree": None if parents is None else _tree(parents),
        "target": _target(case),
        "mask": None if mask is None else _mask(mask),
        "checks": [{"code": check.code, "title": check.title} for check in checks],
        "findings": [finding.as_json() for finding in findings],
        "seconds": round(time.perf_counter() - began, 3),
    }


def _parents(request: MaskRequest) -> tuple[int, ...] | None:
    if not request.parents:
        if request.mask is not None:
            raise SpecdoctorError("--mask: expected --parents beside it, such as --parents [-1,0,0]; -1 is a root")
        return None
    listed, where = read_parents_text(request.parents)
    if len(listed) > MOST_NODES:
        raise SpecdoctorError(f"{where}: {len(listed)} nodes, expected at most {MOST_NODES}")
    return checked_parents(listed, where)


def _dumped(request: MaskRequest, path: Path, parents: tuple[int, ...] | None) -> DumpedMask:
    assert parents is not None
    if request.dtype != "auto" and request.dtype not in DTYPES:
        raise SpecdoctorError(f"--dtype {request.dtype}: expected auto, {', '.join(DTYPES)}")
    dump = read_mask_dump(path, request.tensor)
    return DumpedMask.of(dump, parents, request.context, request.window, DTYPES.get(request.dtype))


def _layouts(case: MaskCase, parents: tuple[int, ...] | None) -> list[RowLayout]:
    """The user's tree alone, else all that ship."""
    if parents is not None:
        return [RowLayout.of("--parents", parents, [0] * len(parents))]
    return [RowLayout.of(tree.name, tree.parents, tree.requests) for tree in case.trees]


def _tree(parents: tuple[int, ...]) -> dict[str, Any]:
    return {
        "parents": list(parents),
        "depths": tree_depths(parents),
        "visible": _rows_of_marks(tree_attention_mask(parents)),
    }


def _mask(mask: DumpedMask) -> dict[str, Any]:
    values = mask.dump.values
    return {
        "file": str(mask.dump.path),
        "tensor": mask.dump.tensor or None,
        "shape": list(mask.dump.shape),
        "dtype": str(values.dtype).removeprefix("torch."),
        "context_columns": mask.context,
        "padding_columns": values.shape[1] - mask.context - len(mask.parents),
        "anchor_row": mask.anchor_row,
        "labels": [mask.node(row) for row in range(len(mask.parents))],
        # The tree's columns alone: the context may be thousands wide.
        "visible": _marked(*(m[:, mask.context :][:, : len(mask.parents)] for m in (mask.visible, mask.expected))),
    }


def _target(case: MaskCase) -> dict[str, Any] | None:
    target = case.target
    if target is None:
        return None
    observed = case.observed if "observed" in vars(case) else []  # not run again if that crashed
    return {
        "path": str(target.folder),
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention_path": {"name": target.attention.name, "reason": target.attention.reason},
        "trees": [_observation(seen) for seen in observed],
    }


def _observation(seen: TreeObservation) -> dict[str, Any]:
    moved = seen.fresh.moved("direct")
    return {
        "name": seen.layout.name,
        "labels": list(seen.layout.labels),
        "moved": _marked(moved, seen.allowed),
        "typical_change": _finite(float(seen.fresh.direct.diagonal().median())),
        "noise": _finite(seen.fresh.noise),
        "change_after_rollback": _finite(seen.stale),
        "largest_error_against_chains": _finite(float(seen.chain_error.max())),
        "error_below_kept_path": _finite(seen.kept_error),
        "error_limit": seen.limit,
    }


def _marked(visible: Tensor, expected: Tensor) -> list[str]:
    """A character an entry: `1` sees, `.` does not, `X` sees and must not, `o` must see and does not."""
    marks = {(True, True): "1", (False, False): ".", (True, False): "X", (False, True): "o"}
    pairs = zip(visible.tolist(), expected.tolist(), strict=True)
    return ["".join(marks[pair] for pair in zip(seen, right, strict=True)) for seen, right in pairs]


def _rows_of_marks(visible: Tensor) -> list[str]:
    return _marked(visible, visible)


def _finite(number: float) -> float | None:
    return number if abs(number) < float("inf") else None
