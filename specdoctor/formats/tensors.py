"""The tensors of a checkpoint folder: names and shapes from headers, values on demand. Never runs code from a file."""

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdoctor.errors import SpecdoctorError


class TensorFolder:
    """A folder's weights as one mapping: the index's shards, else `model.safetensors`, else all `*.safetensors`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in _files(folder):
            for name, shape in _header(path):
                if name in self._file_of:
                    raise SpecdoctorError(
                        f"{path}: tensor {name} is also in {self._file_of[name].name}; expected it once"
                    )
                self._file_of[name] = path
                self._shapes[name] = shape

    def names(self) -> list[str]:
        return list(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def file_of(self, name: str) -> Path:
        return self._file_of[name]

    def load(self, names: list[str]) -> dict[str, Tensor]:
        """The values of `names`, in their stored dtype, on the host."""
        out: dict[str, Tensor] = {}
        for path in sorted({self._file_of[name] for name in names}):
            with safe_open(path, framework="pt") as file:
                out.update({name: file.get_tensor(name) for name in names if self._file_of[name] == path})
        return out


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            raise SpecdoctorError(
                f"{index}: expected a JSON object with a weight_map of tensor names to files"
            ) from None
        files = [folder / shard for shard in shards]
        for path in files:
            if not path.is_file():
                raise SpecdoctorError(f"{path}: named by {index.name} but missing; fetch the checkpoint again")
        return files
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise SpecdoctorError(
            f"{folder}: has a config.json but no *.safetensors; expected the drafter's weights beside it"
        )
    return files


def _header(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, tuple(file.get_slice(name).get_shape())
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise SpecdoctorError(
            f"{path}: not a complete safetensors file ({size} bytes: {error}); fetch or save it again"
        ) from None
