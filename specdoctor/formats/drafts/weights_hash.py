"""A short name for a checkpoint's weights, so that a file made for them can tell whether it still belongs to them.

Contract: two checkpoints with the same tensors under the same names have the same hash, however safetensors shard them.
Small tensors (a confidence head, norms) are read whole, large ones at equal distances: any training changes those too,
and a 3 GB drafter must not be read through to be described. GGUF and pickled files are sampled as they lie.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from specdoctor.formats.drafts.checkpoint import TensorSource

WHOLE, PIECE, PIECES = 1 << 18, 4096, 64  # bytes: read whole up to; of a sample. Samples of a larger tensor
FILE_PIECES = 4096  # samples of a file whose tensors are not told apart


def weights_hash(source: TensorSource) -> str:
    """32 hex digits. Reads the files' bytes; no value is decoded and torch is not needed."""
    digests = []
    for path in sorted({source.file_of(name) for name in source.names()}):
        with path.open("rb") as file:
            for name, start, size in _spans(path, file):
                digest = hashlib.sha256(f"{name} {size}".encode())
                for piece in _sampled(file, start, size, FILE_PIECES if not name else PIECES):
                    digest.update(piece)
                digests.append((name, digest.digest()))
    return hashlib.sha256(b"".join(digest for _, digest in sorted(digests))).hexdigest()[:32]


def _spans(path: Path, file: BinaryIO) -> Iterator[tuple[str, int, int]]:
    """Name with dtype and shape, start and size of each tensor; the whole file without a name for other kinds."""
    if path.suffix != ".safetensors":
        yield "", 0, path.stat().st_size
        return
    length = int.from_bytes(file.read(8), "little")  # the header was checked when the source was opened
    for name, entry in json.loads(file.read(length)).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            yield f"{name} {entry['dtype']} {entry['shape']}", 8 + length + first, last - first


def _sampled(file: BinaryIO, start: int, size: int, pieces: int) -> Iterator[bytes]:
    if size <= WHOLE:
        file.seek(start)
        yield file.read(size)
        return
    for i in range(pieces):
        file.seek(start + (size - PIECE) * i // (pieces - 1))
        yield file.read(PIECE)
