"""The learning rate's way through a run, as a factor of its highest value."""

import math

from specdoctor.training.recipe import Optimiser


def rate_factor(optimiser: Optimiser, share: float) -> float:
    """Factor on the learning rate at `share` (0 to 1) of the run: linear warm-up, then the schedule down to `floor`."""
    if share < optimiser.warmup:
        return share / optimiser.warmup
    if optimiser.schedule == "cosine":
        rest = (share - optimiser.warmup) / max(1 - optimiser.warmup, 1e-9)
        fallen = 0.5 * (1 + math.cos(math.pi * min(rest, 1.0)))
    elif optimiser.schedule == "wsd":  # warm-up, stable, decay
        fallen = min(1.0, max(0.0, 1 - share) / optimiser.decay) if optimiser.decay else 1.0
    else:
        fallen = 1.0
    return optimiser.floor + (1 - optimiser.floor) * fallen
