"""Devices and dtypes by the names that the command line takes."""

import json
from pathlib import Path

import torch

from specdoctor.errors import EnvironmentMissingError, SpecdoctorError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str, option: str = "--device") -> torch.device:
    """`auto` takes cuda, then mps, then cpu. Raises, naming `option`, when the device asked for is not there."""
    if name == "auto":
        return torch.device(
            "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        )
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SpecdoctorError(f"{option} {name}: expected auto, cpu, cuda, cuda:N or mps") from None
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device.type not in there:
        raise SpecdoctorError(f"{option} {name}: expected auto, cpu, cuda, cuda:N or mps")
    if not there[device.type] or (device.index or 0) >= max(1, torch.cuda.device_count()):
        raise EnvironmentMissingError(f"{option} {name}: this machine has no such device for torch {torch.__version__}")
    return device


def resolve_dtype(name: str, device: torch.device, folder: Path | None = None, option: str = "--dtype") -> torch.dtype:
    """`auto`: bfloat16 on an accelerator, else the dtype that the checkpoint's config.json names, else float32."""
    if name != "auto":
        if name not in DTYPES:
            raise SpecdoctorError(f"{option} {name}: expected auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    if device.type != "cpu":
        return torch.bfloat16
    if folder and (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stored = config.get("dtype") or config.get("torch_dtype")
        return DTYPES.get(str(stored), torch.float32)
    return torch.float32
