"""Prompt lookup: the baseline without a model. What followed the last n tokens the last time is proposed again.

Saxena 2023 (prompt lookup decoding); vLLM's `ngram` method. Works on the host: token ids are there already.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from specdoctor.engine.draft import Draft, chain_parents
from specdoctor.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PromptLookupSpec:
    """Settings of the look-up; the longest n-gram is tried first."""

    longest: int = 3
    shortest: int = 1
    family: str = "prompt-lookup"
    algorithm: str = "prompt-lookup"


class PromptLookupDrafter:
    """Proposes the continuation of the most recent earlier occurrence of the text's last n-gram, if there is one."""

    taps: tuple[int, ...] = ()

    def __init__(
        self, device: torch.device, spec: PromptLookupSpec | None = None, max_draft: int = 10, name: str = "ngram"
    ) -> None:
        self.spec = spec or PromptLookupSpec()
        self.device, self.max_draft, self.name = device, max_draft, name

    def begin(self, sequences: Seq[Sequence]) -> None:
        """Nothing to set up: the ids are the state."""

    def observe(self, sequences: Seq[Sequence], taps: Tensor, counts: Seq[int]) -> None:
        """Reads no hidden states."""

    def end(self, sequence: Sequence) -> None:
        """Nothing to forget."""

    def propose(self, sequences: Seq[Sequence], budget: int) -> list[Draft]:
        drafts = []
        for sequence in sequences:
            found = self.look_up(sequence.ids, budget)
            drafts.append(Draft(torch.tensor(found, dtype=torch.long, device=self.device), chain_parents(len(found))))
        return drafts

    def look_up(self, ids: Seq[int], budget: int) -> list[int]:
        """Up to `budget` ids that followed the last occurrence of the final n-gram; empty when there was none."""
        for n in range(self.spec.longest, self.spec.shortest - 1, -1):
            tail = list(ids[-n:])
            if len(tail) < n:
                continue
            for start in range(len(ids) - n - 1, -1, -1):
                if ids[start : start + n] == tail:
                    return list(ids[start + n : start + n + budget])
        return []
