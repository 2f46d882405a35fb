"""Tiny checkpoints of the EAGLE family in each public layout (formats page 1.3, 1.7.4, 1.7.5, 1.8, 1.10).

`CASES` says for each what its config and tensors look like; what that means is in `dense_eagle.py`.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

V, DRAFT_V, H, D, INNER, TARGET_LAYERS = 40, 24, 64, 16, 96, 8

# Sizes of the layers as a transformers config has them.
SIZES: dict[str, Any] = {
    "hidden_size": H,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": D,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
}


@dataclass
class Case:
    """A layout: which config, where the first layer is, which tensors. `facts` is what the formats page says of it."""

    config: dict[str, Any]
    first: str = "midlayer."
    tensors: tuple[str, ...] = ("norm.weight", "lm_head.weight", "d2t", "t2d")
    drop: tuple[str, ...] = ()  # config keys of SIZES that this writer leaves out
    nested: bool = False  # the sizes are in transformer_layer_config
    qk_norm: bool = False
    layers: int = 1
    taps: tuple[int, ...] = (2, 4, 5)  # HS indices
    draft_vocab: int = DRAFT_V
    hidden: int = H
    file: str = "model.safetensors"
    embed_dtype: torch.dtype = torch.float32
    facts: dict[str, Any] = field(default_factory=dict)


def specforge(*tensors: str, drop: tuple[str, ...] = (), **config: Any) -> dict[str, Any]:
    base = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": DRAFT_V}
    return {key: value for key, value in (base | config).items() if key not in drop}


def speculators(kind: str = "eagle3", model: str = "llama", layers: int = 1, **config: Any) -> dict[str, Any]:
    name = "PEagleSpeculator" if kind == "peagle" else "Eagle3Speculator"
    return {
        "architectures": [name],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": {"model_type": model, "num_hidden_layers": layers},
        "draft_vocab_size": DRAFT_V,
        "norm_before_residual": False,
        "norm_output": False,
        "embed_requires_grad": False,
        **config,
    }


OWN = ("norm.weight", "lm_head.weight", "embed_tokens.weight", "d2t", "t2d")
FC_NORMS = tuple(f"fc_norm.{i}.weight" for i in range(3))
AUX = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6], "use_aux_hidden_state": True}}

CASES: dict[str, Case] = {
    "specforge": Case(specforge(**AUX), taps=(1, 4, 7)),
    "specforge default taps": Case(specforge()),
    "specforge full vocabulary": Case(specforge(draft_vocab_size=V), draft_vocab=V),
    "specforge no vocabulary key": Case(
        specforge(drop=("draft_vocab_size",)), tensors=("norm.weight", "lm_head.weight"), draft_vocab=V
    ),
    "specforge narrow": Case(specforge(target_hidden_size=H), tensors=OWN, hidden=32),
    "specforge fc_norm": Case(
        specforge(fc_norm=True, norm_output=False),
        tensors=("norm.weight", "lm_head.weight", "d2t", "t2d", *FC_NORMS),
        facts={"feature_norm": "per_tap", "head_normed": False},
    ),
    "yuhuili": Case(
        specforge(architectures=["LlamaForCausalLM"]),
        drop=("rope_theta", "head_dim"),
        tensors=OWN,
        file="pytorch_model.bin",
        embed_dtype=torch.float16,
        facts={"theta": 10000.0},
    ),
    "speculators qwen3": Case(
        speculators(
            model="qwen3",
            norm_before_residual=True,
            norm_before_fc=True,
            norm_output=True,
            eagle_aux_hidden_state_layer_ids=[1, 4, 7],
        ),
        first="layers.0.",
        nested=True,
        qk_norm=True,
        tensors=(*OWN, "input_norm.weight"),
        taps=(1, 4, 7),
        facts={"feature_norm": "before_fc", "residual_normed": True, "recurrent_normed": True},
    ),
    "speculators llama": Case(
        speculators(layers=2, fc_norm=True),
        first="layers.0.",
        nested=True,
        layers=2,
        tensors=(*OWN, *FC_NORMS),
        facts={"feature_norm": "per_tap"},
    ),
    "speculators converted": Case(speculators(), nested=True, tensors=OWN),
    "speculators peagle": Case(
        speculators("peagle", layers=2, mask_token_id=V - 1, norm_before_residual=True),
        first="layers.0.",
        nested=True,
        layers=2,
        tensors=(*OWN, "mask_hidden"),
        facts={"residual_normed": True, "parallel": True},
    ),
    "specforge peagle": Case(
        specforge(architectures=["PEagleDraftModel"], norm_before_residual=True, mask_token_id=V - 2),
        first="layers.0.",
        layers=2,
        tensors=(*OWN, "mask_hidden"),
        facts={"residual_normed": True, "parallel": True},
    ),
    "peagle in vLLM's layout": Case(
        specforge(parallel_drafting=True, ptd_token_id=V - 2),
        tensors=(*OWN, "mask_hidden flat"),
        facts={"parallel": True},
    ),
    "eagle with bias": Case(
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        first="layers.0.",
        tensors=("embed_tokens.weight", "fc.bias"),
        drop=("rope_theta",),
        facts={"plain": True, "theta": 10000.0},
        draft_vocab=V,
    ),
    "eagle without bias, two layers": Case(
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bias": False},
        first="layers.0.",
        layers=2,
        tensors=("embed_tokens.weight",),
        facts={"plain": True},
        draft_vocab=V,
    ),
}


def config_of(case: Case, vocab: int = V) -> dict[str, Any]:
    sizes = {key: value for key, value in SIZES.items() if key not in case.drop}
    sizes |= {"num_hidden_layers": case.layers, "hidden_size": case.hidden, "vocab_size": vocab}
    if case.nested:
        return case.config | {"transformer_layer_config": sizes | case.config["transformer_layer_config"]}
    return sizes | case.config


def kept_ids(count: int, vocab: int) -> Tensor:
    """Target ids of a reduced vocabulary, rising and spread out."""
    return torch.arange(count) * (vocab - 1) // max(1, count - 1)


def tensors_of(case: Case, vocab: int = V, target_hidden: int = H) -> dict[str, Tensor]:
    """Random tensors under the layout's names."""
    hidden, plain = case.hidden, case.facts.get("plain", False)
    heads, kv, width = 4, 2, D
    taps_width = len(case.taps) * target_hidden
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden if plain else taps_width)}
    for i in range(case.layers):
        name = case.first if i == 0 else f"layers.{i}."
        reads = 2 * hidden if i == 0 and not plain else hidden
        shapes |= {
            f"{name}self_attn.q_proj.weight": (heads * width, reads),
            f"{name}self_attn.k_proj.weight": (kv * width, reads),
            f"{name}self_attn.v_proj.weight": (kv * width, reads),
            f"{name}self_attn.o_proj.weight": (hidden, heads * width),
            f"{name}mlp.gate_proj.weight": (INNER, hidden),
            f"{name}mlp.up_proj.weight": (INNER, hidden),
            f"{name}mlp.down_proj.weight": (hidden, INNER),
            f"{name}post_attention_layernorm.weight": (hidden,),
        }
        if not (plain and i == 0):
            shapes[f"{name}input_layernorm.weight"] = (hidden,)
        if i == 0 and not plain:
            shapes[f"{name}hidden_norm.weight"] = (hidden,)
        if case.qk_norm:
            shapes |= {f"{name}self_attn.{p}_norm.weight": (width,) for p in "qk"}
    shapes |= {
        name: shape
        for name, shape in {
            "norm.weight": (hidden,),
            "input_norm.weight": (taps_width,),
            **dict.fromkeys(FC_NORMS, (target_hidden,)),
            "lm_head.weight": (case.draft_vocab, hidden),
            "embed_tokens.weight": (vocab, hidden),
            "fc.bias": (hidden,),
            "mask_hidden": (1, 1, taps_width),
            "mask_hidden flat": (1, taps_width),
        }.items()
        if name in case.tensors
    }
    made = {}
    spread = 0.1 if plain else 0.2  # no norm keeps the states small, and large scores amplify roundings
    for name, shape in shapes.items():
        norm = name.endswith("norm.weight") or name in FC_NORMS
        made[name.removesuffix(" flat")] = 1 + 0.2 * torch.randn(shape) if norm else torch.randn(shape) * spread
    if "embed_tokens.weight" in made:
        made["embed_tokens.weight"] = (made["embed_tokens.weight"] * 3).to(case.embed_dtype)
    if "d2t" in case.tensors:
        kept = kept_ids(case.draft_vocab, vocab)
        made["d2t"] = kept - torch.arange(len(kept))
        made["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept, True)
    return made


def write_eagle(
    folder: Path,
    case: Case,
    *,
    vocab: int = V,
    target_hidden: int = H,
    seed: int = 3,
    changes: dict[str, Tensor | None] | None = None,
) -> Path:
    """Write the case's checkpoint. `changes` replaces tensors by stored name, or takes them away (None)."""
    torch.manual_seed(seed)
    tensors = tensors_of(case, vocab, target_hidden)
    for name, tensor in (changes or {}).items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(case, vocab)))
    if case.file.endswith(".bin"):
        torch.save(tensors, folder / case.file)
    else:
        save_file(tensors, folder / case.file)
    return folder
