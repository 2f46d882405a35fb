"""An attention mask dumped from somebody's engine: the matrix in a .npy, .pt or .safetensors file.

Contract: nothing in a file is run (numpy without pickle, torch with its restricted unpickler). What comes back is one
matrix [rows, columns] in its stored dtype; dimensions of one, and heads or batch entries that are all equal, fall away.
"""

import pickle
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdoctor.errors import SpecdoctorError

MOST_ENTRIES = 2**26  # a tree of thousands of nodes below a long context is far smaller
SUFFIXES = (".npy", ".pt", ".pth", ".safetensors")


@dataclass(frozen=True)
class MaskDump:
    """A mask as stored, and where it came from."""

    path: Path
    tensor: str  # its name in the file, "" where files have no names
    shape: tuple[int, ...]  # as stored
    values: Tensor  # [rows, columns]

    @property
    def where(self) -> str:
        return f"{self.path}, tensor {self.tensor}" if self.tensor else str(self.path)


def read_mask_dump(path: Path, tensor: str = "") -> MaskDump:
    """Read a dumped mask; `tensor` names it where a file holds several. Raises `SpecdoctorError`."""
    if path.suffix not in SUFFIXES:
        raise SpecdoctorError(f"{path}: expected a mask as one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise SpecdoctorError(f"{path}: no such file; expected a dumped mask ({', '.join(SUFFIXES)})")
    if path.suffix == ".npy":
        name, values = "", _from_numpy(path)
    else:
        name, values = _pick(path, _from_torch(path) if path.suffix != ".safetensors" else _from_safe(path), tensor)
    return MaskDump(path, name, tuple(values.shape), _matrix(values, path))


def _from_numpy(path: Path) -> Tensor:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError, TokenError) as error:
        raise SpecdoctorError(
            f"{path}: not a plain numpy array ({str(error).splitlines()[0]}); save it with numpy.save, without pickle"
        ) from None
    if array.dtype.kind not in "biuf":
        raise SpecdoctorError(f"{path}: holds numbers of type {array.dtype}, expected bool, integers or floats")
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype in (np.uint16, np.uint32, np.uint64, np.longdouble):
        array = array.astype(np.float64)  # wide enough, and never wrapped round
    return torch.from_numpy(np.ascontiguousarray(array))


def _from_torch(path: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise SpecdoctorError(
            f"{path}: not a tensor that can be loaded without running code ({reason[:120]}); "
            "save the mask with torch.save(mask.cpu(), path)"
        ) from None
    named = loaded if isinstance(loaded, dict) else {"": loaded}
    if not named or not all(isinstance(value, Tensor) for value in named.values()):
        raise SpecdoctorError(f"{path}: holds a {type(loaded).__name__}, expected a tensor, or tensors by name")
    return {str(name): value for name, value in named.items()}


def _from_safe(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    except (SafetensorError, OSError) as error:
        raise SpecdoctorError(f"{path}: not a complete safetensors file ({error}); save it again") from None


def _pick(path: Path, named: dict[str, Tensor], tensor: str) -> tuple[str, Tensor]:
    if tensor in named:
        return tensor, named[tensor]
    names = ", ".join(sorted(named)[:8])
    if tensor:
        raise SpecdoctorError(f"{path}: no tensor called {tensor}, expected one of {names or 'none: it is empty'}")
    if len(named) != 1:
        raise SpecdoctorError(f"{path}: holds {len(named)} tensors ({names}), expected one; name it with --tensor")
    return next(iter(named.items()))


def _matrix(values: Tensor, path: Path) -> Tensor:
    """Drop leading dimensions that hold one matrix, or the same one several times."""
    if values.layout != torch.strided or values.is_nested or values.device.type != "cpu":
        raise SpecdoctorError(f"{path}: a {values.layout} tensor on {values.device}, expected plain numbers")
    shape = list(values.shape)
    if values.numel() > MOST_ENTRIES:
        raise SpecdoctorError(
            f"{path}: shape {shape}, expected at most {MOST_ENTRIES} entries; dump one request's mask"
        )
    if values.is_sparse or values.is_complex() or values.is_quantized:
        raise SpecdoctorError(f"{path}: a {values.layout} tensor of {values.dtype}, expected plain numbers")
    if not 2 <= values.ndim <= 4 or 0 in shape:
        raise SpecdoctorError(f"{path}: shape {shape}, expected [rows, columns] and at most two dimensions before them")
    stacked = values.reshape(-1, *shape[-2:])
    if not all(_same(matrix, stacked[0]) for matrix in stacked[1:]):
        raise SpecdoctorError(
            f"{path}: shape {shape} holds {len(stacked)} different masks, expected one; dump that of one request and "
            "one head"
        )
    return stacked[0].contiguous()


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else torch.equal(a, b)


def read_parents_text(text: str) -> tuple[list[object], str]:
    """Parents from `[-1,0,0]`, `-1,0,0` or a file that holds the like; and what to call them in messages.

    Whether they make trees is for `kernels.tree_mask.checked_parents` to say. Raises `SpecdoctorError`.
    """
    where, content = f"--parents {text}", text
    path = Path(text)
    if not text.strip().startswith("[") and not _is_list(text):
        where = text
        try:
            content = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            raise SpecdoctorError(
                f"--parents {text}: no list such as [-1,0,0] and no text file that holds one"
            ) from None
    if content.strip().startswith("[") != content.strip().endswith("]"):
        raise SpecdoctorError(f"{where.splitlines()[0]}: a bracket is missing, expected a list such as [-1,0,0]")
    numbers = content.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    try:
        parents: list[object] = [int(number) for number in numbers]
    except ValueError:
        raise SpecdoctorError(
            f"{where.splitlines()[0]}: expected whole numbers such as [-1,0,0], -1 for a root"
        ) from None
    if not parents:
        raise SpecdoctorError(f"{where}: no nodes, expected whole numbers such as [-1,0,0], -1 for a root")
    return parents, where


def _is_list(text: str) -> bool:
    parts: Seq[str] = text.replace(",", " ").split()
    return bool(parts) and all(part.lstrip("-").isdigit() for part in parts)
