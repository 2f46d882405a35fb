"""Applies the calibration that lies beside a drafter's weights to its confidences.

Contract: temperatures change confidences only, never a token nor the distribution it is drawn from. A calibration that
is broken, stale or another drafter's is not applied, and one warning says why; the drafter works without it.
"""

import logging

from specdoctor.drafters.block import BlockDrafter
from specdoctor.engine.draft import Drafter
from specdoctor.formats.drafts.calibration_file import find_calibration
from specdoctor.formats.drafts.checkpoint import DraftCheckpoint

log = logging.getLogger(__name__)


def apply_calibration(drafter: Drafter, checkpoint: DraftCheckpoint) -> None:
    """Calibrate a drafter with a confidence head by the file beside its checkpoint, if there is one made for it."""
    found = find_calibration(checkpoint)
    if found is None:
        return
    if found.problem or found.stored is None:
        log.warning("warning: calibration not applied: %s", found.problem)
    elif isinstance(drafter, BlockDrafter):
        drafter.calibrate(found.stored.temperatures)
