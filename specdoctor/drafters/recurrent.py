"""Feature-recurrent drafters: the target's features, then the drafter's own hidden states, one token a step.

Formats page 1.3, 1.7.4, 1.8, 1.10 and 1.12. The feature of position i is paired with token i + 1 and rotated at
position i. Features of committed tokens go through the network once, as soon as their next token is known, and their
keys and values stay; the keys and values of the drafter's own steps are written behind them and never kept.

What differs between EAGLE-1, EAGLE-3 and MTP is the network: one module each. A round always proposes the tokens asked
for, also behind a drafted stop token, where DeepSpec's loop ends its round: the text is the same, what follows a stop
token is never committed, and looking for one would make the host wait for every step.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdoctor.drafters.backbone import Attention
from specdoctor.drafters.draft_head import draft_logits
from specdoctor.drafters.recurrent_tree import RecurrentExpansion
from specdoctor.drafters.rope import Rope
from specdoctor.drafters.tree_drafting import Expansion, TreeDrafting
from specdoctor.engine.draft import Draft, chain_drafts
from specdoctor.engine.kv import KVCache
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.sampling import Sampling, probabilities, sample
from specdoctor.engine.sequence import Sequence, stacked_uniforms
from specdoctor.formats.spec import MOST_STEPS, RecurrentSpec


@dataclass(slots=True)
class StepContext:
    """What the layers of one step share: the cache, the attention path, the layout of the rows and their rotation."""

    cache: KVCache
    attention: Any
    rows: PackedRows
    cos: Tensor
    sin: Tensor

    def attend(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        """Causal attention of `x` [N, in] over the cache and these rows, to [N, out]."""
        k, v = self.cache.write(layer, *attention.keys_values(x, self.cos, self.sin), self.rows)
        q = self.rows.spread(attention.queries(x, self.cos, self.sin))
        out = self.attention(q, k, v, self.rows.mask(attention.shape.window), attention.scale)
        return attention.o_proj(self.rows.gather(out).reshape(x.shape[0], -1))


class RecurrentNetwork(Protocol):
    """One step of a feature-recurrent drafter."""

    def features(self, taps: Tensor) -> Tensor:
        """The target's taps [N, n * Ht] to what the first step takes [N, H]."""

    def step(self, embedded: Tensor, feature: Tensor, context: StepContext, index: int) -> tuple[Tensor, Tensor]:
        """Embeddings and features [N, H] to the state fed back [N, H] and what the head reads [N, H].

        `index` counts the drafter's own steps, 0 for the target's features (several MTP layers take turns).
        """


@dataclass(slots=True)
class RecurrentState:
    """Of one request: its slot, and features [m, H] that wait for their next token."""

    slot: int
    waiting: list[Tensor]


class RecurrentDrafter(TreeDrafting, nn.Module):
    """A feature-recurrent drafter bound to a target: EAGLE-1/2/3, MTP.

    With `runs_ahead`, a prompt's features go through the network while the prompt is run, not in the first round.
    """

    runs_ahead = False

    def __init__(
        self, spec: RecurrentSpec, name: str, network: Any, embedding: Tensor, head: Tensor, d2t: Tensor | None
    ) -> None:
        """`embedding` [V, H]; `head` [dV, H]; `d2t` [dV] absolute target ids, None when the vocabularies are equal."""
        super().__init__()
        self.spec, self.name, self.taps = spec, name, spec.taps
        self.max_draft, self.default_draft = spec.max_draft, spec.default_draft
        self.network = network
        self.embedding, self.head, self.d2t = embedding, head, d2t
        self.verify_on = head.device  # where drafts are wanted: the target's device, if that is another one

    def prepare(self, attention: Any, verify_on: torch.device) -> None:
        """Attach what depends on device and dtype: the RoPE table, the cache, the attention path."""
        self.rope = Rope(self.spec.rope, self.spec.layers[0].head_dim, self.device, self.dtype)
        self.cache = KVCache(self.device)
        self.attention, self.verify_on = attention, verify_on

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    # The drafter protocol -------------------------------------------------------------------------------------------

    def begin(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            sequence.drafter_state = RecurrentState(self.cache.open(), [])

    def end(self, sequence: Sequence) -> None:
        self.cache.close(sequence.drafter_state.slot)
        sequence.drafter_state = None

    def observe(self, sequences: Seq[Sequence], taps: Tensor, counts: Seq[int]) -> None:
        """Fuse the features. They wait for the next proposal: the last one's next token may not be known yet."""
        fused = self.network.features(taps.to(self.head, non_blocking=self.device.type != "cpu"))
        for sequence, part in zip(sequences, fused.split(list(counts)), strict=True):
            sequence.drafter_state.waiting.append(part)
        if self.runs_ahead:
            sizes = [sum(len(part) for part in s.drafter_state.waiting) for s in sequences]
            ahead = [(s, size - 1) for s, size in zip(sequences, sizes, strict=True) if size > MOST_STEPS + 1]
            if ahead:  # of a prompt; what a round commits is less
                self._absorb([s for s, _ in ahead], [size for _, size in ahead])

    def propose(self, sequences: Seq[Sequence], budget: int) -> list[Draft]:
        sampling, R = sequences[0].sampling, len(sequences)
        hidden, scored = self.extend(sequences)
        uniforms = self.uniforms(sequences, budget)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        starts = [self.cache.lengths[s.drafter_state.slot] for s in sequences]
        for step in range(budget):
            if step:
                rows = self.rows(sequences, [start + step - 1 for start in starts], [1] * R)
                hidden, scored = self.step(tokens[-1], hidden, rows, step)
            chosen, q = self.choose(self.logits(scored), sampling, None if uniforms is None else uniforms[:, step])
            tokens.append(chosen)
            if q is not None:
                probs.append(q)
        return self.drafts(torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if probs else None)

    def expansion(self, sequences: Seq[Sequence], depth: int) -> Expansion:
        return RecurrentExpansion(self, sequences)

    # The steps, separately callable ---------------------------------------------------------------------------------

    def extend(self, sequences: Seq[Sequence]) -> tuple[Tensor, Tensor]:
        """Run the waiting features through the network and keep them; state and scored state [R, H] of the last row."""
        counts = [sum(len(part) for part in s.drafter_state.waiting) for s in sequences]
        hidden, scored = self._absorb(sequences, counts)
        last = torch.tensor(counts, device=self.device).cumsum(0) - 1
        return hidden[last], scored[last]

    def _absorb(self, sequences: Seq[Sequence], counts: Seq[int]) -> tuple[Tensor, Tensor]:
        """Run each request's first `counts[r]` waiting features and keep their columns; states of all rows [N, H]."""
        starts = [self.cache.lengths[s.drafter_state.slot] for s in sequences]
        tokens, features = self.take(sequences, counts)
        hidden, scored = self.step(
            torch.tensor([token for part in tokens for token in part], device=self.device),
            torch.cat(features),
            self.rows(sequences, starts, counts),
            0,
        )
        for sequence, count in zip(sequences, counts, strict=True):
            self.cache.keep(sequence.drafter_state.slot, range(count))
        return hidden, scored

    def take(self, sequences: Seq[Sequence], counts: Seq[int]) -> tuple[list[list[int]], list[Tensor]]:
        """Remove each request's first `counts[r]` waiting features [n, H]; with each goes the token behind it."""
        tokens, features = [], []
        for sequence, count in zip(sequences, counts, strict=True):
            state = sequence.drafter_state
            waiting = torch.cat(state.waiting)
            start = self.cache.lengths[state.slot]
            tokens.append(sequence.ids[start + 1 : start + 1 + count])
            features.append(waiting[:count])
            state.waiting = [waiting[count:]] if count < len(waiting) else []
        return tokens, features

    def uniforms(self, sequences: Seq[Sequence], n: int) -> Tensor | None:
        """The next `n` random numbers [R, n], on the drafter's device; None where drafts are the likeliest."""
        if sequences[0].sampling.drafting_temperature == 0:
            return None
        return stacked_uniforms(sequences, n, self.device)

    def choose(self, logits: Tensor, sampling: Sampling, uniforms: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Draft logits [N, dV] and random numbers [N] to target ids [N] and the law [N, V] they were drawn from."""
        if uniforms is None:
            return self.to_target_ids(logits.argmax(-1)), None
        q = probabilities(logits, sampling.drafting_temperature, sampling.top_k, sampling.top_p)
        return self.to_target_ids(sample(q, uniforms)), self.in_target_vocabulary(q)

    def step(self, tokens: Tensor, feature: Tensor, rows: PackedRows, index: int) -> tuple[Tensor, Tensor]:
        """Tokens [N] and features [N, H] to the state fed back [N, H] and what the head reads [N, H]."""
        cos, sin = self.rope.at(rows.positions, rows.limit)
        context = StepContext(self.cache, self.attention, rows, cos, sin)
        return self.network.step(self.embed(tokens), feature, context, index)

    def embed(self, tokens: Tensor) -> Tensor:
        """[N] -> [N, H]."""
        embedded = F.embedding(tokens, self.embedding)
        return embedded if self.spec.embed_scale == 1.0 else embedded * self.spec.embed_scale

    def logits(self, scored: Tensor) -> Tensor:
        """[..., H] -> [..., dV]."""
        return draft_logits(scored, self.head, self.spec)

    def rows(self, sequences: Seq[Sequence], starts: Seq[int], counts: Seq[int]) -> PackedRows:
        return PackedRows([s.drafter_state.slot for s in sequences], starts, counts, self.device)

    def drafts(self, tokens: Tensor, probs: Tensor | None) -> list[Draft]:
        """Chains from tokens [R, K] and distributions [R, K, V], on the target's device."""
        return chain_drafts(tokens.to(self.verify_on), None if probs is None else probs.to(self.verify_on))
