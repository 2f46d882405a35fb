"""The LM head of a drafter: logits as its format shapes them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdoctor.formats.spec import DraftSpec


def draft_logits(hidden: Tensor, head: Tensor, spec: DraftSpec) -> Tensor:
    """States [..., H] through the head [dV, H], scaled and soft-capped: [..., dV]."""
    logits = F.linear(hidden, head)
    if spec.logit_scale != 1.0:
        logits = logits * spec.logit_scale
    if spec.softcap:
        logits = torch.tanh(logits / spec.softcap) * spec.softcap
    return logits
