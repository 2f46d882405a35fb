"""String-level mapping: how much of the target's text unlike vocabularies could still exchange.

## What it checks
For vocabularies that differ: the share of the target's tokens whose bytes are also one token of the drafter, over the
vocabulary and over the sample.

## Why it matters
Some engines let unlike vocabularies work together by mapping tokens through their text (the intersection of both
vocabularies) or by encoding the draft's text again. Tokens outside the mapping can never be drafted as one token, so
the share over the sample is a ceiling on acceptance.

## How it is measured
Bytes of each target token are looked up among the drafter's tokens; the sample weighs them by use. Ordinary
speculation gains nothing from it.

## Fix
A high share: try universal assisted generation (transformers, `assistant_tokenizer`) or another string-level method,
and measure. A low share: take a drafter of the target's family.

## References
- Universal assisted generation: https://huggingface.co/blog/universal_assisted_generation
- Lossless speculation across vocabularies: https://arxiv.org/abs/2502.05202
"""

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.registry import Check
from specdoctor.checks.tokenizer_pair import DIFFERENT_FAMILIES, IDS_DIFFER, TokenizerPair


def run(pair: TokenizerPair) -> list[Finding]:
    """One information when the vocabularies differ."""
    if pair.table is None or pair.drafter.vocabulary is None or pair.verdict not in (DIFFERENT_FAMILIES, IDS_DIFFER):
        return []
    of_vocabulary, of_sample = pair.table.coverage
    used = "" if of_sample is None else f", {of_sample:.1%} of the sample's tokens"
    return [
        Finding(
            code="SD109",
            severity=Severity.INFO,
            title=f"a string-level mapping would cover {of_vocabulary:.1%} of the target's tokens{used}",
            evidence={"of_vocabulary": of_vocabulary, "of_sample": of_sample},
            where={"side": "drafter", "file": pair.drafter.vocabulary.file},
            fix="Only engines that map tokens through their text gain from it.",
            subject="coverage",
        )
    ]


CHECK = Check("SD109", "Share that a string-level mapping would cover", "tokens", run)
