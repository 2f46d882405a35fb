"""SPS(N): what a target forward of N rows costs at several context lengths, measured, saved and looked up.

Contract: a table is plain JSON (`kind: cost-table`) that names the target, device and dtype it was measured on, and is
refused for another. Between measured points the time is interpolated linearly, beyond them held.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdoctor.engine.draft import Drafter
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.sequence import Sequence as Request
from specdoctor.engine.target import PREFILL_ROWS, Target
from specdoctor.errors import SpecdoctorError

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXTS = (64, 512, 1536)


@dataclass(frozen=True, slots=True)
class Point:
    rows: int
    context: int
    seconds: float  # median


@dataclass(slots=True)
class CostTable:
    """Measured forwards: the target's by rows and context, a drafter's whole proposal by context."""

    target: str
    device: str
    dtype: str
    sps: list[Point] = field(default_factory=list)
    drafts: dict[str, list[Point]] = field(default_factory=dict)  # by drafter; rows = draft tokens

    def target_seconds(self, rows: float, context: float) -> float:
        """T(rows) at a context length."""
        return _interpolate(self.sps, rows, context)

    def draft_seconds(self, drafter: str, context: float) -> float:
        """A whole proposal of this drafter, its context update included."""
        points = self.drafts[drafter]
        return _interpolate(points, points[0].rows, context)

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": 1, "kind": "cost-table", **asdict(self)}

    @classmethod
    def read(cls, path: Path) -> "CostTable":
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            if row["kind"] == "profile":
                row = row["cost_table"]
            return cls(
                row["target"],
                row["device"],
                row["dtype"],
                [Point(**p) for p in row["sps"]],
                {name: [Point(**p) for p in points] for name, points in row["drafts"].items()},
            )
        except OSError as error:
            raise SpecdoctorError(f"{path}: {error.strerror}; expected a cost table of `specdoctor profile`") from None
        except (ValueError, KeyError, TypeError) as error:
            raise SpecdoctorError(
                f"{path}: not a cost table ({type(error).__name__}: {error}); expected what `specdoctor profile "
                "--costs` wrote"
            ) from None

    def check(self, path: Path, target: str, device: str, dtype: str) -> None:
        """Refuse a table of another target, device or dtype."""
        for key, mine, theirs in (
            ("target", self.target, target),
            ("device", self.device, device),
            ("dtype", self.dtype, dtype),
        ):
            if mine != theirs:
                raise SpecdoctorError(f"{path}: key {key} is {mine}, but this run has {theirs}; measure a table for it")


def _interpolate(points: Sequence[Point], rows: float, context: float) -> float:
    contexts = sorted({p.context for p in points})
    at_context = []
    for c in contexts:
        line = sorted((p.rows, p.seconds) for p in points if p.context == c)
        at_context.append(np.interp(rows, [r for r, _ in line], [s for _, s in line]))
    return float(np.interp(context, contexts, at_context))


@torch.inference_mode()
def measure_target(
    target: Target,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 5,
    on_point: Callable[[], None] | None = None,
) -> list[Point]:
    """Median seconds of forwards of each width behind each context; widths take turns, so drift hits all alike."""
    points = []
    for context in contexts:
        if context + max(rows) > target.max_positions:
            continue
        slot = target.open()
        try:
            fill_context(target, slot, context)
            seconds: dict[int, list[float]] = {n: [] for n in rows}
            for repeat in range(repeats + 1):
                for n in rows if repeat % 2 else reversed(rows):
                    ids = torch.arange(n, device=target.device) % target.vocab_size
                    layout = PackedRows([slot], [context], [n], target.device)
                    took = timed(target.device, partial(target.forward, layout, ids))
                    if repeat:  # the first turn warms up
                        seconds[n].append(took)
                if on_point:
                    on_point()
            points += [Point(n, context, float(np.median(values))) for n, values in seconds.items()]
        finally:
            target.close(slot)
    return points


@torch.inference_mode()
def measure_drafter(
    target: Target,
    drafter: Drafter,
    draft_tokens: int,
    kept_rows: int,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 7,
) -> list[Point]:
    """Median seconds of a whole draft (features of `kept_rows` committed tokens, then the proposal) by context.

    Each draft commits `kept_rows` tokens more, as a round does, so the context grows a little while it is measured.
    """
    points = []
    kept = max(kept_rows, 1)
    for context in contexts:
        if context + draft_tokens + (repeats + 1) * kept > target.max_positions:
            continue
        request = Request([0] * (context + 1), max_new_tokens=1)
        drafter.begin([request])
        try:
            for start in range(0, context, PREFILL_ROWS):
                _observe_noise(target, drafter, request, min(PREFILL_ROWS, context - start))

            def draft(request: Request = request) -> None:
                request.ids += [0] * kept
                _observe_noise(target, drafter, request, kept)
                drafter.propose([request], draft_tokens)

            seconds = [timed(target.device, draft) for _ in range(repeats + 1)][1:]
            points.append(Point(draft_tokens, context, float(np.median(seconds))))
        finally:
            drafter.end(request)
    return points


def _observe_noise(target: Target, drafter: Drafter, request: Request, n: int) -> None:
    """Let the drafter take `n` committed tokens with arbitrary states, unless it reads none."""
    if drafter.taps:
        width = len(drafter.taps) * target.hidden_size
        drafter.observe([request], torch.randn(n, width, device=target.device, dtype=target.dtype), [n])


def fill_context(target: Target, slot: int, context: int) -> None:
    """Put `context` arbitrary tokens into a slot."""
    for start in range(0, context, PREFILL_ROWS):
        n = min(PREFILL_ROWS, context - start)
        layout = PackedRows([slot], [start], [n], target.device)
        ids = torch.arange(n, device=target.device) % target.vocab_size
        target.forward(layout, ids, logit_rows=torch.tensor([n - 1], device=target.device))
        target.cache.keep(slot, range(n))


def timed(device: torch.device, call: Callable[[], Any]) -> float:
    """Seconds of one call, the device idle before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
