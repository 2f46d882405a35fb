"""`calibration.json`, beside a drafter's weights: one temperature for each position of its confidence.

Contract: `specdoctor calibrate` writes it, `load_drafter` applies it, `inspect` shows it. It names the number of draft
positions (`K`) and the hash of the weights it was fitted for (`draft.weights_hash`); a file that names others, or none,
is not applied, and says so in one line. All other keys are for people.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import DraftCheckpoint
from specdoctor.formats.drafts.weights_hash import weights_hash
from specdoctor.formats.gguf_tensors import gguf_file

CALIBRATION = "calibration.json"
AGAIN = "run `specdoctor calibrate` again, or delete the file"


@dataclass(frozen=True)
class StoredCalibration:
    """The file as read. `K` and `weights_hash` are None where it does not name them."""

    path: Path
    temperatures: tuple[float, ...]
    K: int | None
    weights_hash: str | None
    document: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "StoredCalibration":
        """Raises `SpecdoctorError` for what cannot be read or has no temperatures."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            temperatures = tuple(float(value) for value in document["temperatures"])
            if not all(0 < value < float("inf") for value in temperatures):
                raise ValueError
        except OSError as error:
            raise SpecdoctorError(f"{path}: {error.strerror or error}; give the JSON file of a calibration") from None
        except (ValueError, KeyError, TypeError):
            raise SpecdoctorError(
                f"{path}: expected a JSON object with a list of numbers `temperatures`, each above 0; {AGAIN}"
            ) from None
        K, draft = document.get("K"), document.get("draft")
        named = draft.get("weights_hash") if isinstance(draft, dict) else None
        return cls(
            path, temperatures, K if isinstance(K, int) else None, named if isinstance(named, str) else None, document
        )


@dataclass(frozen=True)
class FoundCalibration:
    """A calibration file that lies beside a drafter. `problem`: why it is not applied, in one line; empty if it is."""

    path: Path
    stored: StoredCalibration | None
    problem: str = ""


def calibration_path(draft: Path) -> Path:
    """Where the calibration of a drafter lies: in its folder; of a GGUF beside it, under its name."""
    gguf = gguf_file(draft)
    return draft / CALIBRATION if gguf is None else gguf.with_name(f"{gguf.stem}.{CALIBRATION}")


def find_calibration(checkpoint: DraftCheckpoint) -> FoundCalibration | None:
    """The calibration beside a drafter and whether it is made for it; None where there is none."""
    path = calibration_path(checkpoint.path)
    if not path.is_file():
        return None
    try:
        stored = StoredCalibration.read(path)
    except SpecdoctorError as error:
        return FoundCalibration(path, None, str(error))
    return FoundCalibration(path, stored, _misfit(stored, checkpoint))


def _misfit(stored: StoredCalibration, checkpoint: DraftCheckpoint) -> str:
    spec, path, count = checkpoint.spec, stored.path, len(stored.temperatures)
    if getattr(spec, "confidence", None) is None:
        return f"{path}: a calibration of confidences, but the drafter has no confidence head; delete the file"
    if not (stored.K == count == spec.max_draft):
        return (
            f"{path}: key K is {stored.K} with {count} temperatures, but the drafter beside it makes {spec.max_draft} "
            f"drafts: made for another one; {AGAIN}"
        )
    own = weights_hash(checkpoint.source)
    if stored.weights_hash != own:
        named = "missing" if stored.weights_hash is None else stored.weights_hash
        return (
            f"{path}: key draft.weights_hash is {named}, but the weights beside it have {own}: not fitted on these "
            f"weights; {AGAIN}"
        )
    return ""


def write_calibration(document: dict[str, Any], path: Path) -> None:
    """Write whole or not at all. Raises `SpecdoctorError` where the folder cannot be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise SpecdoctorError(f"{path}: cannot be written ({error.strerror or error}); give another --output") from None
    finally:
        part.unlink(missing_ok=True)
