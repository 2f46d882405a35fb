"""The training-time test of feature-recurrent drafters: their own steps below every answer position.

EAGLE-3 (Li et al. 2025, section 3.2): step t of a chain reads the state that step t - 1 of the same chain gave and the
text's next token, and attends to the target's features up to the chain's first row and to the chain's own columns; so
the drafter is trained on what it will see. Here chain i takes its first step at row i, from the feature of position i
and token i + 1; step t stands at position i + t, reads token i + 1 + t and predicts token i + 2 + t.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from specdoctor.training.batch import TrainingBatch
from specdoctor.training.packed_attention import Chains, TrainingColumns, TrainingRows

# (tokens [n], features [n, H], rows, columns, step) -> state fed back [n, H], state that the head reads [n, H]
StepFunction = Callable[[Tensor, Tensor, TrainingRows, TrainingColumns, int], tuple[Tensor, Tensor]]


def draw_chains(
    batch: TrainingBatch, steps: int, generator: torch.Generator, per_sequence: int | None = None
) -> Chains:
    """Chains with at least one answer token among the `steps` that they predict.

    `per_sequence` limits their number in each sequence, drawn with `generator` (a host generator).
    """
    mask = batch.loss_mask.cpu()
    rows, bounds, ends = [], [0], []
    for start, end in pairwise(batch.starts):
        answer = mask[start:end].long().cumsum(0)
        before = torch.cat([answer.new_zeros(1), answer])  # [n + 1] answer tokens before each row
        first = torch.arange(max(0, end - start - 2))
        last = (first + 2 + steps).clamp(max=end - start)
        usable = first[before[last] > before[first + 2]]
        if per_sequence is not None and len(usable) > per_sequence:
            usable = usable[torch.randperm(len(usable), generator=generator)[:per_sequence]].sort().values
        rows.append(usable + start)
        ends += [end] * len(usable)
        bounds.append(bounds[-1] + len(usable))
    device = batch.ids.device
    return Chains(torch.cat(rows).to(device), bounds, torch.tensor(ends, device=device, dtype=torch.long))


@dataclass
class ChainStep:
    """What one step of all chains predicts."""

    step: int
    scored: Tensor  # [M, H] what the drafter's head reads
    predicts: Tensor  # [M] packed row of the token to be predicted, clamped to the sequence's last
    counts: Tensor  # [M] bool: that token exists and is an answer token


def walk_chains(
    step: StepFunction, features: Tensor, batch: TrainingBatch, chains: Chains, steps: int
) -> Iterator[ChainStep]:
    """Run `steps` steps: the first over all rows (their columns are the context), the others over the chains."""
    device, columns = batch.ids.device, TrainingColumns()
    # The last row of a sequence gets the next one's first token: no chain sees that row.
    rows = TrainingRows(batch.starts, device)
    state, scored = step(batch.ids.roll(-1), features, rows, columns, 0)
    state, scored = state[chains.rows], scored[chains.rows]
    for t in range(steps):
        if t:
            tokens = batch.ids[torch.minimum(chains.rows + 1 + t, chains.ends - 1)]
            rows = TrainingRows(batch.starts, device, t, chains)
            state, scored = step(tokens, state, rows, columns, t)
        wanted = chains.rows + 2 + t
        predicts = torch.minimum(wanted, chains.ends - 1)
        yield ChainStep(t, scored, predicts, (wanted < chains.ends) & batch.loss_mask[predicts])
