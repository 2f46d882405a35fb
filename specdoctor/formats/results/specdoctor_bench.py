"""`specdoctor bench --json`: several arms, each with estimates; counts per prompt in `prompts`, or in the records."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.results import specdoctor_records
from specdoctor.formats.results.result_set import ResultSet, count, estimate_from
from specdoctor.formats.results.source import ResultSource
from specdoctor.formats.results.specdoctor_settings import prompt_hashes, settings_of
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.sums import Sums, total

NAME = "specdoctor bench (JSON)"
CONVENTION = specdoctor_records.CONVENTION
SCHEMA_VERSION = 1
NO_CONFIDENCE = "no confidences: the drafter has no confidence head, or bench ran without --records"
ESTIMATES = {
    "tau_step": "tau_step",
    "tau_request": "tau_request",
    "alpha_draft": "alpha_draft",
    "tokens_per_s": "tokens_per_second",
    "speedup": "measured_speedup",
}


def recognises(source: ResultSource) -> bool:
    return isinstance(source.document.get("arms"), list) and "schema_version" in source.document


def read(source: ResultSource) -> list[ResultSet]:
    document, path = source.document, str(source.path)
    check_version(document, path)
    if not all(isinstance(arm, Mapping) for arm in document["arms"]):
        raise SpecdoctorError(f"{path}: key arms holds {document['arms']!r}, expected objects; is the file damaged?")
    rows = _from_prompts(document, path)
    recorded = _recorded(document, source.path)
    plain = rows.get("ar", {})
    return [_arm(document, path, arm, rows, recorded, plain) for arm in document["arms"]]


def _arm(
    document: Mapping[str, Any],
    path: str,
    arm: Mapping[str, Any],
    rows: dict[str, dict[str, Sums]],
    recorded: dict[str, ResultSet],
    plain: Mapping[str, Sums],
) -> ResultSet:
    name = str(arm.get("name", ""))
    prompts, notes = rows.get(name, {}), []
    records = recorded.get(name)
    if records is not None and records.prompts and not prompts:
        prompts = records.prompts
    elif records is not None and records.prompts and _same_counts(records.prompts, prompts):
        # The records know more (confidences, rounds by length); the times of both are the same.
        prompts = {key: replace(records.prompts[key], seconds=sums.seconds) for key, sums in prompts.items()}
    elif records is not None:
        records = None
        notes.append(f"the file {document['records']} holds other rounds than this result: not used")
    if not prompts:
        notes.append("no counts per prompt: only the printed intervals can be compared")
    prompts = specdoctor_records.beside_plain(prompts, plain)
    return ResultSet(
        tool="specdoctor bench",
        path=path,
        arm=name,
        convention=CONVENTION,
        pooled=total(prompts.values()),
        prompts=prompts or None,
        pairable=True,
        settings=settings_of(document, arm, name),
        hashes=prompt_hashes(document),
        values=estimates(arm, path),
        absent={"expected_calibration_error": NO_CONFIDENCE},
        histogram=records.histogram if records else None,
        marginal=_marginal(arm),
        notes=tuple(notes),
        version=version_of(document),
        date=document.get("created"),
    )


def check_version(document: Mapping[str, Any], path: str) -> None:
    """Raises for a file of a newer specdoctor than this one."""
    version = document.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise SpecdoctorError(
            f"{path}: key schema_version is {version!r}, expected at most {SCHEMA_VERSION}; upgrade specdoctor"
        )


def estimates(arm: Mapping[str, Any], path: str) -> dict[str, Estimate]:
    """The published estimates of an arm, by definition."""
    found = {name: estimate_from(arm.get(key), path, key) for key, name in ESTIMATES.items()}
    return {name: value for name, value in found.items() if value is not None}


def version_of(document: Mapping[str, Any]) -> str | None:
    """The specdoctor that wrote a file."""
    environment = document.get("environment")
    packages = environment.get("packages") if isinstance(environment, Mapping) else None
    return packages.get("specdoctor") if isinstance(packages, Mapping) else None


def row_sums(row: Mapping[str, Any], place: str, prefix: str = "") -> Sums:
    """Counts of one row of `prompts`: one request, or all repeats of a prompt if it says `requests`."""

    def number(key: str, prefix: str = "") -> float | None:
        return count(row.get(prefix + key), place, prefix + key)

    rounds, committed = number("rounds", prefix), number("committed", prefix)
    drafted, accepted, verified = (number(key, prefix) for key in ("drafted", "accepted", "verified"))
    requests, completion = number("requests") or 1, number("completion_tokens")
    if rounds == 0 and completion is not None and completion > requests:
        # Decoded by somebody else (transformers' generate): speed, but no rounds of ours.
        rounds, committed, drafted, accepted = None, completion - requests, None, None
    bins = row.get("confidence_bins")
    counts: dict[str, Any] = {
        "rounds": rounds,
        "committed": committed,
        "draft_rounds": _draft_rounds(number("draft_rounds"), rounds, drafted, verified, row.get("K")),
        "drafted": drafted,
        "accepted": accepted,
        # One prefill token a request.
        "completion": None if committed is None else committed + requests,
        "seconds": number("seconds"),
        "confidence": tuple(float(number) for number in bins) if isinstance(bins, list) else None,
    }
    return Sums.of_request(**counts) if requests == 1 else Sums(requests=requests, **counts)


def _draft_rounds(
    stated: float | None, rounds: float | None, drafted: float | None, verified: float | None, K: Any
) -> float | None:
    """Rounds with drafts, where the row states them or leaves no choice: none drafted, or all of them K tokens."""
    if stated is not None or not rounds:
        return stated if stated is not None else rounds
    if drafted == 0:
        return 0
    whole = isinstance(K, int) and drafted == K * rounds and verified in (None, drafted)
    return rounds if whole else None


def _from_prompts(document: Mapping[str, Any], path: str) -> dict[str, dict[str, Sums]]:
    """arm -> prompt -> counts."""
    arms: dict[str, dict[str, Sums]] = {}
    lengths = {str(a.get("name")): settings_of(document, a, str(a.get("name"))).get("K") for a in document["arms"]}
    rows = document.get("prompts")
    for index, row in enumerate(rows if isinstance(rows, list) else []):
        place = f"{path}: prompts[{index}]"
        if not isinstance(row, Mapping) or not isinstance(row.get("id"), str) or not isinstance(row.get("arm"), str):
            raise SpecdoctorError(f"{place}: expected an object with id and arm; is the file damaged?")
        prompts = arms.setdefault(row["arm"], {})
        sums = row_sums({"K": lengths.get(row["arm"])} | dict(row), place)
        prompts[row["id"]] = prompts[row["id"]] + sums if row["id"] in prompts else sums
    return arms


def _recorded(document: Mapping[str, Any], path: Path) -> dict[str, ResultSet]:
    """arm -> the rounds in the records file that the run wrote, if it is still there."""
    records = document.get("records")
    if isinstance(records, str) and records:
        for place in (path.parent / records, path.parent / Path(records).name, Path(records)):
            if place.is_file():
                return {result.arm: result for result in specdoctor_records.read(ResultSource(place))}
    return {}


def _same_counts(records: Mapping[str, Sums], rows: Mapping[str, Sums]) -> bool:
    return records.keys() == rows.keys() and all(
        (records[key].rounds, records[key].committed) == (sums.rounds, sums.committed) for key, sums in rows.items()
    )


def _marginal(arm: Mapping[str, Any]) -> list[float] | None:
    rates = arm.get("marginal")
    if not isinstance(rates, list):
        return None
    values = [rate.get("value") if isinstance(rate, Mapping) else rate for rate in rates]
    return [float(value) for value in values if isinstance(value, int | float)] or None
