"""Readers of EAGLE-3 checkpoints: DeepSpec (formats page 1.3)."""

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import Reading, TensorSource, same_names
from specdoctor.formats.drafts.config_parts import read_layers, read_rope, read_taps
from specdoctor.formats.drafts.eagle3_tensors import eagle3_tensor_shapes
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import RecurrentSpec


def read_deepspec_eagle3(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """DeepSpec's Qwen3 EAGLE-3: full vocabulary, own embedding and head, q/k norms, `ttt_length` drafts a round."""
    fields = Fields(config, "DeepSpec EAGLE-3")
    layers = read_layers(config)
    if len(layers) != 1:
        raise SpecdoctorError(
            f"{config.path}: key num_hidden_layers is {len(layers)}, expected 1 for DeepSpec's EAGLE-3"
        )
    fields.put("family", "deepspec", "architectures")
    fields.put("algorithm", "eagle3", "architectures")
    fields.key("layers", layers, "num_hidden_layers")
    fields.key("hidden_size", config.positive("hidden_size"), "hidden_size")
    fields.key("vocab_size", config.positive("vocab_size"), "vocab_size")
    fields.key("taps", read_taps(config, "target_layer_ids", lowest=0), "target_layer_ids")
    fields.key("draft_tokens", config.positive("ttt_length"), "ttt_length")
    fields.key("rms_norm_eps", float(config.get("rms_norm_eps", (int, float))), "rms_norm_eps")
    fields.key("rope", read_rope(config), "rope_parameters" if config.has("rope_parameters") else "rope_theta")
    fields.key("num_target_layers", config.get("num_target_layers", int, None), "num_target_layers")
    fields.source("embed_source", "embed_tokens.weight", "embed_tokens.weight" in tensors)
    fields.source("head_source", "lm_head.weight", "lm_head.weight" in tensors)
    spec = fields.build(RecurrentSpec)
    ignored = {
        "step_loss_decay": "training",
        "draft_num_hidden_layers": "equal to num_hidden_layers",
        "target_model_name_or_path": "the target is given by the user",
    }
    return Reading(spec, same_names(eagle3_tensor_shapes(spec)), ignored_keys=ignored)
