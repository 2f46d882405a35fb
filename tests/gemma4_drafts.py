"""Tiny DeepSpec drafters on a Gemma4 backbone, as DeepSpec writes them, and a dense re-computation of what they do.

From the formats page alone (1.2, 1.3): one row at a time, no cache, and no code shared with the drafters.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

V, H, HEADS, HD, INNER, B, RANK, EPS = 40, 64, 4, 32, 96, 4, 8, 1e-6

# Checkpoints, as DeepSpec writes them (formats page 1.2, 1.3) ---------------------------------------------------------


def gemma_config(*, k_eq_v: bool, layers: int, hidden: int = H, vocab: int = V, heads: int = HEADS) -> dict[str, Any]:
    return {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "target_model_type": "gemma4",
        "target_text_model_type": "gemma4_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": k_eq_v,
        "bos_token_id": 2,
        "dtype": "float32",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": 1.5,
        "global_head_dim": HD,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": hidden,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": INNER,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": 512,
        "num_attention_heads": heads,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 0,
        "num_target_layers": 2,
        "rms_norm_eps": EPS,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 512,
        "tie_word_embeddings": False,
        "transformers_version": "5.10.2",
        "use_bidirectional_attention": None,
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": vocab,
        "vocab_size_per_layer_input": vocab,
    }


def gemma_layer(config: dict[str, Any], attention_in: int) -> dict[str, tuple[int, ...]]:
    hidden, q = config["hidden_size"], config["num_attention_heads"] * HD
    kv = HD * config["num_global_key_value_heads" if config["attention_k_eq_v"] else "num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "pre_feedforward_layernorm.weight": (hidden,),
        "post_feedforward_layernorm.weight": (hidden,),
        "layer_scalar": (1,),
        "self_attn.q_proj.weight": (q, attention_in),
        "self_attn.k_proj.weight": (kv, attention_in),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (HD,),
        "self_attn.k_norm.weight": (HD,),
        "mlp.gate_proj.weight": (INNER, hidden),
        "mlp.up_proj.weight": (INNER, hidden),
        "mlp.down_proj.weight": (hidden, INNER),
    }
    return shapes if config["attention_k_eq_v"] else shapes | {"self_attn.v_proj.weight": (kv, attention_in)}


def write(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Path:
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, size in shapes.items():
        noise = torch.randn(size, generator=generator)
        if name.endswith(("norm.weight", "layer_scalar")):
            tensors[name] = 1 + 0.2 * noise
        else:
            tensors[name] = noise * (0.6 if "markov" in name else 0.15)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_block(
    folder: Path,
    head: str | None = "vanilla",
    k_eq_v: bool = True,
    changes: dict[str, Any] | None = None,
    block: int = B,
    **sizes: int,
) -> Path:
    """DSpark with a head, DFlash without one; two layers, taps on the embedding output and both target layers."""
    config = gemma_config(k_eq_v=k_eq_v, layers=2, **sizes)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    config |= {
        "block_size": block,
        "mask_token_id": 4,
        "target_layer_ids": [-1, 0],
        "num_anchors": 8,
        "markov_rank": RANK if head else 0,
        "enable_confidence_head": head is not None,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "fc.weight": (hidden, 2 * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(2):
        shapes |= {f"layers.{i}.{name}": size for name, size in gemma_layer(config, hidden).items()}
    if head:
        config |= {"markov_head_type": head, "confidence_head_with_markov": True}
        shapes |= {"markov_head.markov_w1.weight": (vocab, RANK), "markov_head.markov_w2.weight": (vocab, RANK)}
        shapes |= {"confidence_head.proj.weight": (1, hidden + RANK), "confidence_head.proj.bias": (1,)}
    if head == "gated":
        shapes |= {"markov_head.gate_proj.weight": (RANK, hidden + RANK), "markov_head.gate_proj.bias": (RANK,)}
    if head == "rnn":
        joint = {"weight": (3 * RANK, 2 * RANK + hidden), "bias": (3 * RANK,)}
        shapes |= {f"markov_head.joint_proj.{part}": size for part, size in joint.items()}
    config |= changes or {}
    return write(folder, {k: v for k, v in config.items() if v != "absent"}, shapes)


def write_eagle3(
    folder: Path, k_eq_v: bool = True, changes: dict[str, Any] | None = None, steps: int = 4, **sizes: int
) -> Path:
    config = gemma_config(k_eq_v=k_eq_v, layers=1, **sizes)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    config |= {
        "architectures": ["Gemma4Eagle3Model"],
        "target_layer_ids": [0, 1],
        "ttt_length": steps,
        "step_loss_decay": 0.8,
        "draft_num_hidden_layers": 1,
        "target_model_name_or_path": "google/gemma-4-12B-it",
    }
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "fc.weight": (hidden, 2 * hidden),
        "norm.weight": (hidden,),
        "layers.0.hidden_norm.weight": (hidden,),
    }
    shapes |= {f"layers.0.{name}": size for name, size in gemma_layer(config, 2 * hidden).items()}
    return write(folder, config | (changes or {}), shapes)


# The second implementation, dense and without a cache -----------------------------------------------------------------


class Dense:
    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.t = load_file(folder / "model.safetensors")

    def norm(self, x: Tensor, name: str | None) -> Tensor:
        normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)
        return normed if name is None else normed * self.t[name]

    def turned(self, x: Tensor, position: int) -> Tensor:
        """Proportional RoPE of [heads, D]: the first int(0.25 * D // 2) pairs (j, j + D/2) turn, the others stand."""
        out, turning = x.clone(), int(0.25 * HD // 2)
        for j in range(turning):
            angle = position * 1e6 ** (-2 * j / HD)
            a, b = x[:, j], x[:, j + HD // 2]
            out[:, j] = a * math.cos(angle) - b * math.sin(angle)
            out[:, j + HD // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def key_value(self, layer: int, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        at = f"layers.{layer}.self_attn"
        raw = (self.t[f"{at}.k_proj.weight"] @ x).view(-1, HD)
        v = raw if self.config["attention_k_eq_v"] else (self.t[f"{at}.v_proj.weight"] @ x).view(-1, HD)
        return self.turned(self.norm(raw, f"{at}.k_norm.weight"), position), self.norm(v, None)

    def attended(self, layer: int, x: Tensor, position: int, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One query row over the keys and values it sees; the scale is 1."""
        at, heads = f"layers.{layer}.self_attn", self.config["num_attention_heads"]
        q = self.turned(self.norm((self.t[f"{at}.q_proj.weight"] @ x).view(heads, HD), f"{at}.q_norm.weight"), position)
        mixed = []
        for head in range(heads):
            of = head // (heads // len(seen[0][0]))
            weights = torch.stack([q[head] @ k[of] for k, _ in seen]).softmax(0)
            mixed.append(sum(w * v[of] for w, (_, v) in zip(weights, seen, strict=True)))
        return self.t[f"{at}.o_proj.weight"] @ torch.cat(mixed)

    def behind(self, layer: int, residual: Tensor, attended: Tensor) -> Tensor:
        at, t = f"layers.{layer}", self.t
        x = residual + self.norm(attended, f"{at}.post_attention_layernorm.weight")
        y = self.norm(x, f"{at}.pre_feedforward_layernorm.weight")
        gate = t[f"{at}.mlp.gate_proj.weight"] @ y
        gelu = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        y = t[f"{at}.mlp.down_proj.weight"] @ (gelu * (t[f"{at}.mlp.up_proj.weight"] @ y))
        return (x + self.norm(y, f"{at}.post_feedforward_layernorm.weight")) * t[f"{at}.layer_scalar"]

    def capped(self, hidden: Tensor) -> Tensor:
        logits, cap = self.t["lm_head.weight"] @ hidden, self.config["final_logit_softcapping"]
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def embedded(self, token: int) -> Tensor:
        return self.t["embed_tokens.weight"][token] * math.sqrt(self.config["hidden_size"])

    def block(self, taps: Tensor, anchor: int) -> Tensor:
        """Final normed hidden states [B, H] of the block behind the context `taps`."""
        n, t = len(taps), self.t
        context = [self.norm(t["fc.weight"] @ row, "hidden_norm.weight") for row in taps]
        ids = [anchor] + [self.config["mask_token_id"]] * (self.config["block_size"] - 1)
        x = [self.embedded(i) for i in ids]
        for layer in range(2):
            normed = [self.norm(row, f"layers.{layer}.input_layernorm.weight") for row in x]
            seen = [self.key_value(layer, row, p) for p, row in enumerate([*context, *normed])]
            out = [self.attended(layer, row, n + k, seen) for k, row in enumerate(normed)]
            x = [self.behind(layer, row, a) for row, a in zip(x, out, strict=True)]
        return torch.stack([self.norm(row, "norm.weight") for row in x])

    def walk(self, hidden: Tensor, anchor: int) -> tuple[list[int], list[Tensor], list[float]]:
        """Greedy tokens, corrected logits and confidences: the soft-cap first, then the bias."""
        tokens, logits, sure = [], [], []
        prev, state = anchor, torch.zeros(RANK)
        for h in hidden:
            row = self.capped(h)
            if self.config["markov_rank"]:
                w1 = self.t["markov_head.markov_w1.weight"][prev]
                code, state = self.head(state, w1, h)
                row = row + self.t["markov_head.markov_w2.weight"] @ code
                score = self.t["confidence_head.proj.weight"][0] @ torch.cat([h, w1])
                sure.append(float(torch.sigmoid(score + self.t["confidence_head.proj.bias"][0])))
            prev = int(row.argmax())
            tokens.append(prev)
            logits.append(row)
        return tokens, logits, sure

    def head(self, state: Tensor, w1: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        kind, t, r = self.config["markov_head_type"], self.t, RANK
        if kind == "vanilla":
            return w1, state
        if kind == "gated":
            z = t["markov_head.gate_proj.weight"] @ torch.cat([h, w1]) + t["markov_head.gate_proj.bias"]
            return torch.sigmoid(z) * w1, state
        z = t["markov_head.joint_proj.weight"] @ torch.cat([state, w1, h]) + t["markov_head.joint_proj.bias"]
        a = torch.sigmoid(z[:r])
        return torch.tanh(z[2 * r :]), a * state + (1 - a) * torch.tanh(z[r : 2 * r])

    def eagle(self, taps: Tensor, ids: list[int], steps: int) -> tuple[list[int], list[Tensor]]:
        """Greedy tokens and logits: feature i with token i + 1 at position i, then its own states step by step."""
        features = [self.t["fc.weight"] @ row for row in taps]
        tokens, logits, seen = list(ids[1:]), [], []
        for position in range(len(features) + steps - 1):
            feature = features[position]
            both = torch.cat(
                [
                    self.norm(self.embedded(tokens[position]), "layers.0.input_layernorm.weight"),
                    self.norm(feature, "layers.0.hidden_norm.weight"),
                ]
            )
            seen.append(self.key_value(0, both, position))
            x = self.behind(0, feature, self.attended(0, both, position, seen))
            if position >= len(taps) - 1:
                features.append(x)
                logits.append(self.capped(self.norm(x, "norm.weight")))
                tokens.append(int(logits[-1].argmax()))
        return tokens[-steps:], logits
