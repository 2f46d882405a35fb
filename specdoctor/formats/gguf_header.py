"""The header of a GGUF file: key-value metadata and tensor descriptions, read through a memory map.

The reference reader makes numpy views of every string of every array: over ten seconds for a 260k vocabulary. Layout:
magic, version, tensor count, pair count, pairs, tensor descriptions, padding, data (little endian, versions 2 and 3).
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GgufTensor:
    """Description of one tensor; `shape` as PyTorch counts it (outermost first)."""

    name: str
    shape: tuple[int, ...]
    type: int  # ggml type number
    offset: int  # from the start of the file


class GgufHeader:
    """Metadata and tensors of a GGUF file. Raises SpecdoctorError when the file is cut off or not a GGUF."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        if path.stat().st_size < 24:
            raise SpecdoctorError(
                f"{path}: {path.stat().st_size} bytes, too short for a GGUF header. Download it again."
            )
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            self._view, self._at = view, 0
            try:
                self._read()
            except (struct.error, IndexError, UnicodeDecodeError, OverflowError, MemoryError):
                raise SpecdoctorError(
                    f"{path}: the header is cut off or damaged (byte {self._at:,} of {len(view):,}). Download it again."
                ) from None
            finally:
                del self._view

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a metadata key."""
        return self.metadata.get(key, default)

    @cached_property
    def architecture(self) -> str:
        """`general.architecture`, the prefix of the model's own keys."""
        return str(self.metadata.get("general.architecture", ""))

    def _read(self) -> None:
        magic, version, tensor_count, pair_count = struct.unpack_from("<4sIQQ", self._view, 0)
        if magic != MAGIC:
            raise SpecdoctorError(f"{self.path}: starts with {magic!r}, expected {MAGIC!r}: not a GGUF file.")
        if version not in (2, 3):
            raise SpecdoctorError(
                f"{self.path}: GGUF version {version}, expected 2 or 3 (big-endian files are not read)."
            )
        self._at = 24
        for _ in range(pair_count):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        descriptions = [self._tensor() for _ in range(tensor_count)]
        alignment = int(self.metadata.get("general.alignment", 32)) or 32
        start = -(-self._at // alignment) * alignment
        if any(start + t.offset >= len(self._view) for t in descriptions if 0 not in t.shape):
            raise IndexError(start)  # a weight lies behind the end of the file
        self.tensors = {t.name: GgufTensor(t.name, t.shape, t.type, start + t.offset) for t in descriptions}

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._view, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        self._need(length)
        text = self._view[self._at : self._at + length].decode("utf-8", "backslashreplace")
        self._at += length
        return text

    def _need(self, size: int) -> None:
        if self._at + size > len(self._view):
            raise IndexError(self._at)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._scalar("I"), self._scalar("Q"))
        if kind not in _SCALARS:
            raise IndexError(kind)
        return self._scalar(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> Any:
        self._need(count)  # every element takes a byte or more: a nonsense count fails here, not in memory
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        layout = f"<{count}{_SCALARS.get(kind, '')}"
        if kind not in _SCALARS:
            raise IndexError(kind)
        values = list(struct.unpack_from(layout, self._view, self._at))
        self._at += struct.calcsize(layout)
        return values

    def _strings(self, count: int) -> list[str]:
        """The hot loop: hundreds of thousands of tokens and merges."""
        view, at, end = self._view, self._at, len(self._view)
        length_at: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            (length,) = length_at(view, at)
            at += 8 + length
            if at > end:
                raise IndexError(at)
            strings.append(view[at - length : at].decode("utf-8", "backslashreplace"))
        self._at = at
        return strings

    def _tensor(self) -> GgufTensor:
        name = self._string()
        dimensions = self._scalar("I")
        if dimensions > 8:
            raise IndexError(dimensions)
        shape = tuple(self._scalar("Q") for _ in range(dimensions))
        return GgufTensor(name, shape[::-1], self._scalar("I"), self._scalar("Q"))
