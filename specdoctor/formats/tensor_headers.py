"""Names, shapes and places of tensors from file headers, and single rows read from their place. Needs no torch.

Contract: nothing here reads a whole tensor except the small integer maps that the caller asks for, and nothing runs
code from a file, so pickled checkpoints (.bin, .pt) are named but not read.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.gguf_header import GgufHeader

if TYPE_CHECKING:
    import numpy as np

_NUMPY_NAMES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
}
_NUMPY_NAMES |= {"U8": "u1", "BOOL": "?"}
_GGML_PLAIN = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
PICKLED = (".bin", ".pt", ".pth")


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies. `shape` is outermost first; `dtype` a safetensors name or `ggml:<number>`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 0


def safetensors_places(path: Path) -> dict[str, TensorPlace]:
    """Tensors of one safetensors file. Raises SpecdoctorError when the file is cut off or not safetensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 2 <= length <= size - 8:
            raise SpecdoctorError(
                f"{path}: {size:,} bytes hold no safetensors header; the file is cut off. Fetch it again."
            )
        try:
            header = json.loads(file.read(length))
            places = {
                name: TensorPlace(
                    name, path, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]
                )
                for name, entry in header.items()
                if name != "__metadata__"
            }
            end = max((8 + length + e["data_offsets"][1] for n, e in header.items() if n != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise SpecdoctorError(
                f"{path}: its safetensors header is not the expected JSON. Fetch the file again."
            ) from None
    if end > size:
        raise SpecdoctorError(
            f"{path}: the header promises {end:,} bytes, the file has {size:,}: cut off. Fetch it again."
        )
    return places


def folder_places(folder: Path) -> tuple[dict[str, TensorPlace], list[str]]:
    """Tensors of a folder's safetensors files, and the names of weight files that are not read (pickles).

    Raises SpecdoctorError when an indexed shard is missing or a file is cut off.
    """
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        try:
            files = [folder / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
        except (ValueError, KeyError, AttributeError, TypeError):
            raise SpecdoctorError(
                f"{index}: expected a JSON object with a 'weight_map' of tensor names to files."
            ) from None
    # A folder with tokenizer files and an index but no shard is a common partial download: sizes are then unknown.
    present = [path for path in files if path.is_file()]
    if present and (absent := [path.name for path in files if path not in present]):
        raise SpecdoctorError(
            f"{folder}: {index.name} names {absent[0]}, which is missing. Fetch the checkpoint again."
        )
    places: dict[str, TensorPlace] = {}
    for path in present:
        places.update(safetensors_places(path))
    unread = sorted(
        path.name for path in folder.iterdir() if path.suffix in PICKLED and path.name != "training_args.bin"
    )
    return places, unread


def gguf_places(header: GgufHeader) -> dict[str, TensorPlace]:
    """Tensors of a GGUF file, in the same terms."""
    return {
        t.name: TensorPlace(t.name, header.path, _GGML_PLAIN.get(t.type, f"ggml:{t.type}"), t.shape, t.offset)
        for t in header.tensors.values()
    }


def read_integers(place: TensorPlace) -> "np.ndarray[Any, Any] | None":
    """A whole integer or bool tensor, or None for another dtype."""
    if place.dtype not in ("I64", "I32", "I16", "I8", "U8", "BOOL"):
        return None
    values = _read(place, _NUMPY_NAMES[place.dtype], 0, _count(place))
    return values.astype(bool) if place.dtype == "BOOL" else values.astype("i8")


def read_row(place: TensorPlace, row: int) -> "np.ndarray[Any, Any] | None":
    """One row [H] as float32, or None when the dtype cannot be read row by row."""
    if not 0 <= row < place.rows or len(place.shape) != 2:
        return None
    width = place.shape[1]
    if place.dtype.startswith("ggml:"):
        return _quantised_row(place, row, width)
    if place.dtype not in ("F64", "F32", "F16", "BF16"):
        return None
    raw = _read(place, _NUMPY_NAMES[place.dtype], row * width, width)
    if place.dtype == "BF16":
        return (raw.astype("u4") << 16).view("f4")
    return raw.astype("f4")


def _count(place: TensorPlace) -> int:
    count = 1
    for extent in place.shape:
        count *= extent
    return count


def _read(place: TensorPlace, dtype: str, start: int, count: int) -> "np.ndarray[Any, Any]":
    import numpy as np

    with place.file.open("rb") as file:
        file.seek(place.offset + start * np.dtype(dtype).itemsize)
        values = np.frombuffer(file.read(count * np.dtype(dtype).itemsize), dtype=dtype)
    if len(values) != count:
        raise SpecdoctorError(f"{place.file}: tensor {place.name} is cut off. Fetch the file again.")
    return values


def _quantised_row(place: TensorPlace, row: int, width: int) -> "np.ndarray[Any, Any] | None":
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        kind = GGMLQuantizationType(int(place.dtype.removeprefix("ggml:")))
        block, size = GGML_QUANT_SIZES[kind]
        row_bytes = width // block * size
        return dequantize(_read(place, "u1", row * row_bytes, row_bytes), kind).astype(np.float32)
    except (ValueError, KeyError, NotImplementedError):
        return None
