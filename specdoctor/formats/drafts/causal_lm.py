"""Reader of a plain causal LM as the drafter (formats page 1.13).

What the keys and tensors mean is the affair of transformers' class for that `model_type`, which runs the model: it
reads the config, and `Target.load` refuses a tensor that is missing or has another shape than the config promises.
Here only what a drafter is told by is read, from the config and the headers.
"""

from typing import Any

from specdoctor.formats.drafts.checkpoint import Reading, Remark, Stored, TensorSource
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import AttentionShape, CausalLMSpec

# The same fact under the keys of the many model classes, the usual one first.
HIDDEN, DEPTH, HEADS = ("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head")
INNER = ("intermediate_size", "ffn_dim", "n_inner")


def read_causal_lm(config: JsonConfig, tensors: TensorSource, target_layers: int | None) -> Reading:
    """A causal LM: its own embedding, layers and head. `target_layers` does not matter to it."""
    fields = Fields(config, "transformers")
    part = "text_config." if isinstance(config.find("text_config"), dict) else ""
    fields.put("family", "causal-lm", "architectures")
    fields.put("algorithm", "causal-lm", "architectures")
    fields.key("model_type", config.get("model_type", str), "model_type")
    hidden = _of(config, part, HIDDEN)
    fields.key("hidden_size", config.positive(hidden), hidden)
    fields.key("vocab_size", config.positive(f"{part}vocab_size"), f"{part}vocab_size")
    fields.key("layers", _layers(config, part), _of(config, part, DEPTH))
    fields.put("embed_source", "checkpoint", "the format: a whole model")
    fields.put("head_source", "checkpoint", "the format: a whole model")
    fields.put("draft_tokens", CausalLMSpec.draft_tokens, "default of specdoctor")
    eps = next((key for key in (f"{part}rms_norm_eps", f"{part}layer_norm_epsilon") if config.has(key)), None)
    if eps is not None:
        fields.key("rms_norm_eps", float(config.get(eps, (int, float))), eps)
    rope = next((key for key in (f"{part}rope_parameters", f"{part}rope_scaling") if config.find(key)), None)
    if rope is not None:
        fields.key("rope", config.get(rope, dict), rope)
    loader = f"transformers' class for model_type {fields.values['model_type']}"
    return Reading(
        fields.build(CausalLMSpec),
        {name: Stored(name, tensors.shape(name)) for name in tensors.names()},
        ignored_keys={"*": f"read by {loader}"},
        remarks=[
            Remark(
                "ignored",
                f"{config.path}",
                f"the tensors are accounted for by {loader} when it loads them: a missing one or another shape is "
                "refused then",
            )
        ],
    )


def _of(config: JsonConfig, part: str, keys: tuple[str, ...]) -> str:
    """The first of `keys` that the config has."""
    return next((part + key for key in keys if config.find(part + key) is not None), part + keys[0])


def _layers(config: JsonConfig, part: str) -> tuple[AttentionShape, ...]:
    """One shape a layer, as far as the usual keys tell it: for display, the model's own class computes."""
    count, heads = config.positive(_of(config, part, DEPTH)), config.positive(_of(config, part, HEADS))
    hidden = config.positive(_of(config, part, HIDDEN))
    kinds: Any = config.get(f"{part}layer_types", list, None) or ["full_attention"] * count
    window = config.get(f"{part}sliding_window", int, None)
    return tuple(
        AttentionShape(
            heads=heads,
            kv_heads=config.positive(f"{part}num_key_value_heads", heads),
            head_dim=config.positive(f"{part}head_dim", max(1, hidden // heads)),
            intermediate_size=config.positive(_of(config, part, INNER), 4 * hidden),
            bias=config.get(f"{part}attention_bias", bool, False),
            qk_norm=False,
            window=window if kind == "sliding_attention" else None,
        )
        for kind in kinds
    )
