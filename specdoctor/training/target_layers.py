"""What a drafter takes over from its target when it is made: the shape of its layers, RoPE, and the layers' values.

For targets whose decoder layers are of the Llama form (Llama, Qwen2, Qwen3, Mistral and their likes): pre-norm, gated
SiLU MLP, RMSNorm x_hat * w, RoPE over the whole head.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from specdoctor.engine.target import Target
from specdoctor.errors import SpecdoctorError
from specdoctor.formats.spec import AttentionShape

LLAMA_FORM = ("llama", "qwen2", "qwen3", "mistral", "smollm3")
NORM = 1.0
SPREAD = 0.02  # standard deviation of projections that start at random


def layer_shape(target: Target, *, qk_norm: bool | None = None, intermediate_size: int | None = None) -> AttentionShape:
    """The target's own layer shape, without a window; `qk_norm` None: as the target has it."""
    config, layer = target.config, _tensors(target, 0)
    heads = config.num_attention_heads
    return AttentionShape(
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate_size=intermediate_size or config.intermediate_size,
        bias="self_attn.q_proj.bias" in layer,
        qk_norm="self_attn.q_norm.weight" in layer if qk_norm is None else qk_norm,
    )


def rope_settings(target: Target) -> dict[str, Any]:
    """The target's RoPE as `DraftSpec.rope` has it."""
    config = target.config
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "full_attention" in rope:
        rope = dict(rope["full_attention"])
    theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
    if theta is None:
        raise SpecdoctorError(
            f"{target.name}: {config.model_type} has no rotary positions; expected a target with RoPE"
        )
    rope |= {"rope_theta": float(theta), "rope_type": rope.get("rope_type", "default")}
    if (longest := getattr(config, "max_position_embeddings", None)) is not None:
        rope.setdefault("max_position_embeddings", longest)
    return rope


def layer_values(target: Target, index: int, shape: AttentionShape) -> dict[str, Tensor]:
    """The values of the target's layer `index` (float32, copies) as a drafter's layer of `shape` names them.

    What the shape has and the target has not is left out: other MLP widths, norms on queries and keys. Raises
    `SpecdoctorError` for a target of another form.
    """
    held = _tensors(target, index)
    own = layer_shape(target)
    if replace(shape, qk_norm=own.qk_norm, bias=own.bias, intermediate_size=own.intermediate_size) != own:
        raise SpecdoctorError(
            f"draft.init target-layers: the drafter's layers ({shape.heads} heads of {shape.head_dim}, "
            f"{shape.kv_heads} for keys) differ from those of {target.name}; use draft.init: scratch"
        )
    values = {
        name: value
        for name, value in held.items()
        if not name.startswith("self_attn.") or shape.bias or "bias" not in name
    }
    if not shape.qk_norm:
        values = {
            name: value for name, value in values.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))
        }
    if shape.intermediate_size != own.intermediate_size:
        values = {name: value for name, value in values.items() if not name.startswith("mlp.")}
    if shape.bias and "self_attn.o_proj.bias" not in values:
        values["self_attn.o_proj.bias"] = torch.zeros_like(values["self_attn.o_proj.weight"][:, 0])
    return values


def final_norm_value(target: Target) -> Tensor:
    """The weight of the target's final norm [H], float32, a copy."""
    _refuse_other_form(target)
    return target.final_norm.weight.detach().float().clone()  # type: ignore[operator]


def start_values(module: nn.Module, generator: torch.Generator) -> None:
    """Give a module made on the meta device its first values: norms 1, biases 0, projections normal(0, 0.02)."""
    module.to_empty(device="cpu")
    for name, parameter in module.named_parameters():
        with torch.no_grad():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else NORM)
            else:
                parameter.normal_(0.0, SPREAD, generator=generator)


def _tensors(target: Target, index: int) -> dict[str, Tensor]:
    _refuse_other_form(target)
    return {name: t.detach().float().cpu().clone() for name, t in target.layers[index].state_dict().items()}


def _refuse_other_form(target: Target) -> None:
    if target.config.model_type not in LLAMA_FORM:
        raise SpecdoctorError(
            f"{target.name}: its layers are of {target.config.model_type}, expected one of {', '.join(LLAMA_FORM)}; a "
            "drafter of that form cannot be made for it"
        )
