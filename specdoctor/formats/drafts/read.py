"""From a folder or file to a `DraftCheckpoint`: recognise the family, call its reader, account for what is there.

Adding a format is a line in `READERS` and a module with a function `(config, tensors, target_layers) -> Reading`.
Nothing here, nor a reader at module level, may import torch: `inspect` describes a checkpoint in well under the time
that such an import takes.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.causal_lm import read_causal_lm
from specdoctor.formats.drafts.checkpoint import DraftCheckpoint, Reading, Remark, TensorSource, why_ignored
from specdoctor.formats.drafts.deepspec import read_deepspec_block
from specdoctor.formats.drafts.deepspec_gemma4 import read_deepspec_gemma4_block, read_deepspec_gemma4_eagle3
from specdoctor.formats.drafts.detect import Detected, detect
from specdoctor.formats.drafts.eagle import read_eagle
from specdoctor.formats.drafts.eagle3 import read_deepspec_eagle3, read_eagle3
from specdoctor.formats.drafts.early_exit import read_early_exit
from specdoctor.formats.drafts.gguf_draft import read_gguf_dflash, read_gguf_eagle3
from specdoctor.formats.drafts.known_keys import COMMON_KEYS
from specdoctor.formats.drafts.medusa import read_medusa
from specdoctor.formats.drafts.mtp import read_native_mtp, read_speculators_mtp
from specdoctor.formats.drafts.not_runnable import why_not_runnable
from specdoctor.formats.drafts.specforge import read_specforge_dspark
from specdoctor.formats.drafts.speculators_block import read_speculators_dflash, read_speculators_dspark
from specdoctor.formats.drafts.speculators_dflash2 import read_speculators_dflash2
from specdoctor.formats.drafts.speculators_eagle import read_speculators_eagle3
from specdoctor.formats.drafts.zlab import read_zlab
from specdoctor.formats.drafts.zlab_dflash2 import read_zlab_dflash2
from specdoctor.formats.gguf_header import GgufHeader
from specdoctor.formats.gguf_tensors import GgufTensors, gguf_config, gguf_file
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.tensors import TensorFolder

Reader = Callable[[JsonConfig, TensorSource, int | None], Reading]

READERS: dict[str, Reader] = {
    "causal-lm": read_causal_lm,
    "deepspec": read_deepspec_block,
    "deepspec-eagle3": read_deepspec_eagle3,
    "deepspec-gemma4": read_deepspec_gemma4_block,
    "deepspec-gemma4-eagle3": read_deepspec_gemma4_eagle3,
    "gguf-dflash": read_gguf_dflash,
    "gguf-eagle3": read_gguf_eagle3,
    "medusa": read_medusa,
    "mtp": read_native_mtp,
    "eagle": read_eagle,
    "early-exit": read_early_exit,
    "eagle3": read_eagle3,
    "specforge-dspark": read_specforge_dspark,
    "specforge-peagle": read_eagle3,
    "speculators-dflash": read_speculators_dflash,
    "speculators-dflash2": read_speculators_dflash2,
    "speculators-dspark": read_speculators_dspark,
    "speculators-eagle3": read_speculators_eagle3,
    "speculators-peagle": read_speculators_eagle3,
    "speculators-mtp": read_speculators_mtp,
    "zlab": read_zlab,
    "zlab-dflash2": read_zlab_dflash2,
}


def read_draft(path: Path, target_layers: int | None = None) -> DraftCheckpoint:
    """Recognise and describe a draft checkpoint from its config and tensor headers; `load` reads the values.

    `target_layers` is the target's depth, for formats whose default taps depend on it. Raises `SpecdoctorError` for
    what is broken, foreign or cannot be run.
    """
    config, tensors = open_draft(path)
    checkpoint = describe(path, config, tensors, detect(config, tensors), target_layers)
    checkpoint.refuse_if_incomplete()
    return checkpoint


def open_draft(path: Path) -> tuple[JsonConfig, TensorSource]:
    """A checkpoint's settings and tensor headers. Raises `SpecdoctorError` for an absent, cut or refused file."""
    if (gguf := gguf_file(path)) is not None:
        header = GgufHeader(gguf)
        return gguf_config(header), GgufTensors(header)
    return JsonConfig.read(path), TensorFolder(path)


def _read(reader: Reader, config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """A reader's answer, checked for numbers that no drafter can be computed with."""
    try:
        reading = reader(config, tensors, target_layers)
    except (TypeError, ValueError, OverflowError, IndexError, KeyError, AttributeError) as error:
        raise SpecdoctorError(
            f"{config.path}: a setting has a form that this format does not have ({type(error).__name__}: {error}); "
            "compare the file with one of its writer"
        ) from error
    if not 0 < reading.spec.rms_norm_eps < 1:
        raise SpecdoctorError(
            f"{config.path}: key rms_norm_eps is {reading.spec.rms_norm_eps}, expected a number above 0 and below 1"
        )
    return reading


def describe(
    path: Path, config: JsonConfig, tensors: TensorSource, found: Detected, target_layers: int | None = None
) -> DraftCheckpoint:
    """What the reader of the family `found` makes of a checkpoint, whatever is missing from it.

    Raises `SpecdoctorError` for a family without a reader and for settings that the format does not allow.
    """
    if found.family not in READERS:
        raise SpecdoctorError(
            f"{path}: recognised as {found.title} (by {found.evidence}), which cannot be run as a drafter here: "
            f"{why_not_runnable(found.family)}"
        )
    reading = _read(READERS[found.family], config, tensors, target_layers)
    used = {stored.name for stored in reading.tensors.values()}
    unread, known = config.unread(), {**COMMON_KEYS, **reading.ignored_keys}
    checkpoint = DraftCheckpoint(
        path,
        reading.spec,
        tensors,
        reading.tensors,
        found.title,
        found.evidence,
        _known(set(tensors.names()) - used, reading.ignored_tensors),
        _known(unread, {**{key: "null" for key in unread if config.find(key) is None}, **known}),
    )
    checkpoint.remarks = [
        *found.remarks,
        *reading.remarks,
        *(_unused(tensors, name) for name in checkpoint.unused()),
        *(_unknown(config, key) for key in unread if key not in checkpoint.ignored_keys),
    ]
    return checkpoint


def _known(names: set[str] | list[str], reasons: Mapping[str, str]) -> dict[str, str]:
    """Those of `names` that are known not to matter, with the reason."""
    found = ((name, why_ignored(name, reasons)) for name in sorted(names))
    return {name: reason for name, reason in found if reason is not None}


def _unused(tensors: TensorSource, name: str) -> Remark:
    return Remark(
        "unknown-tensor",
        f"{tensors.file_of(name)}",
        f"tensor {name} is not used by this format; the config and the weights disagree",
        "find out what it is: a drafter without it is not the one that was trained",
        fatal=True,
        subject=name,
    )


def _unknown(config: JsonConfig, key: str) -> Remark:
    text = repr(config.find(key))
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return Remark(
        "unknown-key",
        f"{config.path}",
        f"key {key} is {shown}, and this format has no such key",
        subject=key,
    )
