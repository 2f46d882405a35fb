"""From a folder or file to a `DraftCheckpoint`: recognise the family, call its reader, account for what is there.

Adding a format is a line in `READERS` and a module with a function `(config, tensors, target_layers) -> Reading`.
"""

from collections.abc import Callable
from pathlib import Path

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import DraftCheckpoint, Reading, Remark, TensorSource, account, why_ignored
from specdoctor.formats.drafts.deepspec import read_deepspec_block
from specdoctor.formats.drafts.detect import detect
from specdoctor.formats.drafts.eagle3 import read_deepspec_eagle3
from specdoctor.formats.drafts.known_keys import COMMON_KEYS
from specdoctor.formats.drafts.zlab import read_zlab
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.tensors import TensorFolder

Reader = Callable[[JsonConfig, TensorSource, int | None], Reading]

READERS: dict[str, Reader] = {
    "deepspec": read_deepspec_block,
    "deepspec-eagle3": read_deepspec_eagle3,
    "zlab": read_zlab,
}


def read_draft(path: Path, target_layers: int | None = None) -> DraftCheckpoint:
    """Recognise and describe a draft checkpoint from its config and tensor headers; `load` reads the values.

    `target_layers` is the target's depth, for formats whose default taps depend on it. Raises `SpecdoctorError` for
    what is broken, foreign or cannot be run.
    """
    config = JsonConfig.read(path)
    tensors = TensorFolder(path)
    found = detect(config, tensors)
    if found.family not in READERS:
        raise SpecdoctorError(
            f"{path}: recognised as {found.title} (by {found.evidence}), which cannot be run as a drafter here"
        )
    reading = READERS[found.family](config, tensors, target_layers)
    remarks = [*found.remarks, *reading.remarks]
    remarks += account(path, tensors, reading.tensors, reading.ignored_tensors)
    remarks += _unknown_keys(config, reading)
    ignored = {name: why_ignored(name, reading.ignored_tensors) or "" for name in tensors.names()}
    return DraftCheckpoint(
        path,
        reading.spec,
        tensors,
        reading.tensors,
        found.title,
        found.evidence,
        {name: reason for name, reason in ignored.items() if reason},
        remarks,
    )


def _unknown_keys(config: JsonConfig, reading: Reading) -> list[Remark]:
    known = {**COMMON_KEYS, **reading.ignored_keys}
    return [
        Remark("unknown-key", f"{config.path}", f"key {key} is {_short(config, key)}, and this format has no such key")
        for key in config.unread()
        if why_ignored(key, known) is None
    ]


def _short(config: JsonConfig, key: str) -> str:
    text = repr(config.find(key))
    return text if len(text) <= 60 else f"{text[:57]}..."
