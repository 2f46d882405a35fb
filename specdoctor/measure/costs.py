"""Bare times of the two forwards that a round is made of, outside any decode loop.

They serve twice: T(K+1)/T(1) and the draft time feed the speed-up model, and what a round takes beyond them is the
engine's own overhead. Sampled again and again between the requests of a bench, so drift of the machine hits all alike.
"""

from dataclasses import dataclass, field

import torch

from specdoctor.engine.engine import Engine
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.measure.cost_table import timed


@dataclass(slots=True)
class BareCosts:
    """Seconds of single forwards at one context length each, measured next to one another."""

    context: list[int] = field(default_factory=list)
    target_one: list[float] = field(default_factory=list)  # T(1)
    target_block: list[float] = field(default_factory=list)  # T(K + 1)
    draft: list[float] = field(default_factory=list)  # context features of the committed rows, block, heads


@torch.inference_mode()
def sample_costs(
    engine: Engine,
    ids: list[int],
    costs: BareCosts,
    kept_rows: int,
    sampling: Sampling,
    draft_tokens: int | None = None,
) -> None:
    """Add a sample: after `ids`, a forward of 1 row, of K + 1 rows, and a whole draft with `kept_rows` new features.

    K is `draft_tokens`, where drafts vary in length that of the usual one; None: the engine's own. Of a tree K are its
    nodes (the rows are timed as a chain: the mask alone differs).
    """
    target, drafter = engine.target, engine.drafter
    assert drafter is not None
    K, most = draft_tokens or engine.draft_rows, target.max_positions
    depth = min(K, engine.draft_tokens)
    kept = max(1, min(kept_rows, K + 1))
    # Behind the prompt fits either the block, or what the timed draft commits with a draft behind it.
    ids = ids[: max(1, most - max(K + 1, 1 + kept + K))]
    sequence = Sequence(ids, max_new_tokens=1, sampling=sampling)
    try:
        engine.prefill([sequence])
        assert sequence.slot is not None
        start = target.cache.lengths[sequence.slot]
        block = torch.tensor((ids * (K + 1))[: K + 1], device=target.device)

        def rows(n: int) -> PackedRows:
            return PackedRows([sequence.slot], [start], [n], target.device)  # type: ignore[list-item]

        taps = target.forward(rows(K + 1), block, taps=engine.taps).taps
        target.forward(rows(1), block[:1])
        engine.drafts([sequence], depth)
        costs.context.append(start)
        costs.target_one.append(timed(target.device, lambda: target.forward(rows(1), block[:1])))
        costs.target_block.append(timed(target.device, lambda: target.forward(rows(K + 1), block, taps=engine.taps)))
        sequence.ids += block[:kept].tolist()  # a drafter reads the tokens that it is told of, the new anchor included

        def draft() -> None:
            if taps is not None:
                drafter.observe([sequence], taps[:kept], [kept])
            engine.drafts([sequence], depth)

        costs.draft.append(timed(target.device, draft))
    finally:
        engine.release([sequence])
