"""Names and shapes of the decoder block inside an MTP layer, by whose block it is (formats page 1.7.6, 1.12).

Names are the writer's, relative to the layer's prefix, and as transformers' decoder layer names them, except that
experts may be stored one by one (`mlp.experts.3.up_proj.weight`) or fused (`mlp.experts.gate_up_proj`).
"""

from dataclasses import dataclass

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.json_config import JsonConfig
from specdoctor.formats.spec import AttentionShape

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class BlockClass:
    """What tells the decoder blocks of model families apart."""

    attention: str = "plain"  # "plain"; "gated": the query projection also holds an output gate; "mla": DeepSeek's
    qkv_bias: bool | None = None  # None: key attention_bias
    o_bias: bool | None = None  # None: key attention_bias
    qk_norm: bool | None = False  # None: key use_qk_norm
    experts_key: str | None = None  # config key of the number of experts; None: dense
    shared_expert: str | None = None  # its module's name
    correction_bias: bool = False  # the router has e_score_correction_bias
    norm_offset: bool = False  # RMSNorm is x_hat * (1 + w)


_QWEN = BlockClass(attention="gated", qk_norm=True, norm_offset=True)
_QWEN_MOE = BlockClass(
    attention="gated", qk_norm=True, norm_offset=True, experts_key="num_experts", shared_expert="shared_expert"
)
_DEEPSEEK = BlockClass(
    attention="mla", experts_key="n_routed_experts", shared_expert="shared_experts", correction_bias=True
)

# By transformers' model_type; MiMo's block is Qwen2's.
BLOCK_CLASSES = {
    "qwen2": BlockClass(qkv_bias=True, o_bias=False),
    "mimo": BlockClass(qkv_bias=True, o_bias=False),
    "llama": BlockClass(),
    "qwen3": BlockClass(qk_norm=True),
    "qwen3_moe": BlockClass(qk_norm=True, experts_key="num_experts"),
    "qwen3_next": _QWEN_MOE,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN_MOE,
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": BlockClass(
        o_bias=False,
        qk_norm=None,
        experts_key="n_routed_experts",
        shared_expert="shared_experts",
        correction_bias=True,
    ),
}


def block_class(config: JsonConfig) -> tuple[str, BlockClass]:
    """The family of a config's decoder block. Raises `SpecdoctorError` for one that is not known here."""
    kind = config.get("model_type", str)
    if kind not in BLOCK_CLASSES:
        raise SpecdoctorError(
            f"{config.path}: key {config.prefix}model_type is {kind!r}; MTP layers can be run for "
            f"{', '.join(BLOCK_CLASSES)}"
        )
    return kind, BLOCK_CLASSES[kind]


def block_shapes(config: JsonConfig, known: BlockClass, experts: str | None) -> Shapes:
    """Tensors of one block. `experts`: None (a dense MLP), "separate" or "fused"."""
    H = config.positive("hidden_size")
    shapes: Shapes = {"input_layernorm.weight": (H,), "post_attention_layernorm.weight": (H,)}
    shapes |= {f"self_attn.{name}": shape for name, shape in _attention(config, known, H).items()}
    if experts is None:
        mlp = _mlp("", H, config.positive("intermediate_size"))
    else:
        mlp = _experts(config, known, H, fused=experts == "fused")
    return shapes | {f"mlp.{name}": shape for name, shape in mlp.items()}


def attention_shape(config: JsonConfig, known: BlockClass, dense: bool) -> AttentionShape:
    """The block's sizes, for the spec."""
    heads = config.positive("num_attention_heads")
    if known.attention == "mla":
        kv_heads, head_dim = heads, config.positive("qk_nope_head_dim") + config.positive("qk_rope_head_dim")
    else:
        kv_heads, head_dim = config.positive("num_key_value_heads", heads), _head_dim(config, heads)
    return AttentionShape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.positive("intermediate_size" if dense else "moe_intermediate_size"),
        bias=bool(_flag(config, known.qkv_bias, "attention_bias")),
        qk_norm=bool(_flag(config, known.qk_norm, "use_qk_norm")),
    )


def _attention(config: JsonConfig, known: BlockClass, H: int) -> Shapes:
    if known.attention == "mla":
        return _latent_attention(config, H)
    heads = config.positive("num_attention_heads")
    D, kv = _head_dim(config, heads), config.positive("num_key_value_heads", heads)
    q = heads * D
    shapes: Shapes = {
        "q_proj.weight": (2 * q if known.attention == "gated" else q, H),
        "k_proj.weight": (kv * D, H),
        "v_proj.weight": (kv * D, H),
        "o_proj.weight": (H, q),
    }
    if _flag(config, known.qkv_bias, "attention_bias"):
        shapes |= {f"{p}_proj.bias": shapes[f"{p}_proj.weight"][:1] for p in "qkv"}
    if _flag(config, known.o_bias, "attention_bias"):
        shapes["o_proj.bias"] = (H,)
    if _flag(config, known.qk_norm, "use_qk_norm"):
        shapes |= {"q_norm.weight": (D,), "k_norm.weight": (D,)}
    return shapes


def _latent_attention(config: JsonConfig, H: int) -> Shapes:
    """DeepSeek's multi-head latent attention: low-rank queries, one compressed key/value latent for all heads."""
    heads, nope = config.positive("num_attention_heads"), config.positive("qk_nope_head_dim")
    rope, value, rank = (config.positive(k) for k in ("qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
    q, bias = heads * (nope + rope), config.get("attention_bias", bool, False)
    shapes: Shapes = {
        "kv_a_proj_with_mqa.weight": (rank + rope, H),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (nope + value), rank),
        "o_proj.weight": (H, heads * value),
    }
    low = config.get("q_lora_rank", int, None)
    if low is None:
        shapes["q_proj.weight"] = (q, H)
    else:
        shapes |= {"q_a_proj.weight": (low, H), "q_a_layernorm.weight": (low,), "q_b_proj.weight": (q, low)}
    biased = ("kv_a_proj_with_mqa", "o_proj", *(() if low is None else ("q_a_proj",)))
    return shapes | ({f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased} if bias else {})


def _experts(config: JsonConfig, known: BlockClass, H: int, fused: bool) -> Shapes:
    assert known.experts_key is not None
    count, inner = config.positive(known.experts_key), config.positive("moe_intermediate_size")
    shapes: Shapes = {"gate.weight": (count, H)}
    if known.correction_bias:
        shapes["gate.e_score_correction_bias"] = (count,)
    if fused:
        shapes |= {"experts.gate_up_proj": (count, 2 * inner, H), "experts.down_proj": (count, H, inner)}
    else:
        for e in range(count):
            shapes |= _mlp(f"experts.{e}.", H, inner)
    if known.shared_expert == "shared_experts":
        shapes |= _mlp("shared_experts.", H, inner * config.positive("n_shared_experts", 1))
    elif known.shared_expert:
        shapes |= _mlp("shared_expert.", H, config.positive("shared_expert_intermediate_size"))
        shapes["shared_expert_gate.weight"] = (1, H)
    return shapes


def _mlp(prefix: str, H: int, inner: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (inner, H),
        f"{prefix}up_proj.weight": (inner, H),
        f"{prefix}down_proj.weight": (H, inner),
    }


def _head_dim(config: JsonConfig, heads: int) -> int:
    return config.positive("head_dim", config.positive("hidden_size") // heads)


def _flag(config: JsonConfig, known: bool | None, key: str) -> bool:
    return config.get(key, bool, False) if known is None else known
