"""A drafter without a model, to bring the engine exactly where a test wants it."""

import torch

from specdoctor.engine.draft import Draft, chain_parents
from specdoctor.engine.sequence import Sequence


class Oracle:
    """A drafter that proposes what it is told: the greedy text, wrong from the `misses`-th draft of a round on."""

    name, taps, spec = "oracle", (), None

    def __init__(self, text: list[int], max_draft: int = 4, misses: int = 99) -> None:
        self.text, self.max_draft, self.default_draft, self.misses = text, max_draft, max_draft, misses

    def begin(self, sequences: list[Sequence]) -> None: ...

    def observe(self, sequences: list[Sequence], taps: torch.Tensor, counts: list[int]) -> None: ...

    def end(self, sequence: Sequence) -> None: ...

    def propose(self, sequences: list[Sequence], budget: int) -> list[Draft]:
        drafts = []
        for sequence in sequences:
            ahead = (self.text[len(sequence.ids) :] + [0] * budget)[:budget]
            tokens = [token if i < self.misses else token ^ 1 for i, token in enumerate(ahead)]
            drafts.append(Draft(torch.tensor(tokens), chain_parents(budget)))
        return drafts
