"""A draft checkpoint looked at from its settings and headers alone: what the SD2 and SD3 checks and `inspect` work on.

Contract: no tensor value is decoded (bytes are sampled to tell whether a calibration is of these weights), no code of a
checkpoint runs, and torch is not imported unless the weights are
pickled. What stops a load elsewhere (a missing tensor, two families' markers, a refused pickle) is kept here as data.
"""

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.calibration_file import FoundCalibration, find_calibration
from specdoctor.formats.drafts.checkpoint import DraftCheckpoint, Remark, TargetNeededError, TensorSource
from specdoctor.formats.drafts.detect import Detected, detect
from specdoctor.formats.drafts.expressible import FORMATS, expressible
from specdoctor.formats.drafts.not_runnable import why_not_runnable
from specdoctor.formats.drafts.pair import TargetShape
from specdoctor.formats.drafts.parts import parts_of
from specdoctor.formats.drafts.read import READERS, describe, open_draft
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.sources import HUB_ID, is_offline, is_path, resolve_model
from specdoctor.formats.spec import DraftSpec
from specdoctor.formats.target_shape import read_target_shape, target_shape
from specdoctor.formats.tensors import RefusedPickleError

if TYPE_CHECKING:
    from torch import Tensor

_SOME_DEPTH = 64
OF_THE_FORMAT = "fixed by the format"  # origin of a value that this format has no key for


@dataclass
class Inspection:
    """What is known of a draft checkpoint. `found` is None where not even its family can be told."""

    name: str  # the path or hub id as given
    source: TensorSource
    found: Detected | None = None
    checkpoint: DraftCheckpoint | None = None  # None: no reader, contradicting markers, or settings refused
    exportable: DraftSpec | None = None  # its spec with some taps where the target has to tell them
    refusal: str = ""  # the reader's one line, where it refused the settings
    pickle: str = ""  # the one line about a pickled file that was refused
    target: TargetShape | None = None
    calibration: FoundCalibration | None = None  # of the confidence, beside the weights
    remarks: list[Remark] = field(default_factory=list)

    @property
    def contradicts(self) -> bool:
        """Whether markers of two families are there, so that naming one would be a guess."""
        return self.found is not None and bool(self.found.remarks)

    @property
    def why_not_run(self) -> str | None:
        """Why this checkpoint cannot be run here as it is, or None."""
        if self.pickle:
            return "its weights are refused"
        if self.contradicts:
            return "two families' markers are in it"
        if self.found is not None and self.found.family not in READERS:
            return why_not_runnable(self.found.family)
        if self.refusal:
            return "its settings are refused"
        checkpoint = self.checkpoint
        if checkpoint is None or checkpoint.missing() or checkpoint.misshapen() or checkpoint.unused():
            return "config and weights do not agree"
        fatal = [remark for remark in self.remarks if remark.fatal]
        return fatal[0].evidence if fatal else None


class NoTensors:
    """Stands for weights that were not opened."""

    def names(self) -> list[str]:
        return []

    def __contains__(self, name: str) -> bool:
        return False

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def dtype(self, name: str) -> str:
        raise KeyError(name)

    def file_of(self, name: str) -> Path:
        raise KeyError(name)

    def load(self, names: list[str]) -> "dict[str, Tensor]":
        raise KeyError(names)


def inspect_draft(name: str, target: str = "") -> Inspection:
    """Look at the draft checkpoint `name` (folder, file or hub id), and at `target` beside it if one is given.

    Raises `SpecdoctorError` when a file is absent, cut off, or of no draft format; `EnvironmentMissingError` when the
    hub is needed and cannot be asked.
    """
    shape = _target_shape(target) if target else None
    path = _local_path(name)
    if path is None:
        from specdoctor.formats.hub_headers import HubTensors, hub_config

        path = Path(name)
        return _inspected(name, path, hub_config(name), HubTensors(name), shape)
    try:
        config, source = open_draft(path)
    except RefusedPickleError as error:
        return Inspection(name, NoTensors(), _family_by_config(path), pickle=str(error), target=shape)
    return _inspected(name, path, config, source, shape)


def _inspected(
    name: str, path: Path, config: JsonConfig, source: TensorSource, target: TargetShape | None
) -> Inspection:
    found = detect(config, source)
    result = Inspection(name, source, found, target=target, remarks=list(found.remarks))
    if found.remarks or found.family not in READERS:
        return result
    try:
        _describe(result, path, config, found)
    except SpecdoctorError as error:
        result.checkpoint, result.refusal = None, str(error)
    if result.checkpoint is not None:
        result.remarks = result.checkpoint.remarks
        result.calibration = find_calibration(result.checkpoint)
    return result


def _describe(result: Inspection, path: Path, config: JsonConfig, found: Detected) -> None:
    """Fill in what the family's reader says."""
    source, target = result.source, result.target
    if target is not None:
        result.checkpoint = describe(path, config, source, found, target.num_layers)
        result.exportable = result.checkpoint.spec
        return
    try:
        result.checkpoint = describe(path, config, source, found)
    except TargetNeededError:
        result.checkpoint = describe(path, config, source, found, _SOME_DEPTH)
        origin = result.checkpoint.spec.origin | {"taps": "left to a default that depends on the target: give --target"}
        result.checkpoint.spec = replace(result.checkpoint.spec, taps=(), origin=origin)
    # With the target's depth open, which layers are tapped is open too, but not how many: any depth tells the rest.
    open_taps = not result.checkpoint.spec.taps
    described = describe(path, config, source, found, _SOME_DEPTH) if open_taps else result.checkpoint
    result.exportable = described.spec


def _local_path(name: str) -> Path | None:
    """The folder or file of `name`; None for a hub id whose headers have to be asked for."""
    if is_path(name):
        return Path(name).expanduser()
    return None if HUB_ID.fullmatch(name) and not is_offline("HF_HUB_OFFLINE") else resolve_model(name)


def _target_shape(name: str) -> TargetShape:
    if is_path(name):
        return read_target_shape(Path(name).expanduser())
    if HUB_ID.fullmatch(name) and not is_offline("HF_HUB_OFFLINE"):
        from specdoctor.formats.hub_headers import hub_config

        return target_shape(hub_config(name), name)
    return read_target_shape(resolve_model(name))


def _family_by_config(path: Path) -> Detected | None:
    try:
        return detect(JsonConfig.read(path), NoTensors())
    except SpecdoctorError:
        return None


def facts(inspection: Inspection) -> dict[str, Any]:
    """Everything that was seen, as a JSON-able document."""
    found, checkpoint = inspection.found, inspection.checkpoint
    named = found if found is not None and not inspection.contradicts else None
    parts = parts_of(inspection.source, checkpoint)
    spec = checkpoint.spec if checkpoint else None
    sizes = [part.bytes for part in parts]
    return {
        "path": inspection.name,
        "family": named.family if named else None,
        "title": named.title if named else None,
        "recognised_by": named.evidence if named else None,
        "algorithm": spec.algorithm if spec else None,
        "runs_here": inspection.why_not_run is None,
        "why_not": inspection.why_not_run,
        "drafts_per_round": spec.default_draft if spec else None,
        "legal_k": {"least": 1, "most": spec.max_draft} if spec else None,
        "embedding": spec.embed_source if spec else None,
        "head": spec.head_source if spec else None,
        "spec": _spec_fields(spec) if spec else None,
        "parts": [{**asdict(part), "dtypes": sorted(part.dtypes)} for part in parts],
        "parameters": sum(part.parameters for part in parts),
        "bytes": None if None in sizes else sum(size for size in sizes if size is not None),
        "exports": _exports(inspection.exportable),
        "calibration": _calibration(inspection.calibration),
        "ignored_tensors": dict(checkpoint.ignored) if checkpoint else {},
        "ignored_keys": dict(checkpoint.ignored_keys) if checkpoint else {},
        "remarks": [asdict(remark) for remark in inspection.remarks],
        "target": asdict(inspection.target) if inspection.target else None,
    }


def _spec_fields(spec: Any) -> dict[str, Any]:
    """Each field of a spec with its value and where that came from."""
    out = {}
    for item in fields(spec):
        if item.name != "origin":
            value = getattr(spec, item.name)
            if item.name == "layers":
                value = [asdict(layer) for layer in value]
            value = list(value) if isinstance(value, tuple) else value
            out[item.name] = {"value": value, "origin": spec.origin.get(item.name, OF_THE_FORMAT)}
    return out


def _calibration(found: FoundCalibration | None) -> dict[str, Any] | None:
    """The calibration file beside the weights: whether it is applied, and what it says of itself."""
    if found is None:
        return None
    document = found.stored.document if found.stored else {}
    told = {key: document.get(key) for key in ("method", "created", "sampling", "target", "fitted")}
    held_out = document.get("held_out")
    return {
        "file": found.path.name,
        "applied": not found.problem,
        "problem": found.problem.removeprefix(f"{found.path}: ") or None,
        "temperatures": list(found.stored.temperatures) if found.stored else None,
        "mean_ece_held_out": held_out.get("mean_ece") if isinstance(held_out, dict) else None,
        **told,
    }


def _exports(spec: DraftSpec | None) -> dict[str, str | None] | None:
    """Format -> None where the drafter can be written in it, else the reason why not."""
    return None if spec is None else {name: expressible(spec, name) for name in FORMATS}
