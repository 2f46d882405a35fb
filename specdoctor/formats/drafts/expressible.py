"""What each export format can express: the one table that `export` refuses by and `inspect` lists targets from.

A rule is a condition that makes a drafter inexpressible and the reason in words; `{0}` in it is the spec. Sources:
formats page 1.1 to 1.14, section 3, and for GGUF the sources of llama.cpp build 11434.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from specdoctor.formats.drafts.gguf_rope import why_no_gguf_rope
from specdoctor.formats.spec import BlockSpec, DraftSpec, RecurrentSpec

FORMATS = {
    "deepspec": "DeepSpec folder",
    "speculators": "speculators folder (vLLM)",
    "zlab": "z-lab folder (SGLang, vLLM)",
    "gguf": "GGUF file (llama.cpp)",
}


class Rule(NamedTuple):
    """`refuses` a spec for `reason`; it is asked with a spec of its kind only."""

    refuses: Callable[[Any], bool]
    reason: str


def _differs(spec: DraftSpec, **allowed: object) -> bool:
    return any(getattr(spec, name) != value for name, value in allowed.items())


_GEMMA4 = Rule(lambda s: s.backbone not in (None, "qwen3"), "its layers are of the {0.backbone} form, not yet written")
_UNEVEN = Rule(
    lambda s: len({(x.heads, x.kv_heads, x.head_dim, x.intermediate_size, x.bias, x.qk_norm) for x in s.layers}) > 1,
    "its layers differ in shape, which a config of one shape cannot say",
)
_SMALL_VOCABULARY = Rule(
    lambda s: s.has_vocabulary_map, "it has a reduced vocabulary ({0.draft_vocab_size} of {0.vocab_size})"
)
_OTHER_WIDTH = Rule(
    lambda s: s.target_hidden_size not in (None, s.hidden_size),
    "its target is {0.target_hidden_size} wide and it is {0.hidden_size}",
)
_BIAS = Rule(lambda s: any(x.bias for x in s.layers), "its attention has biases")
_NO_QK_NORM = Rule(lambda s: not all(x.qk_norm for x in s.layers), "it has no norms on queries and keys")
_QK_NORM = Rule(lambda s: any(x.qk_norm for x in s.layers), "it has norms on queries and keys")
_TRANSFORMS = Rule(
    lambda s: _differs(s, embed_scale=1.0, logit_scale=1.0, softcap=None), "it scales or caps embedding or logits"
)
_MARKOV = Rule(lambda s: s.markov is not None, "it has a Markov head")
_CONFIDENCE = Rule(lambda s: s.confidence is not None, "it has a confidence head")
_DFLASH2 = Rule(lambda s: s.conv_kernel_size or s.selector_rank, "it has DFlash2's convolutions and candidate selector")
_HALF_DFLASH2 = Rule(
    lambda s: bool(s.selector_rank) != bool(s.conv_kernel_size),
    "it has only one of DFlash2's convolutions and candidate selector",
)
_WINDOW = Rule(lambda s: any(x.window or x.causal_in_block for x in s.layers), "it has sliding or causal layers")
_WINDOWS_DIFFER = Rule(
    lambda s: len({x.window for x in s.layers if x.window}) > 1, "its layers have windows of several widths"
)
_FINAL_TAP = Rule(
    lambda s: s.num_target_layers in s.taps, "it taps the target's last layer ({0.num_target_layers}), refused there"
)
_EMBEDDING_TAP = Rule(lambda s: 0 in s.taps, "it taps the target's embedding output")
_NO_TAPS = Rule(lambda s: not s.taps, "its taps depend on the target's depth: give the target")
_ONE_LAYER = Rule(lambda s: len(s.layers) != 1, "it has more than one layer")
_ANCHOR_LAST = Rule(
    lambda s: s.row_offset != 1,
    "its row k predicts anchor + k; there row k means anchor + k + 1, so drafts would shift",
)
_ANCHOR_FIRST = Rule(
    lambda s: s.row_offset != 0,
    "its row k predicts anchor + k + 1; there row k means anchor + k, so drafts would shift",
)
_NOT_THREE_TAPS = Rule(lambda s: len(s.taps) != 3, "it has another number of taps than three: {0.taps}")
_FEEDS_NORMED = Rule(lambda s: s.recurrent_normed, "it feeds back the vector after the final norm")
_HEAD_UNNORMED = Rule(lambda s: not s.head_normed, "its head reads the vector before the final norm")
_PER_TAP = Rule(lambda s: s.feature_norm == "per_tap", "it norms each tap apart (fc_norm)")


def _mixed_causality(spec: BlockSpec) -> bool:
    """Neither all layers alike, nor z-lab's rule that the sliding ones are causal."""
    causal = {layer.causal_in_block for layer in spec.layers}
    return len(causal) > 1 and any(layer.causal_in_block != bool(layer.window) for layer in spec.layers)


def _speculators_causality(spec: BlockSpec) -> bool:
    """Full layers are bidirectional there, sliding ones causal or not, all the same."""
    sliding = {layer.causal_in_block for layer in spec.layers if layer.window}
    return len(sliding) > 1 or any(layer.causal_in_block for layer in spec.layers if not layer.window)


def _windows_by(spec: BlockSpec, anchor: str) -> bool:
    """Whether windows begin elsewhere than the format says."""
    return spec.window_anchor != anchor and any(layer.window for layer in spec.layers)


_QUERY_WINDOWS = Rule(lambda s: _windows_by(s, "query"), "its windows begin at the anchor, there at each row")
_BLOCK_WINDOWS = Rule(lambda s: _windows_by(s, "block"), "its windows begin at each row, there at the anchor")

RULES: dict[str, dict[str, tuple[Rule, ...]]] = {
    "deepspec": {
        "block": (
            _GEMMA4,
            _DFLASH2,
            _ANCHOR_LAST,
            _SMALL_VOCABULARY,
            _WINDOW,
            _TRANSFORMS,
            _NO_QK_NORM,
            _UNEVEN,
            _OTHER_WIDTH,
            _FINAL_TAP,
        ),
        "eagle3": (
            _GEMMA4,
            _NO_TAPS,
            _EMBEDDING_TAP,
            _SMALL_VOCABULARY,
            _NO_QK_NORM,
            _ONE_LAYER,
            Rule(lambda s: s.feature_norm is not None, "it norms its taps before fc"),
            Rule(lambda s: s.residual_normed, "its residual is the normed feature (norm_before_residual)"),
            _FEEDS_NORMED,
            _HEAD_UNNORMED,
            _OTHER_WIDTH,
            _FINAL_TAP,
        ),
    },
    "speculators": {
        "block": (
            _GEMMA4,
            _HALF_DFLASH2,
            Rule(lambda s: s.selector_rank and s.has_vocabulary_map, "it is a DFlash2 with a reduced vocabulary"),
            Rule(lambda s: s.markov == "rnn" and s.row_offset == 0, "its rnn head starts at row 1, there at row 0"),
            _BLOCK_WINDOWS,
            Rule(_speculators_causality, "its in-block causality follows another rule than sliding layers"),
            _WINDOWS_DIFFER,
            _TRANSFORMS,
            _UNEVEN,
            Rule(
                lambda s: s.num_target_layers in s.taps and not s.tap_final_is_prenorm,
                "its last tap is after the target's final norm, there before it",
            ),
        ),
        "eagle3": (_GEMMA4, _NOT_THREE_TAPS, _HEAD_UNNORMED, _UNEVEN),
        "peagle": (_GEMMA4, _NOT_THREE_TAPS, _HEAD_UNNORMED, _UNEVEN),
    },
    "zlab": {
        "block": (
            _GEMMA4,
            _HALF_DFLASH2,
            _MARKOV,
            _CONFIDENCE,
            _ANCHOR_FIRST,
            _SMALL_VOCABULARY,
            _QUERY_WINDOWS,
            _WINDOWS_DIFFER,
            Rule(_mixed_causality, "its in-block causality follows another rule than sliding layers"),
            _NO_QK_NORM,
            _UNEVEN,
            _OTHER_WIDTH,
            _EMBEDDING_TAP,
            Rule(
                lambda s: s.num_target_layers in s.taps and s.tap_final_is_prenorm,
                "its last tap is before the target's final norm, there after it",
            ),
        ),
    },
    "gguf": {
        "block": (
            _GEMMA4,
            Rule(
                lambda s: s.markov in ("gated", "rnn"), "its Markov head is {0.markov}, and only vanilla is known there"
            ),
            Rule(
                lambda s: s.confidence is not None and (s.markov is None or s.confidence != "hidden+markov"),
                "its confidence head reads the hidden state alone, there [hidden ; W1[previous]]",
            ),
            Rule(
                lambda s: s.markov is not None and _differs(s, logit_scale=1.0, softcap=None),
                "it scales or caps logits before the Markov bias, which is not done there",
            ),
            _HALF_DFLASH2,
            Rule(
                lambda s: s.hidden_size < s.selector_top_k * (s.selector_top_k + 1),
                "its selector lattice of {0.selector_top_k} candidates needs a wider hidden state than {0.hidden_size}",
            ),
            Rule(
                lambda s: len({x.causal_in_block for x in s.layers}) > 1,
                "only some of its layers are causal in the block, there all or none",
            ),
            _QUERY_WINDOWS,
            _WINDOWS_DIFFER,
            _BIAS,
            _NO_QK_NORM,
            _UNEVEN,
            _OTHER_WIDTH,
            _FINAL_TAP,
        ),
        "eagle3": (
            _GEMMA4,
            _NOT_THREE_TAPS,
            _QK_NORM,
            _ONE_LAYER,
            _BIAS,
            _PER_TAP,
            _FEEDS_NORMED,
            _HEAD_UNNORMED,
            _FINAL_TAP,
            Rule(lambda s: any(x.window for x in s.layers), "it has a sliding layer"),
        ),
    },
}


def expressible(spec: DraftSpec, format: str) -> str | None:
    """Why a drafter cannot be written in `format` (a key of `FORMATS`), in words; None when it can."""
    kind = "block" if isinstance(spec, BlockSpec) else spec.algorithm if isinstance(spec, RecurrentSpec) else ""
    rules = RULES[format].get(kind)
    if rules is None and spec.family == format:
        return f"it is a {FORMATS[format]} already, there is nothing to write"
    if rules is None:
        return f"a {FORMATS[format]} has no place for a drafter of the kind {spec.algorithm}"
    for rule in rules:
        if rule.refuses(spec):
            return rule.reason.format(spec)
    return why_no_gguf_rope(spec.rope) if format == "gguf" else None
