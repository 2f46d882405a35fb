"""Where a round's time goes, finer than the engine's own marks: each step of drafter and target timed at its border.

Contract: the pair is not changed; for the length of a `with` block the steps' methods are wrapped on the instances. A
separate repeat of the run is profiled, never the one whose speed is reported. Time counts once: a step that calls
another is charged for the rest only.
"""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import record_function

from specdoctor.drafters.block import BlockDrafter
from specdoctor.drafters.recurrent import RecurrentDrafter
from specdoctor.engine.engine import Engine

# Method -> the phase that it is. What lies between them is the host's: Python, small tensors, records.
BLOCK_STEPS = {
    "observe": "draft context",  # features of the committed tokens into the draft cache
    "block_hidden": "draft backbone",
    "base_logits": "draft LM head",
    "choose": "sequential head",
    "confidences": "confidence head",
}
RECURRENT_STEPS = {
    "observe": "draft context",  # the target's states to features
    "step": "draft backbone",  # over the committed tokens' features, then over the drafter's own
    "logits": "draft LM head",
    "choose": "draft sampling",
}
OTHER_STEPS = {"observe": "draft context", "propose": "draft"}


def drafter_steps(drafter: Any) -> dict[str, str]:
    """The steps of a drafter that are timed apart."""
    if isinstance(drafter, BlockDrafter):
        return BLOCK_STEPS
    return RECURRENT_STEPS if isinstance(drafter, RecurrentDrafter) else OTHER_STEPS


# Methods of torch.Tensor by which the host reads a device value; on an accelerator each waits for the queue.
HOST_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


class PhaseLog:
    """Seconds by phase, summed; on an accelerator each step is waited for, so phases do not overlap."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self._within: list[float] = []  # of the steps under way, outermost first: seconds of the steps inside them

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = self._now()
            self._within.append(0.0)
            try:
                with record_function(f"specdoctor: {phase}"):
                    return call(*args, **kwargs)
            finally:
                took = self._now() - began
                self.seconds[phase] += took - self._within.pop()
                if self._within:
                    self._within[-1] += took

        return wrapper

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@contextmanager
def logged_phases(engine: Engine, log: PhaseLog) -> Iterator[None]:
    """Time the steps of `engine`'s drafter and target into `log` while the block runs."""
    wrapped: list[tuple[Any, str]] = []

    def wrap(owner: Any, method: str, phase: str) -> None:
        object.__setattr__(owner, method, log.timed(phase, getattr(owner, method)))
        wrapped.append((owner, method))

    if engine.drafter is not None:
        for method, phase in drafter_steps(engine.drafter).items():
            wrap(engine.drafter, method, phase)
    wrap(engine.target, "forward", "verify")
    try:
        yield
    finally:
        for owner, method in wrapped:
            object.__delattr__(owner, method)


@contextmanager
def counted_host_reads(counts: dict[str, int]) -> Iterator[None]:
    """Count into `counts`, by method, how often the host reads a tensor's value while the block runs."""
    originals = {name: getattr(torch.Tensor, name) for name in HOST_READS}
    inside = False

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:  # item within tolist and the like is one read
                return original(*args, **kwargs)
            inside = True
            counts[name] = counts.get(name, 0) + 1
            try:
                return original(*args, **kwargs)
            finally:
                inside = False

        return wrapper

    try:
        for name, original in originals.items():
            setattr(torch.Tensor, name, counting(name, original))
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)
