"""Which backbone and which sequential head a block drafter's spec calls for. A new kind is a line here."""

from specdoctor.drafters.backbone import Backbone
from specdoctor.drafters.dflash2 import CandidateSelector, ConvolvedBackbone
from specdoctor.drafters.gemma4 import Gemma4Backbone
from specdoctor.drafters.heads import HEADS, VanillaHead
from specdoctor.formats.spec import BlockSpec

SequentialHead = VanillaHead | CandidateSelector  # `start`, `step` and `corrected`: see heads.py


def make_backbone(spec: BlockSpec) -> Backbone:
    """The layers that turn context and block into hidden states."""
    if spec.backbone == "gemma4":
        return Gemma4Backbone(spec)
    return ConvolvedBackbone(spec) if spec.conv_kernel_size else Backbone(spec)


def make_sequential_head(spec: BlockSpec) -> SequentialHead | None:
    """What makes a row's logits depend on the token before it; None where nothing does."""
    if spec.selector_top_k:
        return CandidateSelector(spec.vocab_size, spec.hidden_size, spec.selector_rank, spec.selector_top_k)
    if spec.markov is None:
        return None
    return HEADS[spec.markov](spec.vocab_size, spec.hidden_size, spec.markov_rank, spec.head_rows)
