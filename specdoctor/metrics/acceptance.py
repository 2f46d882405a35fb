"""What one arm accepted: tau, alpha, rates by position, waste, splits.

Contract: pure functions of the `RoundRecord`s of ONE arm (several arms raise). A request is (prompt id, repeat).
Every interval resamples prompts, with all repeats of a prompt kept together: repeats of a prompt are no new evidence
about other prompts. A metric that an arm cannot have (alpha of plain decoding) is absent with a reason, never zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdoctor.errors import SpecdoctorError
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.record import RoundRecord
from specdoctor.metrics.statistics import one_arm, ratio_of_sums

IntArray = NDArray[np.int64]

CONTEXT_EDGES = (0, 512, 1024, 2048, 4096, 8192, 16384, 32768)
NO_ROUNDS = "no rounds"
NO_DRAFTS = "no drafts: plain autoregressive decoding"


@dataclass(frozen=True, slots=True)
class Rounds:
    """The columns of one arm's records; build it once with `Rounds.of` to compute many metrics."""

    arm: str
    prompt: IntArray  # [N] index of the prompt, 0..P-1
    request: IntArray  # [N] index of the request, 0..Q-1
    request_prompt: IntArray  # [Q] prompt of each request
    drafted: IntArray  # [N]
    verified: IntArray  # [N]
    levels: IntArray  # [N] of the verified draft: of a chain `verified`, of a tree its depth
    accepted: IntArray  # [N]
    committed: IntArray  # [N]

    @classmethod
    def of(cls, records: "Sequence[RoundRecord] | Rounds") -> "Rounds":
        """Columns of records; raises when they belong to several arms."""
        if isinstance(records, Rounds):
            return records
        arm = one_arm(records)
        prompts: dict[str, int] = {}
        requests: dict[tuple[str, int], int] = {}
        rows = np.empty((len(records), 7), np.int64)
        for row, r in zip(rows, records, strict=True):
            prompt = prompts.setdefault(r.prompt_id, len(prompts))
            request = requests.setdefault((r.prompt_id, r.repeat), len(requests))
            levels = r.verified if r.depth is None else r.depth
            row[:] = prompt, request, r.drafted, r.verified, levels, r.accepted, r.committed
        request_prompt = np.array([prompts[prompt] for prompt, _ in requests], np.int64)
        drafted, verified, levels, accepted, committed = rows.T[2:]
        return cls(arm, rows[:, 0], rows[:, 1], request_prompt, drafted, verified, levels, accepted, committed)

    def __len__(self) -> int:
        return self.prompt.size

    @property
    def depth(self) -> int:
        """Longest verified draft, in levels."""
        return int(self.levels.max(initial=0))


Records = Sequence[RoundRecord] | Rounds


def tau_step(records: Records, seed: int = 0) -> Estimate:
    """Committed tokens per verify round, bonus included, cut at EOS and cap, prefill token excluded; n = rounds."""
    rounds = Rounds.of(records)
    return _pooled(rounds, rounds.committed, np.ones(len(rounds)), len(rounds), NO_ROUNDS, seed)


def tau_request(records: Records, seed: int = 0) -> Estimate:
    """Mean over requests of each request's committed tokens per round; n = requests."""
    rounds = Rounds.of(records)
    per_request = np.bincount(rounds.request, rounds.committed) / np.bincount(rounds.request)
    requests = rounds.request_prompt
    return ratio_of_sums(np.bincount(requests, per_request), np.bincount(requests), requests.size, NO_ROUNDS, seed)


def alpha_draft(records: Records, seed: int = 0) -> Estimate:
    """Accepted drafts / drafted tokens, trimmed ones included in the denominator; n = rounds with drafts."""
    rounds = Rounds.of(records)
    return _pooled(rounds, rounds.accepted, rounds.drafted, int((rounds.drafted > 0).sum()), _no_drafts(rounds), seed)


def alpha_verified(records: Records, seed: int = 0) -> Estimate:
    """Committed tokens / rows sent to the target (verified drafts and one anchor a round); n = rounds.

    The DSpark paper's acceptance rate (its footnote 3), where a trimmed draft counts only what was verified.
    """
    rounds = Rounds.of(records)
    if not rounds.verified.any():
        return Estimate.absent(_no_drafts(rounds), len(rounds))
    return _pooled(rounds, rounds.committed, rounds.verified + 1, len(rounds), NO_ROUNDS, seed)


def marginal(records: Records, seed: int = 0) -> list[Estimate]:
    """[K] P(drafts 0..i all accepted); n = rounds in which draft i was verified, which is the denominator.

    For a fixed K and no cut, tau = 1 + sum(marginal) and the marginals never rise. With trimmed drafts each position
    has its own rounds, the long ones being the promising ones, and neither holds.
    """
    rounds = Rounds.of(records)
    at_risk = [rounds.levels > i for i in range(rounds.depth)]
    return [_rate(rounds, rounds.accepted > i, mask, seed) for i, mask in enumerate(at_risk)]


def conditional(records: Records, seed: int = 0) -> list[Estimate]:
    """[K] P(draft i accepted given 0..i-1 were); n = rounds at risk: draft i verified and 0..i-1 accepted.

    May rise with depth: the survivors are the easy contexts.
    """
    rounds = Rounds.of(records)
    at_risk = [(rounds.levels > i) & (rounds.accepted >= i) for i in range(rounds.depth)]
    return [_rate(rounds, rounds.accepted > i, mask, seed) for i, mask in enumerate(at_risk)]


def waste(records: Records, seed: int = 0) -> Estimate:
    """Drafted and not accepted, per committed token; n = rounds."""
    rounds = Rounds.of(records)
    return _pooled(rounds, rounds.drafted - rounds.accepted, rounds.committed, len(rounds), NO_ROUNDS, seed)


def efficiency(records: Records, proposal_length: int | None = None, seed: int = 0) -> Estimate:
    """tau_step / (K + 1): the part of the possible that was reached. K defaults to the longest draft (deepest tree)."""
    rounds = Rounds.of(records)
    K = int(rounds.drafted.max(initial=0)) if proposal_length is None else proposal_length
    if K < 1:
        return Estimate.absent(_no_drafts(rounds), len(rounds))
    return _pooled(rounds, rounds.committed, np.full(len(rounds), K + 1), len(rounds), NO_ROUNDS, seed)


def accepted_length_histogram(records: Records) -> list[int]:
    """[K+1] rounds by number of accepted drafts, over the rounds that verified any; empty for plain decoding."""
    rounds = Rounds.of(records)
    verified = rounds.verified > 0
    return np.bincount(rounds.accepted[verified], minlength=rounds.depth + 1).tolist() if verified.any() else []


def by_category(records: Sequence[RoundRecord]) -> dict[str, list[RoundRecord]]:
    """Records by category, in the order of names; no category reads `uncategorised`."""
    split: dict[str, list[RoundRecord]] = {}
    for record in records:
        split.setdefault(record.category or "uncategorised", []).append(record)
    return dict(sorted(split.items()))


def by_context(records: Sequence[RoundRecord], edges: Sequence[int] = CONTEXT_EDGES) -> dict[str, list[RoundRecord]]:
    """Records by tokens of context when the round began; bins are [edge, next edge), empty ones left out."""
    if not edges or edges[0] != 0 or any(high <= low for low, high in pairwise(edges)):
        raise SpecdoctorError(f"context bins: found edges {list(edges)}, expected rising numbers that start at 0")
    labels = [f"{low}-{high - 1}" for low, high in pairwise(edges)] + [f"{edges[-1]}+"]
    split: dict[str, list[RoundRecord]] = {label: [] for label in labels}
    bins = np.searchsorted(edges, [r.context for r in records], side="right") - 1
    for index, record in zip(bins, records, strict=True):
        split[labels[index]].append(record)
    return {label: part for label, part in split.items() if part}


@dataclass(frozen=True, slots=True)
class AcceptanceSummary:
    """Everything about acceptance in one arm, ready for JSON."""

    arm: str
    prompts: int
    requests: int
    rounds: int
    drafted: int
    verified: int
    accepted: int
    committed: int
    tau_step: Estimate
    tau_request: Estimate
    alpha_draft: Estimate
    alpha_verified: Estimate
    waste: Estimate
    efficiency: Estimate
    marginal: list[Estimate]
    conditional: list[Estimate]
    accepted_length_histogram: list[int]
    by_category: dict[str, dict[str, Estimate]]
    by_context: dict[str, dict[str, Estimate]]

    def to_json(self) -> dict[str, Any]:
        return {field.name: _jsonable(getattr(self, field.name)) for field in fields(self)}


def summarise(records: Sequence[RoundRecord], proposal_length: int | None = None, seed: int = 0) -> AcceptanceSummary:
    """All metrics of one arm's records; `tau_step` and `alpha_draft` also by category and by context length."""
    rounds = Rounds.of(records)
    return AcceptanceSummary(
        arm=rounds.arm,
        prompts=int(rounds.prompt.max(initial=-1)) + 1,
        requests=rounds.request_prompt.size,
        rounds=len(rounds),
        drafted=int(rounds.drafted.sum()),
        verified=int(rounds.verified.sum()),
        accepted=int(rounds.accepted.sum()),
        committed=int(rounds.committed.sum()),
        tau_step=tau_step(rounds, seed),
        tau_request=tau_request(rounds, seed),
        alpha_draft=alpha_draft(rounds, seed),
        alpha_verified=alpha_verified(rounds, seed),
        waste=waste(rounds, seed),
        efficiency=efficiency(rounds, proposal_length, seed),
        marginal=marginal(rounds, seed),
        conditional=conditional(rounds, seed),
        accepted_length_histogram=accepted_length_histogram(rounds),
        by_category={name: _headline(part, seed) for name, part in by_category(records).items()},
        by_context={name: _headline(part, seed) for name, part in by_context(records).items()},
    )


def _headline(records: Sequence[RoundRecord], seed: int) -> dict[str, Estimate]:
    rounds = Rounds.of(records)
    return {"tau_step": tau_step(rounds, seed), "alpha_draft": alpha_draft(rounds, seed)}


def _jsonable(value: Any) -> Any:
    if isinstance(value, Estimate):
        return value.to_json()
    if isinstance(value, list):
        return [_jsonable(item) for item in value]
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    return value


def _pooled(rounds: Rounds, numerator: Any, denominator: Any, n: int, absent: str, seed: int) -> Estimate:
    """Ratio of sums of two columns [N], clustered by prompt."""
    return ratio_of_sums(
        np.bincount(rounds.prompt, numerator), np.bincount(rounds.prompt, denominator), n, absent, seed
    )


def _rate(rounds: Rounds, success: NDArray[np.bool_], at_risk: NDArray[np.bool_], seed: int) -> Estimate:
    return _pooled(rounds, success & at_risk, at_risk, int(at_risk.sum()), "no round reached this position", seed)


def _no_drafts(rounds: Rounds) -> str:
    return NO_DRAFTS if len(rounds) else NO_ROUNDS
