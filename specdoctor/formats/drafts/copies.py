"""Embedding and head in an exported drafter: kept, left out or fetched from the target, as the format demands.

Formats differ in who supplies them (formats page, section 0): DeepSpec and EAGLE-3 of speculators want both in the
file, z-lab none, speculators' block drafters both (before 0.9) or none, GGUF whichever there is.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.target_facts import TargetFacts
from specdoctor.formats.spec import BlockSpec, DraftSpec

if TYPE_CHECKING:
    from torch import Tensor

TENSORS = {"embedding": "embed_tokens.weight", "head": "lm_head.weight"}
FIELDS = {"embedding": "embed_source", "head": "head_source"}


def wanted_copies(spec: DraftSpec, format: str) -> dict[str, bool]:
    """Whether the file will hold embedding and head, for a drafter that has what `spec` says."""
    here = {part: getattr(spec, field) == "checkpoint" for part, field in FIELDS.items()}
    block = isinstance(spec, BlockSpec)
    if format == "zlab":
        return dict.fromkeys(here, False)
    if format == "deepspec" or (format == "speculators" and not block):
        return dict.fromkeys(here, True)
    if format == "speculators" and not spec.has_vocabulary_map:
        return dict.fromkeys(here, any(here.values()))
    if format == "gguf" and block and here["embedding"]:
        return dict.fromkeys(here, True)  # llama.cpp takes an embedding without a head for both
    return here


def place_copies(
    spec: DraftSpec, tensors: "dict[str, Tensor]", format: str, target: TargetFacts, drop_equal: bool
) -> "tuple[DraftSpec, dict[str, Tensor], list[str]]":
    """Spec and tensors with the copies that `format` wants, and a line on each that changed.

    `drop_equal` leaves out what equals the target's own where the format allows. Raises `SpecdoctorError` where the
    format has no place for a copy that differs from the target's.
    """
    notes: list[str] = []
    tensors = dict(tensors)
    if drop_equal and format in ("gguf", "speculators"):
        for part in FIELDS:
            _drop(part, tensors, target, notes, "left out: bit-equal to the target's", must=False)
        spec = _with_sources(spec, tensors)
    for part, wanted in wanted_copies(spec, format).items():
        if wanted and TENSORS[part] not in tensors:
            _fetch(part, tensors, target, notes)
        elif not wanted:
            _drop(part, tensors, target, notes, "left out: this format takes the target's", must=True)
    return _with_sources(spec, tensors), tensors, notes


def _with_sources(spec: DraftSpec, tensors: "dict[str, Tensor]") -> DraftSpec:
    there = {FIELDS[part]: "checkpoint" if name in tensors else "target" for part, name in TENSORS.items()}
    return replace(spec, **there)  # type: ignore[arg-type]


def _fetch(part: str, tensors: "dict[str, Tensor]", target: TargetFacts, notes: list[str]) -> None:
    theirs = target.embedding() if part == "embedding" else target.head()
    dtype = tensors["fc.weight"].dtype
    names = [str(kind).removeprefix("torch.") for kind in (theirs.dtype, dtype)]
    rounded = f", cast from {names[0]} to {names[1]}" if names[0] != names[1] else ""
    tensors[TENSORS[part]] = theirs.to(dtype)
    notes.append(f"{part} copied from the target{rounded}")


def _drop(
    part: str, tensors: "dict[str, Tensor]", target: TargetFacts, notes: list[str], why: str, *, must: bool
) -> None:
    own = tensors.get(TENSORS[part])
    if own is None:
        return
    theirs = target.embedding() if part == "embedding" else target.head()
    if own.shape == theirs.shape and own.equal(theirs.to(own.dtype)):
        del tensors[TENSORS[part]]
        notes.append(f"{part} {why}")
    elif must:
        raise SpecdoctorError(
            f"cannot be exported: its own {part} differs from the target's, and this format takes the target's; check "
            "that this is the target it was trained for"
        )
