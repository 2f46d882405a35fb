"""Token ids mean the same on both sides.

## What it checks
The table id -> bytes of target and drafter over the ids that both have, whatever kind of file each comes from. An id
counts when text can reach it: ordinary tokens, added tokens that a chat template, a role (bos, eos, ...) or the
sample uses, and added tokens that the other side has at another id. Place-holders and added tokens that nothing uses
do not count; they are listed as information.

## Why it matters
Target and drafter exchange ids, not text. Where an id means something else, each draft that holds it is a random
guess: two swapped chat markers cost the first tokens of every turn, a vocabulary of another family is rejected
altogether. No engine prints an error for it; some refuse pairs that differ in unused tokens only.

## How it is measured
Byte-level, SentencePiece and tiktoken pieces are all reduced to bytes and compared. Each differing id is weighted by
its share in the bundled multilingual and code sample and in the rendered conversations, as the target's tokenizer
encodes them. Fewer than half of the shared ids equal and fewer than 80 % of the token strings in common: different
families.

## Fix
Give the drafter folder the target's own tokenizer files, if the drafter was trained with those ids (compare its
training configuration). Otherwise the drafter was made for another target: take one made for this target, or an
engine's method for unlike vocabularies (SD109 says how much a string-level mapping would cover).

## References
- 100 % rejection and NaN draft probabilities with unlike vocabularies: https://github.com/ggml-org/llama.cpp/pull/3812
- A valid pair refused for its special tokens: https://github.com/ggml-org/llama.cpp/pull/22358
"""

from specdoctor.checks.finding import Finding, Severity, counted
from specdoctor.checks.registry import Check
from specdoctor.checks.token_table import TokenTable, Why
from specdoctor.checks.tokenizer_pair import TokenizerPair

_EXAMPLES = 20
_FAULT = "tokenizer.id-map"
_OTHER_DRAFTER = "Take a drafter made for this target, or an engine's method for unlike vocabularies (see SD109)."
_SAME_FILES = (
    "If the drafter was trained with the target's ids, give it the target's tokenizer files; otherwise it was made for "
    "another target."
)


def run(pair: TokenizerPair) -> list[Finding]:
    """Findings on the id table; none when the drafter has no tokenizer of its own."""
    table, drafter = pair.table, pair.drafter.vocabulary
    if table is None or drafter is None:
        return []
    where = {"side": "drafter", "file": drafter.file}
    if table.differing and table.unlike_families:
        return [_unlike(pair, table, where)]
    findings = []
    if table.differing:
        findings.append(_differing(table, where))
    if table.idle and not all(None in (entry.target, entry.drafter) for entry in table.idle):
        findings.append(_idle(table, where))
    return findings


def _unlike(pair: TokenizerPair, table: TokenTable, where: dict[str, str]) -> Finding:
    target, drafter = pair.target_vocabulary, pair.drafter.vocabulary
    assert drafter is not None
    return Finding(
        code="SD101",
        severity=Severity.ERROR,
        title=f"different vocabularies: {table.same_share:.1%} of {table.shared_range:,} shared ids mean the same",
        evidence={
            "same_share": table.same_share,
            "string_overlap": table.overlap,
            "shared_range": table.shared_range,
            "target_tokens": target.size,
            "drafter_tokens": drafter.size,
            "target_family": target.family,
            "drafter_family": drafter.family,
        },
        where=where,
        fix=_OTHER_DRAFTER,
        fault=_FAULT,
        subject="families",
    )


def _differing(table: TokenTable, where: dict[str, str]) -> Finding:
    harmful = [entry for entry in table.differing if entry.used or entry.why is Why.ORDINARY]
    weight = table.differing_weight
    share = "" if weight is None else f", {weight:.2%} of the sample's tokens"
    count = len(table.differing)
    return Finding(
        code="SD101",
        severity=Severity.ERROR if harmful else Severity.WARNING,
        title=f"{counted(count, 'id')} of {table.all_ids:,} mean{'s' * (count == 1)} another token{share}",
        evidence={
            "differing": count,
            "ids": table.all_ids,
            "weight": weight,
            "by_reason": {str(why): n for why in Why if (n := sum(entry.why is why for entry in table.differing))},
            "examples": [entry.as_json() for entry in table.differing[:_EXAMPLES]],
        },
        where=where,
        fix=_SAME_FILES,
        fault=_FAULT,
        subject="ids",
    )


def _idle(table: TokenTable, where: dict[str, str]) -> Finding:
    renamed = [entry for entry in table.idle if entry.target is not None and entry.drafter is not None]
    return Finding(
        code="SD101",
        severity=Severity.INFO,
        title=f"differing in added tokens or place-holders that nothing uses: {counted(len(renamed), 'id')}",
        evidence={"idle": len(renamed), "examples": [entry.as_json() for entry in renamed[:_EXAMPLES]]},
        where=where,
        fix="Nothing to do; some engines refuse such a pair all the same.",
        subject="idle",
    )


CHECK = Check("SD101", "Token ids mean the same on both sides", "tokens", run)
