"""Chat template: both sides turn a conversation into the same tokens.

## What it checks
A few short conversations (system turn, several turns, a finished one, a thought in the history, thinking switched on
and off, a tool) rendered with the target's and with the drafter's chat template, compared as the target's tokens.

## Why it matters
A drafter learns the texts of one template. Served with another, or with thinking switched on where it was trained
with thinking off, it drafts into a prompt it has never seen, and no engine says so: a missing closed-think suffix
took acceptance from 60 % to 25 %.

## How it is measured
Templates that are the same text need no rendering. Otherwise both are rendered in a sandbox with a fixed clock, and
the ids are compared; the first differing stretch of tokens is shown. A template that refuses a conversation which the
other accepts counts as a difference. A drafter without a template cannot be compared.

## Fix
Serve with the template (and the thinking switch) of the drafter's training data: copy the drafter's
chat_template.jinja to the server's `--chat-template`, or train the drafter again on texts rendered with the target's.

## References
- Thinking on in one harness only, 25 % against 60 %: https://github.com/z-lab/dflash/issues/133
- A template without the closed-think suffix, 0 % in a chat: https://github.com/Luce-Org/lucebox/pull/293
- Qwen3's template rewrites thoughts in the history: https://github.com/sgl-project/SpecForge/issues/296
"""

from difflib import SequenceMatcher

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.registry import Check
from specdoctor.checks.tokenizer_pair import DIFFERENT_FAMILIES, TokenizerPair
from specdoctor.formats.chat_template import Refusal

_SHOWN_TOKENS = 8


def run(pair: TokenizerPair) -> list[Finding]:
    """At most one finding: the conversations that the templates render differently."""
    if not pair.target.chat_template or not pair.drafter.chat_template or pair.same_template:
        return []
    names = [str(conversation["name"]) for conversation in pair.sample.conversations]
    mine, theirs = pair.renderings["target"], pair.renderings["drafter"]
    unequal = [(name, left, right) for name, left, right in zip(names, mine, theirs, strict=True) if left != right]
    where = {"side": "drafter", "file": pair.drafter.template_file}
    if not unequal:
        return [
            Finding(
                code="SD106",
                severity=Severity.INFO,
                title=f"chat templates are written differently and render {len(names)} conversations alike",
                evidence={"conversations": len(names), "different": 0},
                where=where,
                fix="Nothing to do.",
                fault="prompt.chat-template",
                subject="wording",
            )
        ]
    return [
        Finding(
            code="SD106",
            severity=Severity.INFO if pair.verdict == DIFFERENT_FAMILIES else Severity.WARNING,
            title=f"chat templates render {len(unequal)} of {len(names)} conversations differently",
            evidence={
                "conversations": len(names),
                "different": len(unequal),
                "examples": [_difference(pair, *entry) for entry in unequal],
            },
            where=where,
            fix="Serve with the template and thinking switch that the drafter was trained with.",
            fault="prompt.chat-template",
            subject="rendering",
        )
    ]


def _difference(pair: TokenizerPair, name: str, left: str | Refusal, right: str | Refusal) -> dict[str, object]:
    if isinstance(left, Refusal) or isinstance(right, Refusal):
        sides = {"target": left, "drafter": right}
        return {
            "conversation": name,
            **{side: f"refused: {r.reason}" if isinstance(r, Refusal) else "rendered" for side, r in sides.items()},
        }
    ids = pair.encode_with_target([left, right])
    if ids is None:
        rows: list[list[str]] = [list(left), list(right)]
    else:
        rows = [[pair.target_vocabulary.text_of(i) or "" for i in row] for row in ids]
    changes = [op for op in SequenceMatcher(None, rows[0], rows[1], autojunk=False).get_opcodes() if op[0] != "equal"]
    _, a, a_end, b, b_end = changes[0]
    return {
        "conversation": name,
        "position": a,
        "target": rows[0][a:a_end][:_SHOWN_TOKENS],
        "drafter": rows[1][b:b_end][:_SHOWN_TOKENS],
        "tokens_removed": sum(op[2] - op[1] for op in changes),
        "tokens_added": sum(op[4] - op[3] for op in changes),
    }


CHECK = Check("SD106", "Chat template: same conversation, same tokens", "tokens", run)
