"""Growing a draft tree level by level from any drafter that can say what follows a node.

Static trees take siblings by sampling without replacement, one after another, each from what its elder siblings left of
the drafter's distribution, or the likeliest tokens; dynamic trees (EAGLE-2) keep the nodes of highest cumulative draft
probability. The verification rule is the engine's: it needs each sibling's own law, which is what `Draft.probs` holds.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import torch
from torch import Tensor

from specdoctor.drafters.draft_vocabulary import over_target_vocabulary
from specdoctor.engine.draft import Draft
from specdoctor.engine.sampling import Sampling, probabilities, sample
from specdoctor.engine.sequence import Sequence, stacked_uniforms
from specdoctor.engine.trees import DynamicTree, StaticTree, Tree, node_depths

LEAST_MASS = 1e-7  # of a distribution from which a further sibling is drawn; below it float32 has nothing left


class Expansion(Protocol):
    """One round's trees in the making, R requests at once with the same number of nodes in a level."""

    def root(self) -> Tensor:
        """Draft logits [R, 1, dV] for the children of the anchors."""

    def below(self, tokens: Tensor, origin: Tensor) -> Tensor:
        """Go one level down: nodes `tokens` [R, M] (target ids) under nodes `origin` [R, M] of the level before.

        Returns draft logits [R, M, dV] for their children, each given its own path from the anchor.
        """


class TreeDrafting:
    """The tree half of the drafter protocol, for drafters with an `expansion`."""

    spec: Any
    verify_on: torch.device
    d2t: Tensor | None = None  # draft ids to target ids

    def expansion(self, sequences: Seq[Sequence], depth: int) -> Expansion:
        """Begin the trees of one round, at most `depth` levels deep."""
        raise NotImplementedError

    def drafting(self, sampling: Sampling) -> Sampling:
        """What shapes q: the request's settings, unless the drafter has a cut of its own."""
        return sampling

    def in_target_vocabulary(self, q: Tensor) -> Tensor:
        """Draft probabilities [..., dV] over the target's ids [..., V]; ids without a draft row have none."""
        return over_target_vocabulary(q, self.d2t, self.spec.vocab_size)

    def propose_tree(self, sequences: Seq[Sequence], tree: Tree, budget: int) -> list[Draft]:
        """A tree of at most `budget` levels below each anchor. All sequences share their sampling settings."""
        depth = min(tree.depth, budget)
        grown = self.expansion(sequences, depth)
        if isinstance(tree, DynamicTree):
            return _dynamic(self, grown, tree, depth)
        return _static(self, grown, sequences, tree, depth)

    def to_target_ids(self, choice: Tensor) -> Tensor:
        return choice if self.d2t is None else self.d2t[choice]


def _static(
    drafter: TreeDrafting, grown: Expansion, sequences: Seq[Sequence], tree: StaticTree, depth: int
) -> list[Draft]:
    parents = tuple(p for p, d in zip(tree.parents, node_depths(tree.parents), strict=True) if d <= depth)
    levels = _levels(parents)
    sampling = drafter.drafting(sequences[0].sampling)
    pick: Callable[[Tensor, int], tuple[Tensor, Tensor | None]] = _likeliest
    if tree.sampled and sampling.drafting_temperature > 0:

        def pick(logits: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
            uniforms = stacked_uniforms(sequences, logits.shape[1] * width, logits.device)
            q = probabilities(logits, sampling.drafting_temperature, sampling.top_k, sampling.top_p)
            return sample_without_replacement(q, uniforms.view(*logits.shape[:2], width))

    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    logits = grown.root()
    for level, nodes in enumerate(levels):
        origin = torch.tensor([parent for parent, _ in nodes], device=logits.device)
        rank = torch.tensor([rank for _, rank in nodes], device=logits.device)
        choices, q = pick(logits, 1 + max(rank for _, rank in nodes))  # [R, M, W], [R, M, W, dV]
        chosen = drafter.to_target_ids(choices[:, origin, rank])  # [R, nodes of this level]
        tokens.append(chosen)
        if q is not None:
            probs.append(drafter.in_target_vocabulary(q[:, origin, rank]))
        if level + 1 < len(levels):
            logits = grown.below(chosen, origin.expand(len(sequences), -1))
    flat = torch.cat(tokens, dim=1).to(drafter.verify_on)
    laws = torch.cat(probs, dim=1).to(drafter.verify_on) if probs else None
    return [Draft(flat[r], parents, None if laws is None else laws[r]) for r in range(len(flat))]


def _levels(parents: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    """By level, for each node: its parent's place in the level above, and its rank among its siblings."""
    depths = node_depths(parents)
    place: dict[int, int] = {-1: 0}
    counts: dict[int, int] = {}
    levels: list[list[tuple[int, int]]] = [[] for _ in range(max(depths, default=0))]
    for node, parent in enumerate(parents):
        level = levels[depths[node] - 1]
        place[node] = len(level)
        level.append((place[parent], counts.get(parent, 0)))
        counts[parent] = counts.get(parent, 0) + 1
    return levels


def _likeliest(logits: Tensor, width: int) -> tuple[Tensor, None]:
    """The `width` likeliest tokens [R, M, W], likeliest first; their law is one-hot."""
    if width == 1:
        return logits.argmax(-1, keepdim=True), None
    return logits.topk(min(width, logits.shape[-1]), dim=-1).indices, None


def sample_without_replacement(q: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw W distinct tokens [R, M, W] from `q` [R, M, V], one after another, and the law [R, M, W, V] of each draw.

    Where `q` has no mass left, the first token not drawn yet follows, with a one-hot law: it is determined by the
    others, so the acceptance rule still holds.
    """
    tokens, laws = [], []
    drawn = torch.zeros_like(q, dtype=torch.bool)
    for uniform in uniforms.unbind(-1):
        left = q.masked_fill(drawn, 0.0)
        mass = left.sum(-1, keepdim=True)
        spare = torch.zeros_like(q).scatter_(-1, (~drawn).long().argmax(-1, keepdim=True), 1.0)
        law = torch.where(mass > LEAST_MASS, left / mass.clamp_min(LEAST_MASS), spare)
        token = sample(law, uniform)
        drawn = drawn.scatter(-1, token.unsqueeze(-1), True)
        tokens.append(token)
        laws.append(law)
    return torch.stack(tokens, dim=-1), torch.stack(laws, dim=-2)


def _dynamic(drafter: TreeDrafting, grown: Expansion, tree: DynamicTree, depth: int) -> list[Draft]:
    logits = grown.root()
    R, width = logits.shape[0], min(tree.top_k, logits.shape[-1])
    score, choice = logits[:, 0].float().log_softmax(-1).topk(width, dim=-1)  # [R, W]
    tokens, scores = [drafter.to_target_ids(choice)], [score]
    parents = [torch.full_like(choice, -1)]
    beam_score, beam_token, beam_node = score, tokens[0], torch.arange(width, device=choice.device).expand(R, -1)
    origin = torch.zeros_like(choice)
    count = width
    for _ in range(1, depth):
        logits = grown.below(beam_token, origin)  # [R, M, dV]
        step, choice = logits.float().log_softmax(-1).topk(width, dim=-1)  # [R, M, W]
        M = choice.shape[1]
        score = (beam_score.unsqueeze(-1) + step).flatten(1)  # [R, M * W]
        token = drafter.to_target_ids(choice).flatten(1)
        tokens.append(token)
        scores.append(score)
        parents.append(beam_node.repeat_interleave(width, dim=1))
        best = score.topk(width, dim=-1).indices  # the next beam [R, W]
        origin = best // width
        beam_score, beam_token, beam_node = score.gather(1, best), token.gather(1, best), best + count
        count += M * width
    return _kept(drafter, torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), tree.nodes)


def _kept(drafter: TreeDrafting, tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int) -> list[Draft]:
    """The best `nodes` of each request's pool [R, P]: closed under parents, whose scores are never lower."""
    # Stable: of equal scores the earlier node stays, and a parent is earlier than its child.
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
    keep = order.sort(dim=1).values
    host_keep, host_parents = torch.stack([keep, parents.gather(1, keep)]).tolist()
    tokens = tokens.gather(1, keep).to(drafter.verify_on)
    drafts = []
    for r, (kept, own) in enumerate(zip(host_keep, host_parents, strict=True)):
        place = {-1: -1} | {node: i for i, node in enumerate(kept)}
        drafts.append(Draft(tokens[r], tuple(place[parent] for parent in own)))
    return drafts
