"""The merges of a tokenizer.json, left as text until somebody needs them.

Half a million merges are most of the objects in a large tokenizer.json, and most questions do not need one of them:
equal text means equal merges, and a vocabulary is compared by its tokens.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from specdoctor.formats.json_file import collection_paused, parse_json, read_bytes

_START = re.compile(rb'"merges"\s*:\s*(?=\[)')  # a token spelled so has a number behind it, never a list


class MergesText(Sequence[Any]):
    """A list of "a b" or ["a", "b"], parsed on first use. `twin`: an equal list to share the work with."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self.twin: MergesText | None = None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MergesText) and self._text == other._text:
            return True
        return self._pairs == (other._pairs if isinstance(other, MergesText) else other)

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._pairs)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._pairs[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pairs)

    def same_text(self, other: object) -> bool:
        """Whether both were written alike, byte for byte."""
        return isinstance(other, MergesText) and self._text == other._text

    @cached_property
    def _pairs(self) -> list[Any]:
        if self.twin is not None:
            return self.twin._pairs
        with collection_paused():
            return list(json.loads(self._text))


def load_tokenizer_json(path: Path) -> Any:
    """`parse_json` of a file, with `model.merges` as `MergesText` where they stand at the end, as they are written.

    Raises SpecdoctorError on an empty or broken file; what is broken inside the merges shows only when they are used.
    """
    raw = read_bytes(path)
    start, end = _START.search(raw), raw.rfind(b"]") + 1
    if start is None or raw[end:].strip(b"} \r\n\t"):
        return parse_json(raw, path)
    data = parse_json(raw[: start.end()] + b"[]" + raw[end:], path, whole=raw)
    if isinstance(data, dict) and isinstance(data.get("model"), dict) and data["model"].get("merges") == []:
        data["model"]["merges"] = MergesText(raw[start.end() : end])
        return data
    return parse_json(raw, path)
