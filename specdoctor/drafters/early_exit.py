"""The early-exit drafter: the target's own lower layers, then a light head.

First source document, part A (shared representation). The state after the target's layer L goes through one or more
trained layers, the target's final norm and its LM head. The lower layers write into the target's own KV cache, behind
its committed columns, where the verification writes the same again; only the head has keys and values of its own.
The state after layer L of a committed token comes from the verification that committed it (`taps`).
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdoctor.drafters.backbone import Layer, RMSNorm
from specdoctor.drafters.binding import Binding
from specdoctor.drafters.recurrent import StepContext
from specdoctor.drafters.recurrent_tree import LevelRows
from specdoctor.drafters.rope import Rope
from specdoctor.drafters.tree_drafting import Expansion, TreeDrafting
from specdoctor.engine.draft import Draft, chain_parents
from specdoctor.engine.kv import KVCache
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.engine.trees import StaticTree
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.spec import EarlyExitSpec


class ExitHead(nn.Module):
    """The trained layers behind the exit, and the final norm if it is not the target's."""

    def __init__(self, spec: EarlyExitSpec) -> None:
        super().__init__()
        H, eps = spec.hidden_size, spec.rms_norm_eps
        self.layers = nn.ModuleList(Layer(shape, H, eps) for shape in spec.layers)
        if spec.own_norm:
            self.norm = RMSNorm(H, eps)

    def forward(self, x: Tensor, context: StepContext) -> Tensor:
        """States after the exit layer [N, H] to states before the final norm [N, H]; writes the head's KV rows."""
        for i, layer in enumerate(cast(list[Layer], self.layers)):
            x = layer(x, lambda normed, i=i, layer=layer: context.attend(i, layer.self_attn, normed))
        return x


class EarlyExitDrafter(TreeDrafting):
    """An early-exit head bound to its target. Its chain is the tree with one child a node."""

    def __init__(self, spec: EarlyExitSpec, name: str, head: ExitHead, target: Target, attention: Any) -> None:
        self.spec, self.name, self.taps = spec, name, spec.taps
        self.max_draft, self.default_draft = spec.max_draft, spec.default_draft
        self.target, self.exit_head, self.attention = target, head, attention
        self.final_norm: Callable[[Tensor], Tensor] = head.norm if spec.own_norm else target.final_norm
        self.rope = Rope(spec.rope, spec.layers[0].head_dim, target.device, target.dtype)
        self.cache = KVCache(target.device)
        self.verify_on = target.device

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        return self.target.dtype

    def begin(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            sequence.drafter_state = self.cache.open()

    def end(self, sequence: Sequence) -> None:
        self.cache.close(sequence.drafter_state)
        sequence.drafter_state = None

    def observe(self, sequences: Seq[Sequence], taps: Tensor, counts: Seq[int]) -> None:
        """Run the head over the committed tokens' exit states [N, H] and keep its keys and values."""
        slots = [s.drafter_state for s in sequences]
        self.head_states(taps, PackedRows(slots, [self.cache.lengths[slot] for slot in slots], counts, self.device))
        for slot, count in zip(slots, counts, strict=True):
            self.cache.keep(slot, range(count))

    def propose(self, sequences: Seq[Sequence], budget: int) -> list[Draft]:
        return self.propose_tree(sequences, StaticTree(chain_parents(budget)), budget)

    def expansion(self, sequences: Seq[Sequence], depth: int) -> Expansion:
        return EarlyExitExpansion(self, sequences)

    def head_states(self, exit_states: Tensor, rows: PackedRows) -> Tensor:
        """Exit states [N, H] through the head, before the final norm [N, H]."""
        cos, sin = self.rope.at(rows.positions, rows.limit)
        return self.exit_head(exit_states, StepContext(self.cache, self.attention, rows, cos, sin))

    def logits(self, states: Tensor) -> Tensor:
        """States before the final norm [N, H] to draft logits [N, V]."""
        return F.linear(self.final_norm(states), self.target.lm_head.weight, self.target.lm_head.bias)


class EarlyExitExpansion:
    """Levels of a tree: each level once through the target's lower layers and the head. Level 0 is the anchor."""

    def __init__(self, drafter: EarlyExitDrafter, sequences: Seq[Sequence]) -> None:
        self.drafter, self.sequences = drafter, sequences
        target, own = drafter.target.cache, drafter.cache
        slots = [s.slot for s in sequences if s.slot is not None]
        self.lower = LevelRows(slots, [target.lengths[slot] for slot in slots], drafter.device)
        states = [s.drafter_state for s in sequences]
        self.upper = LevelRows(states, [own.lengths[slot] for slot in states], drafter.device)

    def root(self) -> Tensor:
        anchors = torch.tensor([[s.anchor] for s in self.sequences], device=self.drafter.device)
        return self.below(anchors, torch.zeros_like(anchors))

    def below(self, tokens: Tensor, origin: Tensor) -> Tensor:
        R, M = tokens.shape
        exit_states = self.drafter.target.lower(
            self.lower.next(M, origin), tokens.flatten(), self.drafter.spec.exit_layer
        )
        return self.drafter.logits(self.drafter.head_states(exit_states, self.upper.next(M, origin))).view(R, M, -1)


def bind_early_exit(binding: Binding) -> EarlyExitDrafter:
    """An early-exit head from its checkpoint. It runs in the target's dtype on the target's device."""
    target = binding.target
    if (binding.device, binding.dtype) != (target.device, target.dtype):
        raise SpecdoctorError(
            f"--draft-device and --draft-dtype: an early-exit head shares the target's layers and cache, so it runs on "
            f"{target.device} in {str(target.dtype).removeprefix('torch.')}; leave them out"
        )
    with torch.device("meta"):
        head = ExitHead(binding.spec)
    binding.fill(head, dict(binding.tensors))
    return EarlyExitDrafter(binding.spec, binding.name, head, target, binding.attention)
