"""What a result depends on beside the models: versions, devices, threads, and the attention path taken."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "specdoctor",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "scipy",
    "huggingface_hub",
    "gguf",
)
# Variables that change results or speed; nothing else of the environment is looked at.
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def environment() -> dict[str, Any]:
    """Versions, machine, threads and devices as plain JSON values."""
    import torch

    devices = [
        {"name": torch.cuda.get_device_name(i), "memory": torch.cuda.get_device_properties(i).total_memory}
        for i in range(torch.cuda.device_count())
    ]
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(terse=True),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "cuda_devices": devices,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def attention_paths() -> list[dict[str, str]]:
    """The attention path that each device and dtype of this machine takes, and why."""
    import torch

    from specdoctor.kernels.attention import choose_attention

    kinds = ["cpu"] + ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()
    rows = []
    for kind in kinds:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            path = choose_attention(torch.device(kind), dtype)
            row = {"device": kind, "dtype": str(dtype).removeprefix("torch."), "path": path.name, "reason": path.reason}
            rows.append(row)
    return rows


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's name; Linux tells it only here."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
