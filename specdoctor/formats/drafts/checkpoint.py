"""A draft checkpoint as read: its spec, its tensors under canonical names, and everything that was odd about it.

Canonical names are DeepSpec's (formats page 1.1) with each algorithm's own where DeepSpec has none; the drafter module
of an algorithm documents them. Contract: every tensor and every config key is used, known and ignored for a reason, or
unknown, and the unknown are remarks that `inspect` shows as findings and that loading refuses where they change what
is computed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.spec import DraftSpec

if TYPE_CHECKING:
    from torch import Tensor


class TargetNeededError(SpecdoctorError):
    """A setting that is left out depends on the target's depth, which was not given; nothing is wrong with the file."""


class TensorSource(Protocol):
    """Names, shapes and dtypes from headers, values on demand."""

    def names(self) -> list[str]: ...

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """As torch writes it: "bfloat16"."""

    def file_of(self, name: str) -> Path: ...

    def load(self, names: list[str]) -> "dict[str, Tensor]": ...


@dataclass(frozen=True)
class Stored:
    """Where a canonical tensor is in the file, its stored shape, and what turns it into the canonical one."""

    name: str
    shape: tuple[int, ...]
    change: "Callable[[Tensor], Tensor] | None" = None


@dataclass(frozen=True)
class Remark:
    """Something odd in a checkpoint, in plain data: a check turns it into a finding.

    `kind`: "unknown-tensor", "unknown-key", "contradiction", "unverified", "ignored". Only the first three are faults;
    `fatal` ones stop a load.
    """

    kind: str
    place: str  # file and key, or file and tensor
    evidence: str
    fix: str = ""
    fatal: bool = False
    subject: str = ""  # the key or tensor, where it is about one

    def line(self) -> str:
        return f"{self.place}: {self.evidence}" + (f"; {self.fix}" if self.fix else "")


@dataclass
class Reading:
    """What a reader makes of a config and headers: the spec, where each canonical tensor is, and what is set aside."""

    spec: DraftSpec
    tensors: dict[str, Stored]
    ignored_tensors: dict[str, str] = field(default_factory=dict)  # name, or prefix ending in "." or "*" -> why
    ignored_keys: dict[str, str] = field(default_factory=dict)  # the same for config keys
    remarks: list[Remark] = field(default_factory=list)


def same_names(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Stored]:
    """Canonical names and shapes of a format that stores them as they are."""
    return {name: Stored(name, shape) for name, shape in shapes.items()}


@dataclass
class DraftCheckpoint:
    """A draft checkpoint on disk."""

    path: Path  # the folder, or the GGUF file
    spec: DraftSpec
    source: TensorSource
    tensors: dict[str, Stored]  # by canonical name
    title: str = ""  # "DeepSpec DSpark or DFlash, Qwen3 backbone"
    evidence: str = ""  # the marker that decided the family
    ignored: Mapping[str, str] = field(default_factory=dict)  # stored tensor name -> why it is not used
    ignored_keys: Mapping[str, str] = field(default_factory=dict)  # config key -> why it is not used
    remarks: list[Remark] = field(default_factory=list)

    @property
    def where(self) -> Path:
        """The file that error lines about settings name."""
        return self.path if self.path.is_file() else self.path / "config.json"  # a hub id is no folder here

    def missing(self) -> list[str]:
        """Stored names of the tensors that the config promises and no file has."""
        return sorted({stored.name for stored in self.tensors.values()} - set(self.source.names()))

    def misshapen(self) -> list[Stored]:
        """Tensors that are there in another shape than the config gives them, as expected."""
        wanted = {stored.name: stored for stored in self.tensors.values() if stored.name in self.source}
        return [stored for name, stored in wanted.items() if self.source.shape(name) != stored.shape]

    def unused(self) -> list[str]:
        """Stored names that nothing uses and nothing explains."""
        wanted = {stored.name for stored in self.tensors.values()}
        return sorted(set(self.source.names()) - wanted - set(self.ignored))

    def load(self) -> "dict[str, Tensor]":
        """All tensors under their canonical names, in their stored dtype, on the host."""
        loaded = self.source.load(sorted({stored.name for stored in self.tensors.values()}))
        return {
            name: loaded[stored.name] if stored.change is None else stored.change(loaded[stored.name])
            for name, stored in self.tensors.items()
        }

    def refuse_if_incomplete(self) -> None:
        """Raise unless every tensor that the config promises is there in its shape."""
        missing, wrong = self.missing(), self.misshapen()
        if missing:
            raise SpecdoctorError(
                f"{self.path}: tensor {missing[0]} is missing ({len(missing)} in all); its config promises it"
            )
        if wrong:
            name, shape = wrong[0].name, list(wrong[0].shape)
            raise SpecdoctorError(
                f"{self.source.file_of(name)}: {name} has shape {list(self.source.shape(name))}, expected {shape} by "
                "its config"
            )

    def refuse_if_broken(self) -> None:
        """Raise for the first remark that makes the drafter something else than what was trained."""
        fatal = [remark for remark in self.remarks if remark.fatal]
        if fatal:
            more = f" ({len(fatal)} such problems; `specdoctor inspect` lists them)" if len(fatal) > 1 else ""
            raise SpecdoctorError(fatal[0].line() + more)


def why_ignored(name: str, ignored: Mapping[str, str]) -> str | None:
    """The reason why a tensor or key is not used, if it is a known one."""
    if name in ignored:
        return ignored[name]
    for pattern, reason in ignored.items():
        if (pattern.endswith("*") and name.startswith(pattern[:-1])) or (
            pattern.endswith(".") and name.startswith(pattern)
        ):
            return reason
    return None
