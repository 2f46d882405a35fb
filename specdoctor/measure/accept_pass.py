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
from specdoctor.drafters.teacher_forced import HeadWalk, blocks_hidden
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.sampling import Sampling, probabilities, sample
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import PREFILL_ROWS, Target
from specdoctor.errors import SpecdoctorError
from specdoctor.measure.corpus import CorpusText
from specdoctor.metrics.renewal import replay, survival
from specdoctor.metrics.text_acceptance import ReplayedRounds, TextAcceptance

LOGIT_BYTES = 64 << 20  # of one chunk of logits
SCORE_BYTES = 64 << 20  # of one layer's attention scores in the drafter
KEPT_BYTES = 256 << 20  # of the target's logits that wait for the drafted paths


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


@dataclass(slots=True)
class _Known:
    """A text on the device, after the prefill. Row i predicts completion token i + 1."""

    sequence: Sequence
    prompt: int  # tokens of the prompt
    ids: Tensor  # [n + lookahead] completion, on the drafter's device
    probability: Tensor  # [rows] of y's next token under p; 1 in greedy
    logits: Tensor | None  # [kept, V] of the first rows, for drafted paths
    disagreements: int
    impossible: int


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
        if not count:
            return result
        sequence = Sequence(text.prompt_ids, max_new_tokens=1)
        self.drafter.begin([sequence])
        try:
            known = self._prefill(sequence, text)
            result.disagreements, result.impossible = known.disagreements, known.impossible
            self._look(known, result)
            if self.options.anchors is None:
                self._replay(known, result, rng)
        finally:
            self.drafter.end(sequence)
        return result

    def _prefill(self, sequence: Sequence, text: CorpusText) -> _Known:
        """Run prompt and completion once: p of each token of y, and the features into the drafter's cache."""
        target, drafter, P = self.target, self.drafter, len(text.prompt_ids)
        ids = torch.tensor([*text.prompt_ids, *text.ids], device=target.device)
        rows, first = len(ids) - 1, P
        most = _rows_of(LOGIT_BYTES, target.vocab_size)
        known = _Known(sequence, P, ids[P:].to(drafter.device), torch.empty(0), None, 0, 0)
        probability, kept, kept_bytes = [], [], 0
        slot = target.open()
        try:
            start = 0
            while start < rows:
                end = min(start + PREFILL_ROWS, rows, max(start, first) + most)
                wanted = torch.arange(max(first, start), end, device=target.device)
                at = wanted - start if len(wanted) else torch.tensor([end - start - 1], device=target.device)
                layout = PackedRows([slot], [start], [end - start], target.device)
                output = target.forward(layout, ids[start:end], logit_rows=at, taps=drafter.taps)
                target.cache.keep(slot, range(end - start))
                assert output.taps is not None
                drafter.observe([sequence], output.taps, [end - start])
                if len(wanted):
                    probability.append(self._emitted(output.logits, ids[wanted + 1], known))
                    kept_bytes += output.logits.numel() * output.logits.element_size()
                    if self._follows and kept_bytes <= KEPT_BYTES:
                        kept.append(output.logits)
                start = end
        finally:
            target.close(slot)
        known.probability = torch.cat(probability).to(drafter.device)
        known.logits = torch.cat(kept) if kept else None
        return known

    def _emitted(self, logits: Tensor, tokens: Tensor, known: _Known) -> Tensor:
        """p(y) [rows] of the processed distribution; greedy: 1, since y is what the target emits."""
        if self.sampling.greedy:
            known.disagreements += int((logits.argmax(-1) != tokens).sum())
            return torch.ones(len(tokens), device=logits.device)
        sampling = self.sampling
        p = token_probability(logits, tokens, sampling.temperature, sampling.top_k, sampling.top_p)
        known.impossible += int((p == 0).sum())
        return p

    def _look(self, known: _Known, result: TextAcceptance) -> None:
        """Fill acceptance, ranks and confidences of every anchor, a chunk of blocks at a time."""
        options, A = self.options, len(result.anchors)
        result.by_temperature = {label: np.zeros_like(result.accept) for label, _ in options.temperatures}
        result.rank = np.full(result.accept.shape, -1, np.int64) if options.tree_width else None
        result.confidence = None if self.drafter.confidence is None else np.zeros_like(result.accept)
        for first, last in self._chunks(known, A):
            anchors = torch.as_tensor(result.anchors[first:last], device=known.ids.device)
            hidden = self._hidden(known, anchors)[:, : options.depth]
            tokens = _ahead(known.ids, anchors, options.depth)  # [A, depth]
            if result.confidence is not None:
                values = self.drafter.confidences(known.ids[anchors], hidden, tokens)
                assert values is not None
                result.confidence[first:last] = values.cpu().numpy()
            self._walk(known, anchors, hidden, tokens, result, first)
        ahead = result.anchors[:, None] + np.arange(options.depth) + 1
        for array in (result.accept, *result.by_temperature.values()):
            array[ahead >= len(result.tokens)] = np.nan

    def _walk(
        self, known: _Known, anchors: Tensor, hidden: Tensor, tokens: Tensor, result: TextAcceptance, first: int
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
                rank = (logits > logits.gather(-1, y[:, None])).sum(-1)
                alive[rows, -1] &= rank < self.options.tree_width
                result.rank[at, k] = rank.cpu().numpy()
            prev = tokens[:, k]

    def _drafted(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        """q(y) [rows] of the distribution that drafts are drawn from."""
        if temperature == 0:
            return (logits.argmax(-1) == tokens).float()
        return token_probability(logits, tokens, temperature, self.sampling.top_k, self.sampling.top_p)

    def _replay(self, known: _Known, result: TextAcceptance, rng: np.random.Generator) -> None:
        """Draw one run of rounds given y, and the confidences along what each round really drafted."""
        K = self.options.draft_tokens
        accept = np.where(np.arange(K) < result.room[:, None], result.accept[:, :K], 0.0)
        rounds = replay(survival(accept), rng.random(len(accept)))
        at, accepted = np.array(rounds, np.int64).reshape(-1, 2).T
        result.rounds = ReplayedRounds(at, accepted)
        if self._follows:
            result.rounds.confidence = self._paths(known, at, accepted, K, rng)

    def _paths(
        self, known: _Known, at: np.ndarray, accepted: np.ndarray, K: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Confidences [R, K] along the drafts of each round: y's while accepted, then what q would have drafted."""
        confidence = np.full((len(at), K), np.nan, np.float32)
        kept = 0 if known.logits is None else len(known.logits)
        within = int((at + K <= kept).sum())  # anchors rise, so these are the first ones
        for first, last in self._chunks(known, within):
            anchors = torch.as_tensor(at[first:last], device=known.ids.device)
            fallen = torch.as_tensor(accepted[first:last], device=known.ids.device)
            hidden = self._hidden(known, anchors)[:, :K]
            tokens = _ahead(known.ids, anchors, K)
            walk, prev = HeadWalk(self.drafter, hidden), known.ids[anchors]
            for k in range(K - 1):
                uniform = torch.as_tensor(rng.random(len(anchors)), device=known.ids.device)
                drawn = self._drawn(known, walk.step(prev), anchors + k, tokens[:, k], fallen == k, uniform)
                prev = tokens[:, k] = torch.where(k < fallen, tokens[:, k], drawn)
            values = self.drafter.confidences(known.ids[anchors], hidden, tokens)
            assert values is not None
            confidence[first:last] = values.cpu().numpy()
        return confidence

    def _drawn(
        self, known: _Known, logits: Tensor, row: Tensor, y: Tensor, rejected: Tensor, uniform: Tensor
    ) -> Tensor:
        """A draft [R] for each row: from q, or where y's token came out of a rejection from max(q - p, 0)."""
        sampling = self.sampling
        if sampling.drafting_temperature == 0:
            return logits.argmax(-1)
        q = probabilities(logits, sampling.drafting_temperature, sampling.top_k, sampling.top_p)
        if sampling.greedy:
            p = torch.zeros_like(q).scatter_(-1, y[:, None], 1.0)
        else:
            assert known.logits is not None
            p = probabilities(known.logits[row].to(q.device), sampling.temperature, sampling.top_k, sampling.top_p)
        residual = (q - p).clamp_min_(0)
        use = rejected & (residual.sum(-1) > 1e-9)
        return sample(torch.where(use[:, None], residual, q), uniform)

    def _hidden(self, known: _Known, anchors: Tensor) -> Tensor:
        positions = (known.prompt + anchors).tolist()
        return blocks_hidden(self.drafter, known.sequence.drafter_state, positions, known.ids[anchors])

    def _chunks(self, known: _Known, count: int) -> list[tuple[int, int]]:
        """Ranges of blocks whose attention scores and logits stay within bounds."""
        spec = self.drafter.spec
        columns = self.drafter.backbone.cache.lengths[known.sequence.drafter_state]
        heads = max(layer.heads for layer in spec.layers)
        size = _rows_of(LOGIT_BYTES, spec.vocab_size)
        while size > 1 and heads * size * spec.block_size * (columns + size * spec.block_size) * 4 > SCORE_BYTES:
            size //= 2
        return [(first, min(first + size, count)) for first in range(0, count, size)]


def token_probability(logits: Tensor, tokens: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Float32 probability [rows] of `tokens` [rows] under `engine.sampling.probabilities` of `logits` [rows, V]."""
    if top_k or top_p < 1:
        return probabilities(logits, temperature, top_k, top_p).gather(-1, tokens[:, None]).squeeze(-1)
    scores = logits.float() / temperature  # no need of the other probabilities: one pass over V less
    return (scores.gather(-1, tokens[:, None]).squeeze(-1) - scores.logsumexp(-1)).exp()


def acceptance(q: Tensor, p: Tensor) -> Tensor:
    """min(1, q / p). Where p is 0 (y lay at the edge of top-k or top-p) the limit: 1 if q is not 0."""
    return torch.where(p > 0, (q / p.clamp_min(1e-38)).clamp_max(1.0), (q > 0).float())


def _ahead(ids: Tensor, anchors: Tensor, depth: int) -> Tensor:
    """[A, depth] tokens after each anchor; the last one stands for those beyond the text."""
    index = anchors[:, None] + torch.arange(1, depth + 1, device=ids.device)
    return ids[index.clamp_max(len(ids) - 1)]


def _rows_of(budget: int, vocab: int) -> int:
    return max(8, budget // (4 * vocab))


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
