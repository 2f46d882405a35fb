"""`EagleSpec`: the canonical description of an EAGLE-3 drafter (formats page 1.3, 1.7.4, 1.8, and section 7)."""

from dataclasses import dataclass, field
from typing import Any

from specdoctor.formats.spec import AttentionShape


@dataclass(frozen=True)
class EagleSpec:
    """A feature-recurrent drafter: one token a step, fed with its own hidden state."""

    family: str  # "deepspec", "speculators", "specforge"
    hidden_size: int
    target_hidden_size: int
    vocab_size: int  # target rows, of the embedding
    draft_vocab_size: int  # rows of the head
    layers: tuple[AttentionShape, ...]  # the first takes [embedding ; feature], 2 H wide
    taps: tuple[int, ...]  # indices into HS[0..L] of the target
    draft_tokens: int  # proposed in a round unless told otherwise
    rms_norm_eps: float
    rope: dict[str, Any]
    feature_norm: str | None = None  # None; "before_fc" (input_norm over all taps); "per_tap" (fc_norm.i)
    residual_normed: bool = False  # the residual of the first layer is the normed feature
    recurrent_normed: bool = False  # the vector fed back is after the final norm
    head_normed: bool = True  # the final norm stands before the head
    embed_source: str = "checkpoint"
    head_source: str = "checkpoint"
    algorithm: str = "eagle3"
    num_target_layers: int | None = None
    origin: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def has_map(self) -> bool:
        """Whether draft ids differ from target ids (tensor d2t)."""
        return self.draft_vocab_size != self.vocab_size
