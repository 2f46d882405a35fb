"""The training loop: batches to gradients to steps, with everything that makes a run stoppable and repeatable.

Contract: an optimiser step takes `accumulate` batches, all processes together; it never spans epochs. On a CPU, what a
run of given steps or epochs ends with does not depend on how often it was stopped and resumed, bit for bit: anchors
are drawn by (seed, epoch, batch), and the state holds module, optimiser, place in the data and torch's generator.
SIGTERM and Ctrl-C end it behind the step at hand, with the state saved. A loss or gradient that is not finite ends it
before the step is taken, naming the tensor.
"""

import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.training.batch import TrainingBatch
from specdoctor.training.features import FeatureSource
from specdoctor.training.objective import Objective
from specdoctor.training.optimisers import make_optimiser
from specdoctor.training.processes import Processes
from specdoctor.training.recipe import Recipe
from specdoctor.training.run_folder import RunFolder
from specdoctor.training.schedule import rate_factor

Measure = Callable[[Path], dict[str, float]]  # a drafter's folder -> tau_held_out, and by category


@dataclass(slots=True)
class TrainProgress:
    """What a progress bar shows after each step."""

    step: int
    share: float  # of the run; 0 where its end is not known
    seconds: float
    loss: float
    tau: float | None
    tokens_per_s: float


@dataclass(slots=True)
class TrainResult:
    """How a run ended."""

    stopped: str  # complete or interrupted
    steps: int
    epochs: int
    seconds: float  # of all its parts, measuring not counted
    loss: float | None
    held_out: dict[str, float] = field(default_factory=dict)
    drafter: Path | None = None


class WithLoss(nn.Module):
    """The objective as a module, so that a wrapper for many processes sees its forward pass."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.network = objective.module
        self._objective = objective

    def forward(self, batch: TrainingBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        losses = self._objective.loss(batch, generator)
        return losses.total, losses.parts


class TrainLoop:
    """One run of one objective."""

    def __init__(
        self,
        recipe: Recipe,
        objective: Objective,
        source: FeatureSource,
        processes: Processes,
        folder: RunFolder | None,
        measure: Measure | None = None,
        on_step: Callable[[TrainProgress], None] | None = None,
    ) -> None:
        """`source` gives this process's share of the batches; `folder` and `measure` are of the first process only."""
        self.recipe, self.objective, self.source, self.processes = recipe, objective, source, processes
        self.folder, self._measure, self._on_step = folder, measure, on_step
        if recipe.optimiser.accumulate % processes.world:
            raise SpecdoctorError(
                f"optimiser.accumulate is {recipe.optimiser.accumulate}, expected a multiple of the "
                f"{processes.world} processes: it counts batches of all of them together"
            )
        self.each = recipe.optimiser.accumulate // processes.world  # batches of a step, of this process
        torch.manual_seed(recipe.seed)
        optimiser = make_optimiser(recipe.optimiser, objective.module, processes.world)
        self.optimiser: Any
        self.wrapped, self.optimiser = processes.prepare(WithLoss(objective), optimiser)
        self.step = self.epoch = self.index = 0  # index: steps taken in this epoch
        self.seconds = 0.0
        self._tokens, self._noted = 0, _Means()
        self._last_loss: float | None = None
        self._tau: float | None = None
        self._stop = False

    def run(self, state: dict[str, Any] | None = None) -> TrainResult:
        """Train to the end, from `state` if given (together)."""
        if state is not None:
            self._restore(state)
        with self._signals():
            if self.folder is not None:
                self.folder.begin(self.step)
            interrupted = self._steps()
        self._save()
        held_out: dict[str, float] = {}
        drafter = None
        if not interrupted:
            drafter = self._write_drafter()
            held_out = self._held_out(drafter)
        self.processes.wait()
        return TrainResult(
            "interrupted" if interrupted else "complete",
            self.step,
            self.epoch,
            self.seconds,
            self._last_loss,
            held_out,
            drafter,
        )

    # Steps --------------------------------------------------------------------------------------------------------

    def _steps(self) -> bool:
        """Steps until the end of the run; True if it was stopped before."""
        length = self.recipe.length
        while length.epochs is None or self.epoch < length.epochs:
            batches = self.source.batches(self.epoch, self.recipe.seed, self.index * self.each)
            for _ in range(self.index, self._steps_of_epoch()):
                ended, stop = self._agree()
                if ended or stop:
                    return bool(stop) and not ended
                began = time.perf_counter()
                self._one_step(batches)
                self.seconds += time.perf_counter() - began
                self._after_step()
            self.epoch, self.index = self.epoch + 1, 0
        return False

    def _steps_of_epoch(self) -> int:
        steps = self.source.count(self.epoch, self.recipe.seed) // self.each
        if not steps:
            raise SpecdoctorError(
                f"an epoch has {self.source.count(self.epoch, self.recipe.seed) * self.processes.world} batches, fewer "
                f"than optimiser.accumulate, {self.recipe.optimiser.accumulate}; give more samples, or accumulate less",
                ExitCode.NOTHING,
            )
        return steps

    def _agree(self) -> tuple[bool, bool]:
        """Whether the run is at its end, and whether somebody wants to stop; the clock is everybody's slowest."""
        self.seconds, stop = self.processes.agree([self.seconds, float(self._stop)])
        return self._share(self.step) >= 1.0, bool(stop)

    def _share(self, step: float) -> float:
        """Share of the run that is over at `step`; the clock counts where there is a time budget."""
        length, shares = self.recipe.length, [0.0]
        if length.steps is not None:
            shares.append(step / length.steps)
        if length.minutes is not None:
            shares.append(self.seconds / (60 * length.minutes))
        return max(shares)

    def _one_step(self, batches: Iterator[TrainingBatch]) -> None:
        recipe, share = self.recipe, min(1.0, self._share(self.step + 0.5))
        rate = recipe.optimiser.lr * rate_factor(recipe.optimiser, share)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.objective.weights = recipe.weights_at(self.step, share)
        for i in range(self.each):
            batch = next(batches)
            number = (self.index * self.each + i) * self.processes.world + self.processes.rank
            generator = torch.Generator().manual_seed(_batch_seed(recipe.seed, self.epoch, number))
            with self.processes.holding(self.wrapped, last=i == self.each - 1):
                total, parts = self.wrapped(batch, generator)
                self._note(batch, total, parts)
                (total / self.each).backward()
        norm = self._clip()
        self._noted.add({"grad_norm": norm, "lr": rate})
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def _note(self, batch: TrainingBatch, total: Tensor, parts: dict[str, Tensor]) -> None:
        names = ["loss", *parts]
        stacked = torch.stack([value.detach().float().to(total.device) for value in (total, *parts.values())])
        values = dict(zip(names, stacked.tolist(), strict=True))  # one wait for the device
        if not abs(values["loss"]) < float("inf"):
            raise _not_finite(self.step, _first_not_finite(batch, self.objective.module, parts), self.folder)
        self._last_loss = values["loss"]
        self._tau = values.get("tau_match", values.get("tau_accept"))
        self._tokens += len(batch.ids)
        self._noted.add(values)

    def _clip(self) -> float:
        parameters = [p for p in self.wrapped.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not value < float("inf"):
            bad = (n for n, p in self.objective.module.named_parameters() if p.grad is not None and _bad(p.grad))
            raise _not_finite(self.step, f"the gradient of {next(bad, 'some parameter')}", self.folder)
        if self.recipe.optimiser.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.recipe.optimiser.clip, norm)
        return value

    # Between steps --------------------------------------------------------------------------------------------------

    def _after_step(self) -> None:
        recipe = self.recipe
        self.step += 1
        self.index += 1
        if self.step % recipe.log_every == 0:
            self._log()
        if recipe.held_out.every and self.step % recipe.held_out.every == 0 and self._share(self.step) < 1.0:
            self._held_out(self._write_drafter())
        if self.step % recipe.save_every == 0:
            self._save()
        if self._on_step is not None:
            speed = self._tokens * self.processes.world / max(self.seconds, 1e-9)
            assert self._last_loss is not None
            state = TrainProgress(self.step, self._share(self.step), self.seconds, self._last_loss, self._tau, speed)
            self._on_step(state)

    def _log(self) -> None:
        means = self.processes.average({k: torch.tensor(v, dtype=torch.float64) for k, v in self._noted.take().items()})
        if self.folder is not None:
            place: dict[str, Any] = {"epoch": self.epoch, "seconds": round(self.seconds, 3), "tokens": self._tokens}
            self.folder.log(self.step, place | means)

    def _write_drafter(self) -> Path | None:
        """The drafter as it is now (together)."""
        with self.processes.gathered(self.wrapped, self.objective):
            return None if self.folder is None else self.folder.put_drafter(self.objective.save)

    def _held_out(self, drafter: Path | None) -> dict[str, float]:
        if self._measure is None or self.folder is None or drafter is None:
            return {}
        found = self._measure(drafter)
        self.folder.log(self.step, found)
        return found

    # State ------------------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        state = self.processes.state(self.wrapped, self.optimiser)
        if self.folder is not None:
            place = {"step": self.step, "epoch": self.epoch, "index": self.index, "seconds": self.seconds}
            notes = {"tokens": self._tokens, "noted": self._noted.state(), "loss": self._last_loss}
            self.folder.save(state | place | notes | {"random": torch.get_rng_state()})

    def _restore(self, state: dict[str, Any]) -> None:
        self.processes.load(self.wrapped, self.optimiser, state)
        self.step, self.epoch, self.index = state["step"], state["epoch"], state["index"]
        self.seconds, self._tokens, self._last_loss = state["seconds"], state["tokens"], state["loss"]
        self._noted = _Means(state["noted"])
        torch.set_rng_state(state["random"])

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C ask the loop to stop; asked a second time, Ctrl-C interrupts at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        usual = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)}

        def ask(kind: int, frame: Any) -> None:
            self._stop = True
            signal.signal(signal.SIGINT, usual[signal.SIGINT])

        for kind in usual:
            signal.signal(kind, ask)
        try:
            yield
        finally:
            for kind, handler in usual.items():
                signal.signal(kind, handler)


class _Means:
    """Means of what was noted since they were last taken."""

    def __init__(self, state: dict[str, list[float]] | None = None) -> None:
        self._sums = {name: list(pair) for name, pair in (state or {}).items()}

    def add(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            pair = self._sums.setdefault(name, [0.0, 0.0])
            pair[0] += value
            pair[1] += 1

    def take(self) -> dict[str, float]:
        means = {name: total / count for name, (total, count) in self._sums.items()}
        self._sums = {}
        return means

    def state(self) -> dict[str, list[float]]:
        return self._sums


def _batch_seed(seed: int, epoch: int, number: int) -> int:
    """A seed for each batch of a run, apart from those that order the data."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}/{number}".encode()).digest()[:7], "big")


def _bad(tensor: Tensor) -> bool:
    return not bool(torch.isfinite(tensor).all())


def _first_not_finite(batch: TrainingBatch, module: nn.Module, parts: dict[str, Tensor]) -> str:
    """What of a step is not finite, the earliest first."""
    for name in ("taps", "last_hidden"):
        if _bad(getattr(batch, name)):
            return f"the batch's {name} (from the target or its cache; try dtype: float32)"
    for name, parameter in module.named_parameters():
        if _bad(parameter):
            return f"the parameter {name}"
    return next((f"the loss {name}" for name, value in parts.items() if _bad(value)), "the loss")


def _not_finite(step: int, what: str, folder: RunFolder | None) -> SpecdoctorError:
    where = "" if folder is None else f"{folder.path}: "
    return SpecdoctorError(
        f"{where}step {step + 1}: {what} is not finite, expected numbers; lower optimiser.lr, or set autocast: false, "
        "and start again elsewhere (draft.init can be the drafter of this run)",
        ExitCode.FINDINGS,
    )
