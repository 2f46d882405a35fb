"""DSpark and DFlash drafters: one parallel block, then, for DSpark, a sequential head over its rows.

Formats page 1.1 and 1.5; DSpark paper, section 3. A whole block is always run (a shorter one would be a context that
the backbone never saw), and only the rows that were asked for go through the LM head.
"""

from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdoctor.drafters.backbone import Backbone
from specdoctor.drafters.binding import Binding
from specdoctor.drafters.heads import HEADS, ConfidenceHead
from specdoctor.engine.draft import Draft, chain_parents
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.sampling import Sampling, probabilities, sample, widest_float
from specdoctor.engine.sequence import Sequence
from specdoctor.formats.spec import BlockSpec


class BlockDrafter(nn.Module):
    """A DSpark or DFlash drafter bound to a target's vocabulary and taps."""

    def __init__(self, spec: BlockSpec, name: str, embedding: Tensor, head: Tensor) -> None:
        """`embedding` and `head` [V, H] are the checkpoint's own or the target's."""
        super().__init__()
        self.spec, self.name = spec, name
        self.taps, self.max_draft, self.default_draft = spec.taps, spec.max_draft, spec.default_draft
        self.backbone = Backbone(spec)
        self.markov = HEADS[spec.markov](spec.vocab_size, spec.hidden_size, spec.markov_rank) if spec.markov else None
        width = spec.hidden_size + (spec.markov_rank if spec.confidence == "hidden+markov" else 0)
        self.confidence = ConfidenceHead(width) if spec.confidence else None
        self.embedding, self.head = embedding, head
        self.verify_on = head.device  # where drafts are wanted: the target's device, if that is another one

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    # The drafter protocol -------------------------------------------------------------------------------------------

    def begin(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            sequence.drafter_state = self.backbone.cache.open()

    def end(self, sequence: Sequence) -> None:
        self.backbone.cache.close(sequence.drafter_state)
        sequence.drafter_state = None

    def observe(self, sequences: Seq[Sequence], taps: Tensor, counts: Seq[int]) -> None:
        cache = self.backbone.cache
        slots = [s.drafter_state for s in sequences]
        rows = PackedRows(slots, [cache.lengths[slot] for slot in slots], counts, self.device)
        # Only towards an accelerator: a copy to the host that does not block may be read before it is there.
        taps = taps.to(self.head, non_blocking=self.device.type != "cpu")
        self.backbone.add_context(taps, rows)
        for slot, count in zip(slots, counts, strict=True):
            cache.keep(slot, range(count))

    def propose(self, sequences: Seq[Sequence], budget: int) -> list[Draft]:
        sampling = sequences[0].sampling
        anchors = torch.tensor([s.anchor for s in sequences], device=self.device)
        hidden = self.block_hidden(sequences, anchors)[:, :budget]  # [R, K, H]
        temperature = sampling.drafting_temperature
        uniforms = None
        if temperature > 0:
            uniforms = torch.stack([s.uniforms(budget) for s in sequences])
            uniforms = uniforms.to(self.device, widest_float(self.device), non_blocking=True)
        tokens, probs = self.choose(anchors, hidden, self.base_logits(hidden), sampling, uniforms)
        confidence = self.confidences(anchors, hidden, tokens)
        return _drafts(*(None if x is None else x.to(self.verify_on) for x in (tokens, probs, confidence)))

    # The steps, separately callable: measurement and parity tests look at each -----------------------------------

    def block_hidden(self, sequences: Seq[Sequence], anchors: Tensor) -> Tensor:
        """Final hidden states [R, max_draft, H] of the proposing rows of one block below each anchor [R]."""
        spec, R = self.spec, len(sequences)
        ids = torch.full((R, spec.block_size), spec.mask_id, device=self.device)
        ids[:, 0] = anchors
        x = F.embedding(ids.view(-1), self.embedding)
        if spec.embed_scale != 1.0:
            x = x * spec.embed_scale
        slots = [s.drafter_state for s in sequences]
        starts = [self.backbone.cache.lengths[slot] for slot in slots]
        rows = PackedRows(slots, starts, [spec.block_size] * R, self.device, visible="all")
        hidden = self.backbone(x, rows).view(R, spec.block_size, -1)
        return hidden[:, 1 - spec.row_offset :]

    def base_logits(self, hidden: Tensor) -> Tensor:
        """[R, K, H] -> [R, K, V], scaled and soft-capped, before the sequential head."""
        logits = F.linear(hidden, self.head)
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        if self.spec.softcap:
            logits = torch.tanh(logits / self.spec.softcap) * self.spec.softcap
        return logits

    def choose(
        self, anchors: Tensor, hidden: Tensor, base: Tensor, sampling: Sampling, uniforms: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens [R, K] and the distribution [R, K, V] they were drawn from (None: argmax), left to right."""
        if self.markov is None:
            return _pick(base, sampling, uniforms)
        R, K, _ = base.shape
        state, prev = self.markov.start(R), anchors
        tokens, probs = [], []
        for k in range(K):
            code, state = self.markov.step(state, prev, hidden[:, k])
            logits = self.markov.corrected(base[:, k], code)
            prev, q = _pick(logits, sampling, None if uniforms is None else uniforms[:, k])
            tokens.append(prev)
            if q is not None:
                probs.append(q)
        return torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if probs else None

    def confidences(self, anchors: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor | None:
        """Predicted conditional acceptance [R, K] of each token, float32; None without a confidence head."""
        if self.confidence is None:
            return None
        features = hidden
        if self.spec.confidence == "hidden+markov":
            assert self.markov is not None
            prev = torch.cat([anchors[:, None], tokens[:, :-1]], dim=1)
            features = torch.cat([hidden, self.markov.markov_w1(prev)], dim=-1)
        return torch.sigmoid(self.confidence.logits(features))


def _pick(logits: Tensor, sampling: Sampling, uniforms: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if uniforms is None:
        return logits.argmax(-1), None
    q = probabilities(logits, sampling.drafting_temperature, sampling.top_k, sampling.top_p)
    return sample(q, uniforms), q


def _drafts(tokens: Tensor | None, probs: Tensor | None, confidence: Tensor | None) -> list[Draft]:
    """One draft a request; `unbind` makes the views of a whole batch at once."""
    assert tokens is not None
    R, K = tokens.shape
    parents, nothing = chain_parents(K), [None] * R
    return [
        Draft(own, parents, q, sure)
        for own, q, sure in zip(
            tokens.unbind(),
            nothing if probs is None else probs.unbind(),
            nothing if confidence is None else confidence.unbind(),
            strict=True,
        )
    ]


def bind_block(binding: Binding) -> BlockDrafter:
    """A DSpark or DFlash drafter from its checkpoint."""
    spec = binding.spec
    with torch.device("meta"):
        drafter = BlockDrafter(spec, binding.name, binding.embedding, binding.head)
    binding.fill(drafter, {_module_name(name): tensor for name, tensor in binding.tensors.items()})
    drafter.verify_on = binding.target.device
    drafter.backbone.prepare(spec, binding.attention)
    return drafter


def _module_name(tensor: str) -> str:
    for prefix, module in (("markov_head.", "markov."), ("confidence_head.", "confidence.")):
        if tensor.startswith(prefix):
            return module + tensor.removeprefix(prefix)
    return f"backbone.{tensor}"
