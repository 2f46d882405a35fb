"""Training samples: token ids with a loss mask, read from the lines that `specdoctor data regenerate` writes.

Contract (docs/training-data.md): a line is a JSON object with `ids` (prompt and answer), `answer` (a list of [start,
end) spans of `ids` that the target wrote) and, optionally, `key`. A set is sorted by key, so it does not depend on the
order of the lines; of two lines with one key the later counts, and of equal contents one is kept. Lines are read when
they are asked for: a set holds their places alone, 1.3 million of them in some 300 MB.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, overload

from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.measure.prompt_file import FIELDS as PROMPT_FIELDS

SAMPLE_FILES = "samples*.jsonl"
KEY_DIGITS = 24


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence. `loss_mask[i]`: the token i itself is to be predicted."""

    id: str
    ids: list[int]
    loss_mask: list[bool]


class _Place(NamedTuple):
    key: str
    file: int
    offset: int
    size: int
    length: int  # tokens, after the cut
    content: bytes  # hash of ids and answer


class SampleSet(Sequence[Sample]):
    """The samples of a data folder or of one JSONL file, sorted by key."""

    def __init__(self, path: Path, max_length: int | None = None) -> None:
        """`max_length` cuts sequences; one whose answer begins behind the cut is left out and counted.

        Raises `SpecdoctorError` for a line that is no sample, and when there is none at all (exit code NOTHING).
        """
        self.path, self.max_length = path, max_length
        self.duplicates = self.without_answer = self.largest_id = 0
        self._files = sample_files(path)
        self._places = self._read()
        if not self._places:
            raise SpecdoctorError(f"{path}: no samples; make some with `specdoctor data regenerate`", ExitCode.NOTHING)
        self.lengths = [place.length for place in self._places]

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = self._places[index]
        with self._files[place.file].open("rb") as file:
            file.seek(place.offset)
            row = json.loads(file.read(place.size))
        ids = row["ids"][: place.length]
        return Sample(place.key, ids, loss_mask(len(ids), row["answer"]))

    @property
    def keys(self) -> list[str]:
        return [place.key for place in self._places]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def digest(self) -> str:
        """32 hex digits of what the set holds, cut included; the order of lines does not matter."""
        digest = hashlib.sha256()
        for place in self._places:
            digest.update(f"{place.key}:{place.length}:".encode() + place.content)
        return digest.hexdigest()[:32]

    def _read(self) -> list[_Place]:
        by_key: dict[str, _Place] = {}
        for number, file in enumerate(self._files):
            for offset, line, where in whole_lines(file):
                ids, answer, key = parse_sample(line, where)
                length = len(ids) if self.max_length is None else min(len(ids), self.max_length)
                if not any(start < min(end, length) for start, end in answer):
                    self.without_answer += 1
                    continue
                self.largest_id = max(self.largest_id, *ids)
                content = hashlib.sha256(json.dumps([ids, answer]).encode()).digest()[:16]
                key = key or content.hex()[:KEY_DIGITS]
                self.duplicates += key in by_key
                by_key[key] = _Place(key, number, offset, len(line), length, content)
        by_content: dict[bytes, _Place] = {}
        for place in sorted(by_key.values()):
            self.duplicates += place.content in by_content
            by_content.setdefault(place.content, place)
        return list(by_content.values())


def read_samples(path: Path, max_length: int | None = None) -> SampleSet:
    """The samples of a data folder or JSONL file; see `SampleSet`."""
    return SampleSet(path, max_length)


def loss_mask(length: int, answer: Sequence[Sequence[int]]) -> list[bool]:
    """[length]: true on the spans."""
    mask = [False] * length
    for start, end in answer:
        stop = min(end, length)
        mask[start:stop] = [True] * max(0, stop - start)
    return mask


def sample_files(path: Path) -> list[Path]:
    """The JSONL files of a data folder, or the file itself. Raises `SpecdoctorError` when there is none."""
    if path.is_file():
        return [path]
    files = sorted(path.glob(SAMPLE_FILES)) if path.is_dir() else []
    if not files:
        raise SpecdoctorError(
            f"{path}: no {SAMPLE_FILES} there; give a folder that `specdoctor data regenerate` wrote, or a JSONL file"
        )
    return files


def whole_lines(path: Path) -> Iterator[tuple[int, bytes, str]]:
    """(offset, line, place for messages) of a file's lines; half a line at its end is left out: a write was cut off."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n") and line.strip():
                yield offset, line, f"{path}:{number}"
            offset += len(line)


def parse_sample(line: bytes, where: str) -> tuple[list[int], list[list[int]], str]:
    """(ids, answer, key or "") of a line. Raises `SpecdoctorError` naming the line and the key that is wrong."""
    try:
        row: Any = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise SpecdoctorError(f"{where}: not a JSON object; expected a sample with ids and answer, delete the line")
    if "ids" not in row and (kind := next((name for name in PROMPT_FIELDS if name in row), None)):
        raise SpecdoctorError(
            f"{where}: key ids is not there, but {kind} is: these look like prompts; run `specdoctor data regenerate` "
            "first, and give what it writes"
        )
    ids, answer, key = row.get("ids"), row.get("answer"), row.get("key", "")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise SpecdoctorError(f"{where}: key ids is not a list of token ids, expected whole numbers of 0 or more")
    if not isinstance(answer, list) or not all(_is_span(span, len(ids)) for span in answer):
        raise SpecdoctorError(
            f"{where}: key answer is {json.dumps(answer)[:60]}, expected spans [start, end) within the {len(ids)} ids"
        )
    if not isinstance(key, str):
        raise SpecdoctorError(f"{where}: key key is {key!r}, expected text")
    return ids, answer, key


def _is_span(span: Any, length: int) -> bool:
    return (
        isinstance(span, list)
        and len(span) == 2
        and all(type(edge) is int for edge in span)
        and 0 <= span[0] <= span[1] <= length
    )
