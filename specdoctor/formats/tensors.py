"""The tensors of a checkpoint folder: names and shapes from headers, values on demand. Never runs code from a file.

safetensors (with or without an index) first; where there are none, pickled `.bin`, `.pt` and `.pth` files (see
`pickled_tensors`). Importing torch takes seconds, so it waits until values, or a pickled file, are read: headers of
safetensors need none of it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from specdoctor.errors import SpecdoctorError

if TYPE_CHECKING:
    from torch import Tensor

PICKLED = (".bin", ".pt", ".pth")
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"}
_DTYPES |= {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"}


class RefusedPickleError(SpecdoctorError):
    """A pickled file that asks for something else than tensors, so loading it could run code."""


class TensorFolder:
    """A folder's weights as one mapping: the index's shards, else `model.safetensors`, else all of one kind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        self._unpickled: dict[Path, dict[str, Tensor]] = {}
        for path in _files(folder):
            for name, shape, dtype in self._header(path):
                if name in self._file_of:
                    raise SpecdoctorError(
                        f"{path}: tensor {name} is also in {self._file_of[name].name}; expected it once"
                    )
                self._file_of[name], self._shapes[name], self._dtypes[name] = path, shape, dtype

    def names(self) -> list[str]:
        return list(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        """As torch writes it: "bfloat16"."""
        return self._dtypes[name]

    def file_of(self, name: str) -> Path:
        return self._file_of[name]

    def load(self, names: list[str]) -> "dict[str, Tensor]":
        """The values of `names`, in their stored dtype, on the host."""
        out: dict[str, Tensor] = {}
        for path in sorted({self._file_of[name] for name in names}):
            mine = [name for name in names if self._file_of[name] == path]
            if path.suffix in PICKLED:
                out.update({name: self._unpickled[path][name] for name in mine})
                continue
            with safe_open(path, framework="pt") as file:
                out.update({name: file.get_tensor(name) for name in mine})
        return out

    def _header(self, path: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
        if path.suffix in PICKLED:
            from specdoctor.formats.pickled_tensors import unpickle_tensors

            tensors = self._unpickled[path] = unpickle_tensors(path)
            for name, tensor in tensors.items():
                yield name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        else:
            yield from _safetensors_header(path)


def _files(folder: Path) -> list[Path]:
    for pattern, index in (
        ("*.safetensors", "model.safetensors.index.json"),
        ("*.bin", "pytorch_model.bin.index.json"),
        ("*.pt", ""),
        ("*.pth", ""),
    ):
        files = _shards(folder / index) if index and (folder / index).is_file() else []
        single = folder / pattern.replace("*", "model")
        files = files or ([single] if single.is_file() else sorted(folder.glob(pattern)))
        files = [path for path in files if path.is_file() and path.name != "training_args.bin"]
        if files:
            return files
    raise SpecdoctorError(
        f"{folder}: has a config.json but no *.safetensors, *.bin or *.pt; expected the drafter's weights beside it"
    )


def _shards(index: Path) -> list[Path]:
    try:
        shards = list(dict.fromkeys(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise SpecdoctorError(f"{index}: expected a JSON object with a weight_map of tensor names to files") from None
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise SpecdoctorError(f"{index}: key weight_map names {shard!r}, expected the name of a file beside it")
    files = [index.parent / shard for shard in shards]
    for path in files:
        if not path.is_file():
            raise SpecdoctorError(f"{path}: named by {index.name} but missing; fetch the checkpoint again")
    return files


def torch_dtype(name: str) -> str:
    """safetensors' name of a dtype as torch writes it; as it is where there is no such thing."""
    return _DTYPES.get(name, name)


def _safetensors_header(path: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    try:
        with safe_open(path, framework="numpy") as file:  # whatever the framework, only the header is read here
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                part = file.get_slice(name)
                yield name, tuple(part.get_shape()), torch_dtype(part.get_dtype())
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise SpecdoctorError(
            f"{path}: not a complete safetensors file ({size} bytes: {error}); fetch or save it again"
        ) from None
