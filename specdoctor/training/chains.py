"""The training-time test of feature-recurrent drafters: their own steps below many anchors of a packed batch.

EAGLE-3 (Li et al. 2025, section 3.2): step t of a chain reads the state that step t - 1 of the same chain gave and the
text's next token, and attends to the target's features up to the chain's first row and to the chain's own columns; so
the drafter is trained on what it will see. The chain of the anchor at position a takes its first step at position
a - 1, on the feature there and the anchor; step t stands at a - 1 + t, reads token a + t and predicts token a + 1 + t.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from specdoctor.training.anchors import Blocks, sample_blocks
from specdoctor.training.batch import TrainingBatch
from specdoctor.training.packed_attention import TrainingColumns, TrainingRows

# (tokens [n], features [n, H], rows, columns, step) -> state fed back [n, H], state that the head reads [n, H]
StepFunction = Callable[[Tensor, Tensor, TrainingRows, TrainingColumns, int], tuple[Tensor, Tensor]]


def draw_chains(batch: TrainingBatch, per_sequence: int, steps: int, generator: torch.Generator) -> Blocks:
    """At most `per_sequence` chains of `steps` steps in each sequence; the row before an anchor is in its sequence."""
    mask = batch.loss_mask.clone()
    mask[torch.tensor(batch.starts[:-1], device=mask.device)] = False
    return sample_blocks(replace(batch, loss_mask=mask), per_sequence, steps, steps, generator)


def walk_chains(step: StepFunction, features: Tensor, batch: TrainingBatch, chains: Blocks) -> Iterator[Tensor]:
    """States that the head reads [A, H], step by step.

    The first step runs over all rows, since their columns are the context, the others over the chains.
    """
    columns, rows = TrainingColumns(), TrainingRows(batch.starts, batch.ids.device)
    # The last row of a sequence gets the next one's first token: no chain sees that row.
    state, scored = step(batch.ids.roll(-1), features, rows, columns, 0)
    first = chains.anchors - 1
    state, scored = state[first], scored[first]
    yield scored
    for t in range(1, chains.block):
        rows = TrainingRows(batch.starts, batch.ids.device, t, chains)
        state, scored = step(chains.tokens[:, t], state, rows, columns, t)
        yield scored
