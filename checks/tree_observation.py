"""What the rows of a draft tree do in a real model: who moves when a token changes, alone and on reused buffers.

Contract: the model runs as the engine runs it, through `Target.forward` with the tree's own visibility and depths, in
the target's dtype and attention path. Nothing is assumed about what moves: a token is replaced by another one and the
states of all rows are compared. The output of layer 0 moves exactly where attention looks straight at the token (its
keys and values depend on nothing else); that of the last layer moves where any layer lets it through.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from specdoctor.checks.hand_worked_trees import local_parents, members
from specdoctor.checks.mask_faults import MaskFault, mask_faults
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.target import Target
from specdoctor.kernels.tree_mask import tree_attention_mask, tree_depths, with_anchor

CONTEXT = 11  # committed tokens of the first request; the others have a few more each, so that columns differ
JUNK_ROWS = 9  # rows of the draft that is rolled back, beyond the tree's own
# Relative difference of two forwards of the same text in other shapes, as measured and with room; a wrong position or
# a hidden ancestor gives 0.15 and more.
ROUNDING = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
# Rows of other tokens change which rows an expert takes together, so with experts nothing is the same to the last bit.
EXPERT_NOISE = 1e-3  # of the typical move
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
REPLACEMENTS = 8  # tokens tried before a row that does not move is said not to: sharp attention ignores most


@dataclass(frozen=True)
class RowLayout:
    """The rows of one forward: [anchor, nodes...] of each request, N rows in all."""

    name: str
    parents: tuple[tuple[int, ...], ...]  # of each request's rows, -1 the anchor's
    labels: tuple[str, ...]  # [N] what a row is called: "anchor" or the node's number in the tree

    @classmethod
    def of(cls, name: str, parents: Seq[int], requests: Seq[int]) -> "RowLayout":
        groups = members(requests)
        own = tuple(with_anchor(local_parents(parents, nodes)) for nodes in groups)
        several = len(groups) > 1
        labels = [
            label
            for request, nodes in enumerate(groups)
            for label in (f"anchor {request}" if several else "anchor", *map(str, nodes))
        ]
        return cls(name, own, tuple(labels))

    @property
    def counts(self) -> list[int]:
        return [len(parents) for parents in self.parents]

    @property
    def flat_parents(self) -> tuple[int, ...]:
        """Parents of all rows together, numbered by flat row."""
        flat: list[int] = []
        for parents in self.parents:
            first = len(flat)
            flat += [-1 if parent == -1 else first + parent for parent in parents]
        return tuple(flat)

    @property
    def flat_requests(self) -> tuple[int, ...]:
        return tuple(request for request, count in enumerate(self.counts) for _ in range(count))


@dataclass
class Moves:
    """Who moves when the token of a column changes: largest change [N, N] of a row's state."""

    direct: Tensor  # output of layer 0
    through: Tensor  # output of the last layer
    noise: float  # up to which a change says nothing

    def moved(self, which: str = "direct") -> Tensor:
        """Bool [N, N]: row i moves with the token of row j. NaN moves."""
        change: Tensor = getattr(self, which)
        return ~(change <= self.noise)


@dataclass
class TreeObservation:
    """One tree in one model. Errors are relative to the spread of a row's logits."""

    layout: RowLayout
    window: int | None  # sliding window of layer 0
    fresh: Moves
    stale: float  # largest change of the same forward after another draft was written and rolled back
    chain_error: Tensor  # [N] of each row against its path run as a chain
    reused: Moves  # the same tree below a path that was kept, in the same slots
    kept_error: float  # of the tree below the kept path, against a fresh prefill of the same text
    limit: float  # of the two errors: what rounding explains

    @property
    def allowed(self) -> Tensor:
        """Bool [N, N]: which rows may move with which."""
        return tree_attention_mask(self.layout.flat_parents)

    def faults(self, moves: Moves) -> list[MaskFault]:
        """What is wrong with who moves: after layer 0, and, where that is right, after the last layer."""
        return self._faults(moves.moved("direct"), self.window) or self._faults(moves.moved("through"), None)

    def _faults(self, moved: Tensor, window: int | None) -> list[MaskFault]:
        return mask_faults(moved, self.layout.flat_parents, window=window, requests=self.layout.flat_requests)


@torch.inference_mode()
def observe_tree(target: Target, layout: RowLayout, seed: int = 0) -> TreeObservation:
    """Run one tree on `target` in all the ways that the checks compare."""
    slots, spare = ([target.open() for _ in layout.parents] for _ in range(2))
    try:
        return _observe(target, layout, slots, spare, torch.Generator().manual_seed(seed))
    finally:
        for slot in (*slots, *spare):
            target.close(slot)


def _observe(
    target: Target, layout: RowLayout, slots: list[int], spare: list[int], generator: torch.Generator
) -> TreeObservation:
    runner, N = _Runner(target, layout, slots), sum(layout.counts)
    texts = [_random_ids(target, CONTEXT + 3 * r, generator) for r in range(len(slots))]
    for slot, text in zip(slots, texts, strict=True):
        _prefill(target, slot, text)
    tokens = _random_ids(target, N, generator)
    fresh = runner.moves(tokens)
    first = runner.states(tokens)
    _write_junk(target, slots, layout, generator)
    stale = max(_largest(a, b) for a, b in zip(first, runner.states(tokens), strict=True))
    chain_error, noise = _chain_errors(target, runner, tokens, runner.logits(tokens))
    runner.states(tokens)  # what `keep` commits are the rows of the last write
    kept = _deepest_paths(layout)
    for slot, rows in zip(slots, kept, strict=True):
        target.cache.keep(slot, rows)
    for slot, text, rows, own in zip(spare, texts, kept, tokens.split(layout.counts), strict=True):
        _prefill(target, slot, torch.cat([text, own[rows]]))
    tokens = _random_ids(target, N, generator)
    again = _Runner(target, layout, spare).logits(tokens)
    return TreeObservation(
        layout,
        target.windows[0],
        fresh,
        stale,
        chain_error,
        reused=runner.moves(tokens),
        kept_error=float(_relative(runner.logits(tokens), again).max()),
        limit=max(ROUNDING.get(target.dtype, ROUNDING[torch.bfloat16]), 4 * noise),
    )


class _Runner:
    """The same tree, again and again, below what its slots have committed. Nothing is kept."""

    def __init__(self, target: Target, layout: RowLayout, slots: list[int]) -> None:
        self.target, self.layout, self.slots = target, layout, slots
        self.visible = [tree_attention_mask(parents, target.device) for parents in layout.parents]
        self.depths = [tree_depths(parents) for parents in layout.parents]

    def _rows(self) -> PackedRows:
        starts = [self.target.cache.lengths[slot] for slot in self.slots]
        return PackedRows(self.slots, starts, self.layout.counts, self.target.device, self.visible, self.depths)

    def states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of layer 0 and of the last layer, [N, H] each."""
        some_row = torch.zeros(1, dtype=torch.long, device=self.target.device)
        output = self.target.forward(self._rows(), tokens, logit_rows=some_row, taps=(1, self.target.num_layers))
        assert output.taps is not None
        first, last = output.taps.float().split(self.target.hidden_size, dim=-1)
        return first.clone(), last.clone()

    def logits(self, tokens: Tensor) -> Tensor:
        return self.target.forward(self._rows(), tokens).logits.float()

    def moves(self, tokens: Tensor) -> Moves:
        """Replace one token after another; where a row that may move stays, try other tokens before saying so."""
        before = self.states(tokens)
        repeat = max(_largest(a, b) for a, b in zip(before, self.states(tokens), strict=True))
        N, allowed = len(tokens), tree_attention_mask(self.layout.flat_parents)
        direct, through = torch.zeros(N, N), torch.zeros(N, N)
        for column in range(N):
            for attempt in range(REPLACEMENTS):
                changed = tokens.clone()
                step = 1 + (2 * attempt + 1) * self.target.vocab_size // (2 * REPLACEMENTS + 1)
                changed[column] = (changed[column] + step) % self.target.vocab_size
                change = [(a - b).abs().amax(-1).cpu() for a, b in zip(self.states(changed), before, strict=True)]
                direct[:, column] = torch.maximum(direct[:, column], change[0])
                through[:, column] = torch.maximum(through[:, column], change[1])
                noise = self._noise(repeat, change[0][column])
                if bool((direct[:, column] > noise)[allowed[:, column]].all()):
                    break
        return Moves(direct, through, self._noise(repeat, direct.diagonal().median()))

    def _noise(self, repeat: float, typical: Tensor) -> float:
        has_experts = any(getattr(self.target.config, key, None) for key in EXPERT_KEYS)
        return max(4 * repeat, EXPERT_NOISE * float(typical) if has_experts else 0.0)


def _random_ids(target: Target, count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, target.vocab_size, (count,), generator=generator).to(target.device)


def _prefill(target: Target, slot: int, text: Tensor) -> None:
    rows = PackedRows([slot], [0], [len(text)], target.device)
    target.forward(rows, text, logit_rows=torch.zeros(1, dtype=torch.long, device=target.device))
    target.cache.keep(slot, range(len(text)))


def _write_junk(target: Target, slots: list[int], layout: RowLayout, generator: torch.Generator) -> None:
    """A longer draft with other tokens in the same slots, rolled back: what it leaves must not be seen again."""
    for slot, count in zip(slots, layout.counts, strict=True):
        ids = _random_ids(target, count + JUNK_ROWS, generator)
        target.forward(PackedRows([slot], [target.cache.lengths[slot]], [len(ids)], target.device), ids)


def _paths(layout: RowLayout) -> Iterator[tuple[int, list[int]]]:
    """Request and rows, anchor first, of the path to each leaf."""
    for request, parents in enumerate(layout.parents):
        for leaf in sorted(set(range(len(parents))) - set(parents)):
            path, node = [], leaf
            while node != -1:
                path.append(node)
                node = parents[node]
            yield request, path[::-1]


def _deepest_paths(layout: RowLayout) -> list[list[int]]:
    """Rows of each request's last deepest path, in the order of the rows, as the cache keeps them.

    A path whose rows do not stand in depth order is cut where it turns back: columns are kept in ascending order.
    """
    deepest: dict[int, list[int]] = {}
    for request, path in _paths(layout):
        ascending = path[: next((i for i in range(1, len(path)) if path[i] < path[i - 1]), len(path))]
        if len(ascending) >= len(deepest.get(request, [])):
            deepest[request] = ascending
    return [deepest[request] for request in range(len(layout.parents))]


def _chain_errors(target: Target, runner: _Runner, tokens: Tensor, logits: Tensor) -> tuple[Tensor, float]:
    """Relative error [N] of each row against its path run as a plain chain, and the noise of such a comparison."""
    errors, noise = torch.zeros(len(tokens)), 0.0
    firsts = [sum(runner.layout.counts[:r]) for r in range(len(runner.slots))]
    for request, path in _paths(runner.layout):
        slot, rows = runner.slots[request], [firsts[request] + row for row in path]
        alone = _chain_logits(target, slot, tokens[rows])
        errors[rows] = torch.maximum(errors[rows], _relative(logits[rows], alone))
        followed = _chain_logits(target, slot, torch.cat([tokens[rows], tokens[rows]]))[: len(rows)]
        noise = max(noise, float(_relative(followed, alone).max()))
    return errors, noise


def _chain_logits(target: Target, slot: int, ids: Tensor) -> Tensor:
    rows = PackedRows([slot], [target.cache.lengths[slot]], [len(ids)], target.device)
    return target.forward(rows, ids).logits.float()


def _relative(a: Tensor, b: Tensor) -> Tensor:
    """Spread of the difference over the spread of the logits, a row each, on the host."""
    return ((a - b).std(-1) / b.std(-1).clamp_min(1e-12)).cpu()


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
