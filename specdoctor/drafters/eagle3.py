"""EAGLE-3: the target's features, then the drafter's own hidden states, one token a step.

Formats page 1.3, 1.7.4 and 1.8. The feature of position i is paired with token i + 1 and rotated at position i. Features
of committed tokens go through the layer once, as soon as their next token is known, and their keys and values stay; the
keys and values of the drafter's own steps are written behind them and never kept.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdoctor.drafters.backbone import MLP, Attention, Layer, RMSNorm
from specdoctor.drafters.rope import Rope
from specdoctor.engine.draft import Draft, chain_parents
from specdoctor.engine.kv import KVCache
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.sampling import probabilities, sample
from specdoctor.engine.sequence import Sequence
from specdoctor.formats.eagle_spec import EagleSpec
from specdoctor.formats.spec import AttentionShape

MOST_STEPS = 16  # a recurrent drafter has no block; beyond this the state has drifted off what any was trained for


class FirstLayer(nn.Module):
    """The layer that takes [embedding ; feature]: its attention reads both, its residual is the feature."""

    def __init__(self, shape: AttentionShape, hidden: int, eps: float) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(hidden, eps)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(shape, 2 * hidden, eps, out=hidden)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(hidden, shape.intermediate_size)


@dataclass(slots=True)
class _State:
    """Of one request: its slot, and fused features [m, H] that wait for their next token."""

    slot: int
    waiting: list[Tensor]


class Eagle3Drafter(nn.Module):
    """An EAGLE-3 chain drafter bound to a target."""

    def __init__(self, spec: EagleSpec, name: str, embedding: Tensor, head: Tensor, d2t: Tensor | None) -> None:
        """`embedding` [V, H]; `head` [dV, H]; `d2t` [dV] absolute target ids, None when the vocabularies are equal."""
        super().__init__()
        H, eps = spec.hidden_size, spec.rms_norm_eps
        self.spec, self.name, self.taps, self.max_draft = spec, name, spec.taps, MOST_STEPS
        self.default_draft = spec.draft_tokens
        width = len(spec.taps) * spec.target_hidden_size
        self.input_norm = RMSNorm(width, eps) if spec.feature_norm == "before_fc" else None
        per_tap = [RMSNorm(spec.target_hidden_size, eps) for _ in spec.taps] if spec.feature_norm == "per_tap" else []
        self.fc_norm = nn.ModuleList(per_tap)
        self.fc = nn.Linear(width, H, bias=False)
        self.layers = nn.ModuleList(
            [FirstLayer(spec.layers[0], H, eps), *(Layer(shape, H, eps) for shape in spec.layers[1:])]
        )
        self.norm = RMSNorm(H, eps)
        self.embedding, self.head, self.d2t = embedding, head, d2t

    def prepare(self, attention: Any) -> None:
        """Attach what depends on device and dtype: the RoPE table, the cache, the attention path."""
        self.rope = Rope(self.spec.rope, self.spec.layers[0].head_dim, self.device, self.head.dtype)
        self.cache = KVCache(self.device)
        self.attention = attention

    @property
    def device(self) -> torch.device:
        return self.head.device

    # The drafter protocol -------------------------------------------------------------------------------------------

    def begin(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            sequence.drafter_state = _State(self.cache.open(), [])

    def end(self, sequence: Sequence) -> None:
        self.cache.close(sequence.drafter_state.slot)
        sequence.drafter_state = None

    def observe(self, sequences: Seq[Sequence], taps: Tensor, counts: Seq[int]) -> None:
        """Fuse the features; the last one's next token is not committed yet, so all wait for the next proposal."""
        fused = self.features(taps.to(self.head, non_blocking=True))
        for sequence, part in zip(sequences, fused.split(list(counts)), strict=True):
            sequence.drafter_state.waiting.append(part)

    def propose(self, sequences: Seq[Sequence], budget: int) -> list[Draft]:
        sampling, R = sequences[0].sampling, len(sequences)
        hidden, scored = self.extend(sequences)
        uniforms = None
        if sampling.drafting_temperature > 0:
            uniforms = torch.stack([s.uniforms(budget) for s in sequences]).to(self.device, non_blocking=True)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        starts = [self.cache.lengths[s.drafter_state.slot] for s in sequences]
        for step in range(budget):
            if step:
                rows = self._rows(sequences, [start + step - 1 for start in starts], [1] * R)
                hidden, scored = self.forward(F.embedding(tokens[-1], self.embedding), hidden, rows)
            logits = F.linear(scored, self.head)
            if uniforms is None:
                choice = logits.argmax(-1)
            else:
                q = probabilities(logits, sampling.drafting_temperature, sampling.top_k, sampling.top_p)
                choice = sample(q, uniforms[:, step])
                probs.append(self._in_target_vocabulary(q))
            tokens.append(choice if self.d2t is None else self.d2t[choice])
        drawn = torch.stack(tokens, dim=1)  # [R, K]
        q_all = torch.stack(probs, dim=1) if probs else None
        parents = chain_parents(budget)
        return [Draft(drawn[r], parents, None if q_all is None else q_all[r]) for r in range(R)]

    # The steps, separately callable ---------------------------------------------------------------------------------

    def features(self, taps: Tensor) -> Tensor:
        """Concatenated taps [N, n * Ht] to fused features [N, H]."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        elif len(self.fc_norm):
            parts = taps.split(self.spec.target_hidden_size, dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps)

    def extend(self, sequences: Seq[Sequence]) -> tuple[Tensor, Tensor]:
        """Run the waiting features through the layers and keep them; state and scored state [R, H] of the last row."""
        states = [s.drafter_state for s in sequences]
        waiting = [torch.cat(state.waiting) for state in states]
        counts = [len(part) for part in waiting]
        starts = [self.cache.lengths[state.slot] for state in states]
        ids = [s.ids[a + 1 : a + 1 + n] for s, a, n in zip(sequences, starts, counts, strict=True)]
        tokens = torch.tensor([token for part in ids for token in part], device=self.device)
        rows = self._rows(sequences, starts, counts)
        hidden, scored = self.forward(F.embedding(tokens, self.embedding), torch.cat(waiting), rows)
        for state, count in zip(states, counts, strict=True):
            self.cache.keep(state.slot, range(count))
            state.waiting.clear()
        last = torch.tensor(counts, device=self.device).cumsum(0) - 1
        return hidden[last], scored[last]

    def forward(self, embedded: Tensor, feature: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """One step: embeddings and features [N, H] to the state fed back [N, H] and what the head reads [N, H]."""
        cos, sin = self.rope.at(rows.positions, rows.limit)
        x = feature
        for i, layer in enumerate(self.layers):
            if i == 0:
                normed = layer.hidden_norm(x)
                inner = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
                x = normed if self.spec.residual_normed else x
            else:
                inner = layer.input_layernorm(x)
            x = x + self._attend(i, layer.self_attn, inner, rows, cos, sin)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        normed = self.norm(x)
        return normed if self.spec.recurrent_normed else x, normed if self.spec.head_normed else x

    def _attend(self, i: int, attention: Attention, x: Tensor, rows: PackedRows, cos: Tensor, sin: Tensor) -> Tensor:
        k, v = self.cache.write(i, *attention.keys_values(x, cos, sin), rows)
        q = rows.spread(attention.queries(x, cos, sin))
        out = self.attention(q, k, v, rows.mask(), attention.shape.head_dim**-0.5)
        return attention.o_proj(rows.gather(out).reshape(x.shape[0], -1))

    def _rows(self, sequences: Seq[Sequence], starts: Seq[int], counts: Seq[int]) -> PackedRows:
        return PackedRows([s.drafter_state.slot for s in sequences], starts, counts, self.device)

    def _in_target_vocabulary(self, q: Tensor) -> Tensor:
        """Draft probabilities [R, dV] over the target's ids [R, V]; ids without a draft row have none."""
        if self.d2t is None:
            return q
        return q.new_zeros(len(q), self.spec.vocab_size).index_copy_(1, self.d2t, q)
