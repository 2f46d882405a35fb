"""`DraftSpec`: the canonical description that every public draft format reduces to (formats page, section 7)."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AttentionShape:
    """One decoder layer's attention and MLP shape."""

    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    bias: bool = False
    qk_norm: bool = True
    window: int | None = None  # sliding window W: a row sees keys with query position - key position < W
    causal_in_block: bool = False


@dataclass(frozen=True)
class DraftSpec:
    """What a block drafter (DSpark, DFlash) is, whatever the format it came from."""

    family: str  # the writer's format: "deepspec", "zlab"
    algorithm: str  # "dspark" or "dflash"
    hidden_size: int
    vocab_size: int
    layers: tuple[AttentionShape, ...]
    taps: tuple[int, ...]  # indices into HS[0..L] of the target: 0 embedding output, i + 1 raw output of layer i
    block_size: int  # B rows in a block
    row_offset: int  # 1: row k predicts anchor + k + 1 (B drafts); 0: row k predicts anchor + k (rows 1..B-1)
    mask_id: int
    rms_norm_eps: float
    rope: dict[str, Any]  # rope_type, rope_theta and what the type needs
    markov: str | None = None  # None, "vanilla", "gated", "rnn"
    markov_rank: int = 0
    confidence: str | None = None  # None, "hidden" (h), "hidden+markov" ([h ; W1[prev]])
    embed_source: str = "target"  # "checkpoint" or "target"
    head_source: str = "target"
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None  # applied to the base logits, before the Markov bias
    num_target_layers: int | None = None  # the target depth that the checkpoint names, if it does
    origin: dict[str, str] = field(default_factory=dict, compare=False)  # where each value came from

    @property
    def max_draft(self) -> int:
        """Most tokens that one block proposes."""
        return self.block_size if self.row_offset == 1 else self.block_size - 1
