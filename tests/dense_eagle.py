"""A second implementation of the EAGLE family, dense and without a cache, from the formats page alone.

Every step computes all rows again, one row and one head at a time where it matters. No code shared with the drafters.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from eagle_models import Case
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """RoPE of one row [heads, D]: the pair (j, j + D/2) turns by position * theta^(-2j/D)."""
    half = x.shape[-1] // 2
    angle = torch.tensor([position * theta ** (-2 * j / x.shape[-1]) for j in range(half)])
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def hidden_states(model: PreTrainedModel, ids: list[int]) -> tuple[list[Tensor], Tensor]:
    """HS[0..L-1] and the last state after the final norm, [n, Ht] each, by the library's own forward."""
    with torch.inference_mode():
        states = model.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    return [state[0] for state in states[:-1]], states[-1][0]


class DenseEagle:
    """What a checkpoint drafts, from its files and the `facts` of its layout."""

    def __init__(self, folder: Path, case: Case, model: PreTrainedModel) -> None:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        sizes = config.get("transformer_layer_config", config)
        path = folder / case.file
        loaded = torch.load(path, weights_only=True) if case.file.endswith(".bin") else load_file(path)
        self.t = {name: t.float() if t.is_floating_point() else t for name, t in loaded.items()}
        self.case, self.model, self.facts = case, model, case.facts
        self.eps, self.theta = sizes["rms_norm_eps"], case.facts.get("theta", sizes.get("rope_theta"))
        self.group = sizes["num_attention_heads"] // sizes["num_key_value_heads"]
        self.D = sizes["hidden_size"] // sizes["num_attention_heads"]
        self.D = sizes.get("head_dim", self.D)
        self.embedding = self.t.get("embed_tokens.weight", model.get_input_embeddings().weight.detach())
        self.head = self.t.get("lm_head.weight", model.get_output_embeddings().weight.detach())
        self.mask_id = config.get("mask_token_id", config.get("ptd_token_id"))

    def features(self, taps: list[Tensor]) -> Tensor:
        """Taps, [n, Ht] each, to features [n, H]."""
        if self.facts.get("feature_norm") == "per_tap":
            taps = [normed(tap, self.t[f"fc_norm.{i}.weight"], self.eps) for i, tap in enumerate(taps)]
        joined = torch.cat(taps, dim=-1)
        if self.facts.get("feature_norm") == "before_fc":
            joined = normed(joined, self.t["input_norm.weight"], self.eps)
        return joined @ self.t["fc.weight"].T

    def context(self, ids: list[int]) -> Tensor:
        """Features [n, H] of all tokens of `ids`."""
        states, last = hidden_states(self.model, ids)
        return last if self.facts.get("plain") else self.features([states[tap] for tap in self.case.taps])

    def run(self, tokens: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """All rows through the network: the states fed back and the states that the head reads, [n, H] each."""
        embedded, first = self.embedding[tokens], self.case.first
        if self.facts.get("plain"):
            x = torch.cat([embedded, features], dim=-1) @ self.t["fc.weight"].T + self.t.get("fc.bias", torch.zeros(1))
            x = x + self.attention(first, x)
        else:
            hidden = self.norm(f"{first}hidden_norm", features)
            both = torch.cat([self.norm(f"{first}input_layernorm", embedded), hidden], dim=-1)
            x = hidden if self.facts.get("residual_normed") else features
            x = x + self.attention(first, both)
        x = x + self.mlp(first, x)
        for i in range(1, self.case.layers):
            x = x + self.attention(f"layers.{i}.", self.norm(f"layers.{i}.input_layernorm", x))
            x = x + self.mlp(f"layers.{i}.", x)
        if self.facts.get("plain"):
            return x, x
        final = self.norm("norm", x)
        fed = final if self.facts.get("recurrent_normed") else x
        return fed, final if self.facts.get("head_normed", True) else x

    def norm(self, name: str, x: Tensor) -> Tensor:
        return normed(x, self.t[f"{name}.weight"], self.eps)

    def mlp(self, layer: str, x: Tensor) -> Tensor:
        y = self.norm(f"{layer}post_attention_layernorm", x)
        gate, up = y @ self.t[f"{layer}mlp.gate_proj.weight"].T, y @ self.t[f"{layer}mlp.up_proj.weight"].T
        return (gate * torch.sigmoid(gate) * up) @ self.t[f"{layer}mlp.down_proj.weight"].T

    def attention(self, layer: str, x: Tensor) -> Tensor:
        """Causal attention of the rows `x`; row i stands at position i."""

        def heads(name: str, row: Tensor) -> Tensor:
            return (self.t[f"{layer}self_attn.{name}_proj.weight"] @ row).view(-1, self.D)

        def rotated(name: str, row: Tensor, position: int) -> Tensor:
            out = heads(name, row)
            if self.case.qk_norm:
                out = self.norm(f"{layer}self_attn.{name}_norm", out)
            return turned(out, position, self.theta)

        keys = [rotated("k", row, i) for i, row in enumerate(x)]
        values = [heads("v", row) for row in x]
        out = []
        for i, row in enumerate(x):
            q, mixed = rotated("q", row, i), []
            for head in range(len(q)):
                own = head // self.group
                scores = torch.stack([q[head] @ keys[j][own] for j in range(i + 1)]) / math.sqrt(self.D)
                weights = scores.softmax(0)
                mixed.append(sum(w * values[j][own] for j, w in enumerate(weights)))
            out.append(self.t[f"{layer}self_attn.o_proj.weight"] @ torch.cat(mixed))
        return torch.stack(out)

    def target_id(self, choice: int) -> int:
        return choice + int(self.t["d2t"][choice]) if "d2t" in self.t else choice

    def draft(self, ids: list[int], K: int) -> tuple[list[int], Tensor]:
        """Greedy drafts behind `ids` (the anchor last) and the logits [K, dV] that they were chosen by."""
        features, tokens = self.context(ids[:-1]), ids[1:]
        if self.facts.get("parallel"):
            mask = self.t["mask_hidden"].view(1, -1).chunk(len(self.case.taps), dim=-1)
            features = torch.cat([features, self.features(list(mask)).expand(K - 1, -1)])
            _, scored = self.run([*tokens, *[self.mask_id] * (K - 1)], features)
            logits = scored[-K:] @ self.head.T
            return [self.target_id(int(row.argmax())) for row in logits], logits
        rows = []
        for _ in range(K):
            fed, scored = self.run(tokens, features)
            rows.append(scored[-1] @ self.head.T)
            tokens = [*tokens, self.target_id(int(rows[-1].argmax()))]
            features = torch.cat([features, fed[-1:]])
        return tokens[-K:], torch.stack(rows)
