"""What a drafter proposes, and the protocol that every drafter follows.

A chain is the tree whose parents are -1, 0, 1, ...: nothing above the kernels tells them apart.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specdoctor.engine.sequence import Sequence
    from specdoctor.engine.trees import Tree


@dataclass(slots=True)
class Draft:
    """n proposed tokens below the anchor of one sequence.

    `probs` [n, V] is the distribution that each token was really drawn from (float32, already tempered and cut), or
    None when the drafter chose deterministically (then q is one-hot). `confidence` [n] is the drafter's own estimate of
    the conditional acceptance of each token, or None.
    """

    tokens: Tensor  # [n] target ids, on the target's device
    parents: tuple[int, ...]  # [n], -1 = child of the anchor; a parent stands before its children
    probs: Tensor | None = None
    confidence: Tensor | None = None

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        return self.parents == chain_parents(len(self.parents))

    def prefix(self, n: int) -> "Draft":
        """The first n nodes; of a chain, its first n tokens."""
        if n >= len(self):
            return self
        return Draft(
            self.tokens[:n],
            self.parents[:n],
            None if self.probs is None else self.probs[:n],
            None if self.confidence is None else self.confidence[:n],
        )


@lru_cache(maxsize=256)
def chain_parents(n: int) -> tuple[int, ...]:
    """Parents of a chain of n tokens."""
    return tuple(range(-1, n - 1))


def chain_drafts(tokens: Tensor, probs: Tensor | None = None, confidence: Tensor | None = None) -> list[Draft]:
    """A chain a request from tokens [R, K], distributions [R, K, V] and confidences [R, K]; `unbind` makes the views
    of a whole batch at once."""
    R, K = tokens.shape
    parents, nothing = chain_parents(K), [None] * R
    return [
        Draft(own, parents, q, sure)
        for own, q, sure in zip(
            tokens.unbind(),
            nothing if probs is None else probs.unbind(),
            nothing if confidence is None else confidence.unbind(),
            strict=True,
        )
    ]


class Drafter(Protocol):
    """One drafting algorithm bound to a target. It keeps its per-request state in `sequence.drafter_state`."""

    name: str
    taps: tuple[int, ...]  # indices into HS[0..L] whose states it reads; may be empty
    max_draft: int  # most tokens it can propose in one round
    default_draft: int  # tokens it proposes unless told otherwise
    spec: Any  # its DraftSpec

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def begin(self, sequences: Seq["Sequence"]) -> None:
        """Take up new requests, before their prefill."""

    def observe(self, sequences: Seq["Sequence"], taps: Tensor, counts: Seq[int]) -> None:
        """Take the target's tapped states [N, len(taps) * H] of newly committed tokens, `counts[r]` rows a sequence.

        Not called for a drafter without taps: it finds what was committed in `sequence.ids`.
        """

    def propose(self, sequences: Seq["Sequence"], budget: int) -> list[Draft]:
        """Propose up to `budget` tokens below each sequence's anchor. All sequences share their sampling settings."""

    def end(self, sequence: "Sequence") -> None:
        """Forget a request."""


class TreeDrafter(Drafter, Protocol):
    """A drafter that can also propose trees."""

    def propose_tree(self, sequences: Seq["Sequence"], tree: "Tree", budget: int) -> list[Draft]:
        """Propose a tree of at most `budget` levels below each sequence's anchor."""


# Trims each draft to what is worth verifying; may look only at what comes before the node it decides on.
Schedule = Callable[[Seq["Sequence"], Seq[Draft]], list[Draft]]
# Most tokens to draft for a sequence in its next round; may look only at what is committed.
DraftLength = Callable[["Sequence"], int]
