"""How many tokens to draft in the next round of a request.

`constant` is what there is without any of this. `adaptive` follows the acceptance so far, as transformers' heuristic
schedule does: two more after a round that took the whole draft, one less after any other. `threshold` ends a draft
where the drafter is no longer sure: a causal LM stops drafting there (`CausalLMDrafter.stop_below`), the chain of a
parallel drafter with a confidence head is cut there (`confidence_threshold`).

All are lossless, because none looks at a token to decide about that token: `adaptive` reads rounds that are over, and
`threshold` a law that depends on the tokens before. A rule that drops a drafted token for being what it is would favour
the tokens it keeps.
"""

from weakref import WeakKeyDictionary

from specdoctor.engine.draft import DraftLength
from specdoctor.engine.sequence import Sequence
from specdoctor.errors import SpecdoctorError

DYNAMIC_K = ("constant", "threshold", "adaptive")
DEFAULT_THRESHOLD = 0.4  # transformers' assistant_confidence_threshold
GROWTH, SHRINKAGE = 2, 1


def check_dynamic_k(kind: str) -> str:
    """Raises `SpecdoctorError` unless `kind` is one of `DYNAMIC_K`."""
    if kind not in DYNAMIC_K:
        raise SpecdoctorError(f"--dynamic-k {kind}: expected one of {', '.join(DYNAMIC_K)}")
    return kind


def adaptive(first: int, most: int) -> DraftLength:
    """K of each request by its own rounds: `first` at the start, never below 1 nor above `most`.

    A round that verified no draft tells nothing and changes nothing. A request's K is a function of its own records, so
    it does not depend on its neighbours in a batch.
    """
    reached: WeakKeyDictionary[Sequence, tuple[int, int]] = WeakKeyDictionary()  # rounds looked at, K after them

    def draft_length(sequence: Sequence) -> int:
        seen, K = reached.get(sequence, (0, first))
        for record in sequence.records[seen:]:
            if record.verified:
                K = min(K + GROWTH, most) if record.accepted == record.verified else max(K - SHRINKAGE, 1)
        reached[sequence] = len(sequence.records), K
        return K

    return draft_length
