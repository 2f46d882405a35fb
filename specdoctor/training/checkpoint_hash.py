"""Which target wrote a data set: a hash of a checkpoint on disk, taken without loading it.

Contract: the hash covers the settings that change the model's output, every tensor's name, dtype and shape, and bytes
at equal distances of each; a copy of the folder has the same hash, a fine-tuned one another.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from specdoctor.formats.json_file import load_json
from specdoctor.formats.tensor_headers import folder_places

SPOTS, SPOT_BYTES = 8, 256  # read of each tensor
# Keys of config.json that say how a file was written, not what the model computes.
INDIFFERENT = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures", "use_cache")


def checkpoint_hash(folder: Path) -> str:
    """32 hex digits. Raises `SpecdoctorError` when a shard is missing or cut off."""
    digest = hashlib.sha256()
    config = load_json(folder / "config.json")
    facts: dict[str, Any] = {key: value for key, value in config.items() if key not in INDIFFERENT}
    digest.update(json.dumps(facts, sort_keys=True).encode())
    places, pickled = folder_places(folder)
    for name, place in sorted(places.items()):
        count = 1
        for extent in place.shape:
            count *= extent
        digest.update(f"{name}{place.dtype}{place.shape}".encode())
        _read_spots(digest, place.file, place.offset, count * _bytes_of(place.dtype))
    if not places:
        for name in pickled:
            path = folder / name
            digest.update(f"{name}{path.stat().st_size}".encode())
            _read_spots(digest, path, 0, path.stat().st_size)
    return digest.hexdigest()[:32]


def _bytes_of(dtype: str) -> int:
    """Bytes of a value by its safetensors name: I64, BF16, F8_E4M3, U8, BOOL."""
    bits = "".join(c for c in dtype.split("_")[0] if c.isdigit())
    return max(1, int(bits) // 8) if bits else 1


def _read_spots(digest: Any, path: Path, start: int, length: int) -> None:
    with path.open("rb") as file:
        for spot in range(SPOTS):
            file.seek(start + (length - min(length, SPOT_BYTES)) * spot // max(1, SPOTS - 1))
            digest.update(file.read(min(length, SPOT_BYTES)))
