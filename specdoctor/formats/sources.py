"""From what a user calls a model to a local Hugging Face folder: a path, a known name, or a hub id.

Contract: `resolve_model` returns a folder that has a config.json and complete weights, or raises one clear line. A
name that is already in the cache costs milliseconds, needs no network and imports no transformers. Code from a hub
(`*.py`) is never fetched. Nothing is ever half there: a folder appears under its final name when it is whole.
"""

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from specdoctor.errors import EnvironmentMissingError, SpecdoctorError
from specdoctor.formats.model_folder import check_model_folder

SOURCE_NAME = "specdoctor-source.json"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_PATTERNS = ["*.json", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt"]
# Sub-folders and consolidated files are second copies of the same weights in other layouts.
HUB_IGNORED = ["*.py", "*/*", "consolidated*.safetensors"]


def _build_smollm2(folder: Path, bars: Any) -> dict[str, Any]:
    from specdoctor.formats.smollm2 import build_smollm2

    return build_smollm2(folder, bars)


# Name -> what fills an empty folder, given progress bars, and returns the record of where the model came from.
ALIASES: dict[str, Callable[[Path, Any], dict[str, Any]]] = {"smollm2-135m": _build_smollm2}


def shipped_drafters() -> dict[str, Path]:
    """Known name -> folder of the drafters that come with the package (their model cards: README.md in each)."""
    root = Path(str(files("specdoctor.data"))) / "drafters"
    return {path.parent.name: path.parent for path in sorted(root.glob("*/config.json"))}


def is_known(name: str) -> bool:
    """Whether `name` is one of our names for a model, no path and no hub id."""
    return name in ALIASES or name in shipped_drafters()


def cache_root() -> Path:
    """Where fetched models are kept: $SPECDOCTOR_HOME, else the user's cache folder for specdoctor."""
    if home := os.environ.get("SPECDOCTOR_HOME"):
        return Path(home).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("specdoctor", appauthor=False))


def resolve_model(name: str, *, progress: bool | None = None) -> Path:
    """The local folder of the model `name`; fetches it if it is a known name or a hub id that is not here yet.

    `progress` shows bars on stderr (default: when stderr is a terminal). Raises SpecdoctorError for a wrong path or an
    unknown name, EnvironmentMissingError for a model that cannot be had here: off line, no network, no access.
    """
    shown = sys.stderr.isatty() if progress is None else progress
    if is_path(name):
        folder = Path(name).expanduser()
        check_model_folder(folder)
        return folder
    if name in ALIASES:
        return _alias_folder(name, shown)
    shipped = shipped_drafters()
    if name in shipped:
        check_model_folder(shipped[name])
        return shipped[name]
    if HUB_ID.fullmatch(name):
        return _hub_folder(name, shown)
    raise SpecdoctorError(
        f"{name!r}: no such folder and no known model; known names: {', '.join([*ALIASES, *shipped])}; "
        "else give a folder or a Hugging Face id (owner/name)"
    )


def is_offline(*variables: str) -> bool:
    """Whether the user forbade downloads: SPECDOCTOR_OFFLINE (what --offline sets), or another of `variables`."""
    values = (os.environ.get(name, "") for name in ("SPECDOCTOR_OFFLINE", *variables))
    return any(value.strip().lower() in ("1", "true", "yes", "on") for value in values)


def is_path(name: str) -> bool:
    """Whether `name` can only mean a path here, and no known name or hub id."""
    looks = name.startswith((os.sep, "/", "./", "../", "~")) or name in (".", "..") or Path(name).is_absolute()
    # owner/name has one separator: more of them can only be a path, and so can what begins with a folder that is here.
    nested = "/" in name and Path(name).parent.is_dir()
    return looks or nested or name.count("/") > 1 or (bool(name) and Path(name).exists())


def _alias_folder(name: str, shown: bool) -> Path:
    from filelock import FileLock

    models = cache_root() / "models"
    folder = models / name
    if not (folder / SOURCE_NAME).is_file():
        if is_offline():
            raise EnvironmentMissingError(
                f"{name}: not in {models}, and downloads are off; run `specdoctor fetch {name}` once "
                "without --offline and SPECDOCTOR_OFFLINE"
            )
        models.mkdir(parents=True, exist_ok=True)
        # Two processes may ask at once: the second waits here and then finds the folder.
        with FileLock(models / f".{name}.lock"):
            if not (folder / SOURCE_NAME).is_file():
                _build(name, folder, shown)
    try:
        check_model_folder(folder)
    except SpecdoctorError as error:
        raise EnvironmentMissingError(f"{error}; delete {folder} and run `specdoctor fetch {name}`") from None
    return folder


def _build(name: str, folder: Path, shown: bool) -> None:
    from rich.console import Console
    from rich.progress import Progress

    if folder.exists():
        raise SpecdoctorError(
            f"{folder}: exists but holds no {SOURCE_NAME}, so specdoctor did not make it; move it away, then run "
            f"`specdoctor fetch {name}`"
        )
    # We hold the lock, so an unfinished folder here belongs to a process that was killed.
    for stale in folder.parent.glob(f".{name}.partial-*"):
        shutil.rmtree(stale, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=f".{name}.partial-", dir=folder.parent) as scratch,
        Progress(console=Console(stderr=True), disable=not shown) as bars,
    ):
        whole = Path(scratch) / "model"  # an inner folder: the outer one is private to its owner
        whole.mkdir()
        record = {"schema_version": 1, "name": name, **ALIASES[name](whole, bars)}
        (whole / SOURCE_NAME).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        whole.replace(folder)


def _hub_folder(repo_id: str, shown: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not shown:
        disable_progress_bars()
    offline = is_offline("HF_HUB_OFFLINE")

    def snapshot(weights: str) -> Path:
        patterns = [*HUB_PATTERNS, weights]
        got = snapshot_download(repo_id, allow_patterns=patterns, ignore_patterns=HUB_IGNORED, local_files_only=offline)
        return Path(got)

    with hub_errors(repo_id):
        folder = snapshot("*.safetensors")
        if not any(folder.glob("*.safetensors")):
            folder = snapshot("*.bin")
    try:
        check_model_folder(folder)
    except SpecdoctorError as error:
        raise EnvironmentMissingError(f"{repo_id}: {error}") from None
    return folder


@contextmanager
def hub_errors(repo_id: str) -> Iterator[None]:
    """Turns what huggingface_hub raises for a repository into one clear line; a file that is not in it stays as it is.

    Raises `EnvironmentMissingError`: off line, no network, no access, no such repository.
    """
    from huggingface_hub import errors

    try:
        yield
    except errors.LocalEntryNotFoundError as error:
        offline = is_offline("HF_HUB_OFFLINE")
        why = "downloads are off" if offline else f"the hub cannot be reached ({_first_line(error)})"
        raise EnvironmentMissingError(
            f"{repo_id}: no such folder here, not in the local Hugging Face cache, and {why}; run `specdoctor fetch "
            f"{repo_id}` once with network, or give the path of a folder"
        ) from None
    except errors.EntryNotFoundError:
        raise
    except errors.GatedRepoError:
        raise EnvironmentMissingError(
            f"{repo_id}: gated; accept its terms at https://huggingface.co/{repo_id} and log in with `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise EnvironmentMissingError(
            f"{repo_id}: no such folder here, and no such model on the hub; a private one needs `hf auth login`"
        ) from None
    except errors.HFValidationError:
        raise SpecdoctorError(f"{repo_id}: no such folder, and not a valid Hugging Face id (owner/name)") from None
    except (errors.HTTPError, ConnectionError) as error:  # an answer such as 500, or a connection lost half-way
        raise EnvironmentMissingError(f"{repo_id}: the hub failed ({_first_line(error)}); try again later") from None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
