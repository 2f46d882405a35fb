"""Numbers of a configuration at which acceptance may break: windows, position limits, RoPE scaling."""

from typing import Any

from specdoctor.engine.draft import Drafter
from specdoctor.engine.target import Target


def landmarks(target: Target, drafter: Drafter) -> dict[str, int]:
    """Name to number, for `specdoctor.metrics.change_point`. Names say where the number stands."""
    found: dict[str, int] = {}
    windows = {window for window in target.windows if window}
    found |= {f"target sliding_window ({window})": window for window in windows}
    _add(found, "target max_position_embeddings", getattr(target.config, "max_position_embeddings", None))
    rope = getattr(target.config, "rope_parameters", None) or getattr(target.config, "rope_scaling", None) or {}
    if isinstance(rope, dict):
        _add(found, "target rope original_max_position_embeddings", rope.get("original_max_position_embeddings"))
    spec = drafter.spec
    windows = {layer.window for layer in spec.layers if layer.window}
    found |= {f"drafter sliding_window ({window})": window for window in windows}
    for key in ("original_max_position_embeddings", "max_position_embeddings"):
        _add(found, f"drafter rope {key}", spec.rope.get(key))
    return found


def _add(found: dict[str, int], name: str, number: Any) -> None:
    if isinstance(number, int) and number > 0:
        found[name] = number
