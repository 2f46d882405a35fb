"""The tensors and settings of a GGUF file in the terms of a checkpoint folder: shapes as PyTorch counts them.

Contract: names, shapes and types come from the header; values are read from their place, quantised ones dequantised to
float32 by the gguf library. Settings become a `JsonConfig` in which `dflash.block_size` is the key it is in the file.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.gguf_header import GgufHeader
from specdoctor.formats.json_config import JsonConfig

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN = {
    0: "float32",
    1: "float16",
    24: "int8",
    25: "int16",
    26: "int32",
    27: "int64",
    28: "float64",
    30: "bfloat16",
}


def gguf_file(path: Path) -> Path | None:
    """The GGUF that `path` stands for: the file itself, or the only one of a folder without a config.json."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise SpecdoctorError(f"{path}: holds {len(files)} *.gguf files; give the drafter's own path")
    return files[0] if files else None


def gguf_config(header: GgufHeader) -> JsonConfig:
    """The metadata as a config with dotted keys; error lines name the file."""
    values: dict[str, Any] = {}
    for key, value in header.metadata.items():
        *parents, last = key.split(".")
        place: Any = values
        for parent in parents:
            place = place.setdefault(parent, {}) if isinstance(place, dict) else None
        if isinstance(place, dict) and not isinstance(place.get(last), dict):
            place[last] = value
        else:
            values[key] = value  # a key that is also the prefix of another: tokenizer.chat_template
    return JsonConfig(header.path, values)


class GgufTensors:
    """A GGUF file as a source of tensors (`formats.drafts.checkpoint.TensorSource`)."""

    def __init__(self, header: GgufHeader) -> None:
        self.path, self._tensors = header.path, header.tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """As torch writes it; quantised tensors are named by their ggml type ("q4_1") and load as float32."""
        number = self._tensors[name].type
        if number in _PLAIN:
            return _PLAIN[number]
        from gguf import GGMLQuantizationType

        try:
            return GGMLQuantizationType(number).name.lower()
        except ValueError:
            return f"ggml type {number}"

    def file_of(self, name: str) -> Path:
        return self.path

    def load(self, names: list[str]) -> "dict[str, Tensor]":
        """The values of `names`, on the host. Raises `SpecdoctorError` for a type that gguf cannot dequantise."""
        return {name: self._value(name) for name in names}

    def _value(self, name: str) -> "Tensor":
        import numpy as np
        import torch

        stored = self._tensors[name]
        rows, size = self._bytes(name)
        raw = np.fromfile(self.path, dtype=np.uint8, count=size, offset=stored.offset)
        if len(raw) != size:
            raise SpecdoctorError(f"{self.path}: tensor {name} is cut off. Fetch the file again.")
        if stored.type in _PLAIN:
            return torch.from_numpy(raw).view(getattr(torch, _PLAIN[stored.type])).reshape(stored.shape)
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            values = dequantize(raw.reshape(rows, -1), GGMLQuantizationType(stored.type))
        except NotImplementedError:
            raise SpecdoctorError(
                f"{self.path}: tensor {name} has type {self.dtype(name)}, which the gguf library cannot dequantise; "
                "export the drafter in float16 or bfloat16"
            ) from None
        return torch.from_numpy(values.astype(np.float32)).reshape(stored.shape)

    def _bytes(self, name: str) -> tuple[int, int]:
        """Rows and bytes of a tensor."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        stored = self._tensors[name]
        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(stored.type)]
        except (ValueError, KeyError):
            raise SpecdoctorError(
                f"{self.path}: tensor {name} has ggml type {stored.type}, which is not known here"
            ) from None
        rows = 1
        for extent in stored.shape[:-1]:
            rows *= extent
        return rows, rows * (stored.shape[-1] if stored.shape else 1) // block * size
