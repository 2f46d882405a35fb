"""Saved JSON in, checked documents out.

Contract: whatever is wrong with a file is ONE line: file, key, value found, value expected.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specdoctor.errors import SpecdoctorError
from specdoctor.reports.html_rows import CheckDocument, CostDocument, Document
from specdoctor.reports.html_rows_accept import AcceptDocument
from specdoctor.reports.html_rows_bench import BenchDocument
from specdoctor.reports.html_rows_profile import ProfileDocument

SCHEMA_VERSION = 1
_SHOWN = 60  # characters of a wrong value

_KINDS: dict[str, type[Document]] = {
    "bench": BenchDocument,
    "accept": AcceptDocument,
    "profile": ProfileDocument,
    "check": CheckDocument,
    "cost-table": CostDocument,
}


def read_document(document: Any, name: str) -> Document:
    """Check one JSON object; `name` is the file, for the message. Raises SpecdoctorError with one line."""
    if not isinstance(document, Mapping):
        raise SpecdoctorError(f"{name}: found {_short(document)}, expected a JSON object written by specdoctor --json")
    kind = _kind(document, name)
    version = document.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise SpecdoctorError(
            f"{name}: schema_version: found {_short(version)}, expected {SCHEMA_VERSION}; draw it with the specdoctor "
            "that wrote it"
        )
    try:
        return _KINDS[kind].model_validate({**document, "kind": kind})
    except ValidationError as error:
        raise SpecdoctorError(f"{name}: {_first(error)} (kind {kind})") from None


def load_document(path: Path) -> Any:
    """The JSON of a file. Raises SpecdoctorError when it is not there or not one JSON document."""
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SpecdoctorError(f"{path}: {error.strerror or error}; give a file written with --json") from None
    except UnicodeDecodeError:
        raise SpecdoctorError(
            f"{path}: found bytes that are no UTF-8 text, expected a file written with --json"
        ) from None
    except ValueError as error:
        hint = "; for round records (JSONL) give the JSON of the same run" if path.suffix == ".jsonl" else ""
        raise SpecdoctorError(f"{path}: not one JSON document ({error}){hint}") from None


def _kind(document: Mapping[str, Any], name: str) -> str:
    kind = document.get("kind")
    if kind is None and "findings" in document:
        return "check"
    if kind is None and "sps" in document:
        return "cost-table"
    if isinstance(kind, str) and kind in _KINDS:
        return kind
    keys = ", ".join(sorted(map(str, document))[:6]) or "none"
    found = f"nothing (keys: {keys})" if kind is None else _short(kind)
    raise SpecdoctorError(
        f"{name}: kind: found {found}, expected one of {', '.join(_KINDS)}; give a file that specdoctor wrote with "
        "--json"
    )


def _first(error: ValidationError) -> str:
    """The first trouble as `key: found ..., expected ...`."""
    problem = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in problem["loc"]) or "document"
    if problem["type"] == "missing":
        return f"{key}: found no such key, expected one"
    if problem["type"] == "too_short":
        return (
            f"{key}: found {problem['ctx']['actual_length']} entries, expected at least {problem['ctx']['min_length']}"
        )
    if problem["type"] == "value_error":
        return f"{key}: found {problem['ctx']['error']}"
    wanted = problem["msg"].removeprefix("Input should be ")
    return f"{key}: found {_short(problem['input'])}, expected {wanted}"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
