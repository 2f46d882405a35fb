"""What rounds really drafted, drafts that fell included: the confidences that a head gives along those paths.

A confidence head that reads the draft before (Markov) judges later drafts by tokens that need not be in the text. Given
the text, the drafts of a round are y's tokens while they are accepted; the one that fell is drawn from the normalised
max(q - p, 0), whatever y's token was; those behind it from q. (Rejection sampling couples drafts and text maximally.)
"""

import numpy as np
import torch
from torch import Tensor

from specdoctor.drafters.block import BlockDrafter
from specdoctor.drafters.teacher_forced import HeadWalk
from specdoctor.engine.sampling import Sampling, probabilities, sample
from specdoctor.measure.known_text import KnownText, block_chunks, hidden_below, tokens_ahead

Ints = np.ndarray


def needs_target_logits(sampling: Sampling) -> bool:
    """Whether the path of a fallen draft depends on the target's whole distribution, not on its argmax alone."""
    return not sampling.greedy and sampling.drafting_temperature > 0


def drafted_logits(
    drafter: BlockDrafter,
    known: KnownText,
    sampling: Sampling,
    at: Ints,
    accepted: Ints,
    K: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Logits of the confidences [R, K] along the drafts of rounds anchored at `at` [R] (rising) of which `accepted` [R]
    survived, before any stored temperature.

    NaN for rounds beyond the target's logits that were kept (of a very long text only the first part is followed).
    """
    logits = np.full((len(at), K), np.nan, np.float32)
    within = len(at)
    if needs_target_logits(sampling):
        kept = 0 if known.logits is None else len(known.logits)
        within = int((at + K <= kept).sum())
    for first, last in block_chunks(drafter, known, within):
        anchors = torch.as_tensor(at[first:last], device=known.ids.device)
        fallen = torch.as_tensor(accepted[first:last], device=known.ids.device)
        hidden = hidden_below(drafter, known, anchors)[:, :K]
        tokens = tokens_ahead(known.ids, anchors, K)
        walk, prev = HeadWalk(drafter, hidden), known.ids[anchors]
        for k in range(K - 1):
            uniform = torch.as_tensor(rng.random(len(anchors)), device=known.ids.device)
            drawn = _drawn(known, sampling, walk.step(prev), anchors + k, tokens[:, k], fallen == k, uniform)
            prev = tokens[:, k] = torch.where(k < fallen, tokens[:, k], drawn)
        values = drafter.confidence_logits(known.ids[anchors], hidden, tokens)
        assert values is not None
        logits[first:last] = values.cpu().numpy()
    return logits


def _drawn(
    known: KnownText, sampling: Sampling, logits: Tensor, row: Tensor, y: Tensor, rejected: Tensor, uniform: Tensor
) -> Tensor:
    """A draft [R] for each row: from q, or where y's token came out of a rejection from max(q - p, 0)."""
    if sampling.drafting_temperature == 0:
        return logits.argmax(-1)
    q = probabilities(logits, sampling.drafting_temperature, sampling.top_k, sampling.top_p)
    if sampling.greedy:
        p = torch.zeros_like(q).scatter_(-1, y[:, None], 1.0)
    else:
        assert known.logits is not None
        rows = known.logits[row.to(known.logits.device)].to(q.device)
        p = probabilities(rows, sampling.temperature, sampling.top_k, sampling.top_p)
    residual = (q - p).clamp_min_(0)
    use = rejected & (residual.sum(-1) > 1e-9)
    return sample(torch.where(use[:, None], residual, q), uniform)
