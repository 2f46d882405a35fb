"""Drafter without a tokenizer: it is bound to its target's ids, and only its numbers can be checked.

## What it checks
Whether the drafter's folder has tokenizer files at all. DSpark, DFlash and EAGLE heads usually have none: they read
and write the ids of the target they were trained with.

## Why it matters
The id table of such a drafter cannot be compared with anything. A head trained for another target of the same size
loads without a complaint, so it matters to know what was checked and what was not.

## How it is measured
No tokenizer.json, tokenizer.model, rank file or GGUF vocabulary on the drafter's side. The verdict then rests on the
configured vocabulary size, the tensor rows, the mask id and the draft vocabulary map.

## Fix
Nothing to do. To be sure of the target, compare the `_name_or_path` or `verifier` entry of the drafter's config.json.

## References
- Drafters that take embedding and head from the target: https://github.com/z-lab/dflash
- Drafters with frozen copies of both: https://github.com/deepseek-ai/DeepSpec
"""

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.registry import Check
from specdoctor.checks.tokenizer_pair import TokenizerPair


def run(pair: TokenizerPair) -> list[Finding]:
    """One information for a drafter without tokenizer files."""
    if pair.drafter.vocabulary is not None:
        return []
    facts = pair.drafter.facts
    return [
        Finding(
            code="SD110",
            severity=Severity.INFO,
            title="the drafter has no tokenizer and is bound to the target's ids: sizes, mask and map were checked",
            evidence={
                "drafter_rows": pair.drafter_rows,
                "target_rows": pair.target_rows,
                "target_tokens": pair.target_vocabulary.size,
                "pickles_not_read": len(facts.unread),
            },
            where={"side": "drafter", **({"file": facts.unread[0]} if facts.unread else {})},
            fix="Nothing to do.",
            subject="no-tokenizer",
        )
    ]


CHECK = Check("SD110", "Drafter without a tokenizer of its own", "static", run)
