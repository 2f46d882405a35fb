"""Time by phase within a round: events on an accelerator, a monotonic clock on a CPU.

Contract: `mark` never waits for the device; `seconds` waits once, at the end.
"""

import time

import torch


class PhaseClock:
    """`mark(name)` ends the phase `name`, which began at the mark before."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._names: list[str] = []
        self._marks: list = [self._now()]
        self._seconds: dict[str, float] | None = None

    def mark(self, name: str) -> None:
        self._names.append(name)
        self._marks.append(self._now())
        self._seconds = None

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, and `round` for all of them; read once for all requests of a round."""
        if self._seconds is not None:
            return self._seconds.copy()
        if self._cuda:
            self._marks[-1].synchronize()
        times: dict[str, float] = {}
        for name, before, after in zip(self._names, self._marks, self._marks[1:], strict=False):
            times[name] = times.get(name, 0.0) + self._between(before, after)
        times["round"] = self._between(self._marks[0], self._marks[-1])
        self._seconds = times
        return times.copy()

    def _now(self) -> object:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, before, after) -> float:  # type: ignore[no-untyped-def]
        return before.elapsed_time(after) / 1000 if self._cuda else after - before
