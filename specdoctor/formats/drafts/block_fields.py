"""Fields that every writer of block drafters has: sizes, layers, RoPE, sources, Markov and confidence heads."""

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.checkpoint import TensorSource
from specdoctor.formats.drafts.config_parts import read_layers, read_rope
from specdoctor.formats.drafts.fields import Fields
from specdoctor.formats.json_config import JsonConfig

MARKOV_HEADS = ("vanilla", "gated", "rnn")


def read_block_common(
    fields: Fields, config: JsonConfig, tensors: TensorSource, *, sliding_is_causal: bool, qk_norm: bool = True
) -> None:
    """Sizes, layers, RoPE and who supplies embedding and head, from `config` (the object that describes the layers)."""
    at = config.prefix
    fields.key("hidden_size", config.positive("hidden_size"), f"{at}hidden_size")
    fields.key("vocab_size", config.positive("vocab_size"), f"{at}vocab_size")
    fields.key("rms_norm_eps", float(config.get("rms_norm_eps", (int, float))), f"{at}rms_norm_eps")
    rope = read_rope(config)
    fields.key("rope", rope, f"{at}rope_parameters" if config.has("rope_parameters") else f"{at}rope_theta")
    layers = read_layers(config, sliding_is_causal=sliding_is_causal, qk_norm=qk_norm)
    fields.key("layers", layers, f"{at}num_hidden_layers")
    fields.key("num_target_layers", config.get("num_target_layers", int, None), f"{at}num_target_layers")
    fields.source("embed_source", "embed_tokens.weight", "embed_tokens.weight" in tensors)
    fields.source("head_source", "lm_head.weight", "lm_head.weight" in tensors)


def read_heads(
    fields: Fields,
    config: JsonConfig,
    *,
    rank: int,
    enabled: bool,
    prefix: str = "",
    default_type: str | None = None,
    default_with_markov: bool | None = None,
) -> int:
    """The Markov and the confidence head; returns the rank (0: no Markov head). `prefix` stands before the keys.

    A writer without a default for a key demands it.
    """
    missing = {} if default_type is None else {"default": default_type}
    missing_with = {} if default_with_markov is None else {"default": default_with_markov}
    if rank < 0:
        raise SpecdoctorError(f"{config.path}: key {prefix}markov_rank is {rank}, expected 0 (no head) or more")
    config.find(f"{prefix}markov_head_type")  # of no use without a rank
    head = config.get(f"{prefix}markov_head_type", str, **missing).lower() if rank > 0 else None
    if head is not None and head not in MARKOV_HEADS:
        raise SpecdoctorError(
            f"{config.path}: key {prefix}markov_head_type is {head!r}, expected one of {', '.join(MARKOV_HEADS)}"
        )
    confidence = None
    config.find(f"{prefix}confidence_head_with_markov")  # of no use without the head
    if enabled:
        with_markov = config.get(f"{prefix}confidence_head_with_markov", bool, **missing_with)
        confidence = "hidden+markov" if with_markov else "hidden"
        if with_markov and rank == 0:
            raise SpecdoctorError(
                f"{config.path}: {prefix}confidence_head_with_markov is true but {prefix}markov_rank is 0; "
                "expected a rank"
            )
    fields.key("markov", head, f"{prefix}markov_head_type")
    fields.key("markov_rank", rank, f"{prefix}markov_rank")
    fields.key("confidence", confidence, f"{prefix}enable_confidence_head")
    return rank
