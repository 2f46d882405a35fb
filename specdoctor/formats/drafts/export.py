"""A drafter in another public format: refuse what cannot be expressed, write beside the output, read back, rename.

Contract: what `read_draft` makes of the output is the same drafter, field for field and bit for bit; that is checked on
what was written, before it gets its name. Nothing is left behind on a failure, a full disk included.
"""

import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdoctor.errors import EnvironmentMissingError, ExitCode, SpecdoctorError
from specdoctor.formats.drafts.calibration_file import calibration_path
from specdoctor.formats.drafts.checkpoint import DraftCheckpoint
from specdoctor.formats.drafts.copies import place_copies
from specdoctor.formats.drafts.expressible import FORMATS, expressible
from specdoctor.formats.drafts.pair import misfits
from specdoctor.formats.drafts.read import read_draft
from specdoctor.formats.drafts.target_facts import TargetFacts
from specdoctor.formats.drafts.write_deepspec import write_deepspec
from specdoctor.formats.drafts.write_gguf import needs_zero_markov_head, spec_type, write_gguf
from specdoctor.formats.drafts.write_speculators import write_speculators
from specdoctor.formats.drafts.write_zlab import write_zlab
from specdoctor.formats.sources import HUB_ID
from specdoctor.formats.spec import BlockSpec, DraftSpec, EarlyExitSpec, MedusaSpec

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("keep", "float32", "bfloat16", "float16")
NOT_COMPARED = ("family", "origin", "target_name", "num_target_layers")
# Model types and GGUF architectures on which llama-server dies at the first request of such a drafter.
NOT_TAPPED_BY_LLAMA_CPP = ("qwen2", "gemma3")


@dataclass(frozen=True)
class Exported:
    """What was written, and what a user should know of it."""

    path: Path
    format: str
    spec: DraftSpec
    notes: tuple[str, ...]
    bytes: int


def export_draft(
    checkpoint: DraftCheckpoint,
    format: str,
    target: TargetFacts,
    output: Path,
    dtype: str = "keep",
    drop_equal: bool = False,
) -> Exported:
    """Write a drafter in `format` (a key of `FORMATS`) for `target`; `output` is a new folder, or a new GGUF file.

    `dtype` of `DTYPES` casts the floats; `drop_equal` leaves out an embedding or head that equals the target's. Raises
    `SpecdoctorError` with the reason when the format cannot express the drafter, when it does not fit the target, when
    the output exists or when the disk is full.
    """
    _refuse(checkpoint, format, target, output, dtype)
    spec, notes = _with_depth(checkpoint.spec, format, target)
    try:
        spec, tensors, moved = place_copies(spec, _cast(checkpoint.load(), dtype), format, target, drop_equal)
    except SpecdoctorError as error:
        raise SpecdoctorError(f"{checkpoint.path}: {error}") from None
    notes += moved
    if format == "speculators":
        notes += _verifier_notes(spec, target)
    if format == "gguf":
        notes += _serving_notes(spec, target)
    if (stored := calibration_path(checkpoint.path)).is_file():
        notes.append(f"{stored.name} is not exported: run `specdoctor calibrate` on what was written")
    try:
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.partial-", dir=output.parent) as scratch:
            partial = Path(scratch) / output.name
            _write(spec, tensors, format, partial, target)
            _check(partial, output, spec, tensors, target)
            size = _size(partial)
            partial.rename(output)
    except OSError as error:
        raise _cannot_write(output, error.strerror or str(error)) from None
    except Exception as error:
        if type(error).__name__ != "SafetensorError":  # how safetensors reports a full disk
            raise
        raise _cannot_write(output, str(error)) from None
    return Exported(output, format, spec, tuple(notes), size)


def same_drafter(one: DraftSpec, other: DraftSpec) -> list[str]:
    """Fields in which two specs describe different drafters.

    Not compared: `family` and `origin`; what is said of the target and not of the drafter (its name and depth, for
    which not every format has a key); what has no meaning for the drafter at hand (where windows begin if no layer has
    one, whether a final tap is normed if there is none). An explicit size equal to its default is the default.
    """
    a, b = _plain(one), _plain(other)
    if type(a) is not type(b):
        return ["kind"]
    names = [field.name for field in fields(a) if field.name not in NOT_COMPARED]
    return [name for name in names if getattr(a, name) != getattr(b, name)]


def _plain(spec: DraftSpec) -> DraftSpec:
    changes: dict[str, Any] = {}
    if spec.draft_vocab_size == spec.vocab_size:
        changes["draft_vocab_size"] = None
    if spec.target_hidden_size == spec.hidden_size:
        changes["target_hidden_size"] = None
    if spec.num_target_layers not in spec.taps:
        changes["tap_final_is_prenorm"] = True
    if isinstance(spec, BlockSpec) and not any(layer.window for layer in spec.layers):
        changes["window_anchor"] = "query"
    return replace(spec, **changes)


def _refuse(checkpoint: DraftCheckpoint, format: str, target: TargetFacts, output: Path, dtype: str) -> None:
    own = checkpoint.spec.algorithm if isinstance(checkpoint.spec, MedusaSpec | EarlyExitSpec) else None
    if format == own:
        raise SpecdoctorError(f"{checkpoint.path}: is in the format {own} already, there is nothing to write")
    if format not in FORMATS or dtype not in DTYPES:
        raise SpecdoctorError(
            f"format {format!r}, dtype {dtype!r}: expected a format of {', '.join(FORMATS)} and a dtype of "
            f"{', '.join(DTYPES)}"
        )
    checkpoint.refuse_if_broken()
    misfit = next(misfits(checkpoint, target.shape), None)
    if misfit is not None:
        raise SpecdoctorError(misfit.line)
    spec = replace(checkpoint.spec, num_target_layers=target.shape.num_layers)
    if (reason := expressible(spec, format)) is not None:
        raise SpecdoctorError(f"{checkpoint.path}: cannot be exported as {format}: {reason}")
    if output.exists() or output.is_symlink():
        raise SpecdoctorError(f"{output}: exists already; give another --output, or move it away")
    if not output.parent.is_dir():
        raise SpecdoctorError(f"{output.parent}: no such folder for the output {output.name}")
    if format == "gguf" and output.suffix != ".gguf":
        raise SpecdoctorError(f"{output}: expected a file name that ends in .gguf")


def _with_depth(spec: DraftSpec, format: str, target: TargetFacts) -> tuple[DraftSpec, list[str]]:
    """DeepSpec's readers compare `num_target_layers` with the target's, so a drafter that has none gets it."""
    if spec.num_target_layers is not None or format != "deepspec":
        return spec, []
    depth = target.shape.num_layers
    return replace(spec, num_target_layers=depth), [f"num_target_layers {depth} taken from the target"]


def _cast(tensors: "dict[str, Tensor]", dtype: str) -> "dict[str, Tensor]":
    if dtype == "keep":
        return tensors
    import torch

    return {
        name: value.to(getattr(torch, dtype)) if value.is_floating_point() else value for name, value in tensors.items()
    }


def _verifier_notes(spec: DraftSpec, target: TargetFacts) -> list[str]:
    """Where engines will look for the target, and whether they can find it from any folder."""
    key, named = "speculators_config.verifier.name_or_path", spec.target_name or target.name
    notes = []
    if spec.embed_source == "target":
        notes.append(f"engines load embedding and head from {key}, {named!r}")
    if not Path(named).is_absolute() and (Path(named).exists() or not HUB_ID.fullmatch(named)):
        notes.append(f"{key} is {named!r}: write a hub id or an absolute path there, or engines do not find the target")
    return notes


def _serving_notes(spec: DraftSpec, target: TargetFacts) -> list[str]:
    options = f"--spec-type {spec_type(spec)} --spec-draft-n-max {spec.default_draft}"
    notes = [f"serve with llama-server -m TARGET.gguf -md THIS.gguf {options}"]
    if needs_zero_markov_head(spec):
        notes.append("a Markov head of zeros added: draft-dflash would shift this drafter's rows by one")
    lowered = target.architecture.lower()
    if any(lowered.startswith(name) for name in NOT_TAPPED_BY_LLAMA_CPP):
        notes.append(
            f"llama.cpp build 11434 aborts at the first request: it cannot tap a target of {target.architecture}"
        )
    return notes


def _write(spec: DraftSpec, tensors: "dict[str, Tensor]", format: str, path: Path, target: TargetFacts) -> None:
    if format == "gguf":
        write_gguf(spec, tensors, path, target)
    elif format == "speculators":
        write_speculators(spec, tensors, path, target)
    elif format == "deepspec":
        write_deepspec(spec, tensors, path)
    else:
        assert isinstance(spec, BlockSpec)
        write_zlab(spec, tensors, path)


def _check(partial: Path, output: Path, spec: DraftSpec, tensors: "dict[str, Tensor]", target: TargetFacts) -> None:
    """Read back what was written; a difference is a fault of the exporter, and the file is not kept."""
    again = read_draft(partial, target.shape.num_layers)
    wrong = same_drafter(spec, again.spec) + [remark.line() for remark in again.remarks if remark.fatal]
    wrong += sorted(set(tensors) ^ set(again.tensors))
    for name in () if wrong else again.tensors:
        value = _value(again, name)
        if value.dtype != tensors[name].dtype or not value.equal(tensors[name]):
            wrong.append(name)
    if wrong:
        raise SpecdoctorError(
            f"{output}: not written, because reading it back gave another drafter ({', '.join(wrong[:3])}); a bug in "
            "specdoctor, please report it",
            ExitCode.INTERNAL,
        )


def _value(checkpoint: DraftCheckpoint, name: str) -> "Tensor":
    """One canonical tensor: a drafter read whole beside the one in memory could be too much."""
    stored = checkpoint.tensors[name]
    value = checkpoint.source.load([stored.name])[stored.name]
    return value if stored.change is None else stored.change(value)


def _cannot_write(output: Path, reason: str) -> EnvironmentMissingError:
    return EnvironmentMissingError(f"{output}: cannot be written ({reason}); nothing was left behind")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(part.stat().st_size for part in path.iterdir())
