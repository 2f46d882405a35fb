"""`DraftSpec`: the canonical description that every public draft format reduces to (formats page, section 7).

One base for what all drafters share and one class an algorithm family for the rest. Readers in `formats/drafts/` fill
them; drafters, exporters and `inspect` read nothing else.
"""

from dataclasses import dataclass, field
from typing import Any

FINAL_NORMED = -1  # the tap after the target's final norm; a tap L is the raw state before it


@dataclass(frozen=True)
class AttentionShape:
    """One decoder layer's attention and MLP shape."""

    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    bias: bool = False
    qk_norm: bool = True
    window: int | None = None  # sliding window W, see BlockSpec.window_anchor
    causal_in_block: bool = False


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """What every drafter has. Sizes are in elements; `taps` index HS[0..L] (0: embedding output, i + 1: layer i)."""

    family: str  # the writer's format: "deepspec", "zlab", "speculators", "specforge", "gguf", ...
    algorithm: str  # "dspark", "dflash", "dflash2", "eagle3", "peagle", "eagle", "mtp", "medusa", "causal-lm", ...
    hidden_size: int
    vocab_size: int  # rows of the target's vocabulary
    draft_vocab_size: int | None = None  # rows of the draft head where it is smaller; then a map `d2t` goes with it
    target_hidden_size: int | None = None  # None: equal to hidden_size
    layers: tuple[AttentionShape, ...] = ()
    taps: tuple[int, ...] = ()
    tap_final_is_prenorm: bool = True  # a tap equal to L is the raw state, not the one after the final norm
    rms_norm_eps: float = 1e-6
    rope: dict[str, Any] = field(default_factory=dict)  # rope_type, rope_theta and what the type needs
    embed_source: str = "target"  # "checkpoint" or "target"
    head_source: str = "target"
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None  # applied to the base logits, before a Markov bias
    num_target_layers: int | None = None  # the target depth that the checkpoint names, if it does
    target_name: str | None = None  # the target that the checkpoint names, if it does
    origin: dict[str, str] = field(default_factory=dict, compare=False)  # field name -> where its value came from

    @property
    def has_vocabulary_map(self) -> bool:
        """Whether draft ids differ from target ids (tensor `d2t`, absolute target ids)."""
        return self.draft_vocab_size is not None and self.draft_vocab_size != self.vocab_size

    @property
    def head_rows(self) -> int:
        return self.draft_vocab_size or self.vocab_size

    @property
    def max_draft(self) -> int:
        """Most tokens that one round can propose."""
        raise NotImplementedError

    @property
    def default_draft(self) -> int:
        """Tokens that a round proposes unless told otherwise."""
        return self.max_draft


@dataclass(frozen=True, kw_only=True)
class BlockSpec(DraftSpec):
    """A parallel block drafter: DSpark, DFlash, DFlash2 (formats page 1.1, 1.2, 1.5, 1.6, 1.7.1, 1.7.2, 1.9)."""

    block_size: int  # B rows in a block
    row_offset: int  # 1: row k predicts anchor + k + 1 (B drafts); 0: row k predicts anchor + k (rows 1..B-1)
    mask_id: int
    backbone: str = "qwen3"  # "qwen3" or "gemma4"
    window_anchor: str = "query"  # sliding layers: "query": |query - key| < W; "block": key >= anchor - W
    markov: str | None = None  # None, "vanilla", "gated", "rnn"
    markov_rank: int = 0
    confidence: str | None = None  # None, "hidden" (h), "hidden+markov" ([h ; W1[prev]])
    conv_kernel_size: int = 0  # DFlash2: causal convolutions over the block; 0: none
    conv_group_size: int = 0
    selector_rank: int = 0  # DFlash2: candidate selector; 0: none
    selector_top_k: int = 0
    v_from_k: bool = False  # Gemma4: no v_proj, V is the raw key projection
    layer_scalar: bool = False  # Gemma4

    @property
    def max_draft(self) -> int:
        return self.block_size if self.row_offset == 1 else self.block_size - 1


MOST_LOOKED_UP = 64  # looked-up tokens cost nothing to draft, but each is a row to verify
MOST_STEPS = 16  # a recurrent drafter has no block; beyond this its state has drifted off what any was trained for


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec(DraftSpec):
    """A feature-recurrent drafter: EAGLE-1/2/3, P-EAGLE, MTP (formats page 1.3, 1.7.4 to 1.7.6, 1.8, 1.10, 1.12)."""

    draft_tokens: int  # proposed in a round unless told otherwise
    feature_norm: str | None = None  # None; "before_fc" (input_norm over all taps); "per_tap" (fc_norm.i)
    residual_normed: bool = False  # EAGLE-3: the residual of the first layer is the normed feature
    recurrent_normed: bool = False  # the vector fed back is after the final norm
    head_normed: bool = True  # the final norm stands before the head
    fc_bias: bool = False  # EAGLE-1/2
    hidden_first: bool = False  # MTP: the projection reads [hidden ; embedding] (MiMo) instead of [embedding ; hidden]
    norm_offset: bool = False  # MTP of Qwen3-Next/3.5: RMSNorm is x_hat * (1 + w)
    block_class: str | None = None  # MTP: whose decoder layer it is ("qwen3_next", "deepseek_v3", "mimo", ...)
    mask_id: int | None = None  # P-EAGLE: token of the parallel depths
    backbone: str | None = None  # EAGLE-3: "gemma4" where its layer is Gemma4's, else the Llama and Qwen3 form
    v_from_k: bool = False  # as of BlockSpec
    layer_scalar: bool = False

    @property
    def max_draft(self) -> int:
        return MOST_STEPS

    @property
    def default_draft(self) -> int:
        return self.draft_tokens


@dataclass(frozen=True, kw_only=True)
class MedusaSpec(DraftSpec):
    """Medusa-1 heads on the target's last hidden state (formats page 1.11)."""

    num_heads: int
    res_layers: int = 1  # ResBlocks a head, all of one head share one module in the reference
    fc_bias: bool = True
    shared_head: bool = False  # all heads end in one projection to the vocabulary (vLLM: `original_lm_head`)

    @property
    def max_draft(self) -> int:
        return self.num_heads


@dataclass(frozen=True, kw_only=True)
class CausalLMSpec(DraftSpec):
    """A small causal LM as the drafter (formats page 1.13); `vocab_size` is its own."""

    model_type: str
    draft_tokens: int = 5
    confidence: str = "max-probability"  # of its next token, before the draw: known from the tokens before it alone

    @property
    def max_draft(self) -> int:
        return MOST_STEPS

    @property
    def default_draft(self) -> int:
        return self.draft_tokens


@dataclass(frozen=True, kw_only=True)
class PromptLookupSpec(DraftSpec):
    """n-gram look-up in the text so far; needs no checkpoint."""

    longest: int = 3  # n-grams tried, longest first
    shortest: int = 1
    draft_tokens: int = 10

    @property
    def max_draft(self) -> int:
        return max(MOST_LOOKED_UP, self.draft_tokens)

    @property
    def default_draft(self) -> int:
        return self.draft_tokens


@dataclass(frozen=True, kw_only=True)
class EarlyExitSpec(DraftSpec):
    """A light head on the target's own layer `taps[0]` (docs/early-exit-format.md)."""

    draft_tokens: int = 4
    own_norm: bool = False  # a final norm of its own; else the target's

    @property
    def exit_layer(self) -> int:
        """The target's layers that run before the head."""
        return self.taps[0]

    @property
    def max_draft(self) -> int:
        return MOST_STEPS

    @property
    def default_draft(self) -> int:
        return self.draft_tokens
