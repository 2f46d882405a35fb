"""DSpark and DFlash drafters: one parallel block, then, for DSpark, a sequential head over its rows.

Formats page 1.1 and 1.5; DSpark paper, section 3. A whole block is always run (a shorter one would be a context that
the backbone never saw), and only the rows that were asked for go through the LM head.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdoctor.drafters.binding import Binding
from specdoctor.drafters.block_parts import make_backbone, make_sequential_head
from specdoctor.drafters.block_tree import BlockExpansion
from specdoctor.drafters.draft_head import draft_logits
from specdoctor.drafters.draft_vocabulary import checked_map
from specdoctor.drafters.gemma4 import scaled_in
from specdoctor.drafters.heads import ConfidenceHead, VanillaHead
from specdoctor.drafters.tree_drafting import Expansion, TreeDrafting
from specdoctor.engine.draft import Draft, chain_drafts
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.sampling import Sampling, probabilities, sample
from specdoctor.engine.sequence import Sequence, stacked_uniforms
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.spec import BlockSpec


class BlockDrafter(TreeDrafting, nn.Module):
    """A DSpark or DFlash drafter bound to a target's vocabulary and taps."""

    def __init__(self, spec: BlockSpec, name: str, embedding: Tensor, head: Tensor, d2t: Tensor | None = None) -> None:
        """`embedding` [V, H] and `head` [dV, H] are the checkpoint's own or the target's.

        `d2t` [dV] holds absolute target ids, None when the vocabularies are equal.
        """
        super().__init__()
        self.spec, self.name = spec, name
        self.taps, self.max_draft, self.default_draft = spec.taps, spec.max_draft, spec.default_draft
        self.backbone = make_backbone(spec)
        self.markov = make_sequential_head(spec)  # of DSpark, or the candidate selector of DFlash2
        width = spec.hidden_size + (spec.markov_rank if spec.confidence == "hidden+markov" else 0)
        self.confidence = ConfidenceHead(width) if spec.confidence else None
        self.temperatures: Tensor | None = None  # [max_draft] of the confidence's logits, where it was calibrated
        self.embedding, self.head, self.d2t = embedding, head, d2t
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
        sampling = self.drafting(sequences[0].sampling)
        anchors = torch.tensor([s.anchor for s in sequences], device=self.device)
        hidden = self.block_hidden(sequences, anchors)[:, :budget]  # [R, K, H]
        temperature = sampling.drafting_temperature
        uniforms = None
        if temperature > 0:
            uniforms = stacked_uniforms(sequences, budget, self.device)
        tokens, probs = self.choose(anchors, hidden, self.base_logits(hidden), sampling, uniforms)
        confidence = self.confidences(anchors, hidden, tokens)
        where = self.verify_on
        return chain_drafts(
            tokens.to(where),
            None if probs is None else probs.to(where),
            None if confidence is None else confidence.to(where),
        )

    def expansion(self, sequences: Seq[Sequence], depth: int) -> Expansion:
        anchors = torch.tensor([s.anchor for s in sequences], device=self.device)
        hidden = self.block_hidden(sequences, anchors)[:, :depth]
        return BlockExpansion(self.markov, anchors, hidden, self.base_logits(hidden))

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
        """[R, K, H] -> [R, K, dV], scaled and soft-capped, before the sequential head."""
        return draft_logits(hidden, self.head, self.spec)

    def choose(
        self, anchors: Tensor, hidden: Tensor, base: Tensor, sampling: Sampling, uniforms: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Target ids [R, K] and the distribution [R, K, V] they were drawn from (None: argmax), left to right.

        `base` [R, K, dV]. A choice is made among draft ids; only its result is carried over to the target's.
        """
        if self.markov is None:
            choice, q = _pick(base, sampling, uniforms)
            return self.to_target_ids(choice), None if q is None else self.in_target_vocabulary(q)
        R, K, _ = base.shape
        state, prev = self.markov.start(R), anchors
        tokens, probs = [], []
        for k in range(K):
            code, state = self.markov.step(state, prev, hidden[:, k])
            logits = self.markov.corrected(base[:, k], code)
            choice, q = _pick(logits, sampling, None if uniforms is None else uniforms[:, k])
            prev = self.to_target_ids(choice)
            tokens.append(prev)
            if q is not None:
                probs.append(q)
        return torch.stack(tokens, dim=1), self.in_target_vocabulary(torch.stack(probs, dim=1)) if probs else None

    def drafting(self, sampling: Sampling) -> Sampling:
        """What shapes q: the request's settings, but a candidate selector is a cut of its own (formats page 1.6)."""
        return replace(sampling, top_k=0, top_p=1.0) if self.spec.selector_top_k else sampling

    def confidences(self, anchors: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor | None:
        """Predicted conditional acceptance [R, K] of each token, float32; None without a confidence head."""
        logits = self.confidence_logits(anchors, hidden, tokens)
        return None if logits is None else self.confidence_of(logits)

    def confidence_logits(self, anchors: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor | None:
        """What the head itself says [R, K], float32, before any stored temperature and the sigmoid."""
        if self.confidence is None:
            return None
        features = hidden
        if self.spec.confidence == "hidden+markov":
            assert isinstance(self.markov, VanillaHead)
            prev = torch.cat([anchors[:, None], tokens[:, :-1]], dim=1)
            features = torch.cat([hidden, self.markov.markov_w1(prev)], dim=-1)
        return self.confidence.logits(features)

    def confidence_of(self, logits: Tensor) -> Tensor:
        """[R, K] logits of the first K positions -> confidences, each divided by its position's temperature first."""
        if self.temperatures is not None:
            logits = logits / self.temperatures[: logits.shape[-1]]
        return torch.sigmoid(logits)

    def calibrate(self, temperatures: Seq[float] | None) -> None:
        """Divide the confidence's logits by these, one for each position; None: leave them as the head gives them.

        No token, and no distribution that tokens are drawn from, depends on it. Raises unless there are `max_draft`
        numbers above 0, and a confidence head.
        """
        if temperatures is None:
            self.temperatures = None
            return
        values, K = list(temperatures), self.max_draft
        if len(values) != K or not all(0 < value < float("inf") for value in values):
            raise SpecdoctorError(
                f"confidence temperatures: found {values}, expected {K} numbers above 0, one for each draft of "
                f"{self.name}"
            )
        if self.confidence is None:
            raise SpecdoctorError(f"confidence temperatures: the drafter {self.name} has no confidence head")
        self.temperatures = torch.tensor(values, dtype=torch.float32, device=self.device)


def _pick(logits: Tensor, sampling: Sampling, uniforms: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if uniforms is None:
        return logits.argmax(-1), None
    q = probabilities(logits, sampling.drafting_temperature, sampling.top_k, sampling.top_p)
    return sample(q, uniforms), q


def bind_block(binding: Binding) -> BlockDrafter:
    """A DSpark or DFlash drafter from its checkpoint."""
    spec = scaled_in(binding.spec, binding.dtype) if binding.spec.backbone == "gemma4" else binding.spec
    _check_widths(binding)
    tensors = dict(binding.tensors)
    d2t = checked_map(tensors.pop("d2t", None), spec)
    with torch.device("meta"):
        drafter = BlockDrafter(spec, binding.name, binding.embedding, binding.head, d2t)
    binding.fill(drafter, {_module_name(name): tensor for name, tensor in tensors.items()})
    drafter.taps = binding.taps
    drafter.verify_on = binding.target.device
    drafter.backbone.prepare(spec, binding.attention)
    return drafter


def _check_widths(binding: Binding) -> None:
    """The target's embedding and head fit a drafter of its own width only."""
    spec = binding.spec
    for what, tensor, source in (
        ("embedding", binding.embedding, spec.embed_source),
        ("head", binding.head, spec.head_source),
    ):
        if tensor.shape[1] != spec.hidden_size:
            raise SpecdoctorError(
                f"the {what} of {'the checkpoint' if source == 'checkpoint' else binding.target.name} is "
                f"{tensor.shape[1]} wide, expected hidden_size, {spec.hidden_size}; a drafter narrower or wider than "
                "its target needs its own embedding and head in the file"
            )


def _module_name(tensor: str) -> str:
    prefixes = (("markov_head.", "markov."), ("candidate_selector.", "markov."), ("confidence_head.", "confidence."))
    for prefix, module in prefixes:
        if tensor.startswith(prefix):
            return module + tensor.removeprefix(prefix)
    return f"backbone.{tensor}"
