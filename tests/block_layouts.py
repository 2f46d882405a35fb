"""Tiny block-drafter checkpoints in the layouts of speculators, SpecForge and z-lab, written by hand.

Every layout comes with `Facts`: what the formats page says about it, for the dense second implementation of the tests.
Names, shapes and keys are spelled out here, not taken from the package.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

V, H, HEADS, KV, HD, INNER, RANK = 40, 64, 4, 2, 16, 96, 8
MASK = V - 1


@dataclass
class Facts:
    """How a block is computed, in the words of the formats page."""

    t: dict[str, Tensor] = field(default_factory=dict)  # tensors as stored
    block: int = 5
    offset: int = 1  # 1: row k predicts anchor + k + 1; 0: anchor + k
    taps: tuple[int, ...] = (2, 4, 5)  # HS indices
    final_normed: bool = False  # a tap equal to the target's depth is after the final norm
    windows: tuple[int | None, ...] = (None, None)
    causal: tuple[bool, ...] = (False, False)
    left_edge: bool = False  # windows begin at anchor - W for every row
    kv: int = KV
    hidden: int = H
    ids: Tensor | None = None  # of a reduced vocabulary: target id of each draft row
    markov: str | None = None
    confidence: bool = False
    with_markov: bool = False
    prefix: str = ""  # of the heads' tensors
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None


def backbone(f: Facts, target_hidden: int = H, qk_norm: bool = True) -> dict[str, Tensor]:
    """`fc`, norms and two layers (formats page 1.1)."""
    h = f.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(f.taps) * target_hidden),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for i in range(2):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (h,),
            f"layers.{i}.post_attention_layernorm.weight": (h,),
            f"layers.{i}.self_attn.q_proj.weight": (HEADS * HD, h),
            f"layers.{i}.self_attn.k_proj.weight": (f.kv * HD, h),
            f"layers.{i}.self_attn.v_proj.weight": (f.kv * HD, h),
            f"layers.{i}.self_attn.o_proj.weight": (h, HEADS * HD),
            f"layers.{i}.mlp.gate_proj.weight": (INNER, h),
            f"layers.{i}.mlp.up_proj.weight": (INNER, h),
            f"layers.{i}.mlp.down_proj.weight": (h, INNER),
        }
        if qk_norm:
            shapes |= {f"layers.{i}.self_attn.{n}_norm.weight": (HD,) for n in "qk"}
    return {
        name: 1 + 0.1 * torch.randn(shape) if "norm" in name else 0.15 * torch.randn(shape)
        for name, shape in shapes.items()
    }


def heads(f: Facts, vocab: int = V) -> dict[str, Tensor]:
    """Markov and confidence head; W1 has the target's rows, W2 the draft's (formats page 1.7.2)."""
    rows = vocab if f.ids is None else len(f.ids)
    t: dict[str, Tensor] = {}
    if f.markov:
        t["markov_head.markov_w1.weight"] = 0.8 * torch.randn(vocab, RANK)
        t["markov_head.markov_w2.weight"] = 0.8 * torch.randn(rows, RANK)
    if f.markov == "gated":
        t["markov_head.gate_proj.weight"] = 0.3 * torch.randn(RANK, f.hidden + RANK)
        t["markov_head.gate_proj.bias"] = 0.3 * torch.randn(RANK)
    if f.markov == "rnn":
        t["markov_head.joint_proj.weight"] = 0.3 * torch.randn(3 * RANK, 2 * RANK + f.hidden)
        t["markov_head.joint_proj.bias"] = 0.3 * torch.randn(3 * RANK)
    if f.confidence:
        t["confidence_head.proj.weight"] = 0.3 * torch.randn(1, f.hidden + (RANK if f.with_markov else 0))
        t["confidence_head.proj.bias"] = 0.3 * torch.randn(1)
    return {f.prefix + name: tensor for name, tensor in t.items()}


def layer_config(f: Facts, vocab: int = V) -> dict[str, Any]:
    """The Qwen3 keys of the draft's layers."""
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": f.hidden,
        "vocab_size": vocab,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": HD,
        "intermediate_size": INNER,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in f.windows],
        "sliding_window": next((w for w in f.windows if w), None),
    }
    return config


def speculators(
    folder: Path, f: Facts, kind: str, *, version: str = "0.9.0", vocab: int = V, target_width: int = H, **keys: Any
) -> Facts:
    """speculators dflash or dspark (formats page 1.7); `keys` go to the top level, None leaves a key out.

    0.8 stores embedding and head always, 0.9 only the head of a reduced vocabulary.
    """
    torch.manual_seed(11)
    rows = vocab if f.ids is None else len(f.ids)
    config = {
        "architectures": [{"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}[kind]],
        "speculators_model_type": kind,
        "speculators_version": version,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": f.block - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layer_config(f, vocab),
        "draft_vocab_size": rows,
        "block_size": f.block,
        "mask_token_id": vocab - 1,
        "aux_hidden_state_layer_ids": list(f.taps),
        "dtype": "float32",
        "transformers_version": "5.2.0",
    } | keys
    config = {key: value for key, value in config.items() if value is not None}
    f.t = backbone(f, target_width) | heads(f, vocab)
    if version < "0.9":
        f.t["embed_tokens.weight"] = torch.randn(vocab, f.hidden)
    if version < "0.9" or f.ids is not None:
        f.t["lm_head.weight"] = 0.3 * torch.randn(rows, f.hidden)
    if f.ids is not None:
        f.t["d2t"] = f.ids - torch.arange(rows)
        f.t["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, f.ids, True)
    return written(folder, config, f)


def specforge_dspark(folder: Path, f: Facts, **own: Any) -> Facts:
    """SpecForge DSpark (formats page 1.9): no embedding, no head; `own` are keys of `dflash_config`."""
    torch.manual_seed(12)
    config = layer_config(f) | {
        "architectures": ["DSparkDraftModel"],
        "block_size": f.block,
        "num_target_layers": 8,
        "dflash_config": {
            "projector_type": "dspark",
            "target_layer_ids": [tap - 1 for tap in f.taps],
            "mask_token_id": MASK,
        }
        | own,
    }
    f.t = backbone(f) | heads(f)
    return written(folder, config, f)


def zlab(folder: Path, f: Facts, *, top: dict[str, Any] | None = None, **own: Any) -> Facts:
    """z-lab or SpecForge DFlash (formats page 1.5): `own` are keys of `dflash_config`, None leaves a key out."""
    torch.manual_seed(13)
    inside = {"target_layer_ids": [tap - 1 for tap in f.taps], "mask_token_id": MASK} | own
    config = layer_config(f) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": f.block,
        "num_target_layers": 8,
        "dflash_config": {key: value for key, value in inside.items() if value is not None},
    }
    f.t = backbone(f)
    return written(folder, config | (top or {}), f)


def written(folder: Path, config: dict[str, Any], f: Facts) -> Facts:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(f.t, folder / "model.safetensors")
    return f


def changed(folder: Path, **changes: Any) -> None:
    """Overwrite top-level keys of a written config; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


REDUCED = torch.tensor([0, 1, 3, 4, 7, 9, 10, 12, 13, 17, 18, 20, 21, 22, 25, 27, 28, 30, 33, 36, 38, 39])
WINDOW = (4, None)  # narrower than the contexts of the tests and than a block


def dflash_reduced(folder: Path) -> Facts:
    """0.9.0: no embedding in the file, a reduced head, a sliding layer that is causal in the block."""
    return speculators(
        folder, Facts(offset=0, ids=REDUCED, windows=WINDOW, causal=(True, False), left_edge=True), "dflash"
    )


def dflash_08_bidirectional(folder: Path) -> Facts:
    """0.8: embedding and head in the file; default taps; sliding layers see the whole block."""
    f = Facts(offset=0, windows=WINDOW, left_edge=True)
    return speculators(
        folder, f, "dflash", version="0.8.0", aux_hidden_state_layer_ids=None, sliding_window_non_causal=True
    )


def dflash_from_anchor(folder: Path) -> Facts:
    return speculators(folder, Facts(taps=(0, 3, 8)), "dflash", sample_from_anchor=True)


def dspark_vanilla_reduced(folder: Path) -> Facts:
    f = Facts(ids=REDUCED, markov="vanilla", confidence=True, with_markov=True)
    return speculators(folder, f, "dspark", markov_rank=8)


def dspark_gated_reduced_08(folder: Path) -> Facts:
    f = Facts(offset=0, ids=REDUCED, markov="gated", confidence=True, with_markov=True)
    keys = {"markov_rank": 8, "markov_head_type": "gated", "sample_from_anchor": False}
    return speculators(folder, f, "dspark", version="0.8.0", **keys)


def dspark_rnn_sliding(folder: Path) -> Facts:
    f = Facts(windows=WINDOW, causal=(True, False), left_edge=True, markov="rnn", confidence=True)
    keys = {"markov_rank": 8, "markov_head_type": "rnn", "confidence_head_with_markov": False}
    return speculators(folder, f, "dspark", **keys)


def dspark_narrow(folder: Path) -> Facts:
    """A drafter half as wide as its target."""
    f = Facts(hidden=32, ids=REDUCED, markov="vanilla")
    keys = {"markov_rank": 8, "target_hidden_size": 64, "enable_confidence_head": False}
    return speculators(folder, f, "dspark", version="0.8.0", **keys)


def specforge_early(folder: Path) -> Facts:
    """Heads under `logit_head.`, the confidence head told by the weight of its loss, without Markov by default."""
    f = Facts(markov="vanilla", confidence=True, prefix="logit_head.", kv=4)
    keys = {"markov_rank": 8, "confidence_head_alpha": 0.5, "attention_mode": "mha"}
    return specforge_dspark(folder, f, **keys)


def specforge_rnn(folder: Path) -> Facts:
    f = Facts(windows=WINDOW, causal=(True, False), markov="rnn", confidence=True, with_markov=True)
    keys = {"markov_rank": 8, "markov_head_type": "rnn", "enable_confidence_head": True}
    return specforge_dspark(folder, f, **keys, confidence_head_with_markov=True, attention_mode="gqa")


def specforge_bare(folder: Path) -> Facts:
    """No head at all: rank 0 and no confidence by default."""
    return specforge_dspark(folder, Facts(taps=(2, 6)), target_layer_ids=None)


def zlab_default_taps(folder: Path) -> Facts:
    """L = 8 and two draft layers: ids 1 and L - 3."""
    return zlab(folder, Facts(offset=0, taps=(2, 6)), target_layer_ids=None)


def zlab_last_layer(folder: Path) -> Facts:
    return zlab(folder, Facts(offset=0, taps=(1, 8), final_normed=True))


def zlab_scaled(folder: Path) -> Facts:
    f = Facts(offset=0, embed_scale=8.0, logit_scale=0.25, softcap=1.5, windows=WINDOW, causal=(True, False))
    keys = {"input_embedding_scale": 8.0, "output_multiplier": 0.25, "final_logit_softcapping": 1.5, "block_size": 5}
    return zlab(folder, f, top={"block_size": None}, **keys)


def zlab_swa(folder: Path) -> Facts:
    """vLLM's aliases: a causal window of 3 in every layer."""
    f = Facts(offset=0)
    zlab(folder, f, use_swa=True, swa_window_size=3)
    f.windows, f.causal = (3, 3), (True, True)
    return f


def zlab_swa_not_causal(folder: Path) -> Facts:
    f = Facts(offset=0)
    zlab(folder, f, use_swa=True, swa_window_size=3, causal=False)
    f.windows = (3, 3)
    return f


def zlab_is_causal_wins(folder: Path) -> Facts:
    f = Facts(offset=0, causal=(True, True))
    return zlab(folder, f, top={"is_causal": True}, causal=False)


LAYOUTS: list[Callable[[Path], Facts]] = [
    dflash_reduced,
    dflash_08_bidirectional,
    dflash_from_anchor,
    dspark_vanilla_reduced,
    dspark_gated_reduced_08,
    dspark_rnn_sliding,
    dspark_narrow,
    specforge_early,
    specforge_rnn,
    specforge_bare,
    zlab_default_taps,
    zlab_last_layer,
    zlab_scaled,
    zlab_swa,
    zlab_swa_not_causal,
    zlab_is_causal_wins,
]
