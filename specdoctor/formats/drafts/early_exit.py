"""Reader of early-exit heads, a format of our own (docs/early-exit-format.md)."""

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.block_tensors import layer_tensor_shapes
from specdoctor.formats.drafts.checkpoint import Reading, TensorSource, same_names
from specdoctor.formats.drafts.config_parts import read_layers, read_rope
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import EarlyExitSpec

ARCHITECTURE = "SpecdoctorEarlyExitModel"


def read_early_exit(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """An exit layer of the target, and one or more decoder layers behind it."""
    fields = Fields(config, "specdoctor")
    exit_layer, depth = config.positive("exit_layer"), config.positive("num_target_layers")
    if exit_layer >= depth:
        raise SpecdoctorError(
            f"{config.path}: key exit_layer is {exit_layer}, expected less than num_target_layers, {depth}"
        )
    fields.put("family", "specdoctor", "architectures")
    fields.put("algorithm", "early-exit", "architectures")
    fields.key("taps", (exit_layer,), "exit_layer")
    fields.key("num_target_layers", depth, "num_target_layers")
    fields.key("hidden_size", config.positive("hidden_size"), "hidden_size")
    fields.key("vocab_size", config.positive("vocab_size"), "vocab_size")
    qk_norm = "layers.0.self_attn.q_norm.weight" in tensors
    fields.key("layers", read_layers(config, qk_norm=qk_norm), "num_hidden_layers")
    fields.key("rms_norm_eps", float(config.get("rms_norm_eps", (int, float))), "rms_norm_eps")
    fields.key("rope", read_rope(config), "rope_parameters" if config.has("rope_parameters") else "rope_theta")
    fields.key("draft_tokens", config.positive("draft_tokens", 4), "draft_tokens")
    fields.key("target_name", config.get("target_name", str, None), "target_name")
    own_norm = "norm.weight" in tensors
    fields.put("own_norm", own_norm, "tensor norm.weight" if own_norm else "no tensor norm.weight: the target's")
    spec = fields.build(EarlyExitSpec)
    return Reading(spec, same_names(early_exit_tensor_shapes(spec)))


def early_exit_tensor_shapes(spec: EarlyExitSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes [out, in]: decoder layers and, if it has one of its own, the final norm."""
    H = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (H,)} if spec.own_norm else {}
    for i, layer in enumerate(spec.layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer_tensor_shapes(layer, H).items()}
    return shapes
