"""What one pass learns about one text: plain arrays from which every acceptance figure is computed.

For chain rejection sampling, P(draft k is accepted | drafts 0..k-1 were, y) = min(1, q(y_k | y_<k) / p(y_k | y_<k)):
accepting and emitting y has probability min(p, q), emitting y has probability p, and what y goes on with does not
depend on which of the two emitted it. p and q are the distributions really used: tempered, cut by top-k and top-p,
one-hot for greedy. q is teacher-forced on y inside the block. (Leviathan et al. 2023, Algorithm 1; issue text.)

Not so 1 - TV(p, q) at the positions of y, multiplied up: its factors are averages over a token that the later factors
are then conditioned on, and the product is biased.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(slots=True)
class ReplayedRounds:
    """Rounds of one text drawn from their law given the text; in greedy, the rounds of decoding themselves."""

    anchor: Ints  # [R] index into the completion
    accepted: Ints  # [R] before the cut at the end of the text
    confidence: Array | None = None  # [R, K] along the drafted path, rejected drafts included; NaN where not followed
    confidence_logit: Array | None = None  # [R, K] the same before the sigmoid and any stored temperature


@dataclass(slots=True)
class TextAcceptance:
    """One completion y of one prompt. K = draft positions looked at. Row a of an array is the anchor `anchors[a]`."""

    prompt_id: str
    category: str
    repeat: int
    prompt_tokens: int
    tokens: Ints  # [n + lookahead] ids of the completion and of what the target said after its end
    length: int  # n: tokens of the completion, cut at a stop token or at the cap
    anchors: Ints  # [A] positions in the completion, all of 0..n-2 or a sample of them
    weight: Array  # [A] anchors that each one stands for
    accept: Array  # [A, K] conditional acceptance along y; NaN where y is not known so far ahead
    room: Ints  # [A] drafts that fit below the target's last position
    by_temperature: dict[str, Array] = field(default_factory=dict)  # accept at other draft temperatures
    rank: Ints | None = None  # [A, K] of y's token in q, 0 = likeliest; -1 where an earlier one was out of reach
    confidence: Array | None = None  # [A, K] of the drafter, along y
    confidence_logit: Array | None = None  # [A, K] the same before the sigmoid and any stored temperature
    reads_drafts: bool = False  # whether the confidence of a draft depends on the drafts before it
    rounds: ReplayedRounds | None = None
    disagreements: int = 0  # greedy: positions where the prefill's argmax is not y's token (near ties)
    impossible: int = 0  # sampling: positions where the prefill gives y's token probability 0 (edge of top-k or top-p)

    @property
    def whole(self) -> bool:
        """Whether every anchor was looked at, so that rounds can be followed."""
        return len(self.anchors) == max(0, self.length - 1)
