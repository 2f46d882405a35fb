"""Draft vocabulary map: each draft id stands for the right target id.

## What it checks
For a drafter whose head is smaller than the target's vocabulary: that `d2t` is there, follows the convention of its
file (offsets in Hugging Face checkpoints, absolute ids in GGUF), stays in range, repeats no id, agrees with `t2d`,
has one entry per row of the head, is not the identity, and how much of the sample's text it can draft at all.

## Why it matters
A wrong map yields plausible text of wrong tokens: the loss looks normal, acceptance is near zero. Applying offsets
twice, not at all, or dropping the map (it lived in a side file) are all silent. Tokens outside the map cannot be
drafted, so the coverage of the map is a ceiling on acceptance.

## How it is measured
The two small integer tensors are read, no weights. Coverage is the share of the sample's tokens, as the target
encodes them, that the map reaches. Without `t2d`, a map that reaches far more of the sample when shifted by one is
off by one.

## Fix
Offsets: `d2t[i] = id - i`; absolute: `d2t[i] = id`, for the kept target ids in ascending order; `t2d[id] = true` for
the same ids. Take both from the training run that made the head, never from a recount of another corpus.

## References
- d2t kept in a side file, acceptance collapses: https://github.com/NVIDIA-NeMo/Automodel/pull/2447
- Reduced vocabulary without a map: https://github.com/verl-project/verl-SpeCo/pull/66
- Offsets against absolute ids in converters: https://github.com/ggml-org/llama.cpp/pull/18039
"""

from typing import TYPE_CHECKING, Any

from specdoctor.checks.draft_map import DraftMap
from specdoctor.checks.finding import Finding, Severity, counted
from specdoctor.checks.registry import Check
from specdoctor.checks.tokenizer_pair import TokenizerPair
from specdoctor.formats.tensor_headers import TensorPlace, read_integers

if TYPE_CHECKING:
    from specdoctor.checks.draft_map import Ids

_MUCH_BETTER = 0.15  # gain in coverage that gives a shifted map away
_REWRITE = "Write the map again from the training run's list of kept ids (Hugging Face: id - index, GGUF: id)."


def run(pair: TokenizerPair) -> list[Finding]:
    """Findings on d2t and t2d; none for a drafter with the full vocabulary."""
    place = pair.drafter.facts.tensors.get("d2t")
    if place is None:
        return _missing(pair)
    values = read_integers(place)
    if values is None or values.ndim != 1 or len(place.shape) != 1 or not len(values):
        shape = "x".join(map(str, place.shape))
        return [
            _finding(
                place, "dtype", f"d2t is {place.dtype} [{shape}], expected a list of integers", {"rows": place.rows}
            )
        ]
    stored, trouble = _stored_map(pair, values)
    trouble += _sizes(pair, place, stored) + _values(pair, place, stored)
    return trouble or _coverage(pair, place, stored)


def _stored_map(pair: TokenizerPair, values: "Ids") -> tuple[DraftMap, list[Finding]]:
    facts = pair.drafter.facts
    place = facts.tensors.get("t2d")
    flags = read_integers(place) if place is not None else None
    kept, trouble = None, []
    if flags is not None and place is not None:
        kept = flags.astype(bool).nonzero()[0]
        if len(kept) != len(values):
            title = f"t2d marks {len(kept):,} target ids, d2t has {len(values):,} entries"
            trouble.append(_finding(place, "popcount", title, {"t2d_marked": len(kept), "d2t_entries": len(values)}))
        if len(flags) < pair.target_vocabulary.size and len(flags) != pair.target_rows:
            title = f"t2d has {len(flags):,} entries for {pair.target_vocabulary.size:,} target tokens"
            evidence = {"t2d_entries": len(flags), "target_tokens": pair.target_vocabulary.size}
            trouble.append(_finding(place, "t2d-length", title, evidence))
    return DraftMap(values, kept, facts.absolute_map), trouble


def _sizes(pair: TokenizerPair, place: TensorPlace, stored: DraftMap) -> list[Finding]:
    facts, count = pair.drafter.facts, len(stored.values)
    declared = facts.draft_vocab_size.value if facts.draft_vocab_size else None
    wrong = {"draft_vocab_size": declared, "head_rows": facts.rows("head")}
    wrong = {name: size for name, size in wrong.items() if size is not None and size != count}
    if not wrong:
        return []
    words = ", ".join(f"{name} is {size:,}" for name, size in wrong.items())
    return [_finding(place, "length", f"d2t has {count:,} entries, {words}", {"d2t_entries": count, **wrong})]


def _values(pair: TokenizerPair, place: TensorPlace, stored: DraftMap) -> list[Finding]:
    """What is wrong with the ids: one cause, not each of its symptoms."""
    size, count = pair.target_rows or pair.target_vocabulary.size, len(stored.values)
    written, meant = ("offsets", "absolute ids") if stored.expects_absolute else ("absolute ids", "offsets")
    if stored.wrong_convention:
        title = f"d2t holds {written} where this kind of file holds {meant}"
        return [_finding(place, "convention", title, {"entries": count, "outside_if_read_so": stored.outside(size)})]
    if stored.is_identity and count < pair.target_vocabulary.size:
        title = f"d2t maps each draft id to itself: only the first {count:,} target ids can be drafted"
        agrees = stored.disagreements == 0
        evidence = {
            "entries": count,
            "target_tokens": pair.target_vocabulary.size,
            "coverage": _share(pair, stored.expected),
        }
        return [_finding(place, "identity", title, evidence, Severity.WARNING if agrees else Severity.ERROR)]
    if stored.shift is not None:
        return [
            _finding(
                place, "shift", f"every entry of d2t is off by {stored.shift:+d} against t2d", {"shift": stored.shift}
            )
        ]
    findings = []
    if outside := stored.outside(size):
        title = f"{counted(outside, 'draft id')} stand for no id of the target (0 to {size - 1:,})"
        findings.append(_finding(place, "range", title, {"outside": outside, "target_rows": size}))
    if duplicates := stored.duplicates:
        title = f"{counted(duplicates, 'draft id')} repeat the target id of another one"
        findings.append(_finding(place, "duplicates", title, {"duplicates": duplicates, "entries": count}))
    if (disagreements := stored.disagreements) and not findings:
        title = f"d2t and t2d disagree at {disagreements:,} of {count:,} draft ids"
        findings.append(_finding(place, "disagree", title, {"disagreements": disagreements, "entries": count}))
    if not findings and stored.kept is None:
        findings += _shifted_by_coverage(pair, place, stored)
    return findings


def _shifted_by_coverage(pair: TokenizerPair, place: TensorPlace, stored: DraftMap) -> list[Finding]:
    now = _share(pair, stored.expected)
    shifted = {shift: _share(pair, stored.expected - shift) for shift in (1, -1)}
    better = [(share, shift) for shift, share in shifted.items() if share is not None and now is not None]
    if not better or now is None or max(better)[0] < now + _MUCH_BETTER:
        return []
    share, shift = max(better)
    title = f"d2t looks off by {shift:+d}: it reaches {now:.1%} of the sample's tokens, moved back {share:.1%}"
    return [_finding(place, "shift", title, {"shift": shift, "coverage": now, "coverage_moved_back": share})]


def _coverage(pair: TokenizerPair, place: TensorPlace, stored: DraftMap) -> list[Finding]:
    share, encoded = _share(pair, stored.expected), pair.target_encoded
    if share is None or encoded is None:
        return []
    reached = set(stored.expected.tolist())
    by_category: dict[str, list[int]] = {}
    for category, row in zip(pair.sample.categories, encoded.texts, strict=True):
        by_category.setdefault(category, []).extend(row)
    shares = {name: sum(i in reached for i in ids) / len(ids) for name, ids in by_category.items() if ids}
    ends = sorted(pair.target.eos_ids())
    evidence = {
        "entries": len(stored.values),
        "coverage": share,
        "by_category": shares,
        "eos_in_map": [i for i in ends if i in reached],
        "eos_not_in_map": [i for i in ends if i not in reached],
    }
    title = f"the map reaches {share:.1%} of the sample's tokens: a ceiling on acceptance"
    if "english" in shares and "code" in shares:
        title += f" (English {shares['english']:.0%}, code {shares['code']:.0%})"
    return [
        _finding(
            place, "coverage", title, evidence, Severity.INFO, "Nothing to do, unless your texts are of another kind."
        )
    ]


def _missing(pair: TokenizerPair) -> list[Finding]:
    facts, tokens = pair.drafter.facts, pair.target_vocabulary.size
    declared = facts.draft_vocab_size.value if facts.draft_vocab_size else None
    full = facts.vocab_size.value if facts.vocab_size else tokens
    head = facts.rows("head")
    reduced = (declared is not None and declared < full) or (head is not None and head < tokens and head < full)
    if not reduced:
        return []
    size = declared or head
    evidence = {"draft_vocab_size": declared, "head_rows": head, "target_tokens": tokens}
    if not facts.tensors:
        unread = f" ({facts.unread[0]} is a pickle and not read)" if facts.unread else ""
        where = {"side": "drafter", "file": facts.unread[0] if facts.unread else "config.json"}
        title = f"a draft vocabulary of {size:,} is declared, but no safetensors file is here to hold its map{unread}"
        return [
            Finding("SD107", Severity.INFO, title, evidence, where, "Add the weights to check d2t.", subject="unread")
        ]
    t2d = facts.tensors.get("t2d")
    title = f"the head has {size:,} rows for {tokens:,} target tokens, and there is no d2t to map them"
    where = {"side": "drafter", "file": _any_file(facts.tensors), "tensor": "d2t"}
    fix = "Add d2t to the safetensors file: " + ("the ids where t2d is true, less their index." if t2d else _REWRITE)
    return [Finding("SD107", Severity.ERROR, title, evidence, where, fix, "vocab.d2t-map", "missing")]


def _share(pair: TokenizerPair, targets: "Ids") -> float | None:
    """Share of the sample's tokens that are among `targets`."""
    encoded = pair.target_encoded
    if encoded is None:
        return None
    counts, reached = encoded.counts(), set(targets.tolist())
    total = sum(counts.values())
    return sum(n for token_id, n in counts.items() if token_id in reached) / total if total else None


def _any_file(tensors: dict[str, TensorPlace]) -> str:
    return next(iter(tensors.values())).file.name


def _finding(
    place: TensorPlace,
    subject: str,
    title: str,
    evidence: dict[str, Any],
    severity: Severity = Severity.ERROR,
    fix: str = _REWRITE,
) -> Finding:
    where = {"side": "drafter", "file": place.file.name, "tensor": place.name}
    return Finding("SD107", severity, title, evidence, where, fix, "vocab.d2t-map", subject)


CHECK = Check("SD107", "Draft vocabulary map: d2t and t2d", "static", run)
