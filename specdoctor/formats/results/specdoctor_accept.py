"""`specdoctor accept --json`: expected rounds and tokens per prompt, exact given the text."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.results.result_set import ResultSet, estimate_from
from specdoctor.formats.results.source import ResultSource
from specdoctor.formats.results.specdoctor_bench import check_version, estimates, row_sums, version_of
from specdoctor.formats.results.specdoctor_settings import prompt_hashes, settings_of
from specdoctor.metrics.calibration import BINS
from specdoctor.metrics.sums import Sums, total

NAME = "specdoctor accept (JSON)"
NO_SPEED = "accept does not decode: it has no speed of its own"
CONVENTION = (
    "expected values given the text, not counts of a run: bonus in, prefill token out, cut at EOS and at the length cap"
)


def recognises(source: ResultSource) -> bool:
    rows = source.document.get("prompts")
    return isinstance(rows, list) and any(isinstance(row, Mapping) and "expected_rounds" in row for row in rows)


def read(source: ResultSource) -> list[ResultSet]:
    document, path = source.document, str(source.path)
    check_version(document, path)
    entries = {str(arm.get("name", "")): arm for arm in document.get("arms") or [] if isinstance(arm, Mapping)}
    arms: dict[str, dict[str, Sums]] = {}
    for index, row in enumerate(document["prompts"]):
        place = f"{path}: prompts[{index}]"
        if not isinstance(row, Mapping) or not isinstance(row.get("id"), str):
            raise SpecdoctorError(f"{place}: expected an object with id and expected_rounds; is the file damaged?")
        prompts = arms.setdefault(str(row.get("arm") or _only(entries)), {})
        sums = row_sums(row, place, prefix="expected_")
        prompts[row["id"]] = prompts[row["id"]] + sums if row["id"] in prompts else sums
    return [_arm(document, path, name, entries.get(name, {}), _even(prompts)) for name, prompts in arms.items()]


def _even(prompts: dict[str, Sums]) -> dict[str, Sums]:
    """Where any prompt has confidences, one without them has none to count: that is empty bins, not unknown ones."""
    if all(sums.confidence is None for sums in prompts.values()):
        return prompts
    empty = (0.0,) * (2 * BINS)
    return {prompt: replace(sums, confidence=sums.confidence or empty) for prompt, sums in prompts.items()}


def _arm(
    document: Mapping[str, Any], path: str, name: str, entry: Mapping[str, Any], prompts: dict[str, Sums]
) -> ResultSet:
    alone = not entry
    values = estimates(document if alone else entry, path)
    error = _calibration_error(document if alone else entry, path)
    if error is not None:
        values["expected_calibration_error"] = error
    return ResultSet(
        tool="specdoctor accept",
        path=path,
        arm=name,
        convention=CONVENTION,
        pooled=total(prompts.values()),
        prompts=prompts,
        pairable=True,
        settings=settings_of(document, entry, name),
        hashes=prompt_hashes(document),
        values=values,
        absent={"tokens_per_second": NO_SPEED, "expected_calibration_error": _no_confidence(entry)},
        version=version_of(document),
        date=document.get("created"),
    )


def _no_confidence(entry: Mapping[str, Any]) -> str:
    section = entry.get("calibration")
    reason = section.get("reason") if isinstance(section, Mapping) else None
    return str(reason or "no confidences in the file")


def _only(entries: Mapping[str, Any]) -> str:
    return next(iter(entries)) if len(entries) == 1 else ""


def _calibration_error(layer: Mapping[str, Any], path: str) -> Any:
    """The published ECE, wherever a calibration section keeps it."""
    for section in (layer, layer.get("calibration"), layer.get("confidence")):
        if isinstance(section, Mapping):
            for key in ("expected_calibration_error", "ece"):
                if isinstance(section.get(key), Mapping) and "value" in section[key]:
                    return estimate_from(section[key], path, key)
    return None
