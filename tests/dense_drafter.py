"""A second implementation of block drafters, dense and without a cache, from the formats page alone (1.1, 1.5).

One row at a time, and no code shared with the drafters: what both agree on is what the page says.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specdoctor.engine.target import Target


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def turned(x: Tensor, position: int, theta: float = 10000.0) -> Tensor:
    """RoPE of one row [heads, D]: the pair (j, j + D/2) turns by position * theta^(-2j/D)."""
    D = x.shape[-1]
    out = x.clone()
    for j in range(D // 2):
        angle = position * theta ** (-2 * j / D)
        a, b = x[:, j], x[:, j + D // 2]
        out[:, j] = a * math.cos(angle) - b * math.sin(angle)
        out[:, j + D // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


class Dense:
    """A drafter's block, computed row by row from the files of a checkpoint."""

    def __init__(self, folder: Path, target: Target) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.t = load_file(folder / "model.safetensors")
        self.zlab = self.config["architectures"] == ["DFlashDraftModel"]
        self.own = self.config.get("dflash_config", {}) if self.zlab else {}
        self.embedding = self.t.get("embed_tokens.weight", target.embedding.weight.detach())
        self.head = self.t.get("lm_head.weight", target.lm_head.weight.detach())
        self.B = self.config["block_size"]
        self.mask_id = self.own.get("mask_token_id", self.config.get("mask_token_id"))

    def sees(self, layer: int, query: int, key: int, start: int) -> bool:
        """Positions; `start` is the anchor's. Context and block alike (formats page 1.5, [ZL-new]; 1.1 sees all)."""
        sliding = self.config["layer_types"][layer] == "sliding_attention"
        causal = self.config.get("is_causal")
        if causal is None:
            causal = sliding and self.zlab
        if causal and key > query:
            return False
        return not (sliding and abs(query - key) >= self.config["sliding_window"])

    def heads_of(self, name: str, x: Tensor) -> Tensor:
        out = x @ self.t[f"{name}.weight"].T + self.t.get(f"{name}.bias", torch.tensor(0.0))
        return out.view(-1, self.config["head_dim"])

    def hidden(self, taps: Tensor, anchor: int, slots: list[int] | None = None) -> Tensor:
        """Final normed hidden states [B, H] of the block behind the context `taps` [n, taps * H]."""
        n, t = len(taps), self.t
        context = norm(taps @ t["fc.weight"].T, t["hidden_norm.weight"])
        ids = slots or [anchor] + [self.mask_id] * (self.B - 1)
        x = self.embedding[ids] * self.own.get("input_embedding_scale", 1.0)
        for i in range(self.config["num_hidden_layers"]):
            x = x + self.attention(i, context, norm(x, t[f"layers.{i}.input_layernorm.weight"]), n)
            y = norm(x, t[f"layers.{i}.post_attention_layernorm.weight"])
            gate, up = y @ t[f"layers.{i}.mlp.gate_proj.weight"].T, y @ t[f"layers.{i}.mlp.up_proj.weight"].T
            x = x + (gate * torch.sigmoid(gate) * up) @ t[f"layers.{i}.mlp.down_proj.weight"].T
        return norm(x, t["norm.weight"])

    def attention(self, i: int, context: Tensor, x: Tensor, n: int) -> Tensor:
        name, t = f"layers.{i}.self_attn", self.t
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        keys, values = [], []
        for position, row in enumerate([*context, *x]):
            k = norm(self.heads_of(f"{name}.k_proj", row), t[f"{name}.k_norm.weight"])
            keys.append(turned(k, position))
            values.append(self.heads_of(f"{name}.v_proj", row))
        out = []
        for offset, row in enumerate(x):
            query = n + offset
            q = turned(norm(self.heads_of(f"{name}.q_proj", row), t[f"{name}.q_norm.weight"]), query)
            seen = [p for p in range(len(keys)) if self.sees(i, query, p, n)]
            mixed = []
            for head in range(len(q)):
                scores = torch.stack([q[head] @ keys[p][head // group] for p in seen]) / self.config["head_dim"] ** 0.5
                mixed.append(sum(w * values[p][head // group] for w, p in zip(scores.softmax(0), seen, strict=True)))
            flat = torch.cat(mixed)
            out.append(flat @ t[f"{name}.o_proj.weight"].T + t.get(f"{name}.o_proj.bias", torch.tensor(0.0)))
        return torch.stack(out)

    def greedy(self, hidden: Tensor, anchor: int) -> tuple[list[int], list[Tensor], list[float]]:
        """Tokens, corrected logits and confidences, left to right, with the head that the checkpoint has."""
        t, r = self.t, self.config.get("markov_rank", 0)
        rows = hidden[1:] if self.zlab else hidden
        base = rows @ self.head.T * self.own.get("output_multiplier", 1.0)
        cap = self.own.get("final_logit_softcapping")
        base = cap * torch.tanh(base / cap) if cap else base
        tokens, logits, confidence = [], [], []
        state, prev = torch.zeros(r), anchor
        for h, row in zip(rows, base, strict=True):
            code = None
            if r:
                w1 = t["markov_head.markov_w1.weight"][prev]
                code, state = self.step(state, w1, h)
                row = row + t["markov_head.markov_w2.weight"] @ code
            if self.config.get("enable_confidence_head"):
                features = torch.cat([h, w1]) if self.config["confidence_head_with_markov"] else h
                score = t["confidence_head.proj.weight"][0] @ features + t["confidence_head.proj.bias"][0]
                confidence.append(float(1 / (1 + torch.exp(-score))))
            prev = int(row.argmax())
            tokens.append(prev)
            logits.append(row)
        return tokens, logits, confidence

    def step(self, state: Tensor, w1: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        t, kind, r = self.t, self.config["markov_head_type"], len(state)
        if kind == "gated":
            z = t["markov_head.gate_proj.weight"] @ torch.cat([h, w1]) + t["markov_head.gate_proj.bias"]
            return torch.sigmoid(z) * w1, state
        if kind == "rnn":
            z = t["markov_head.joint_proj.weight"] @ torch.cat([state, w1, h]) + t["markov_head.joint_proj.bias"]
            a, c, o = torch.sigmoid(z[:r]), z[r : 2 * r], z[2 * r :]
            return torch.tanh(o), a * state + (1 - a) * torch.tanh(c)
        return w1, state
