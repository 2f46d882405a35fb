"""The tensors of a pickled checkpoint file (.bin, .pt, .pth), without ever running code from it.

torch's restricted unpickler (`weights_only`) makes tensors and plain containers and refuses every other name that a
pickle asks for. Files are memory-mapped where their layout allows it.
"""

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.tensors import RefusedPickleError


def unpickle_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickled file, memory-mapped. Raises `SpecdoctorError` for anything but a mapping of tensors."""
    try:
        loaded = _load(path)
    except pickle.UnpicklingError as error:
        raise RefusedPickleError(
            f"{path}: holds something else than tensors ({_reason(error)}), which could run code when loaded, so it is "
            "refused; get the checkpoint as safetensors"
        ) from None
    except Exception as error:  # a damaged pickle can make the unpickler fail in any way
        raise SpecdoctorError(
            f"{path}: not a complete torch file ({path.stat().st_size} bytes: {_reason(error)}); fetch or save it again"
        ) from None
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict):
        raise SpecdoctorError(f"{path}: holds a {type(loaded).__name__}, expected a mapping of names to tensors")
    other = next((name for name, value in loaded.items() if not isinstance(value, Tensor)), None)
    if other is not None:
        raise SpecdoctorError(
            f"{path}: entry {other!r} is of type {type(loaded[other]).__name__}, expected a mapping of names to tensors"
        )
    return {str(name): value for name, value in loaded.items()}


def _load(path: Path) -> Any:
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # about pickle protocols; the error says more
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)  # the format before 1.6 cannot be mapped


def _reason(error: Exception) -> str:
    """What a long message of torch says in its first sentence, or the refused name in it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    refused = next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), "")
    return (refused or (lines[0] if lines else type(error).__name__))[:160].rstrip(".")
