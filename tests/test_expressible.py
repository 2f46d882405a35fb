"""The table of what each export format can express: every rule, in both directions."""

from dataclasses import replace
from typing import Any

import pytest

from specdoctor.formats.drafts.expressible import FORMATS, RULES, Rule, expressible
from specdoctor.formats.spec import AttentionShape, BlockSpec, CausalLMSpec, RecurrentSpec

V = 24
SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=16, intermediate_size=96)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
BLOCK = BlockSpec(
    family="x",
    algorithm="dflash",
    hidden_size=64,
    vocab_size=V,
    layers=(SHAPE, SHAPE),
    taps=(1, 2),
    block_size=4,
    row_offset=1,
    mask_id=5,
    rope=ROPE,
    num_target_layers=8,
)
ZLAB = replace(BLOCK, row_offset=0)
DSPARK = replace(BLOCK, markov="vanilla", markov_rank=8, algorithm="dspark")
EAGLE = RecurrentSpec(
    family="x",
    algorithm="eagle3",
    hidden_size=64,
    vocab_size=V,
    layers=(replace(SHAPE, qk_norm=False),),
    taps=(1, 2, 3),
    draft_tokens=5,
    rope=ROPE,
    num_target_layers=8,
)
EAGLE_QK = replace(EAGLE, layers=(SHAPE,))
WINDOW = replace(SHAPE, window=6)
CAUSAL = replace(WINDOW, causal_in_block=True)

DFLASH2 = replace(ZLAB, algorithm="dflash2", conv_kernel_size=2, conv_group_size=16, selector_rank=8, selector_top_k=6)

EXPRESSIBLE = [
    (DFLASH2, "speculators zlab gguf"),
    (BLOCK, "deepspec speculators gguf"),
    (ZLAB, "speculators zlab gguf"),
    (DSPARK, "deepspec speculators gguf"),
    (replace(DSPARK, row_offset=0), "speculators gguf"),
    (EAGLE, "speculators gguf"),
    (EAGLE_QK, "deepspec speculators"),
    (replace(ZLAB, layers=(CAUSAL, SHAPE)), "zlab"),
    (replace(ZLAB, layers=(CAUSAL, CAUSAL)), "zlab gguf"),
    (replace(ZLAB, layers=(WINDOW, SHAPE)), "zlab gguf"),
    (replace(ZLAB, layers=(CAUSAL, SHAPE), window_anchor="block"), "speculators"),
    (replace(ZLAB, softcap=3.0), "zlab gguf"),
    (replace(DSPARK, draft_vocab_size=10), "speculators gguf"),
]


@pytest.mark.parametrize(("spec", "formats"), EXPRESSIBLE)
def test_what_can_be_expressed(spec: Any, formats: str) -> None:
    assert {format for format in FORMATS if expressible(spec, format) is None} == set(formats.split())


REFUSED = [
    (replace(DSPARK, markov="gated"), "gguf", "its Markov head is gated, and only vanilla is known there"),
    (replace(DSPARK, markov="rnn"), "gguf", "its Markov head is rnn"),
    (replace(DSPARK, markov="rnn", row_offset=0), "speculators", "its rnn head starts at row 1"),
    (replace(DSPARK, confidence="hidden"), "gguf", "its confidence head reads the hidden state alone"),
    (replace(BLOCK, confidence="hidden"), "gguf", "its confidence head reads the hidden state alone"),
    (replace(BLOCK, confidence="hidden", row_offset=0), "zlab", "it has a confidence head"),
    (replace(DSPARK, row_offset=0), "zlab", "it has a Markov head"),
    (replace(DSPARK, softcap=30.0), "gguf", "it scales or caps logits before the Markov bias"),
    (replace(DSPARK, softcap=30.0), "deepspec", "it scales or caps embedding or logits"),
    (BLOCK, "zlab", "its row k predicts anchor"),
    (ZLAB, "deepspec", "its row k predicts anchor"),
    (replace(BLOCK, draft_vocab_size=10), "deepspec", "it has a reduced vocabulary (10 of 24)"),
    (replace(ZLAB, draft_vocab_size=10), "zlab", "it has a reduced vocabulary (10 of 24)"),
    (replace(BLOCK, backbone="gemma4"), "deepspec", "its layers are of the gemma4 form"),
    (replace(BLOCK, backbone="gemma4"), "gguf", "its layers are of the gemma4 form"),
    (replace(BLOCK, layers=(replace(SHAPE, bias=True),) * 2), "gguf", "its attention has biases"),
    (replace(BLOCK, layers=(replace(SHAPE, qk_norm=False),) * 2), "gguf", "it has no norms on queries and keys"),
    (replace(BLOCK, layers=(SHAPE, replace(SHAPE, heads=2))), "deepspec", "its layers differ in shape"),
    (replace(ZLAB, layers=(CAUSAL, SHAPE)), "gguf", "only some of its layers are causal"),
    (replace(ZLAB, layers=(CAUSAL, SHAPE)), "deepspec", "its row k predicts anchor"),
    (replace(BLOCK, layers=(CAUSAL, SHAPE)), "deepspec", "it has sliding or causal layers"),
    (replace(ZLAB, layers=(CAUSAL, SHAPE)), "speculators", "its windows begin at each row"),
    (replace(ZLAB, layers=(CAUSAL, SHAPE), window_anchor="block"), "zlab", "its windows begin at the anchor"),
    (replace(ZLAB, layers=(replace(WINDOW, window=3), WINDOW)), "gguf", "its layers have windows of several widths"),
    (replace(BLOCK, target_hidden_size=32), "gguf", "its target is 32 wide and it is 64"),
    (replace(BLOCK, taps=(1, 8)), "gguf", "it taps the target's last layer (8)"),
    (replace(BLOCK, taps=(1, 8), tap_final_is_prenorm=False), "speculators", "its last tap is after"),
    (replace(ZLAB, taps=(1, 8)), "zlab", "its last tap is before the target's final norm"),
    (replace(ZLAB, taps=(0, 1)), "zlab", "it taps the target's embedding output"),
    (
        replace(BLOCK, rope={"rope_type": "proportional", "rope_theta": 1e6}),
        "gguf",
        "its RoPE is of type 'proportional'",
    ),
    (
        replace(BLOCK, rope=ROPE | {"rope_type": "yarn", "attention_factor": 1.2}),
        "gguf",
        "its YaRN sets attention_factor",
    ),
    (replace(EAGLE, taps=(1, 2, 3, 4, 5)), "gguf", "it has another number of taps than three: (1, 2, 3, 4, 5)"),
    (EAGLE_QK, "gguf", "it has norms on queries and keys"),
    (replace(EAGLE, layers=EAGLE.layers * 2), "gguf", "it has more than one layer"),
    (replace(EAGLE, feature_norm="per_tap"), "gguf", "it norms each tap apart (fc_norm)"),
    (replace(EAGLE, recurrent_normed=True), "gguf", "it feeds back the vector after the final norm"),
    (replace(EAGLE, head_normed=False), "speculators", "its head reads the vector before the final norm"),
    (EAGLE, "deepspec", "it has no norms on queries and keys"),
    (replace(EAGLE_QK, residual_normed=True), "deepspec", "its residual is the normed feature"),
    (EAGLE, "zlab", "has no place for a drafter of the kind eagle3"),
    (replace(ZLAB, selector_rank=8), "zlab", "it has only one of DFlash2's convolutions and candidate selector"),
    (replace(ZLAB, conv_kernel_size=2), "gguf", "it has only one of DFlash2's"),
    (replace(DFLASH2, row_offset=1), "deepspec", "it has DFlash2's convolutions and candidate selector"),
    (replace(DFLASH2, draft_vocab_size=10), "speculators", "it is a DFlash2 with a reduced vocabulary"),
    (replace(DFLASH2, selector_top_k=8), "gguf", "its selector lattice of 8 candidates needs a wider hidden state"),
    (replace(ZLAB, layers=(SHAPE, replace(SHAPE, causal_in_block=True))), "zlab", "its in-block causality follows"),
    (replace(ZLAB, layers=(replace(SHAPE, causal_in_block=True),) * 2), "speculators", "its in-block causality"),
    (replace(EAGLE_QK, feature_norm="before_fc"), "deepspec", "it norms its taps before fc"),
    (replace(EAGLE_QK, taps=()), "deepspec", "its taps depend on the target's depth: give the target"),
    (replace(EAGLE, algorithm="mtp"), "gguf", "has no place for a drafter of the kind mtp"),
    (
        replace(EAGLE, algorithm="mtp", family="speculators"),
        "speculators",
        "it is a speculators folder (vLLM) already, there is nothing to write",
    ),
    (
        CausalLMSpec(family="x", algorithm="causal-lm", hidden_size=8, vocab_size=9, model_type="llama"),
        "gguf",
        "causal",
    ),
]


@pytest.mark.parametrize(("spec", "format", "reason"), REFUSED)
def test_what_cannot_is_refused_in_words(spec: Any, format: str, reason: str) -> None:
    assert reason in (expressible(spec, format) or "expressible")


def test_every_rule_of_the_table_is_tried() -> None:
    """A rule that no case above trips would be untested."""
    specs = [spec for spec, _, _ in REFUSED] + [spec for spec, _ in EXPRESSIBLE]
    rules = {rule for kinds in RULES.values() for of_kind in kinds.values() for rule in of_kind}
    assert {rule.reason for rule in rules if not any(_hit(rule, spec) for spec in specs)} == set()


def _hit(rule: Rule, spec: Any) -> bool:
    try:
        return bool(rule.refuses(spec))
    except AttributeError:  # of the other kind
        return False
