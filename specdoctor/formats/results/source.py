"""A results file before anybody knows what it is: a JSON object, rows of JSON, or text."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from specdoctor.errors import SpecdoctorError


class Row(NamedTuple):
    place: str  # file and line, for messages
    values: dict[str, Any]


class ResultSource:
    """`document`: the file is one JSON object. `rows`: it is a JSON array or JSONL of objects (an object alone is one
    row). `text`: whatever it is. Each is parsed when first asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise SpecdoctorError(
                f"{path}: no such file; expected a results file (specdoctor compare --help lists them)"
            )

    @cached_property
    def text(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise SpecdoctorError(f"{self.path}: not UTF-8 text ({error.reason}); expected a results file") from None

    @cached_property
    def first(self) -> dict[str, Any]:
        """The object on the first line, {} when there is none: tells JSONL formats apart without reading all."""
        with self.path.open("rb") as file:
            line = next((line for line in file if line.strip()), b"")
        try:
            value = json.loads(line)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    @cached_property
    def _json(self) -> Any:
        """The whole file as JSON; None for JSONL and for text. Raises for JSON that is cut off or damaged."""
        body = self.text.strip()
        # A log line may begin with a bracket too; JSON goes on with a value or ends at once.
        if body[:1] not in ("{", "[") or body[1:].lstrip()[:1] not in ('"', "{", "[", "}", "]"):
            return None
        try:
            return json.loads(body)
        except ValueError as error:
            if self.first:  # the first line is an object of its own: JSONL
                return None
            raise SpecdoctorError(f"{self.path}: not valid JSON ({error}); is the file complete?") from None

    @property
    def document(self) -> dict[str, Any]:
        """The one object of the file; {} when it is something else."""
        return self._json if isinstance(self._json, dict) else {}

    @cached_property
    def rows(self) -> list[Row]:
        """All objects of the file; [] when it is text. Raises for a line that is not an object."""
        if isinstance(self._json, dict):
            return [Row(str(self.path), self._json)]
        if isinstance(self._json, list):
            return [self._row(f"{self.path}[{i}]", value) for i, value in enumerate(self._json)]
        if not self.first:
            return []
        rows = []
        for number, line in enumerate(self.text.splitlines(), 1):
            if not line.strip():
                continue
            place = f"{self.path}:{number}"
            try:
                rows.append(self._row(place, json.loads(line)))
            except ValueError as error:
                raise SpecdoctorError(f"{place}: not valid JSON ({error}); is the file complete?") from None
        return rows

    @staticmethod
    def _row(place: str, value: Any) -> Row:
        if not isinstance(value, dict):
            raise SpecdoctorError(f"{place}: holds a {type(value).__name__}, expected a JSON object")
        return Row(place, value)
