"""Which taps a cache keeps: named one by one, or those of a drafter that is to be trained further."""

from pathlib import Path

from specdoctor.engine.target import FINAL_NORMED
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.read import read_draft


def chosen_taps(text: str, draft: Path | None, layers: int | None) -> tuple[int, ...]:
    """Indices into HS[0..L] from "1,9,17" or from a draft checkpoint; `layers` is L of the target, where known.

    Raises `SpecdoctorError` when both are given, or the text is no list of whole numbers.
    """
    if text and draft is not None:
        raise SpecdoctorError("--taps and --draft: give one of them; a drafter names its own taps")
    if draft is not None:
        spec = read_draft(draft, layers).spec
        last = spec.num_target_layers if layers is None else layers
        return tuple(FINAL_NORMED if tap == last and not spec.tap_final_is_prenorm else tap for tap in spec.taps)
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise SpecdoctorError(f"--taps {text}: expected whole numbers such as 1,9,17") from None
