"""What one training step reads: packed sequences with the target's states, without padding."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class TrainingBatch:
    """Packed sequences, no padding. N tokens in all, S sequences one after another."""

    ids: Tensor  # [N] int64
    loss_mask: Tensor  # [N] bool: answer tokens (the token itself is to be predicted)
    starts: list[int]  # [S + 1] offsets of the sequences (cu_seqlens on the host)
    taps: Tensor  # [N, n_taps * Ht] raw states HS[taps] in the order of the drafter's taps
    last_hidden: Tensor  # [N, Ht] after the target's final norm: target logits = lm_head(last_hidden), made in chunks
