"""Added tokens: both sides know the same special and chat tokens.

## What it checks
Tokens that are matched in the raw text before the model sees it: which of them only one side has, which differ in how
they are matched (white space around them, whole words only, special or not), and whether a side's own files disagree
about an id (`added_tokens` and `model.vocab` of tokenizer.json, `added_tokens_decoder` of tokenizer_config.json).

## Why it matters
A chat marker that the drafter's tokenizer does not know was cut into pieces in its training data, so the row that the
target's id points at was never trained. Files that contradict each other are read differently by different engines.

## How it is measured
Added tokens of one side only are a warning if the target's chat template, roles or sample use them, else information.
Sides whose file cannot name added tokens (tiktoken, bare drafters) are not compared. Ids that mean something else are
SD101's business.

## Fix
Copy tokenizer.json, tokenizer_config.json and special_tokens_map.json of the target into the drafter's folder as one
set, if the drafter was trained with that tokenizer.

## References
- Layout of added tokens: https://huggingface.co/docs/tokenizers/api/added-tokens
"""

from specdoctor.checks.finding import Finding, Severity, counted
from specdoctor.checks.registry import Check
from specdoctor.checks.tokenizer_pair import DIFFERENT_FAMILIES, TokenizerPair
from specdoctor.formats.tokenizer_files import TokenizerSide
from specdoctor.formats.vocabulary import AddedToken, Vocabulary, is_unused_slot

_FAULT = "tokenizer.id-map"
_EXAMPLES = 20


def run(pair: TokenizerPair) -> list[Finding]:
    """Findings on added tokens."""
    findings = [*_conflicts(pair.target, "target"), *_conflicts(pair.drafter, "drafter")]
    target, drafter = pair.target_vocabulary, pair.drafter.vocabulary
    if drafter is None or pair.verdict == DIFFERENT_FAMILIES:
        return findings
    if target.lists_added and drafter.lists_added:
        findings += _one_sided(pair, target, drafter)
        findings += _matched_differently(target, drafter)
    elif target.lists_added != drafter.lists_added:
        findings.append(_not_listed(target, drafter))
    return findings


def _conflicts(side: TokenizerSide, name: str) -> list[Finding]:
    conflicts = side.vocabulary.conflicts if side.vocabulary else []
    if not conflicts:
        return []
    return [
        Finding(
            code="SD104",
            severity=Severity.WARNING,
            title=f"the {name}'s own files disagree about {counted(len(conflicts), 'added token')}",
            evidence={"conflicts": len(conflicts), "examples": conflicts[:_EXAMPLES]},
            where={"side": name, "file": side.vocabulary.file if side.vocabulary else ""},
            fix="Restore the tokenizer files of one release as a set; engines read different ones of these entries.",
            fault=_FAULT,
            subject="conflict",
        )
    ]


def _one_sided(pair: TokenizerPair, target: Vocabulary, drafter: Vocabulary) -> list[Finding]:
    only_target = _absent(target, drafter)
    only_drafter = _absent(drafter, target)
    used = [token for token in only_target if pair.target_uses(token.id)]
    findings = []
    if used:
        findings.append(
            Finding(
                code="SD104",
                severity=Severity.WARNING,
                title=f"the drafter's tokenizer lacks {counted(len(used), 'added token')} of the target's prompts",
                evidence={"missing": len(used), "examples": [_example(token) for token in used[:_EXAMPLES]]},
                where={"side": "drafter", "file": drafter.file},
                fix="The drafter was trained with an older tokenizer: expect rejections around these, or retrain.",
                fault=_FAULT,
                subject="missing",
            )
        )
    idle = len(only_target) - len(used) + len(only_drafter)
    if idle:
        findings.append(
            Finding(
                code="SD104",
                severity=Severity.INFO,
                title=f"only one side has {counted(idle, 'added token')} that nothing uses",
                evidence={
                    "only_target": len(only_target) - len(used),
                    "only_drafter": len(only_drafter),
                    "examples": [_example(token) for token in (only_target + only_drafter) if token not in used][
                        :_EXAMPLES
                    ],
                },
                where={"side": "drafter", "file": drafter.file},
                fix="Nothing to do; some engines refuse such a pair all the same.",
                subject="one-sided",
            )
        )
    return findings


def _absent(mine: Vocabulary, theirs: Vocabulary) -> list[AddedToken]:
    """Added tokens of one side whose id is free and whose text is unknown on the other."""
    return [
        token
        for token in mine.added.values()
        if token.text.encode() not in theirs.id_of
        and (token.id >= theirs.size or theirs.tokens[token.id] is None)
        and not is_unused_slot(token.text.encode())
    ]


def _matched_differently(target: Vocabulary, drafter: Vocabulary) -> list[Finding]:
    pairs = [(token, drafter.added[i]) for i, token in target.added.items() if i in drafter.added]
    if target.kind != drafter.kind:  # other kinds of file do not hold these flags
        return []
    different = [(a, b) for a, b in pairs if a.text == b.text and (a.flags, a.special) != (b.flags, b.special)]
    if not different:
        return []
    examples = [
        {
            **_example(a),
            "target_flags": sorted(a.flags),
            "drafter_flags": sorted(b.flags),
            "special": [a.special, b.special],
        }
        for a, b in different[:_EXAMPLES]
    ]
    return [
        Finding(
            code="SD104",
            severity=Severity.INFO,
            title=f"matched or shown differently (flags, special or not): {counted(len(different), 'added token')}",
            evidence={"different_flags": len(different), "examples": examples},
            where={"side": "drafter", "file": drafter.file},
            fix="Copy the added_tokens entries of the target, unless the drafter was trained with its own.",
            subject="flags",
        )
    ]


def _not_listed(target: Vocabulary, drafter: Vocabulary) -> Finding:
    name, silent, listing = ("drafter", drafter, target) if target.lists_added else ("target", target, drafter)
    return Finding(
        code="SD104",
        severity=Severity.INFO,
        title=f"a {silent.kind} file names no added tokens: {len(listing.added):,} of the other side were not compared",
        evidence={"not_compared": len(listing.added)},
        where={"side": name, "file": silent.file},
        fix="Give the model's folder instead of the single file to have them compared.",
        subject="not-listed",
    )


def _example(token: AddedToken) -> dict[str, object]:
    return {"id": token.id, "token": token.text}


CHECK = Check("SD104", "Added and special tokens", "static", run)
