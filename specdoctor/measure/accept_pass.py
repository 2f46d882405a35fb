"""One pass over one text: a prefill of the target, a packed pass of the drafter, and what they say of each draft.

Contract: `AcceptancePass.run` turns a text that the target wrote into a `TextAcceptance` (there: the theory). Memory is
bounded whatever the text's length: the target's logits exist for a chunk of rows, the drafter's for one position of a
chunk of blocks. A row goes through the drafter's LM head only while its block can still matter: in greedy that ends
with the first draft that misses.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdoctor.drafters.block import BlockDrafter
from specdoctor.drafters.teacher_forced import HeadWalk
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.measure.corpus import CorpusText
from specdoctor.measure.drafted_paths import drafted_logits, needs_target_logits
from specdoctor.measure.known_text import (
    KnownText,
    block_chunks,
    hidden_below,
    prefill,
    token_probability,
    tokens_ahead,
)
from specdoctor.metrics.renewal import replay, survival
from specdoctor.metrics.text_acceptance import ReplayedRounds, TextAcceptance


@dataclass(frozen=True, slots=True)
class PassOptions:
    """What to learn beside the headline acceptance."""

    draft_tokens: int  # K of the rounds that are replayed
    depth: int  # draft positions looked at, K or more
    temperatures: tuple[tuple[str, float], ...] = ()  # further draft temperatures: label, value
    tree_width: int = 0  # ranks below this are told apart; 0: no ranks
    anchors: int | None = None  # at most so many anchors of a text, stratified; None: all
    drafted_paths: bool = True  # follow rejected drafts too, where the confidence head reads them
    seed: int = 0


class AcceptancePass:
    """A target, a drafter and the sampling that the texts were written with."""

    def __init__(self, target: Target, drafter: BlockDrafter, sampling: Sampling, options: PassOptions) -> None:
        if not isinstance(drafter, BlockDrafter):
            raise SpecdoctorError(
                f"accept: {getattr(drafter, 'name', drafter)} is a {type(drafter).__name__}, expected a DSpark or "
                "DFlash drafter; measure others with `specdoctor bench`"
            )
        self.target, self.drafter, self.sampling, self.options = target, drafter, sampling, options
        self._follows = options.drafted_paths and drafter.spec.confidence == "hidden+markov" and options.anchors is None
        self._keeps_logits = self._follows and needs_target_logits(sampling)

    @torch.inference_mode()
    def run(self, text: CorpusText, length: int) -> TextAcceptance:
        """Look at the first `length` tokens of a completion; what the target wrote beyond serves as look-ahead."""
        count = max(0, length - 1)
        rng = np.random.default_rng(_seed(self.options.seed, text))
        anchors, weight = _stratified(count, self.options.anchors, rng)
        room = self.target.max_positions - (len(text.prompt_ids) + anchors + 1)
        result = TextAcceptance(
            prompt_id=text.prompt_id,
            category=text.category,
            repeat=text.repeat,
            prompt_tokens=len(text.prompt_ids),
            tokens=np.array(text.ids, np.int64),
            length=length,
            anchors=anchors,
            weight=weight,
            accept=np.zeros((len(anchors), self.options.depth), np.float32),
            room=np.maximum(room, 0),
            reads_drafts=self.drafter.spec.confidence == "hidden+markov",
        )
        self._make_room(result)
        if not count:
            return result
        sequence = Sequence(text.prompt_ids, max_new_tokens=1)
        self.drafter.begin([sequence])
        try:
            known = prefill(self.target, self.drafter, self.sampling, text, sequence, self._keeps_logits)
            result.disagreements, result.impossible = known.disagreements, known.impossible
            self._look(known, result)
            if self.options.anchors is None:
                self._replay(known, result, rng)
        finally:
            self.drafter.end(sequence)
        return result

    def _make_room(self, result: TextAcceptance) -> None:
        """Arrays for whatever is asked for, also of a text without a single anchor."""
        result.by_temperature = {label: np.zeros_like(result.accept) for label, _ in self.options.temperatures}
        result.rank = np.full(result.accept.shape, -1, np.int64) if self.options.tree_width else None
        if self.drafter.confidence is not None:
            result.confidence, result.confidence_logit = np.zeros_like(result.accept), np.zeros_like(result.accept)

    def _look(self, known: KnownText, result: TextAcceptance) -> None:
        """Fill acceptance, ranks and confidences of every anchor, a chunk of blocks at a time."""
        options = self.options
        for first, last in block_chunks(self.drafter, known, len(result.anchors)):
            anchors = torch.as_tensor(result.anchors[first:last], device=known.ids.device)
            hidden = hidden_below(self.drafter, known, anchors)[:, : options.depth]
            tokens = tokens_ahead(known.ids, anchors, options.depth)  # [A, depth]
            logits = self.drafter.confidence_logits(known.ids[anchors], hidden, tokens)
            if logits is not None:
                assert result.confidence is not None and result.confidence_logit is not None
                result.confidence[first:last] = self.drafter.confidence_of(logits).cpu().numpy()
                result.confidence_logit[first:last] = logits.cpu().numpy()
            self._walk(known, anchors, hidden, tokens, result, first)
        ahead = result.anchors[:, None] + np.arange(options.depth) + 1
        for array in (result.accept, *result.by_temperature.values()):
            array[ahead >= len(result.tokens)] = np.nan

    def _walk(
        self, known: KnownText, anchors: Tensor, hidden: Tensor, tokens: Tensor, result: TextAcceptance, first: int
    ) -> None:
        walk = HeadWalk(self.drafter, hidden)
        prev = known.ids[anchors]
        labels = [None, *result.by_temperature]
        alive = torch.ones(len(anchors), len(labels) + 1, dtype=torch.bool, device=anchors.device)
        alive[:, -1] = self.options.tree_width > 0
        for k in range(self.options.depth):
            needed = alive[walk.rows].any(-1) & (anchors[walk.rows] + k + 1 < len(known.ids))
            walk.keep(needed.nonzero().squeeze(-1))
            if not len(walk.rows):
                return
            rows, y = walk.rows, tokens[walk.rows, k]
            logits = walk.step(prev[rows])
            at = first + rows.cpu().numpy()
            p = known.probability[anchors[rows] + k]
            values = [self.sampling.drafting_temperature, *(t for _, t in self.options.temperatures)]
            for column, (label, temperature) in enumerate(zip(labels, values, strict=True)):
                taken = acceptance(self._drafted(logits, y, temperature), p)
                alive[rows, column] &= taken > 0
                array = result.accept if label is None else result.by_temperature[label]
                array[at, k] = taken.cpu().numpy()
            if result.rank is not None:
                own = logits.gather(-1, y[:, None])
                rank = (logits > own).sum(-1)
                rank[own.squeeze(-1) == -torch.inf] = logits.shape[-1]  # no draft row: out of any tree's reach
                alive[rows, -1] &= rank < self.options.tree_width
                result.rank[at, k] = rank.cpu().numpy()
            prev = tokens[:, k]

    def _drafted(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        """q(y) [rows] of the distribution that drafts are drawn from."""
        if temperature == 0:
            return (logits.argmax(-1) == tokens).float()
        cut = self.drafter.drafting(self.sampling)  # a candidate selector is a cut of its own
        return token_probability(logits, tokens, temperature, cut.top_k, cut.top_p)

    def _replay(self, known: KnownText, result: TextAcceptance, rng: np.random.Generator) -> None:
        """Draw one run of rounds given y, and the confidences along what each round really drafted."""
        K = self.options.draft_tokens
        accept = np.where(np.arange(K) < result.room[:, None], result.accept[:, :K], 0.0)
        rounds = replay(survival(accept), rng.random(len(accept)))
        at, accepted = np.array(rounds, np.int64).reshape(-1, 2).T
        result.rounds = ReplayedRounds(at, accepted)
        if self._follows:
            logits = drafted_logits(self.drafter, known, self.sampling, at, accepted, K, rng)
            sure = self.drafter.confidence_of(torch.as_tensor(logits, device=self.drafter.device))
            result.rounds.confidence, result.rounds.confidence_logit = sure.cpu().numpy(), logits


def acceptance(q: Tensor, p: Tensor) -> Tensor:
    """min(1, q / p). Where p is 0 (y lay at the edge of top-k or top-p) the limit: 1 if q is not 0."""
    return torch.where(p > 0, (q / p.clamp_min(1e-38)).clamp_max(1.0), (q > 0).float())


def _stratified(count: int, most: int | None, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Anchors 0..count-1, or one drawn from each of `most` equal strata; and how many each stands for."""
    if most is None or count <= most:
        return np.arange(count, dtype=np.int64), np.ones(count, np.float32)
    edges = np.linspace(0, count, most + 1).astype(np.int64)
    sizes = np.diff(edges)
    return edges[:-1] + (rng.random(most) * sizes).astype(np.int64), sizes.astype(np.float32)


def _seed(seed: int, text: CorpusText) -> int:
    """Of a text, not of its place in the run: the same text is replayed alike whatever else is measured."""
    key = f"{seed}:{text.prompt_id}:{text.repeat}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big")
