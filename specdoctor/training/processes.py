"""One process or many: Accelerate carries everything that they share (DDP, FSDP2); alone, none of it is loaded.

Contract: a recipe means the same on any number of processes. `accelerate launch` and torchrun are recognised by their
environment. Every process calls every method that says "together".
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from specdoctor.errors import EnvironmentMissingError, SpecdoctorError

if TYPE_CHECKING:
    from specdoctor.training.objective import Objective

WAIT_HOURS = 2  # others wait while the first one measures on held-out prompts


class Processes:
    """This process and its fellows."""

    def __init__(self) -> None:
        """Joins the group that the launcher made. Raises `EnvironmentMissingError` without accelerate."""
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.world > 1 else 0
        self._accelerator: Any = None
        if self.world > 1:
            self._accelerator = self._join()

    @property
    def main(self) -> bool:
        """Whether this process writes files and measures."""
        return self.rank == 0

    def device(self, wanted: str) -> str:
        """The device of this process: its own GPU, where there are several."""
        if self._accelerator is None or wanted not in ("auto", "cuda"):
            return wanted
        return str(self._accelerator.device)

    def prepare(self, module: nn.Module, optimiser: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        """Wrap module and optimiser so that gradients are shared (together)."""
        if self._accelerator is None:
            return module, optimiser
        return self._accelerator.prepare(module, optimiser)

    @property
    def sharded(self) -> bool:
        """Whether each process holds a part of the parameters only (FSDP2)."""
        return self._accelerator is not None and self._accelerator.distributed_type.value == "FSDP"

    def holding(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """While gradients are accumulated: share them only with the last batch of a step."""
        return nullcontext() if last or self._accelerator is None else self._accelerator.no_sync(module)

    def average(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """Means over processes of scalars (together). A process may lack some of them."""
        if self._accelerator is None:
            return {name: float(value) for name, value in values.items()}
        from accelerate.utils import gather_object

        everyone = gather_object([{name: float(value) for name, value in values.items()}])
        names = dict.fromkeys(name for one in everyone for name in one)
        return {name: _mean([one[name] for one in everyone if name in one]) for name in names}

    def agree(self, flags: list[float]) -> list[float]:
        """The highest of each number over processes (together): one that wants to stop stops all."""
        if self._accelerator is None:
            return flags
        import torch.distributed as dist

        numbers = torch.tensor(flags, device=self._accelerator.device, dtype=torch.float64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return numbers.tolist()

    def wait(self) -> None:
        """Until all are here (together)."""
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()

    def leave(self) -> None:
        """Out of the group, at the end (together)."""
        if self._accelerator is not None:
            self._accelerator.end_training()

    def state(self, module: nn.Module, optimiser: Any) -> dict[str, Any]:
        """Whole module and optimiser on the host (together)."""
        plain = _plain(optimiser)
        if self.sharded:
            own, theirs = get_state_dict(module, plain, options=_OPTIONS)
            return {"sharded": True, "module": own, "optimiser": theirs}
        return {"sharded": False, "module": _unwrapped(module).state_dict(), "optimiser": plain.state_dict()}

    def load(self, module: nn.Module, optimiser: Any, state: dict[str, Any]) -> None:
        """Take over what `state` returned (together), on any number of processes of the same kind."""
        plain = _plain(optimiser)
        if state["sharded"] != self.sharded:
            kinds = [("FSDP" if x else "whole") for x in (state["sharded"], self.sharded)]
            raise SpecdoctorError(f"the state was saved {kinds[0]}, this run is {kinds[1]}; launch it as before")
        if self.sharded:
            own, theirs = state["module"], state["optimiser"]
            set_state_dict(module, plain, model_state_dict=own, optim_state_dict=theirs, options=_OPTIONS)
        else:
            _unwrapped(module).load_state_dict(state["module"])
            plain.load_state_dict(state["optimiser"])

    @contextmanager
    def gathered(self, module: nn.Module, objective: "Objective") -> Iterator[None]:
        """While the first process writes the drafter: its objective's module is whole (together)."""
        if not self.sharded:
            yield
            return
        whole = get_model_state_dict(module, options=_OPTIONS)
        parts = objective.module
        if self.main:
            objective.module = _Whole(
                {name.removeprefix("network."): value for name, value in whole.items() if isinstance(value, Tensor)},
                parts,
            )
        try:
            yield
        finally:
            objective.module = parts

    def _join(self) -> Any:
        try:
            from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
        except ImportError:
            raise EnvironmentMissingError(
                f"WORLD_SIZE is {self.world}, but accelerate is not installed; pip install 'specdoctor[train]', or "
                "train in one process"
            ) from None
        from datetime import timedelta

        return Accelerator(
            cpu=not torch.cuda.is_available(),
            kwargs_handlers=[
                DistributedDataParallelKwargs(find_unused_parameters=True),  # a phase may leave a head out
                InitProcessGroupKwargs(timeout=timedelta(hours=WAIT_HOURS)),
            ],
        )


_OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True)


class _Whole(nn.Module):
    """Stands in for a module of which this process holds a part: its state is the whole one."""

    def __init__(self, state: dict[str, Tensor], module: nn.Module) -> None:
        super().__init__()
        self._state, self._like = state, [module]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        return self._state

    def tensors(self) -> dict[str, Tensor]:
        """As `DraftNetwork.tensors`."""
        like: Any = type(self._like[0])
        return like.tensors(self)


def _unwrapped(module: nn.Module) -> nn.Module:
    """Without the wrapper of DDP."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module


def _plain(optimiser: Any) -> torch.optim.Optimizer:
    """Accelerate wraps the optimiser."""
    return getattr(optimiser, "optimizer", optimiser)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
