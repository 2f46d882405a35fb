"""`specdoctor calibrate`: temperatures for a drafter's confidence, fitted on some prompts and judged on the others.

Contract: data comes from `accept`'s pass over texts of the target; nothing is decoded with the drafter. Prompts are
split by a hash of their id within each category, so that the same prompt is on the same side in every run. The file
is written whole or not at all, and only where the held-out prompts do not speak against it.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specdoctor import __version__
from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.formats.drafts.calibration_file import calibration_path, write_calibration
from specdoctor.formats.drafts.read import read_draft
from specdoctor.formats.drafts.weights_hash import weights_hash
from specdoctor.measure.accept_command import AcceptRequest, MeasuredAcceptance, measure_request
from specdoctor.measure.bench import Progress
from specdoctor.measure.workload import BenchRequest, draft_sources
from specdoctor.metrics.accept_calibration import ConfidenceRounds, confidence_report, gather_rounds
from specdoctor.metrics.calibration import BINS
from specdoctor.metrics.temperature_scaling import Fit, Grid, fit_sequentially, mean_error, mean_error_change
from specdoctor.metrics.text_acceptance import TextAcceptance

SCHEMA_VERSION = 1
HELD_OUT = 0.5
FEWEST = 4  # prompts: below, neither side could be resampled


@dataclass(slots=True)
class CalibrateRequest:
    """The options of the command. `workload` names target, the one drafter, prompts and sampling."""

    workload: BenchRequest
    corpus: Path | None = None
    repeats: int = 1
    budget: float | None = None  # seconds
    held_out: float = HELD_OUT  # share of the prompts
    output: Path | None = None  # None: beside the weights


def run_calibrate_request(
    request: CalibrateRequest, on_progress: Callable[[Progress], None] | None = None
) -> dict[str, Any]:
    """Measure, fit, judge, write. The result's `exit_code` is what the command should exit with.

    Raises `SpecdoctorError` for anything that does not fit, before anything is decoded.
    """
    if not 0 < request.held_out < 1:
        raise SpecdoctorError(f"--held-out {request.held_out}: expected a share between 0 and 1, such as 0.5")
    (folder,) = draft_sources(request.workload).values()
    source = _weights(Path(folder))
    path = request.output or calibration_path(Path(folder))
    if not path.parent.is_dir():
        raise SpecdoctorError(f"{path}: {path.parent} is no folder; give another --output")
    accept = AcceptRequest(
        workload=request.workload, corpus=request.corpus, repeats=request.repeats, budget=request.budget, what_if=False
    )
    measured = measure_request(accept, on_progress)
    if measured.run.stopped == "interrupted":
        raise KeyboardInterrupt  # half of the prompts would be another split; the texts are kept
    seed = request.workload.seed
    fitted, held = split_by_prompt(measured.run.arms[0].texts, request.held_out, seed)
    document = _document(measured, source, fitted, held, seed)
    change = document["held_out"]["mean_ece"]["change"]["value"]
    written = change < 0
    if written:
        write_calibration(document, path)
    code = ExitCode.OK if written else ExitCode.INCONCLUSIVE
    return document | {
        "kind": "calibrate",
        "path": str(path),
        "written": written,
        "command": sys.argv,
        "exit_code": int(code),
    }


def split_by_prompt(
    texts: Sequence[TextAcceptance], held_out: float, seed: int = 0
) -> tuple[list[TextAcceptance], list[TextAcceptance]]:
    """Texts to fit on and texts to judge by, whole prompts, each category in the same shares.

    Raises `SpecdoctorError` where a side would have fewer than two prompts.
    """
    prompts = {text.prompt_id: text.category for text in texts}
    held: set[str] = set()
    taken, passed = 0, 0
    for category in sorted(set(prompts.values())):
        mine = sorted((p for p in prompts if prompts[p] == category), key=lambda prompt: _key(seed, prompt))
        for prompt in mine:  # the running share stays next to `held_out` over categories too small for it
            passed += 1
            if taken < round(held_out * passed):
                held.add(prompt)
                taken += 1
    if min(len(held), len(prompts) - len(held)) < FEWEST // 2:
        raise SpecdoctorError(
            f"{len(prompts)} prompts, {len(held)} of them held out: expected at least {FEWEST // 2} on each side; give "
            "more prompts",
            ExitCode.NOTHING,
        )
    return [t for t in texts if t.prompt_id not in held], [t for t in texts if t.prompt_id in held]


def _weights(folder: Path) -> dict[str, Any]:
    """Facts of the drafter's file, read before a target is loaded. Raises where there is nothing to calibrate."""
    checkpoint = read_draft(folder, None)
    spec = checkpoint.spec
    if getattr(spec, "confidence", None) is None:
        raise SpecdoctorError(
            f"{folder}: {checkpoint.title} without a confidence head ({spec.algorithm}); there is nothing to calibrate"
        )
    return {"name": folder.resolve().name, "weights_hash": weights_hash(checkpoint.source)}


def _document(
    measured: MeasuredAcceptance,
    source: dict[str, Any],
    fitted: Sequence[TextAcceptance],
    held: Sequence[TextAcceptance],
    seed: int,
) -> dict[str, Any]:
    """What calibration.json holds."""
    arm, manifest = measured.run.arms[0], measured.run.corpus.manifest
    K, grid = arm.drafter.max_draft, Grid()
    rounds, judged = _rounds(fitted, K), _rounds(held, K)
    fit = fit_sequentially(rounds, grid)
    described = measured.load.described
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "confidence-calibration",
        "specdoctor": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "method": "sequential temperature scaling: left to right, each temperature minimises the ECE of the cumulative "
        "product with the earlier ones frozen",
        "temperatures": fit.temperatures,
        "K": K,
        "grid": asdict(grid) | {"spacing": "geometric"},
        "bins": BINS,
        "draft": source | {"dtype": str(arm.drafter.dtype).removeprefix("torch.")},
        "target": {"name": manifest.target, "target_hash": manifest.target_hash, "dtype": manifest.dtype},
        "sampling": {
            key: described[key]
            for key in ("temperature", "draft_temperature", "top_k", "top_p", "max_new_tokens", "seed")
        },
        "data": {
            "prompts": described["prompts"],
            "template": manifest.template["kind"],
            "corpus": manifest.key,
            "categories": sorted({text.category for text in [*fitted, *held]}),
            "split": "by prompt, within categories",
        },
        "fitted": _facts(fitted, rounds) | {"mean_ece": _mean(rounds, fit, seed)},
        "held_out": _facts(held, judged)
        | {"mean_ece": _mean(judged, fit, seed), "positions": _positions(held, K, fit, seed)},
    }


def _rounds(texts: Sequence[TextAcceptance], K: int) -> ConfidenceRounds:
    rounds = gather_rounds(texts, K)
    if rounds is None or not len(rounds.prompt):
        raise SpecdoctorError(
            "no round of these texts has confidences (answers of one token?); give other prompts", ExitCode.NOTHING
        )
    return rounds


def _facts(texts: Sequence[TextAcceptance], rounds: ConfidenceRounds) -> dict[str, Any]:
    """What a side of the split holds, and a hash of its texts."""
    rows = sorted([text.prompt_id, text.repeat, text.tokens[: text.length].tolist()] for text in texts)
    return {
        "prompts": len({text.prompt_id for text in texts}),
        "texts": len(texts),
        "rounds": len(rounds.prompt),
        "texts_hash": hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32],
    }


def _mean(rounds: ConfidenceRounds, fit: Fit, seed: int) -> dict[str, Any]:
    return {
        "before": mean_error(rounds, None, seed).to_json(),
        "after": mean_error(rounds, fit.temperatures, seed).to_json(),
        "change": mean_error_change(rounds, fit.temperatures, seed).to_json(),
    }


def _positions(texts: Sequence[TextAcceptance], K: int, fit: Fit, seed: int) -> list[dict[str, Any]]:
    """By position, before and after: error of the product, and how well each of the two questions is ranked."""
    report = confidence_report(texts, K, fit.temperatures, seed)
    rows = []
    for k in range(K):
        row: dict[str, Any] = {
            "position": k + 1,
            "temperature": fit.temperatures[k],
            "fitted": fit.error[k] is not None,
            "at_grid_end": Grid().ends_at(fit.temperatures[k]),
        }
        for when in ("before", "after"):
            cumulative, conditional = report[when]["cumulative"][k], report[when]["conditional"][k]
            row[when] = {
                "ece": cumulative["ece"].to_json(),
                "debiased_rms": cumulative["debiased_rms"].to_json(),
                "mean_prediction": cumulative["mean_prediction"],
                "mean_label": cumulative["mean_label"],
                "auroc": cumulative["auroc"].to_json(),
                "conditional_auroc": conditional["auroc"].to_json(),
            }
        rows.append(row)
    return rows


def _key(seed: int, prompt: str) -> str:
    return hashlib.sha256(f"{seed}:{prompt}".encode()).hexdigest()
