"""The folder that `specdoctor data regenerate` writes: a manifest, and answers appended as they are done.

Contract (docs/training-data.md): `manifest.json` holds the facts that all answers share; a run with other facts is
refused with the fact that differs. Lines are appended and synced one by one. A killed run leaves at most half a line,
which the next one drops; what is there by its key is not asked for again. Worker i of n appends to a file of its own.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from specdoctor.errors import SpecdoctorError
from specdoctor.training.samples import KEY_DIGITS, SAMPLE_FILES, parse_sample, whole_lines

MANIFEST = "manifest.json"
FORMAT = 1
FOR_PEOPLE = ("target", "server")  # keys of the manifest that may differ between runs


class AnswerFile:
    """A data folder opened for appending. Use as a context: it is locked meanwhile."""

    def __init__(self, folder: Path, facts: Mapping[str, Any], worker: int = 0, workers: int = 1) -> None:
        """`facts`: what decides the answers. Raises `SpecdoctorError` when the folder has others."""
        self.folder, self.facts = folder, {"format": FORMAT, **facts}
        name = "samples.jsonl" if workers == 1 else f"samples-{worker:05d}-of-{workers:05d}.jsonl"
        self.path = folder / name
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".manifest.lock"):
            check_manifest(folder / MANIFEST, self.facts, FOR_PEOPLE, "--out")
        identity = {key: value for key, value in self.facts.items() if key not in FOR_PEOPLE}
        self._identity = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._lock = FileLock(folder / f".{name}.lock")
        self.keys: set[str] = set()

    def __enter__(self) -> "AnswerFile":
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise SpecdoctorError(
                f"{self.path}: another run is writing here; wait for it, or give another --out"
            ) from None
        drop_torn_line(self.path)
        for file in self.folder.glob(SAMPLE_FILES):
            for _, line, where in whole_lines(file):
                self.keys.add(parse_sample(line, where)[2])
        self._file = self.path.open("ab")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._lock.release()

    def key(self, prompt_ids: Sequence[int], sample: int) -> str:
        """What an answer is known by: settings, prompt and number of the sample."""
        text = json.dumps([self._identity, list(prompt_ids), sample])
        return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one answer; it is on the disk when this returns."""
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.keys.add(line["key"])


def check_manifest(path: Path, facts: Mapping[str, Any], for_people: Sequence[str], option: str) -> None:
    """Write `facts` to a new manifest, or compare them with the one that is there; the caller holds a lock.

    Raises `SpecdoctorError` naming the first key that differs (those `for_people` may) and the `option` to change.
    """
    if not path.is_file():
        write_whole(path, json.dumps(facts, indent=2) + "\n")
        return
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        there = None
    if not isinstance(there, dict):
        raise SpecdoctorError(f"{path}: not a JSON object; give another {option} folder")
    for key, value in json.loads(json.dumps(facts)).items():
        if key not in for_people and there.get(key) != value:
            raise SpecdoctorError(
                f"{path}: key {key} is {there.get(key)!r}, but this run has {value!r}; give another {option} folder, "
                "or the same settings"
            )


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all, and is on the disk when this returns.

    The caller holds a lock: what a killed run left of the unfinished file is then written over, not left behind.
    """
    part = path.with_name(f".{path.name}.partial")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def drop_torn_line(path: Path) -> None:
    """Cut a file behind its last newline."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position:
            start = max(0, position - 65536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < end:
            file.truncate(position)
