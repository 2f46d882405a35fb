"""`check-nan` as data: weights, runs in each dtype, and the findings on both.

The document is what `--json` writes and what the console report is drawn from.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specdoctor import __version__
from specdoctor.checks.finding import by_severity
from specdoctor.checks.mask_case import DumpedMask
from specdoctor.checks.mask_values import is_additive
from specdoctor.checks.numerics_case import NumericsCase
from specdoctor.checks.registry import family, run_checks
from specdoctor.checks.sd403_headroom import LARGEST_HALF, layer_of, measured_run
from specdoctor.drafters.load import load_drafter
from specdoctor.engine.device import DTYPES, resolve_device
from specdoctor.engine.draft import Drafter
from specdoctor.engine.target import Target
from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.formats.drafts.read import open_draft
from specdoctor.formats.mask_dump import read_mask_dump, read_parents_text
from specdoctor.formats.sources import resolve_model
from specdoctor.formats.tensors import TensorFolder
from specdoctor.kernels.tree_mask import checked_parents
from specdoctor.measure.numerics import DtypeRun, NumericsPlan, OwnMask, check_mask_fits, run_numerics
from specdoctor.measure.prompts import Prompt, check_ids, load_bundled, load_jsonl, load_tokenizer, render
from specdoctor.measure.weight_scan import WeightFacts, scan_weights

SCHEMA_VERSION = 1
STATIC_COST = "static"


@dataclass(frozen=True)
class NumericsRequest:
    """What the command line asked for; empty is not asked."""

    target: str
    draft: str = ""
    dtypes: tuple[str, ...] = tuple(DTYPES)
    prompts: Path | None = None
    max_prompts: int = 3
    max_new_tokens: int = 24
    template: str = "auto"
    mask: Path | None = None
    parents: str = ""
    tensor: str = ""
    device: str = "auto"
    attention: str = "auto"
    weights_only: bool = False


Progress = Callable[[Iterable[str]], Iterable[str]]


def examine_numerics(request: NumericsRequest, progress: Progress = iter) -> dict[str, Any]:
    """The whole result of `check-nan`. Raises `SpecdoctorError` for what cannot be read or run."""
    began = time.perf_counter()
    _check_request(request)
    target = resolve_model(request.target)
    draft = resolve_model(request.draft) if request.draft else None
    weights = list(scan_weights("target", TensorFolder(target)))
    if draft is not None:
        weights += scan_weights("drafter", open_draft(draft)[1])
    case = NumericsCase(weights)
    if not request.weights_only:
        plan = _plan(request, target)
        case.runs = list(run_numerics(_maker(request, target, draft, plan), progress(request.dtypes), plan))
        if all(run.error for run in case.runs):
            raise SpecdoctorError(f"{target}: no dtype can be run here: {case.runs[0].error}", ExitCode.ENVIRONMENT)
    checks = [check for check in family("SD4") if case.runs or check.cost == STATIC_COST]
    findings = by_severity(list(run_checks(checks, case)))
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "specdoctor", "version": __version__},
        "command": "check-nan",
        "target": str(target),
        "drafter": str(draft) if draft is not None else None,
        "weights": _weights(weights),
        "dtypes": [_run(run) for run in case.runs],
        "headroom": _headroom(case),
        "checks": [{"code": check.code, "title": check.title} for check in checks],
        "findings": [finding.as_json() for finding in findings],
        "seconds": round(time.perf_counter() - began, 3),
    }


def _check_request(request: NumericsRequest) -> None:
    """Refuse what is wrong in itself before anything is loaded."""
    if not request.dtypes:
        raise SpecdoctorError(f"--dtypes: names none, expected some of {', '.join(DTYPES)}")
    for dtype in request.dtypes:
        if dtype not in DTYPES:
            raise SpecdoctorError(f"--dtypes {dtype}: expected some of {', '.join(DTYPES)}")
    if request.mask is not None and not request.parents:
        raise SpecdoctorError("--mask: expected --parents beside it, such as --parents [-1,0,0]; -1 is a root")
    if request.mask is not None and request.weights_only:
        raise SpecdoctorError("--mask: expected a run, and --weights-only makes none; leave one of them out")
    resolve_device(request.device)


def _maker(
    request: NumericsRequest, target: Path, draft: Path | None, plan: NumericsPlan
) -> Callable[[str], tuple[Target, Drafter | None]]:
    def make(dtype: str) -> tuple[Target, Drafter | None]:
        loaded = Target.load(target, request.device, dtype, attention=request.attention)
        check_ids(plan.prompts, loaded.vocab_size)
        if plan.mask is not None:
            check_mask_fits(plan.mask, loaded)
        return loaded, None if draft is None else load_drafter(draft, loaded)

    return make


def _plan(request: NumericsRequest, target: Path) -> NumericsPlan:
    raw = load_bundled(None, request.max_prompts) if request.prompts is None else load_jsonl(request.prompts)
    prompts: list[Prompt] = render(raw[: request.max_prompts], load_tokenizer(target), request.template)
    return NumericsPlan(prompts, max_new_tokens=request.max_new_tokens, mask=_own_mask(request))


def _own_mask(request: NumericsRequest) -> OwnMask | None:
    if request.mask is None:
        return None
    listed, where = read_parents_text(request.parents)
    mask = DumpedMask.of(read_mask_dump(request.mask, request.tensor), checked_parents(listed, where))
    values = mask.dump.values
    if not is_additive(values):  # what torch makes of a boolean mask
        values = torch.zeros(values.shape).masked_fill_(~values.bool(), -torch.inf)
    return OwnMask(values, mask.parents, mask.context)


def _weights(weights: list[WeightFacts]) -> list[dict[str, Any]]:
    """Sums of each side; single tensors are in the findings."""
    rows = []
    for side in dict.fromkeys(facts.side for facts in weights):
        own = [facts for facts in weights if facts.side == side]
        rows.append(
            {
                "side": side,
                "tensors": len(own),
                "numbers": sum(facts.numbers for facts in own),
                "dtypes": sorted({facts.dtype for facts in own}),
                "nan": sum(facts.nan for facts in own),
                "inf": sum(facts.inf for facts in own),
                "denormal": sum(facts.denormal for facts in own),
                "largest": max(facts.largest for facts in own),
                "largest_tensor": max(own, key=lambda facts: facts.largest).name,
            }
        )
    return rows


def _run(run: DtypeRun) -> dict[str, Any]:
    accepted = run.acceptance
    return {
        "dtype": run.dtype,
        "error": run.error or None,
        "attention": run.attention,
        "emulated_operations": run.emulated,
        "births": {side: asdict(birth) for side, birth in run.record.births.items()},
        "rows_that_see_nothing": [asdict(rows) for rows in run.record.masked],
        "cured_by_lowest_float16": run.cured,
        "overflow_hidden_in": sorted(run.record.swallowed),
        "tau_step": None if accepted is None else accepted.tau_step,
        "rounds": None if accepted is None else accepted.rounds,
        "drafted": None if accepted is None else accepted.drafted,
        "accepted": None if accepted is None else accepted.accepted,
    }


def _headroom(case: NumericsCase) -> dict[str, Any] | None:
    """The highest peak of each layer, in the order of the forward."""
    run = measured_run(case) if case.runs else None
    if run is None:
        return None
    layers: dict[str, tuple[str, float]] = {}
    for label, peak in run.record.peaks.items():
        layer = layer_of(label)
        if peak.magnitude >= layers.get(layer, ("", -1.0))[1]:
            layers[layer] = (label, peak.magnitude)
    rows = [
        {
            "layer": layer,
            "module": label,
            "largest": largest,
            "headroom_in_float16": LARGEST_HALF / largest if largest else None,
        }
        for layer, (label, largest) in layers.items()
    ]
    return {"measured_in": run.dtype, "layers": rows}
