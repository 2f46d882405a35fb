"""MTP layers as drafters: a projection of [embedding ; hidden] before a decoder block of the target's own family.

Formats page 1.7.6 (speculators) and 1.12 (inside a target). Token i + 1 is paired with the hidden state of position i:
x = input_proj([token_norm(embedding) ; hidden_norm(hidden)]), then the block, then final_norm before the target's head.
What is fed to the next step is the vector after final_norm (speculators, Qwen, MiMo) or before it (DeepSeek, GLM).

Steps and layers: step k runs layer k % n. One layer is re-applied to its own output. Of several, layer k reads the
states that layer k - 1 gave for the same positions, beside the tokens k + 1 further on, over the whole text
(DeepSeek-V3 report, section 2.2), so each keeps a cache of its own; its last k columns depend on drafted tokens and are
made anew.

vLLM zeroes the embedding at the first position for DeepSeek and MiMo (formats page, item 29); that is NOT done here, as
it is not in training: one context entry differs from vLLM's.
"""

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, cast

import torch
from torch import Tensor, nn

from specdoctor.drafters.backbone import RMSNorm
from specdoctor.drafters.binding import Binding
from specdoctor.drafters.mtp_blocks import DecoderBlocks
from specdoctor.drafters.recurrent import RecurrentDrafter
from specdoctor.drafters.tree_drafting import Expansion
from specdoctor.engine.draft import Draft
from specdoctor.engine.kv import KVCache
from specdoctor.engine.rows import PackedRows
from specdoctor.engine.sequence import Sequence
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import RecurrentSpec

KEPT_WIDE = ".e_score_correction_bias"  # moves which experts are taken, so it stays in the precision of the file


class ZeroCentredRMSNorm(RMSNorm):
    """x / rms(x) * (1 + w), in float32: Qwen3-Next and Qwen3.5."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).to(x.dtype)


class MTPLayer(nn.Module):
    """What stands around the decoder block of one MTP layer."""

    def __init__(self, spec: RecurrentSpec, block: nn.Module) -> None:
        super().__init__()
        norm, H, eps = ZeroCentredRMSNorm if spec.norm_offset else RMSNorm, spec.hidden_size, spec.rms_norm_eps
        self.token_norm, self.hidden_norm, self.final_norm = norm(H, eps), norm(H, eps), norm(H, eps)
        self.input_proj = nn.Linear(2 * H, H, bias=False)
        self.block = block


class MTPNetwork(nn.Module):
    """One or several MTP layers; tensors are named as in `formats.drafts.mtp`."""

    def __init__(self, spec: RecurrentSpec, blocks: DecoderBlocks) -> None:
        super().__init__()
        self.spec = spec
        self.layers = nn.ModuleList(MTPLayer(spec, block) for block in blocks.layers)
        self._blocks = [blocks]  # in a list: its layers are registered above already

    @property
    def blocks(self) -> DecoderBlocks:
        return self._blocks[0]

    def features(self, taps: Tensor) -> Tensor:
        """The target's last hidden state [N, H] is the feature."""
        return taps

    def step(
        self, embedded: Tensor, feature: Tensor, rows: PackedRows, cache: KVCache, attention: Any, index: int
    ) -> tuple[Tensor, Tensor]:
        """Embeddings and features [N, H] to the state fed back [N, H] and what the head reads [N, H]."""
        layer = cast(MTPLayer, self.layers[index % len(self.layers)])
        parts = [layer.token_norm(embedded), layer.hidden_norm(feature)]
        x = layer.input_proj(torch.cat(parts[::-1] if self.spec.hidden_first else parts, dim=-1))
        x = self.blocks.run(index % len(self.layers), x, rows, cache, attention)
        normed = layer.final_norm(x)
        return normed if self.spec.recurrent_normed else x, normed


class MTPDrafter(RecurrentDrafter):
    """MTP layers bound to a target."""

    def prepare(self, attention: Any, verify_on: torch.device) -> None:
        """As of `RecurrentDrafter`, but the blocks have a rotary embedding of their own."""
        self.cache = KVCache(self.device)
        self.attention, self.verify_on = attention, verify_on

    def step(self, tokens: Tensor, feature: Tensor, rows: PackedRows, index: int) -> tuple[Tensor, Tensor]:
        """See `RecurrentDrafter.step`."""
        return self.network.step(self.embed(tokens), feature, rows, self.cache, self.attention, index)


class LayeredMTPDrafter(MTPDrafter):
    """Several MTP layers that take turns. Chains only.

    The features of the last n - 1 committed positions wait on: layer k has its columns for them from drafted tokens, so
    the next round goes through them again. Beyond n steps, where no writer says what to do, layer k % n goes on with
    the state before it in one further column.
    """

    def expansion(self, sequences: Seq[Sequence], depth: int) -> Expansion:
        raise SpecdoctorError(f"--tree: {self.name} has {len(self.network.layers)} MTP layers, which draft chains only")

    def propose(self, sequences: Seq[Sequence], budget: int) -> list[Draft]:
        """See `Drafter.propose`. All layers run, even beyond `budget`: each needs its columns for the next round."""
        sampling, n = sequences[0].sampling, len(self.network.layers)
        states = [s.drafter_state for s in sequences]
        waiting = [torch.cat(state.waiting) for state in states]
        counts, starts = [len(part) for part in waiting], [self.cache.lengths[state.slot] for state in states]
        rows = self.rows(sequences, starts, counts)
        last = torch.tensor(counts, device=self.device).cumsum(0) - 1
        ids = [s.ids[a + 1 : a + 1 + m] for s, a, m in zip(sequences, starts, counts, strict=True)]
        fed = torch.tensor([token for part in ids for token in part], device=self.device)  # [N]
        hidden = torch.cat(waiting)
        uniforms = self.uniforms(sequences, budget)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(max(budget, n)):
            if step == n:
                hidden, last = hidden[last], torch.arange(len(sequences), device=self.device)
            if step >= n:
                columns = [a + m + step // n - 1 for a, m in zip(starts, counts, strict=True)]
                rows, fed = self.rows(sequences, columns, [1] * len(sequences)), tokens[-1]
            hidden, scored = self.step(fed, hidden, rows, step)
            if step >= budget:
                choice = fed[last]  # only the columns of committed tokens are wanted of this layer
            else:
                drawn = None if uniforms is None else uniforms[:, step]
                choice, q = self.choose(self.logits(scored[last]), sampling, drawn)
                tokens.append(choice)
                if q is not None:
                    probs.append(q)
            fed = fed.roll(-1).index_copy(0, last, choice)  # the next layer reads one token further on
        for state, part, count in zip(states, waiting, counts, strict=True):
            kept = max(0, count - (n - 1))
            self.cache.keep(state.slot, range(kept))
            state.waiting = [part[kept:]]
        return self.drafts(torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if probs else None)


def bind_mtp(binding: Binding) -> MTPDrafter:
    """An MTP drafter from its checkpoint. Raises `SpecdoctorError` when transformers' block has other tensors."""
    spec = binding.spec
    tensors = _fused_experts(binding.tensors)
    for name, stored in binding.checkpoint.tensors.items():
        if name.endswith(KEPT_WIDE):
            tensors[name] = binding.checkpoint.source.load([stored.name])[stored.name].to(binding.device)
    sparse = any(".experts." in name for name in tensors)
    with torch.device("meta"):
        blocks = DecoderBlocks(_block_settings(binding), len(spec.layers), sparse)
        network = MTPNetwork(spec, blocks)
    blocks.place(binding.device)
    _refuse_mismatch(network, tensors, spec.block_class)
    binding.fill(network, tensors)
    kind = MTPDrafter if len(spec.layers) == 1 else LayeredMTPDrafter
    drafter = kind(spec, binding.name, network, binding.embedding, binding.head, None)
    drafter.taps = binding.taps
    drafter.prepare(binding.attention, binding.target.device)
    return drafter.eval()


def _block_settings(binding: Binding) -> dict[str, Any]:
    """The object of config.json that describes the decoder block."""
    values = JsonConfig.read(binding.checkpoint.path).values
    return values.get("transformer_layer_config") or values.get("text_config") or values


def _fused_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts stored one by one, stacked as transformers has them: gate_up_proj [E, 2I, H], down_proj [E, H, I]."""
    out: dict[str, Tensor] = {}
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match:
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
        else:
            out[name] = tensor
    for prefix, parts in experts.items():
        gate, up, down = (torch.stack([parts[p][e] for e in sorted(parts[p])]) for p in ("gate", "up", "down"))
        out[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        out[f"{prefix}.down_proj"] = down
    return out


def _refuse_mismatch(network: nn.Module, tensors: Mapping[str, Tensor], kind: str) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise SpecdoctorError(
                f"{name} is {found.get(name, 'not there')}, expected {wanted.get(name, 'no such tensor')} by "
                f"transformers' {kind} layer; this transformers cannot run these MTP layers"
            )
