"""Whether a folder is a complete Hugging Face model, told from its file names and file headers.

Contract: no tensor is read and no code runs, so a check costs milliseconds; what is wrong is one clear line that says
which file and what to do. Loading a cut file otherwise fails minutes later, or not at all.
"""

import json
from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError

LAYOUT = "a Hugging Face model folder (config.json and *.safetensors)"
NOT_WEIGHTS = {"training_args.bin", "optimizer.bin", "scheduler.bin"}
LFS_MARK = b"version https://git-lfs"


def check_model_folder(folder: Path) -> None:
    """Raise SpecdoctorError unless `folder` has a readable config.json and complete weights. Reads headers only."""
    if not folder.exists():
        raise SpecdoctorError(f"{folder}: no such folder; expected {LAYOUT}")
    if not folder.is_dir():
        raise SpecdoctorError(f"{folder}: a file; expected {LAYOUT}")
    if not (folder / "config.json").is_file():
        raise SpecdoctorError(f"{folder}: no config.json; expected {LAYOUT}")
    _read_object(folder / "config.json")
    for path in _weight_files(folder):
        if path.suffix == ".safetensors":
            check_safetensors_file(path)


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, in the order in which transformers looks for them."""
    for whole in ("model.safetensors", "pytorch_model.bin"):
        if (path := folder / whole).is_file():
            return [path]
        if (index := folder / f"{whole}.index.json").is_file():
            return _shards(index)
    found = sorted(folder.glob("*.safetensors")) or sorted(
        set(folder.glob("*.bin")) - {folder / n for n in NOT_WEIGHTS}
    )
    if not found:
        raise SpecdoctorError(f"{folder}: config.json but no weights; expected *.safetensors (or *.bin) beside it")
    return found


def _shards(index: Path) -> list[Path]:
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(n, str) for n in weight_map.values()):
        raise SpecdoctorError(f"{index}: key weight_map is missing or wrong, expected tensor names to file names")
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise SpecdoctorError(
            f"{index}: names {len(names)} files, {len(absent)} missing (first: {absent[0]}); fetch the model again"
        )
    return [index.parent / name for name in names]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SpecdoctorError(f"{path}: not valid JSON ({error}); fetch the model again") from None
    if not isinstance(values, dict):
        raise SpecdoctorError(f"{path}: holds a {type(values).__name__}, expected a JSON object")
    return values


def check_safetensors_file(path: Path) -> None:
    """Raise SpecdoctorError unless `path` is safetensors and as long as its header says. Reads the header only."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            return
    except SafetensorError as error:
        raise SpecdoctorError(f"{path}: {_what_is_wrong(path, str(error))}") from None


def _what_is_wrong(path: Path, said: str) -> str:
    """Tell a cut file from a file of another kind, with the sizes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(LFS_MARK))
        if start == LFS_MARK:
            return f"a Git LFS pointer of {size:,} bytes, not the weights; run `git lfs pull`"
        if not start:
            return "empty; fetch it again"
        # Layout: 8 bytes with the header's length, little endian, then a JSON object, then the data.
        length = int.from_bytes(start[:8], "little")
        if len(start) > 8 and start[8:9] != b"{":
            return f"not a safetensors file (starts with {start[:16]!r})"
        if size < 8 + length:
            return f"cut off in its header: {size:,} bytes, and the header alone has {8 + length:,}; fetch it again"
        file.seek(8)
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
            promised = 8 + length + max(ends, default=0)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return f"its safetensors header cannot be read ({said}); fetch it again"
    if size < promised:
        return f"cut off: {size:,} bytes, its header promises {promised:,}; fetch it again"
    if size > promised:
        return f"too long: {size:,} bytes, its header promises {promised:,}; fetch it again"
    return f"its safetensors header is inconsistent ({said}); save it again"
