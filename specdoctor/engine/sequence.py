"""One request, and the only owner of its state."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from specdoctor.engine.clock import PhaseClock
from specdoctor.engine.sampling import Sampling, widest_float
from specdoctor.metrics.record import RoundRecord

NO_UNIFORMS = torch.empty(0, dtype=torch.float64)
UNIFORMS_AHEAD = 64  # random numbers drawn at once: a slice costs a tenth of a call of the generator


class Sequence:
    """Ids, sampling settings, seeded generator, KV slot, drafter state, stop reason and round records of a request.

    `ids` ends with the anchor: the last committed token, whose target hidden state does not exist yet. Every token
    before the anchor has its KV column.
    """

    def __init__(
        self,
        prompt_ids: Seq[int],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: Iterable[int] = (),
        prompt_id: str = "",
        category: str = "",
        repeat: int = 0,
    ) -> None:
        self.ids = list(prompt_ids)
        self.prompt_length = len(self.ids)
        self.max_new_tokens = max_new_tokens
        self.sampling = sampling or Sampling()
        self.stop_ids = frozenset(stop_ids)
        self.prompt_id, self.category, self.repeat = prompt_id, category, repeat
        self.generator = torch.Generator().manual_seed(self.sampling.seed)
        self._ahead, self._taken = NO_UNIFORMS, 0  # drawn from the generator, and how many of them were given out
        self.slot: int | None = None
        self.drafter_state: Any = None
        self.stop_reason: str | None = (
            None  # "stop" (a stop token), "length" (the cap) or "context" (the model's limit)
        )
        self.records: list[RoundRecord] = []
        self.clocks: list[PhaseClock] = []  # of rounds whose times are not read yet: reading may wait for the device
        self.prefill_seconds = 0.0

    @property
    def anchor(self) -> int:
        return self.ids[-1]

    @property
    def completion_ids(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def finished(self) -> bool:
        return self.stop_reason is not None

    def uniforms(self, n: int) -> Tensor:
        """The next n uniform numbers [n] (float64, host) of this request's own stream."""
        if self._taken + n > self._ahead.shape[0]:
            fresh = torch.rand(max(n, UNIFORMS_AHEAD), generator=self.generator, dtype=torch.float64)
            self._ahead, self._taken = torch.cat([self._ahead[self._taken :], fresh]), 0
        self._taken += n
        return self._ahead[self._taken - n : self._taken]

    def settle_times(self) -> None:
        """Read the clocks of the last rounds into their records."""
        for record, clock in zip(self.records[len(self.records) - len(self.clocks) :], self.clocks, strict=True):
            record.times = clock.seconds()
        self.clocks.clear()

    def commit(self, tokens: Seq[int]) -> list[int]:
        """Append `tokens`, cut after the first stop token and at the cap; return what was really appended."""
        room = self.max_new_tokens - len(self.completion_ids)
        kept: list[int] = []
        for token in tokens[:room]:
            kept.append(token)
            if token in self.stop_ids:
                self.stop_reason = "stop"
                break
        self.ids += kept
        if self.stop_reason is None and len(self.completion_ids) >= self.max_new_tokens:
            self.stop_reason = "length"
        return kept


def stacked_uniforms(sequences: Seq[Sequence], n: int, device: torch.device) -> Tensor:
    """The next n numbers of each request's own stream [R, n], on `device` in its widest float dtype."""
    drawn = torch.stack([sequence.uniforms(n) for sequence in sequences])
    return drawn.to(device, widest_float(device), non_blocking=True)
