"""What a training batch says of acceptance: per position, and the expected tau of a whole block.

Contract: rows are teacher-forced. `match_k` is the share of rows whose likeliest draft token is the text's (what greedy
decoding accepts); `accept_k` the mean of 1 - 0.5 ||p - q||_1 (what sampling at temperature 1 accepts). Both are
conditional: the tokens before are the text's. `tau_match` and `tau_accept` are 1 + the sum over k of the mean product
up to k, over the blocks that have k tokens to predict.
"""

import torch
from torch import Tensor

from specdoctor.training.head_loss import HeadLosses


def acceptance_parts(valid: Tensor, found: HeadLosses) -> dict[str, Tensor]:
    """Scalars by name from the rows' values; `valid` [A, K] says which rows they are of."""
    parts = _by_position("match", valid, found.match.float())
    if found.l1 is not None:
        parts |= _by_position("accept", valid, 1 - 0.5 * found.l1)
    return parts


def _by_position(name: str, valid: Tensor, values: Tensor) -> dict[str, Tensor]:
    spread = torch.zeros(valid.shape, device=valid.device).masked_scatter(valid, values.float())  # [A, K]
    counts = valid.sum(0)
    seen = int((counts > 0).sum())
    means = spread.sum(0) / counts.clamp_min(1)
    survival = spread.cumprod(1).sum(0) / counts.clamp_min(1)
    parts = {f"{name}_{k + 1}": means[k] for k in range(seen)}
    return parts | {f"tau_{name}": 1 + survival.sum()}
