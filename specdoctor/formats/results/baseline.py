"""`specdoctor gate record`: a baseline small enough for git. One line per prompt, sorted, no text.

The same run always gives the same bytes but for the line `recorded`, so a diff shows what changed.
"""

import json
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specdoctor import __version__
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.results.result_set import ResultSet, count, estimate_from
from specdoctor.formats.results.source import ResultSource
from specdoctor.metrics.calibration import BINS
from specdoctor.metrics.sums import DEFINITIONS, Sums, estimate_of, total

NAME = "specdoctor baseline (JSON)"
KIND = "specdoctor-baseline"
SCHEMA_VERSION = 1
COLUMNS = [field.name for field in fields(Sums) if field.name != "confidence"]
OVER_REQUESTS = ("tau_sum", "length_sum", "completion_length_sum")


def recognises(source: ResultSource) -> bool:
    return source.document.get("kind") == KIND


def read(source: ResultSource) -> list[ResultSet]:
    document, path = source.document, str(source.path)
    if document.get("schema_version") != SCHEMA_VERSION:
        found = document.get("schema_version")
        raise SpecdoctorError(
            f"{path}: key schema_version is {found!r}, expected {SCHEMA_VERSION}; record the baseline again"
        )
    columns, rows = document.get("columns"), document.get("prompts")
    if not isinstance(columns, list) or not set(columns) <= {*COLUMNS, "confidence", "prompt_hash"}:
        raise SpecdoctorError(f"{path}: key columns is {columns!r}, expected names of {', '.join(COLUMNS)}")
    prompts, hashes = None, {}
    if columns[-1:] == ["prompt_hash"] and isinstance(rows, dict):
        columns = columns[:-1]
        hashes = {prompt: str(row[-1]) for prompt, row in rows.items() if isinstance(row, list) and row}
        rows = {prompt: row[:-1] if isinstance(row, list) else row for prompt, row in rows.items()}
    if rows is not None:
        prompts = {prompt: _sums(row, columns, f"{path}: prompts.{prompt}") for prompt, row in rows.items()}
    values = document.get("values") or {}
    return [
        ResultSet(
            tool=str(document.get("tool", "specdoctor")),
            path=path,
            arm=str(document.get("arm", "")),
            convention=str(document.get("convention", "")),
            pooled=_pooled(document.get("pooled"), columns, prompts, path),
            prompts=prompts,
            pairable=bool(document.get("pairable")),
            settings=dict(document.get("settings") or {}),
            hashes=hashes,
            values={name: found for name in values if (found := estimate_from(values[name], path, f"values.{name}"))},
            absent=dict(document.get("absent") or {}),
            histogram=document.get("histogram"),
            marginal=document.get("marginal"),
            notes=tuple(document.get("notes") or ()),
            version=document.get("version"),
            date=document.get("recorded"),
        )
    ]


def write(result: ResultSet, path: Path, recorded: datetime | None = None) -> None:
    """Write a baseline; the file appears whole or not at all. `recorded`: the time to state, now by default."""
    every = [*(result.prompts or {}).values()] or [result.pooled]
    columns = [name for name in COLUMNS if any(getattr(sums, name) is not None for sums in every)]
    if result.prompts and all(sums.requests == 1 for sums in every):
        columns = [name for name in columns if name not in OVER_REQUESTS]  # they follow from the rest
    if any(sums.confidence is not None for sums in every):
        columns.append("confidence")
    hashes = result.hashes if result.prompts and result.hashes.keys() >= result.prompts.keys() else {}
    counted = {name for name in result.values if result.prompts and estimate_of(DEFINITIONS[name], result.prompts)}
    head: dict[str, Any] = {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "recorded": (recorded or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "specdoctor_version": __version__,
        "tool": result.tool,
        "version": result.version,
        "measured": result.date,
        "source": Path(result.path).name,
        "arm": result.arm,
        "convention": result.convention,
        "pairable": result.pairable,
        "settings": dict(sorted(result.settings.items())),
        "notes": list(result.notes),
        "absent": dict(sorted(result.absent.items())),
        "values": {name: result.values[name].to_json() for name in sorted(result.values) if name not in counted},
        "histogram": result.histogram,
        "marginal": result.marginal,
        "columns": [*columns, "prompt_hash"] if hashes else columns,
    }
    head["pooled"] = _row(result.pooled, columns)
    lines = [
        f"  {json.dumps(key)}: {_lines(value) if key == 'settings' else _line(value)}" for key, value in head.items()
    ]
    rows = {
        prompt: _row(sums, columns) + ([hashes[prompt]] if hashes else [])
        for prompt, sums in (result.prompts or {}).items()
    }
    lines.append(f'  "prompts": {_lines(dict(sorted(rows.items()))) if rows else "null"}')
    part = path.with_name(path.name + ".part")
    part.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    part.replace(path)


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _lines(values: dict[str, Any]) -> str:
    """An object with one line a key."""
    inside = ",\n".join(f"    {_line(key)}: {_line(value)}" for key, value in values.items())
    return "{\n" + inside + "\n  }" if values else "{}"


def _row(sums: Sums, columns: list[str]) -> list[Any]:
    return [_sparse(sums.confidence) if name == "confidence" else _short(getattr(sums, name)) for name in columns]


def _short(number: float | None) -> float | None:
    """Whole numbers without a point; others to a precision that no interval can see."""
    if number is None:
        return None
    return int(number) if float(number).is_integer() else float(f"{number:.9g}")


def _sparse(bins: tuple[float, ...] | None) -> dict[str, list[float | None]] | None:
    """{bin: [predictions, sum of prediction - outcome]}, empty bins left out."""
    if bins is None:
        return None
    return {str(i): [_short(bins[i]), round(bins[BINS + i], 4)] for i in range(BINS) if bins[i]}


def _sums(row: Any, columns: list[str], place: str) -> Sums:
    if not isinstance(row, list) or len(row) != len(columns):
        raise SpecdoctorError(f"{place}: is {row!r}, expected {len(columns)} numbers; record the baseline again")
    values: dict[str, Any] = {}
    for name, value in zip(columns, row, strict=True):
        values[name] = _dense(value, place) if name == "confidence" else count(value, place, name)
    if values.get("requests") == 1:
        return Sums.of_request(
            **{key: value for key, value in values.items() if key not in ("requests", *OVER_REQUESTS)}
        )
    return Sums(**values)


def _pooled(row: Any, columns: list[str], prompts: dict[str, Sums] | None, path: str) -> Sums:
    """The stated sum, which may know more than its parts, over the sum of the prompts."""
    added = total((prompts or {}).values())
    stated = _sums(row, columns, f"{path}: pooled") if row else Sums()
    known = {name: getattr(stated, name) for name in columns if getattr(stated, name) is not None}
    return replace(added, **known)


def _dense(bins: Any, place: str) -> tuple[float, ...] | None:
    if bins is None:
        return None
    dense = [0.0] * (2 * BINS)
    try:
        for index, (size, gap) in bins.items():
            dense[int(index)], dense[BINS + int(index)] = float(size), float(gap)
    except (AttributeError, ValueError, TypeError, IndexError):
        raise SpecdoctorError(f"{place}: key confidence is {bins!r}, expected {{bin: [count, gap]}}") from None
    return tuple(dense)
