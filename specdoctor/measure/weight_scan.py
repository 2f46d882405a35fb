"""The weights of a checkpoint, tensor by tensor, straight from its files.

Contract: each tensor is read once and alone, so a checkpoint larger than memory can be scanned; quantised and integer
tensors are counted and left out. Nothing is judged here: `WeightFacts` are the numbers, checks judge them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

FLOATS = {"float64", "float32", "float16", "bfloat16"}
CHUNK = 1 << 24  # numbers looked at together


class Weights(Protocol):
    """A checkpoint's tensors: `formats.tensors.TensorFolder`, or a draft checkpoint's source."""

    def names(self) -> list[str]: ...

    def dtype(self, name: str) -> str: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def file_of(self, name: str) -> Path: ...

    def load(self, names: list[str]) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class WeightFacts:
    """One tensor in numbers."""

    side: str
    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    numbers: int
    nan: int
    inf: int
    denormal: int  # not zero, and smaller than the smallest normal number of its dtype
    zero: int
    largest: float  # magnitude, of the finite ones
    rms: float  # of the finite ones

    @property
    def kind(self) -> str:
        """The name with its layer's number left out: what its siblings in other layers share."""
        return re.sub(r"\.\d+\.", ".N.", self.name)


def scan_weights(side: str, weights: Weights) -> Iterator[WeightFacts]:
    """Facts of each float tensor, in the order of the files."""
    for name in weights.names():
        if weights.dtype(name) in FLOATS:
            tensor = weights.load([name])[name]
            if tensor.numel():
                yield _facts(side, name, weights.file_of(name), tensor)


def _facts(side: str, name: str, file: Path, tensor: Tensor) -> WeightFacts:
    smallest = torch.finfo(tensor.dtype).smallest_normal
    nan = inf = denormal = zero = 0
    largest = squares = 0.0
    for part in tensor.reshape(-1).split(CHUNK):
        size = part.double() if part.dtype == torch.float64 else part.float()
        size = size.abs()
        finite = size.isfinite()
        if not finite.all():
            nan, inf = nan + int(size.isnan().sum()), inf + int(size.isinf().sum())
            size = size[finite]
        if size.numel():
            none = int((size == 0).sum())
            zero, denormal = zero + none, denormal + int((size < smallest).sum()) - none
            largest = max(largest, float(size.max()))
            squares += float(size.double().square().sum())
    count = tensor.numel() - nan - inf
    rms = (squares / count) ** 0.5 if count else 0.0
    dtype = str(tensor.dtype).removeprefix("torch.")
    return WeightFacts(
        side, name, file, dtype, tuple(tensor.shape), tensor.numel(), nan, inf, denormal, zero, largest, rms
    )
