"""Segmentation: both sides cut the same text into the same pieces.

## What it checks
Normaliser, pre-tokenizer and merges, by their effect: the bundled sample (languages, code, digits, white space,
Unicode normal forms) is encoded by both tokenizers and the pieces are compared as bytes, whatever ids they have. A
text whose bytes differ went through another normaliser (composed accents, lower case, a space put in front); one
whose bytes agree and whose cuts differ went through another pre-tokenizer or other merges.

## Why it matters
Engines hand the drafter the target's ids, so nothing fails; but a drafter trained on text that was cut otherwise has
rarely seen these sequences of ids, and accepts less where the cuts differ: numbers, indentation, non-Latin scripts. A
converter that loses the pre-tokenizer changes what the model itself is asked.

## How it is measured
Nothing is encoded when both sides describe the same pipeline. Otherwise each text is encoded by both; the share of
texts that differ and the first differing pieces are shown. Files that hold no pre-tokenizer (tiktoken ranks, some
GGUF files) are named as not compared; a tokenizer that cannot be built at all is a warning. Vocabularies of different
families cut differently by nature and are not compared.

## Fix
Use the target's tokenizer files to train and serve the drafter. For a GGUF file: convert again with a converter that
knows the model's pre-tokenizer (`tokenizer.ggml.pre`).

## References
- Components of a tokenizer: https://huggingface.co/docs/tokenizers/components
"""

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.registry import Check
from specdoctor.checks.tokenizer_pair import DIFFERENT_FAMILIES, TokenizerPair
from specdoctor.formats.vocabulary import Vocabulary, show

_EXAMPLES = 6
_CONTEXT = 4  # pieces shown from the first difference on


def run(pair: TokenizerPair) -> list[Finding]:
    """At most one finding: how many sample texts the sides cut differently, or why that was not compared."""
    target, drafter = pair.target_vocabulary, pair.drafter.vocabulary
    if drafter is None or pair.verdict == DIFFERENT_FAMILIES:
        return []
    if target.segmentation.describes_same(drafter.segmentation):
        return []
    mine, theirs = pair.target_encoded, pair.drafter_encoded
    if mine is None or theirs is None or not (mine.exact and theirs.exact):
        return [_not_compared(pair, target, drafter)]
    both_normalize = target.segmentation.names_normalizer and drafter.segmentation.names_normalizer
    differences = []
    for name, left, right in zip(pair.sample.names, mine.texts, theirs.texts, strict=True):
        pieces = _pieces(target, left), _pieces(drafter, right)
        if pieces[0] == pieces[1]:
            continue
        # A file without a place for a normaliser (GGUF) says nothing about composing accents and the like.
        if both_normalize or b"".join(pieces[0]) == b"".join(pieces[1]):
            differences.append((name, *pieces))
    return [_different(drafter, differences, len(mine.texts))] if differences else []


def _different(drafter: Vocabulary, differences: list[tuple[str, list[bytes], list[bytes]]], texts: int) -> Finding:
    normalised = sum(b"".join(left) != b"".join(right) for _, left, right in differences)
    return Finding(
        code="SD105",
        severity=Severity.WARNING,
        title=f"{len(differences)} of {texts} sample texts are cut differently"
        + (f", {normalised} of them after another normalisation" if normalised else ""),
        evidence={
            "texts": texts,
            "different": len(differences),
            "normalised_differently": normalised,
            "examples": [_example(*difference) for difference in differences[:_EXAMPLES]],
        },
        where={"side": "drafter", "file": drafter.file},
        fix="Use the target's tokenizer files (normaliser, pre-tokenizer, merges) to train and serve the drafter.",
        fault="tokenizer.id-map",
        subject="cuts",
    )


def _example(name: str, left: list[bytes], right: list[bytes]) -> dict[str, object]:
    at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return {
        "text": name,
        "piece": at,
        "target": [show(piece) for piece in left[at : at + _CONTEXT]],
        "drafter": [show(piece) for piece in right[at : at + _CONTEXT]],
    }


def _not_compared(pair: TokenizerPair, target: Vocabulary, drafter: Vocabulary) -> Finding:
    silent = [
        (side, vocabulary)
        for side, vocabulary in (("target", target), ("drafter", drafter))
        if side in pair.trouble or not vocabulary.encoder_is_exact
    ]
    side, vocabulary = next((entry for entry in silent if entry[0] in pair.broken), silent[-1])
    return Finding(
        code="SD105",
        severity=Severity.WARNING if side in pair.broken else Severity.INFO,
        title="cuts were not compared: "
        + pair.trouble.get(side, f"{vocabulary.file} names no pre-tokenizer that is known here"),
        evidence={"compared": 0},
        where={"side": side, "file": vocabulary.file},
        fix="Restore the file from its release."
        if side in pair.broken
        else "Give a tokenizer.json to have normaliser and pre-tokenizer compared.",
        subject="not-compared",
    )


def _pieces(vocabulary: Vocabulary, ids: list[int]) -> list[bytes]:
    return [vocabulary.tokens[i] or b"" for i in ids]


CHECK = Check("SD105", "Segmentation: same text, same pieces", "tokens", run)
