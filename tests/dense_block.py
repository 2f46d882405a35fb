"""A block drafter's round from `Facts`, dense and without a cache: the formats page once more, in plain torch.

Shares no code with the package. All positions are computed at once, context and block in one row of keys.
"""

import torch
from block_layouts import HD, HEADS, MASK, Facts
from torch import Tensor


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE of [n, heads, HD], theta 10000, pairs (j, j + HD / 2)."""
    angle = positions[:, None].float() * 10000.0 ** (-2 * torch.arange(HD // 2).float() / HD)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., : HD // 2], x[..., HD // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class DenseBlock:
    """One drafter; `embedding` and `head` are the target's, used where the checkpoint has none."""

    def __init__(self, facts: Facts, embedding: Tensor, head: Tensor, mask: int = MASK) -> None:
        self.f, self.t, self.mask = facts, facts.t, mask
        self.embedding = facts.t.get("embed_tokens.weight", embedding)
        self.head = facts.t.get("lm_head.weight", head)

    def sees(self, layer: int, query: int, key: int, start: int) -> bool:
        """Positions; `start` is the anchor's."""
        W = self.f.windows[layer]
        if self.f.causal[layer] and key > query:
            return False
        if W is None:
            return True
        return key >= start - W if self.f.left_edge else abs(query - key) < W

    def hidden(self, taps: Tensor, anchor: int) -> Tensor:
        """Final normed states [B, H] of the block behind the concatenated context states `taps` [n, taps * Ht]."""
        t, n, B = self.t, len(taps), self.f.block
        context = norm(taps @ t["fc.weight"].T, t["hidden_norm.weight"])
        x = self.embedding[[anchor] + [self.mask] * (B - 1)] * self.f.embed_scale
        at = torch.arange(n + B)
        for i in range(2):
            name = f"layers.{i}.self_attn."
            rows = norm(x, t[f"layers.{i}.input_layernorm.weight"])
            source = torch.cat([context, rows])
            k = self._normed((source @ t[name + "k_proj.weight"].T).view(n + B, self.f.kv, HD), name + "k_norm.weight")
            v = (source @ t[name + "v_proj.weight"].T).view(n + B, self.f.kv, HD)
            q = self._normed((rows @ t[name + "q_proj.weight"].T).view(B, HEADS, HD), name + "q_norm.weight")
            k, q = turned(k, at), turned(q, at[n:])
            k, v = (s.repeat_interleave(HEADS // self.f.kv, dim=1) for s in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / HD**0.5
            seen = torch.tensor([[self.sees(i, n + b, p, n) for p in range(n + B)] for b in range(B)])
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            x = x + torch.einsum("hqk,khd->qhd", weights, v).reshape(B, -1) @ t[name + "o_proj.weight"].T
            y = norm(x, t[f"layers.{i}.post_attention_layernorm.weight"])
            gate, up = (y @ t[f"layers.{i}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
            x = x + (gate * torch.sigmoid(gate) * up) @ t[f"layers.{i}.mlp.down_proj.weight"].T
        return norm(x, t["norm.weight"])

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return norm(x, self.t[name]) if name in self.t else x

    def walk(self, hidden: Tensor, anchor: int, forced: list[int] | None = None) -> tuple[list[int], Tensor, list]:
        """Greedy (or `forced`) target ids, logits over TARGET ids [K, V] (-inf: no draft row) and confidences."""
        f = self.f
        rows = hidden if f.offset else hidden[1:]
        base = rows @ self.head.T * f.logit_scale
        base = f.softcap * torch.tanh(base / f.softcap) if f.softcap else base
        ids = torch.arange(base.shape[-1]) if f.ids is None else f.ids
        tokens, logits, confidence = [], [], []
        state, previous = torch.zeros(8), anchor
        for k, (h, row) in enumerate(zip(rows, base, strict=True)):
            w1 = None
            if f.markov:
                w1 = self.t[f.prefix + "markov_head.markov_w1.weight"][previous]
                code, state = self._code(state, w1, h)
                row = row + self.t[f.prefix + "markov_head.markov_w2.weight"] @ code
            if f.confidence:
                features = torch.cat([h, w1]) if f.with_markov else h
                weight, bias = (self.t[f"{f.prefix}confidence_head.proj.{n}"] for n in ("weight", "bias"))
                confidence.append(float(torch.sigmoid(weight[0] @ features + bias[0])))
            whole = torch.full((len(self.embedding),), -torch.inf)
            whole[ids] = row
            previous = int(whole.argmax()) if forced is None else forced[k]
            tokens.append(previous)
            logits.append(whole)
        return tokens, torch.stack(logits), confidence

    def _code(self, state: Tensor, w1: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        t, p, r = self.t, self.f.prefix + "markov_head.", len(state)
        if self.f.markov == "gated":
            z = t[p + "gate_proj.weight"] @ torch.cat([h, w1]) + t[p + "gate_proj.bias"]
            return torch.sigmoid(z) * w1, state
        if self.f.markov == "rnn":
            z = t[p + "joint_proj.weight"] @ torch.cat([state, w1, h]) + t[p + "joint_proj.bias"]
            a, c, o = torch.sigmoid(z[:r]), z[r : 2 * r], z[2 * r :]
            return torch.tanh(o), a * state + (1 - a) * torch.tanh(c)
        return w1, state
