"""Feature-recurrent drafters: the target's features, then the drafter's own hidden states, one token a step.

Formats page 1.3, 1.7.4, 1.8, 1.10 and 1.12. The feature of position i is paired with token i + 1 and rotated at
position i. Features of committed tokens go through the network once, as soon as their next token is known, and their
keys and values stay; the keys and values of the drafter's own steps are written behind them and never kept.

What differs between EAGLE-1, EAGLE-3 and MTP is the network: one module each.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdoctor.drafters.backbone import Attention
from specdoctor.drafters.rope import Rope
from specdoctor.engine.draft import Draft, chain_parents
from specdoctor.engine.kv import KVCache
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.sampling import probabilities, sample, widest_float
from specdoctor.engine.sequence import Sequence
from specdoctor.formats.spec import RecurrentSpec


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
        out = self.attention(q, k, v, self.rows.mask(attention.shape.window), attention.shape.head_dim**-0.5)
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


class RecurrentDrafter(nn.Module):
    """A feature-recurrent drafter bound to a target: EAGLE-1/2/3, MTP."""

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
        """Fuse the features; the last one's next token is not committed yet, so all wait for the next proposal."""
        fused = self.network.features(taps.to(self.head, non_blocking=self.device.type != "cpu"))
        for sequence, part in zip(sequences, fused.split(list(counts)), strict=True):
            sequence.drafter_state.waiting.append(part)

    def propose(self, sequences: Seq[Sequence], budget: int) -> list[Draft]:
        sampling, R = sequences[0].sampling, len(sequences)
        hidden, scored = self.extend(sequences)
        uniforms = None
        if sampling.drafting_temperature > 0:
            uniforms = torch.stack([s.uniforms(budget) for s in sequences])
            uniforms = uniforms.to(self.device, widest_float(self.device), non_blocking=True)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        starts = [self.cache.lengths[s.drafter_state.slot] for s in sequences]
        for step in range(budget):
            if step:
                rows = self.rows(sequences, [start + step - 1 for start in starts], [1] * R)
                hidden, scored = self.step(tokens[-1], hidden, rows, step)
            logits = self.logits(scored)
            if uniforms is None:
                choice = logits.argmax(-1)
            else:
                q = probabilities(logits, sampling.drafting_temperature, sampling.top_k, sampling.top_p)
                choice = sample(q, uniforms[:, step])
                probs.append(self.in_target_vocabulary(q))
            tokens.append(choice if self.d2t is None else self.d2t[choice])
        return self.drafts(torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if probs else None)

    # The steps, separately callable ---------------------------------------------------------------------------------

    def extend(self, sequences: Seq[Sequence]) -> tuple[Tensor, Tensor]:
        """Run the waiting features through the network and keep them; state and scored state [R, H] of the last row."""
        states = [s.drafter_state for s in sequences]
        waiting = [torch.cat(state.waiting) for state in states]
        counts = [len(part) for part in waiting]
        starts = [self.cache.lengths[state.slot] for state in states]
        ids = [s.ids[a + 1 : a + 1 + n] for s, a, n in zip(sequences, starts, counts, strict=True)]
        tokens = torch.tensor([token for part in ids for token in part], device=self.device)
        hidden, scored = self.step(tokens, torch.cat(waiting), self.rows(sequences, starts, counts), 0)
        for state, count in zip(states, counts, strict=True):
            self.cache.keep(state.slot, range(count))
            state.waiting.clear()
        last = torch.tensor(counts, device=self.device).cumsum(0) - 1
        return hidden[last], scored[last]

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
        logits = F.linear(scored, self.head)
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        return torch.tanh(logits / self.spec.softcap) * self.spec.softcap if self.spec.softcap else logits

    def rows(self, sequences: Seq[Sequence], starts: Seq[int], counts: Seq[int]) -> PackedRows:
        return PackedRows([s.drafter_state.slot for s in sequences], starts, counts, self.device)

    def in_target_vocabulary(self, q: Tensor) -> Tensor:
        """Draft probabilities [R, dV] over the target's ids [R, V]; ids without a draft row have none."""
        if self.d2t is None:
            return q
        return q.new_zeros(len(q), self.spec.vocab_size).index_copy_(1, self.d2t, q)

    def drafts(self, tokens: Tensor, probs: Tensor | None) -> list[Draft]:
        """Chains from tokens [R, K] and distributions [R, K, V], on the target's device."""
        tokens = tokens.to(self.verify_on)
        probs = None if probs is None else probs.to(self.verify_on)
        parents = chain_parents(tokens.shape[1])
        return [Draft(tokens[r], parents, None if probs is None else probs[r]) for r in range(len(tokens))]
