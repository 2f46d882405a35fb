"""Medusa-1 heads (Cai et al. 2024; formats page 1.11): each reads one hidden state and predicts one place ahead.

Timing. A round's target forward gives states of the old anchor and the accepted drafts; the new anchor is the
correction or bonus token, sampled from the base logits of the last of these rows, so its own state does not exist yet.
With t the position of that last row, the new anchor stands at t + 1, and head i, which is trained to predict
t + 2 + i from the state at t, predicts anchor + 1 + i: the first draft token is head 0's, and no head is spent on the
anchor.

Given the state, the heads do not see each other's tokens: each draft token is drawn from its own head's distribution,
which is therefore the q that lossless verification needs. Medusa's own "typical acceptance" is lossy and lives apart,
in `engine.typical`.
"""

from collections.abc import Sequence as Seq
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdoctor.drafters.binding import Binding
from specdoctor.drafters.draft_head import draft_logits
from specdoctor.drafters.draft_vocabulary import checked_map
from specdoctor.drafters.tree_drafting import Expansion, TreeDrafting
from specdoctor.engine.draft import Draft, chain_drafts
from specdoctor.engine.sampling import probabilities, sample
from specdoctor.engine.sequence import Sequence, stacked_uniforms
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.spec import MedusaSpec


class MedusaHead(nn.Module):
    """The ResBlocks of one head: x + SiLU(Wx + b), one after the other."""

    def __init__(self, spec: MedusaSpec) -> None:
        super().__init__()
        H = spec.hidden_size
        self.blocks = nn.ModuleList(nn.Linear(H, H, bias=spec.fc_bias) for _ in range(spec.res_layers))

    def forward(self, x: Tensor) -> Tensor:
        """[R, H] -> [R, H]."""
        for block in self.blocks:
            x = x + F.silu(block(x))
        return x


class MedusaNetwork(nn.Module):
    """All heads; `lm_heads` is empty where they share one projection. Tensors: see `formats.drafts.medusa`."""

    def __init__(self, spec: MedusaSpec) -> None:
        super().__init__()
        self.heads = nn.ModuleList(MedusaHead(spec) for _ in range(spec.num_heads))
        own = 0 if spec.shared_head else spec.num_heads
        self.lm_heads = nn.ModuleList(nn.Linear(spec.hidden_size, spec.head_rows, bias=False) for _ in range(own))


class MedusaDrafter(TreeDrafting):
    """Medusa heads bound to a target. A request's drafter state is the last committed row's hidden state [H]."""

    def __init__(
        self, binding: Binding, network: MedusaNetwork, shared_head: Tensor | None, d2t: Tensor | None
    ) -> None:
        """`shared_head` [rows, H] where all heads end in one; `d2t` [rows] absolute target ids."""
        self.spec, self.name, self.taps = cast(MedusaSpec, binding.spec), binding.name, binding.taps
        self.max_draft, self.default_draft = self.spec.max_draft, self.spec.default_draft
        self.network, self.shared_head, self.d2t = network, shared_head, d2t
        self.device, self.dtype, self.verify_on = binding.device, binding.dtype, binding.target.device

    def begin(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            sequence.drafter_state = None

    def end(self, sequence: Sequence) -> None:
        sequence.drafter_state = None

    def observe(self, sequences: Seq[Sequence], taps: Tensor, counts: Seq[int]) -> None:
        """Keep the state of the last committed row: all that the heads read."""
        last = taps[torch.tensor(counts).cumsum(0).sub(1).tolist()]
        last = last.to(self.device, self.dtype, non_blocking=self.device.type != "cpu")
        for sequence, state in zip(sequences, last, strict=True):
            sequence.drafter_state = state

    def propose(self, sequences: Seq[Sequence], budget: int) -> list[Draft]:
        sampling = sequences[0].sampling
        hidden = self.hidden(sequences)
        logits = torch.stack([self.logits(i, hidden) for i in range(budget)], dim=1)  # [R, K, rows]
        probs = None
        if sampling.drafting_temperature > 0:
            uniforms = stacked_uniforms(sequences, budget, self.device)
            q = probabilities(logits, sampling.drafting_temperature, sampling.top_k, sampling.top_p)
            choice, probs = sample(q, uniforms), self.in_target_vocabulary(q).to(self.verify_on)
        else:
            choice = logits.argmax(-1)
        return chain_drafts(self.to_target_ids(choice).to(self.verify_on), probs)

    def expansion(self, sequences: Seq[Sequence], depth: int) -> Expansion:
        return MedusaExpansion(self, self.hidden(sequences))

    def hidden(self, sequences: Seq[Sequence]) -> Tensor:
        """[R, H]."""
        return torch.stack([s.drafter_state for s in sequences])

    def logits(self, i: int, hidden: Tensor) -> Tensor:
        """Head i's logits [R, rows] for anchor + 1 + i, given the last committed row's states [R, H]."""
        lm_heads = self.network.lm_heads
        weight = self.shared_head if self.shared_head is not None else cast(nn.Linear, lm_heads[i]).weight
        return draft_logits(self.network.heads[i](hidden), weight, self.spec)


class MedusaExpansion:
    """A tree of Medusa's: every node of a level has the same head's distribution below it."""

    def __init__(self, drafter: MedusaDrafter, hidden: Tensor) -> None:
        self.drafter, self.hidden_states, self.level = drafter, hidden, 0

    def root(self) -> Tensor:
        """See `Expansion`."""
        return self.drafter.logits(0, self.hidden_states).unsqueeze(1)

    def below(self, tokens: Tensor, origin: Tensor) -> Tensor:
        """See `Expansion`."""
        self.level += 1
        logits = self.drafter.logits(self.level, self.hidden_states)
        return logits.unsqueeze(1).expand(-1, tokens.shape[1], -1)


def bind_medusa(binding: Binding) -> MedusaDrafter:
    """A Medusa drafter from its checkpoint. Raises `SpecdoctorError` for a vocabulary map that cannot be one."""
    spec, tensors = binding.spec, dict(binding.tensors)
    d2t = checked_map(tensors.pop("d2t", None), spec)
    for name in [name for name in tensors if name.startswith("lm_heads.")]:
        tensors[name] = _cut(tensors[name], d2t)
    with torch.device("meta"):
        network = MedusaNetwork(spec)
    binding.fill(network, tensors)
    head = _cut(binding.head, d2t) if spec.shared_head else None
    if head is not None and head.shape[0] != spec.head_rows:
        raise SpecdoctorError(f"the shared head has {head.shape[0]} rows, expected {spec.head_rows}")
    return MedusaDrafter(binding, network, head, d2t)


def _cut(head: Tensor, d2t: Tensor | None) -> Tensor:
    """A whole head [V, H] cut to the rows of the map; one that is cut already stays."""
    return head if d2t is None or head.shape[0] == len(d2t) else head[d2t]
