"""Tiny DFlash2 drafters, as z-lab and speculators write them, and a dense re-computation of what they do.

From the formats page alone (1.6, 1.7.3): one row at a time, no cache, and no code shared with the drafters.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdoctor.engine.target import Target

V, H, HEADS, D, INNER, B = 40, 64, 4, 16, 96, 5
TAPS_K, GROUP, RANK, TOP = 3, 16, 8, 6  # kernel taps, channels a group, selector's rank and candidates
LAYERS = 3  # of the target
SLIDING, WINDOW = ["sliding_attention", "full_attention"], 6

# Checkpoints, as z-lab and speculators write them (formats page 1.6, 1.7.3) -------------------------------------------


def layer_keys(hidden: int, vocab: int, heads: int, kinds: list[str]) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": D,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "layer_types": kinds,
        "max_position_embeddings": 512,
        "num_attention_heads": heads,
        "num_hidden_layers": 2,
        "num_key_value_heads": heads // 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_window": WINDOW if "sliding_attention" in kinds else None,
        "use_sliding_window": "sliding_attention" in kinds,
        "vocab_size": vocab,
    }


def tensor_shapes(hidden: int, vocab: int, heads: int, taps: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "candidate_selector.predecessor_codebook": (vocab, RANK),
        "candidate_selector.successor_codebook": (vocab, RANK),
        "candidate_selector.hidden_projection.weight": (RANK, hidden),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads * D, hidden),
        "self_attn.k_proj.weight": (heads // 2 * D, hidden),
        "self_attn.v_proj.weight": (heads // 2 * D, hidden),
        "self_attn.o_proj.weight": (hidden, heads * D),
        "self_attn.q_norm.weight": (D,),
        "self_attn.k_norm.weight": (D,),
        "mlp.gate_proj.weight": (INNER, hidden),
        "mlp.up_proj.weight": (INNER, hidden),
        "mlp.down_proj.weight": (hidden, INNER),
    }
    for name in ("attention_conv", "mlp_conv"):
        layer[f"{name}.base_kernel"] = (2, TAPS_K, hidden)
        layer[f"{name}.kernel_projection.weight"] = (2 * TAPS_K * (hidden // GROUP), hidden)
    for i in range(2):
        shapes |= {f"layers.{i}.{name}": size for name, size in layer.items()}
    return shapes


def write(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Path:
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, size in shapes.items():
        noise = torch.randn(size, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.2 * noise
        elif name.endswith("base_kernel"):
            tensors[name] = torch.tensor([1.0, 0.0, 0.0])[None, :, None] + 0.3 * noise
        else:
            tensors[name] = noise * (0.9 if "codebook" in name else 0.15)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_zlab(
    folder: Path, kinds: list[str] = SLIDING, block: int = B, size: dict | None = None, **own: object
) -> Path:
    sizes = {"hidden": H, "vocab": V, "heads": HEADS} | (size or {})
    target_layers = sizes.pop("target_layers", LAYERS)
    config = layer_keys(**sizes, kinds=kinds) | {
        "architectures": ["DFlash2DraftModel"],
        "auto_map": {"AutoModel": "dflash2.DFlash2DraftModel"},
        "dtype": "float32",
        "num_target_layers": target_layers,
        "tie_word_embeddings": False,
    }
    config["dflash_config"] = {
        "block_size": block,
        "conv_group_size": GROUP,
        "conv_kernel_size": TAPS_K,
        "mask_token_id": sizes["vocab"] - 1,
        "selector_rank": RANK,
        "selector_top_k": TOP,
        "target_layer_ids": [0, 1],
        **own,
    }
    config["dflash_config"] = {k: v for k, v in config["dflash_config"].items() if v != "absent"}
    return write(folder, config, tensor_shapes(**sizes, taps=2))


def write_speculators(
    folder: Path, kinds: list[str] = SLIDING, own_embedding: bool = False, block: int = B, **changes: object
) -> Path:
    config: dict[str, Any] = {
        "architectures": ["DFlash2DraftModel"],
        "aux_hidden_state_layer_ids": [0, 1],
        "block_size": block,
        "conv_group_size": GROUP,
        "conv_kernel_size": TAPS_K,
        "draft_vocab_size": V,
        "dtype": "float32",
        "mask_token_id": V - 1,
        "sample_from_anchor": False,
        "selector_rank": RANK,
        "selector_top_k": TOP,
        "sliding_window_non_causal": True,
        "speculators_config": {
            "algorithm": "dflash2",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": B - 1,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
        },
        "speculators_model_type": "dflash2",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "transformer_layer_config": layer_keys(H, V, HEADS, kinds),
        "transformers_version": "5.10.2",
    }
    shapes = tensor_shapes(H, V, HEADS, taps=2)
    if own_embedding:
        shapes |= {"embed_tokens.weight": (V, H), "lm_head.weight": (V, H)}
    return write(folder, {k: v for k, v in (config | changes).items() if v != "absent"}, shapes)


# The second implementation, dense and without a cache -----------------------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def turned(x: Tensor, position: int) -> Tensor:
    out = x.clone()
    for j in range(D // 2):
        angle = position * 10000.0 ** (-2 * j / D)
        a, b = x[:, j], x[:, j + D // 2]
        out[:, j] = a * math.cos(angle) - b * math.sin(angle)
        out[:, j + D // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


class Dense:
    def __init__(self, folder: Path, target: Target) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.t = load_file(folder / "model.safetensors")
        self.zlab = "dflash_config" in self.config
        self.own = self.config["dflash_config"] if self.zlab else self.config
        self.layers = self.config if self.zlab else self.config["transformer_layer_config"]
        self.embedding = self.t.get("embed_tokens.weight", target.embedding.weight.detach())
        self.lm_head = self.t.get("lm_head.weight", target.lm_head.weight.detach())
        self.first_row = 0 if self.own.get("sample_from_anchor") else 1

    def sees(self, layer: int, query: int, key: int, start: int) -> bool:
        """Positions; `start` is the anchor's. z-lab: causal, |q - k| < W. speculators: key >= start - W."""
        if self.layers["layer_types"][layer] == "full_attention":
            return True
        if self.zlab:
            return key <= query and query - key < WINDOW
        causal = not self.own.get("sliding_window_non_causal", True)
        return key >= start - WINDOW and not (causal and key > query)

    def hidden(self, taps: Tensor, anchor: int) -> Tensor:
        """Final normed hidden states [B, H]."""
        t, n, block = self.t, len(taps), self.own["block_size"]
        context = [norm(t["fc.weight"] @ row, t["hidden_norm.weight"]) for row in taps]
        ids = [anchor] + [self.own["mask_token_id"]] * (block - 1)
        x = [self.embedding[i] * self.own.get("input_embedding_scale", 1.0) for i in ids]
        for i in range(2):
            at = f"layers.{i}"
            u = [norm(row, t[f"{at}.input_layernorm.weight"]) for row in x]
            attended = self.attention(i, context, self.convolved(f"{at}.attention_conv", 0, u, u), n)
            x = [a + b for a, b in zip(x, self.convolved(f"{at}.attention_conv", 1, attended, u), strict=True)]
            u = [norm(row, t[f"{at}.post_attention_layernorm.weight"]) for row in x]
            y = [self.mlp(at, row) for row in self.convolved(f"{at}.mlp_conv", 0, u, u)]
            x = [a + b for a, b in zip(x, self.convolved(f"{at}.mlp_conv", 1, y, u), strict=True)]
        return torch.stack([norm(row, t["norm.weight"]) for row in x])

    def convolved(self, name: str, side: int, rows: list[Tensor], u: list[Tensor]) -> list[Tensor]:
        """Channel by channel group: row j is the sum over o of (base + dynamic of row j) times row j - o."""
        base, width = self.t[f"{name}.base_kernel"][side], len(rows[0])
        out = []
        for j in range(len(rows)):
            made = (self.t[f"{name}.kernel_projection.weight"] @ u[j]).view(2, TAPS_K, width // GROUP)[side]
            y = torch.zeros(width)
            for o in range(min(TAPS_K, j + 1)):
                for g in range(width // GROUP):
                    channels = slice(g * GROUP, (g + 1) * GROUP)
                    y[channels] += (base[o, channels] + made[o, g]) * rows[j - o][channels]
            out.append(y)
        return out

    def attention(self, i: int, context: list[Tensor], x: list[Tensor], n: int) -> list[Tensor]:
        t, at = self.t, f"layers.{i}.self_attn"
        group = self.layers["num_attention_heads"] // self.layers["num_key_value_heads"]
        keys, values = [], []
        for position, row in enumerate([*context, *x]):
            k = norm((t[f"{at}.k_proj.weight"] @ row).view(-1, D), t[f"{at}.k_norm.weight"])
            keys.append(turned(k, position))
            values.append((t[f"{at}.v_proj.weight"] @ row).view(-1, D))
        out = []
        for offset, row in enumerate(x):
            q = norm((t[f"{at}.q_proj.weight"] @ row).view(-1, D), t[f"{at}.q_norm.weight"])
            q = turned(q, n + offset)
            seen = [p for p in range(len(keys)) if self.sees(i, n + offset, p, n)]
            mixed = []
            for head in range(len(q)):
                weights = (torch.stack([q[head] @ keys[p][head // group] for p in seen]) / D**0.5).softmax(0)
                mixed.append(sum(w * values[p][head // group] for w, p in zip(weights, seen, strict=True)))
            out.append(t[f"{at}.o_proj.weight"] @ torch.cat(mixed))
        return out

    def mlp(self, at: str, x: Tensor) -> Tensor:
        gate = self.t[f"{at}.mlp.gate_proj.weight"] @ x
        return self.t[f"{at}.mlp.down_proj.weight"] @ (
            gate * torch.sigmoid(gate) * (self.t[f"{at}.mlp.up_proj.weight"] @ x)
        )

    def unary(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head @ hidden * self.own.get("output_multiplier", 1.0)
        cap = self.own.get("final_logit_softcapping")
        return cap * torch.tanh(logits / cap) if cap else logits

    def scores(self, hidden: Tensor, prev: int) -> dict[int, float]:
        """The score of each of a row's candidates."""
        t, logits = self.t, self.unary(hidden)
        projected = t["candidate_selector.hidden_projection.weight"] @ hidden
        out = {}
        for c in sorted(range(len(logits)), key=lambda c: -float(logits[c]))[: self.own["selector_top_k"]]:
            pair = t["candidate_selector.predecessor_codebook"][prev] * projected
            out[c] = float(logits[c] + pair @ t["candidate_selector.successor_codebook"][c])
        return out

    def greedy(self, hidden: Tensor, anchor: int) -> list[int]:
        tokens, prev = [], anchor
        for row in hidden[self.first_row :]:
            scores = self.scores(row, prev)
            prev = max(scores, key=lambda c: scores[c])
            tokens.append(prev)
        return tokens
