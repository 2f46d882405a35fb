"""A sample of the vocabulary that stands for all of it in one step's losses.

Contract: columns that are certain (the step's own tokens, and the lowest ids, which byte-pair vocabularies give to the
most frequent tokens) count once; the rest are drawn evenly among the others, and each counts for as many as it stands
for. Both distributions get the same correction, log(factor) on their logits, so sums over the vocabulary (the
normalisers, the L1 distance) are estimated without bias. The columns change at every step: no token goes unpunished.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CERTAIN = 0.75  # share of the columns that is certain


@dataclass(slots=True)
class Columns:
    """S columns of the vocabulary."""

    ids: Tensor  # [S] ascending
    log_factor: Tensor  # [S] float32

    def place_of(self, tokens: Tensor) -> Tensor:
        """Columns of `tokens`, which must be among `ids`."""
        return torch.searchsorted(self.ids, tokens.contiguous())


def sample_columns(vocab: int, size: int, needed: Tensor, generator: torch.Generator) -> Columns:
    """About `size` of `vocab` columns, those of the tokens `needed` for sure. `generator` is a CPU one."""
    certain = torch.zeros(vocab, dtype=torch.bool)
    certain[: int(size * CERTAIN)] = True
    certain[needed.cpu().flatten()] = True
    others = (~certain).nonzero().squeeze(1)
    drawn = others[torch.randperm(len(others), generator=generator)[: max(1, size - int(certain.sum()))]]
    log_factor = torch.zeros(vocab)
    if len(drawn):
        log_factor[drawn] = math.log(len(others) / len(drawn))
    certain[drawn] = True
    ids = certain.nonzero().squeeze(1)
    return Columns(ids.to(needed.device), log_factor[ids].to(needed.device))
