"""Special ids: both sides begin, end and pad text with the same tokens.

## What it checks
The ids of bos, eos, pad and unk as the tokenizer's files name them, the ids that end a text according to config.json
and generation_config.json, whether each named token exists in the vocabulary, and whether both sides put bos in front
of a text.

## Why it matters
A drafter that ends texts with another token drafts past the end or stops early: the drafts at every end of turn are
lost. llama.cpp refuses a pair whose bos or eos differ. Frameworks that stop drafting at the drafter's own eos cut
each draft.

## How it is measured
Names are resolved to ids through each side's own vocabulary and compared. Different eos, or a different bos that the
target puts before its prompts, is a warning; pad and unk are information. Vocabularies of different families are not
compared (SD101 says so).

## Fix
Copy `eos_token`, `bos_token` (tokenizer_config.json) and `eos_token_id` (config.json, generation_config.json) from
the target to the drafter. A base drafter of a chat target keeps its ids; expect its drafts to fail at the end of each
turn.

## References
- Roles and ids of GGUF and Hugging Face files: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
- A pair refused for its special tokens: https://github.com/ggml-org/llama.cpp/pull/22358
"""

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.registry import Check
from specdoctor.checks.tokenizer_pair import DIFFERENT_FAMILIES, TokenizerPair
from specdoctor.formats.tokenizer_files import SpecialRole, TokenizerSide

_FAULT = "tokenizer.id-map"
_COMPARED = ("bos", "eos", "pad", "unk")


def run(pair: TokenizerPair) -> list[Finding]:
    """Findings on roles; none across vocabularies of different families."""
    findings = [*_unknown_tokens(pair.target, "target"), *_unknown_tokens(pair.drafter, "drafter")]
    if pair.verdict == DIFFERENT_FAMILIES:
        return findings
    for role in _COMPARED:
        mine, theirs = pair.target.roles.get(role), pair.drafter.roles.get(role)
        if mine and theirs and None not in (mine.id, theirs.id) and mine.id != theirs.id:
            findings.append(_other_role(pair, role, mine, theirs))
    if not any(finding.subject == "role-eos" for finding in findings):
        findings += _disjoint_ends(pair)
    return findings + _prefix(pair)


def _unknown_tokens(side: TokenizerSide, name: str) -> list[Finding]:
    return [
        Finding(
            code="SD103",
            severity=Severity.WARNING if role in ("eos", "bos") else Severity.INFO,
            title=f"the {name}'s {found.key} {found.text!r} is not in its vocabulary",
            evidence={"token": found.text, "tokens": side.vocabulary.size},
            where={"side": name, "file": found.file, "key": found.key},
            fix="Correct the token's text, or use the tokenizer file that has it.",
            fault=_FAULT,
            subject=f"unknown-{role}",
        )
        for role, found in side.roles.items()
        if side.vocabulary is not None and found.id is None
    ]


def _other_role(pair: TokenizerPair, role: str, mine: SpecialRole, theirs: SpecialRole) -> Finding:
    prompts_begin_with_it = mine.id in (pair.target_vocabulary.prefix_ids or ())
    serious = role == "eos" or (role == "bos" and prompts_begin_with_it)
    return Finding(
        code="SD103",
        severity=Severity.WARNING if serious else Severity.INFO,
        title=f"{role} is {mine.id} {mine.text!r} for the target and {theirs.id} {theirs.text!r} for the drafter",
        evidence={
            "role": role,
            "target_id": mine.id,
            "drafter_id": theirs.id,
            "target": mine.text,
            "drafter": theirs.text,
        },
        where={"side": "drafter", "file": theirs.file, "key": theirs.key},
        fix=f"Copy {mine.key} from the target, if the drafter was trained on the target's texts.",
        fault=_FAULT,
        subject=f"role-{role}",
    )


def _disjoint_ends(pair: TokenizerPair) -> list[Finding]:
    mine, theirs = pair.target.eos_ids(), pair.drafter.eos_ids()
    if not mine or not theirs or mine & theirs:
        return []
    declared = pair.drafter.facts.special_ids.get("eos") or []
    place = {"file": declared[0].file, "key": declared[0].key} if declared else {}
    return [
        Finding(
            code="SD103",
            severity=Severity.WARNING,
            title=f"no common end of text: target {sorted(mine)}, drafter {sorted(theirs)}",
            evidence={"target_eos": sorted(mine), "drafter_eos": sorted(theirs)},
            where={"side": "drafter", **place},
            fix="Copy eos_token_id from the target's config.json and generation_config.json.",
            fault=_FAULT,
            subject="eos-sets",
        )
    ]


def _prefix(pair: TokenizerPair) -> list[Finding]:
    mine = pair.target_vocabulary.prefix_ids
    theirs = pair.drafter.vocabulary.prefix_ids if pair.drafter.vocabulary else None
    if mine is None or theirs is None or mine == theirs:
        return []
    return [
        Finding(
            code="SD103",
            severity=Severity.INFO,
            title=f"ids put before a text: target {list(mine)}, drafter {list(theirs)}",
            evidence={"target_prefix": list(mine), "drafter_prefix": list(theirs)},
            where={"side": "drafter", "file": pair.drafter.vocabulary.file if pair.drafter.vocabulary else ""},
            fix="Engines take the target's prompt ids: this matters to training with the drafter's tokenizer only.",
            subject="prefix",
        )
    ]


CHECK = Check("SD103", "Special ids: bos, eos, pad, unk", "static", run)
