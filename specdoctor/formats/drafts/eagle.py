"""Reader of EAGLE-1 and EAGLE-2 checkpoints (formats page 1.10); they differ in the drafted tree only."""

from specdoctor.formats.drafts.block_tensors import layer_tensor_shapes
from specdoctor.formats.drafts.checkpoint import Reading, TensorSource, same_names
from specdoctor.formats.drafts.eagle3_tensors import rotary_buffers
from specdoctor.formats.drafts.eagle_parts import DRAFT_TOKENS, NEVER_OF_USE, read_draft_layers
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import FINAL_NORMED, RecurrentSpec


def read_eagle(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """A plain Llama config and `fc.weight` [H, 2 H]; the feature is the target's last state after its final norm."""
    fields = Fields(config, "SafeAILab EAGLE")
    fields.put("family", "eagle", "tensors: fc.weight without lm_head and norm")
    fields.put("algorithm", "eagle", "tensors: fc.weight without lm_head and norm")
    read_draft_layers(fields, config, qk_norm=False)
    fields.put("taps", (FINAL_NORMED,), "the format: the last state after the final norm")
    fields.put("tap_final_is_prenorm", False, "the format: the last state after the final norm")
    biased = "fc.bias" in tensors
    fields.put("fc_bias", biased, "tensor fc.bias" if biased else "no tensor fc.bias in the file")
    fields.put("head_normed", False, "the format: the layer's output goes to the target's head as it is")
    fields.put("head_source", "target", "the format: the head is the target's")
    fields.source("embed_source", "embed_tokens.weight", "embed_tokens.weight" in tensors)
    fields.put("draft_tokens", DRAFT_TOKENS, "chosen here; the format leaves it to the run")
    spec = fields.build(RecurrentSpec)
    ignored = {"bias": "told by fc.bias", **NEVER_OF_USE}
    return Reading(spec, same_names(eagle_tensor_shapes(spec)), rotary_buffers(tensors), ignored)


def eagle_tensor_shapes(spec: RecurrentSpec) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes: a decoder whose first layer has no norm before its attention, and none at the end."""
    H = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 2 * H)}
    if spec.fc_bias:
        shapes["fc.bias"] = (H,)
    for i, layer in enumerate(spec.layers):
        own = layer_tensor_shapes(layer, H)
        if i == 0:
            del own["input_layernorm.weight"]
        shapes |= {f"layers.{i}.{name}": shape for name, shape in own.items()}
    if spec.embed_source == "checkpoint":
        shapes["embed_tokens.weight"] = (spec.vocab_size, H)
    return shapes
