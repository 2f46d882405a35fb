"""A second implementation of MTP layers, dense and without a cache, from the formats page alone (1.7.6, 1.12).

All rows at once, plain loops over heads and experts, and no code shared with the drafters or with transformers.
"""

import math
from typing import Any

import torch
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float, offset: bool = False) -> Tensor:
    out = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return out * (1 + weight) if offset else out * weight


def silu_mlp(x: Tensor, t: dict[str, Tensor], name: str) -> Tensor:
    gate, up = x @ t[f"{name}.gate_proj.weight"].T, x @ t[f"{name}.up_proj.weight"].T
    return (gate * torch.sigmoid(gate) * up) @ t[f"{name}.down_proj.weight"].T


def turn(row: Tensor, position: int, theta: float, width: int, interleaved: bool = False) -> Tensor:
    """RoPE of one head's row: pairs (j, j + width/2) of its first `width` numbers, or neighbours (2j, 2j + 1).

    Interleaved pairs come out split in halves: q and k alike, so their products are those of turned neighbours.
    """
    out = row.clone()
    for j in range(width // 2):
        angle = position * theta ** (-2 * j / width)
        a, b = (row[2 * j], row[2 * j + 1]) if interleaved else (row[j], row[j + width // 2])
        out[j] = a * math.cos(angle) - b * math.sin(angle)
        out[j + width // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


class DenseMTP:
    """MTP layers from the raw tensors of a file. `kind` is the block's family; `c` the object of its config."""

    def __init__(self, c: dict[str, Any], tensors: dict[str, Tensor], kind: str, embedding: Tensor, head: Tensor):
        self.c, self.t, self.kind, self.embedding, self.head = c, tensors, kind, embedding, head
        self.offset = kind.startswith(("qwen3_next", "qwen3_5"))
        self.eps, self.theta = c["rms_norm_eps"], c["rope_theta"]

    # Names of the parts of MTP layer i; the vector fed back is after the final norm but for DeepSeek and GLM.
    def names(self, i: int) -> tuple[str, str, str, str, str]:
        if "mtp.fc.weight" in self.t:
            pre = "mtp.pre_fc_norm_"
            return f"{pre}embedding", f"{pre}hidden", "mtp.fc", "mtp.norm", f"mtp.layers.{i}"
        if any(".eh_proj." in n for n in self.t):
            p = f"model.layers.{self.c['num_hidden_layers'] + i}"
            return f"{p}.enorm", f"{p}.hnorm", f"{p}.eh_proj", f"{p}.shared_head.norm", p
        p = f"mtp_layers.{i}" if f"mtp_layers.{i}.input_proj.weight" in self.t else f"model.mtp_layers.{i}"
        return f"{p}.token_layernorm", f"{p}.hidden_layernorm", f"{p}.input_proj", f"{p}.final_layernorm", p

    def layer(self, i: int, tokens: list[int], hidden: Tensor, places: list[int]) -> tuple[Tensor, Tensor]:
        """Rows of (token, hidden) at `places` to what is fed back and what the head reads, each [N, H]."""
        token_norm, hidden_norm, proj, final, block = self.names(i)
        e = rms(self.embedding[tokens], self.t[f"{token_norm}.weight"], self.eps, self.offset)
        h = rms(hidden, self.t[f"{hidden_norm}.weight"], self.eps, self.offset)
        reversed_order = block.startswith("model.mtp_layers.")
        x = torch.cat([h, e] if reversed_order else [e, h], dim=-1) @ self.t[f"{proj}.weight"].T
        a = rms(x, self.t[f"{block}.input_layernorm.weight"], self.eps, self.offset)
        x = x + (self.latent(a, block, places) if self.kind == "deepseek_v3" else self.attention(a, block, places))
        m = rms(x, self.t[f"{block}.post_attention_layernorm.weight"], self.eps, self.offset)
        x = x + (
            self.experts(m, block) if f"{block}.mlp.gate.weight" in self.t else silu_mlp(m, self.t, f"{block}.mlp")
        )
        normed = rms(x, self.t[f"{final}.weight"], self.eps, self.offset)
        return (x if self.kind in ("deepseek_v3", "glm4_moe") else normed), normed

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.t[f"{name}.weight"].T
        return out + self.t[f"{name}.bias"] if f"{name}.bias" in self.t else out

    def attention(self, x: Tensor, block: str, places: list[int]) -> Tensor:
        c, name, N = self.c, f"{block}.self_attn", len(x)
        heads, kv, D = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        width = int(D * c.get("partial_rotary_factor", 1.0))
        q, gate = self.linear(x, f"{name}.q_proj"), None
        if self.offset:  # per head: D numbers of the query, then D of the output gate
            q = q.view(N, heads, 2 * D)
            q, gate = q[..., :D], q[..., D:].reshape(N, heads * D)
        q = q.reshape(N, heads, D)
        k, v = (self.linear(x, f"{name}.{p}_proj").view(N, kv, D) for p in "kv")
        if f"{name}.q_norm.weight" in self.t:
            q = rms(q, self.t[f"{name}.q_norm.weight"], self.eps, self.offset)
            k = rms(k, self.t[f"{name}.k_norm.weight"], self.eps, self.offset)
        q, k = (
            torch.stack(
                [torch.stack([turn(h, p, self.theta, width) for h in row]) for row, p in zip(r, places, strict=True)]
            )
            for r in (q, k)
        )
        k, v = (r.repeat_interleave(heads // kv, dim=1) for r in (k, v))
        out = self.mixed(q, k, v, D**-0.5)
        return self.linear(out if gate is None else out * torch.sigmoid(gate), f"{name}.o_proj")

    def latent(self, x: Tensor, block: str, places: list[int]) -> Tensor:
        c, name, N, t = self.c, f"{block}.self_attn", len(x), self.t
        heads, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        low = rms(self.linear(x, f"{name}.q_a_proj"), t[f"{name}.q_a_layernorm.weight"], 1e-6)
        q = self.linear(low, f"{name}.q_b_proj").view(N, heads, nope + rope)
        both = self.linear(x, f"{name}.kv_a_proj_with_mqa")
        latent, k_rope = both[:, : c["kv_lora_rank"]], both[:, c["kv_lora_rank"] :]
        latent = rms(latent, t[f"{name}.kv_a_layernorm.weight"], 1e-6)
        kv = self.linear(latent, f"{name}.kv_b_proj").view(N, heads, nope + c["v_head_dim"])
        q_out, k_out = [], []
        for n, place in enumerate(places):
            shared = turn(k_rope[n], place, self.theta, rope, interleaved=True)
            turned = [turn(q[n, h, nope:], place, self.theta, rope, interleaved=True) for h in range(heads)]
            q_out.append(torch.stack([torch.cat([q[n, h, :nope], turned[h]]) for h in range(heads)]))
            k_out.append(torch.stack([torch.cat([kv[n, h, :nope], shared]) for h in range(heads)]))
        out = self.mixed(torch.stack(q_out), torch.stack(k_out), kv[..., nope:], (nope + rope) ** -0.5)
        return self.linear(out, f"{name}.o_proj")

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Causal attention, row by row and head by head: [N, heads, D] to [N, heads * Dv]."""
        rows = []
        for n in range(len(q)):
            one = [((k[: n + 1, h] @ q[n, h]) * scale).softmax(0) @ v[: n + 1, h] for h in range(q.shape[1])]
            rows.append(torch.cat(one))
        return torch.stack(rows)

    def expert(self, x: Tensor, block: str, e: int) -> Tensor:
        if f"{block}.mlp.experts.gate_up_proj" in self.t:
            gate, up = (x @ self.t[f"{block}.mlp.experts.gate_up_proj"][e].T).chunk(2)
            return (gate * torch.sigmoid(gate) * up) @ self.t[f"{block}.mlp.experts.down_proj"][e].T
        return silu_mlp(x, self.t, f"{block}.mlp.experts.{e}")

    def experts(self, x: Tensor, block: str) -> Tensor:
        c, out = self.c, []
        for row in x:
            scores = self.t[f"{block}.mlp.gate.weight"] @ row
            if self.offset:  # softmax over all, the best k, made to sum to one
                weights = scores.softmax(0)
                best = weights.topk(c["num_experts_per_tok"]).indices.tolist()
                total = float(weights[best].sum()) if c["norm_topk_prob"] else 1.0
                factor = 1.0
            else:  # sigmoid; a correction only for choosing, first groups by their two best, then experts in them
                weights = torch.sigmoid(scores)
                corrected = (weights + self.t[f"{block}.mlp.gate.e_score_correction_bias"]).view(c["n_group"], -1)
                groups = corrected.topk(2, dim=1).values.sum(1).topk(c["topk_group"]).indices.tolist()
                allowed = torch.full_like(corrected, -torch.inf)
                allowed[groups] = corrected[groups]
                best = allowed.flatten().topk(c["num_experts_per_tok"]).indices.tolist()
                total, factor = float(weights[best].sum()) + 1e-20, c["routed_scaling_factor"]
            row_out = sum(weights[e] / total * factor * self.expert(row, block, e) for e in best)
            if self.offset:
                gate = torch.sigmoid(self.t[f"{block}.mlp.shared_expert_gate.weight"] @ row)
                row_out = row_out + gate * silu_mlp(row, self.t, f"{block}.mlp.shared_expert")
            else:
                row_out = row_out + silu_mlp(row, self.t, f"{block}.mlp.shared_experts")
            out.append(row_out)
        return torch.stack(out)

    def logits(self, ids: list[int], hidden: Tensor, drafted: list[int], layers: int = 1, shift: int = 0) -> Tensor:
        """Draft logits [K, V] of a round: `ids` [a + 1] end with the anchor, `hidden` [a, H], `drafted` [K] as drawn.

        One layer: its own state goes on as one more row. Several: layer k reads layer k - 1's states of all rows,
        beside tokens one further on. `shift` moves all positions.
        """
        a, out = len(hidden), []
        if layers == 1:
            rows, tokens = hidden, list(ids[1:])
            for step in range(len(drafted)):
                fed, scored = self.layer(0, tokens, rows, [p + shift for p in range(len(tokens))])
                out.append(scored[-1] @ self.head.T)
                rows, tokens = torch.cat([rows, fed[-1:]]), [*tokens, drafted[step]]
            return torch.stack(out)
        states, inputs, fed = hidden, {}, hidden
        for step in range(len(drafted)):
            i = step % layers
            known = [*ids, *drafted]
            if step < layers:
                inputs[i] = (known[1 + step : 1 + step + a], states)
            else:
                tokens, rows = inputs[i]
                inputs[i] = ([*tokens, drafted[step - 1]], torch.cat([rows, fed[-1:]]))
            tokens, rows = inputs[i]
            fed, scored = self.layer(i, tokens, rows, [p + shift for p in range(len(tokens))])
            states = fed[:a]
            out.append(scored[-1] @ self.head.T)
        return torch.stack(out)
