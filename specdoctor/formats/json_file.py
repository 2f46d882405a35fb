"""JSON files of any size, with one clear line for an empty or broken one."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError


def load_json(path: Path) -> Any:
    """Parse a JSON file. Raises SpecdoctorError on an empty or broken file."""
    return parse_json(read_bytes(path), path)


def read_bytes(path: Path) -> bytes:
    """The bytes of a file. Raises SpecdoctorError when there are none."""
    raw = path.read_bytes()
    if not raw.strip():
        raise SpecdoctorError(f"{path}: the file is empty; expected JSON. Download it again.")
    return raw


def parse_json(raw: bytes, path: Path, whole: bytes | None = None) -> Any:
    """Parse JSON text of a file. `whole`: the file's own text where `raw` is a part of it, to name the right place."""
    try:
        with collection_paused():
            return json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        if whole is not None:
            return parse_json(whole, path)
        place = f"line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else "not UTF-8"
        raise SpecdoctorError(f"{path}: not valid JSON ({place}): broken or cut off. Download it again.") from None
    except RecursionError:
        raise SpecdoctorError(f"{path}: JSON nested too deeply to be a tokenizer or configuration file.") from None


@contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection inside.

    A 33 MB tokenizer.json makes 1.5 million objects, none of them garbage; looking through them again and again costs
    half of the time.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
