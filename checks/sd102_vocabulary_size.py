"""Vocabulary sizes: configuration, embedding rows and tokenizer agree.

## What it checks
For each side the three sizes that ought to fit each other: `vocab_size` of the configuration, rows of the embedding
and head tensors (and of a Markov head's tables), and the number of tokens of the tokenizer. Across the sides: whether
the drafter has a row for each id that the target can emit, and whether the sides are padded to different row counts.

## Why it matters
Embeddings are padded to a multiple of 64, 128 or 256, so sizes of a good pair may differ: engines then refuse the
pair, reshape wrongly or fail to share the head, although the pair is fine. A configuration that states another number
than the tensor holds is a real fault: loaders trust one or the other.

## How it is measured
Headers of safetensors or GGUF files are read, never the weights. Different padding is information only. An error is:
a tensor that does not have the rows its configuration states, or a target id in use beyond the drafter's rows.

## Fix
Correct `vocab_size` in config.json, or resize the embedding to it. For a padding difference that an engine refuses:
pad the smaller embedding with zero rows (and `vocab_size` with it), or cut the larger one to the tokenizer's length.

## References
- Different padding aborts on an equal-vocabulary assertion: https://github.com/vllm-project/vllm/issues/5203
- 151936 against 152064 rows, same tokenizer, refused: https://github.com/vllm-project/vllm/issues/7252
- A padded target hides the shared head, nothing is accepted: https://github.com/vllm-project/vllm/pull/46435
"""

from specdoctor.checks.finding import Finding, Severity, counted
from specdoctor.checks.registry import Check
from specdoctor.checks.tokenizer_pair import TokenizerPair
from specdoctor.formats.tokenizer_files import TokenizerSide

_FAULT = "tokenizer.vocab-padding"
_FULL_TABLES = ("embedding", "markov_w1")  # one row per target id
_DRAFT_TABLES = ("head", "markov_w2")  # one row per draft id, where the drafter has a smaller vocabulary


def run(pair: TokenizerPair) -> list[Finding]:
    """Findings on sizes within each side and across both."""
    findings = [
        *_wrong_rows(pair.target, "target"),
        *_wrong_rows(pair.drafter, "drafter"),
        *_without_row(pair),
        *_padding(pair),
    ]
    return findings + _beyond_own_rows(pair.target, "target") + _beyond_own_rows(pair.drafter, "drafter")


def _wrong_rows(side: TokenizerSide, name: str) -> list[Finding]:
    """Tensors that do not have as many rows as their configuration states."""
    facts, findings = side.facts, []
    # A head with a map is as long as its map, which is SD107's business.
    draft_size = facts.draft_vocab_size or (None if "d2t" in facts.tensors else facts.vocab_size)
    for roles, declared in ((_FULL_TABLES, facts.vocab_size), (_DRAFT_TABLES, draft_size)):
        for role in roles:
            place = facts.tensors.get(role)
            if place is None or declared is None or place.rows == declared.value:
                continue
            findings.append(
                Finding(
                    code="SD102",
                    severity=Severity.ERROR,
                    title=f"{declared.key} is {declared.value:,}, but {place.name} has {place.rows:,} rows",
                    evidence={
                        "declared": declared.value,
                        "rows": place.rows,
                        "difference": place.rows - declared.value,
                    },
                    where={"side": name, "file": declared.file, "key": declared.key, "tensor": place.name},
                    fix=f"Set {declared.key} to {place.rows} in {declared.file}, or resize {place.name}.",
                    fault=_FAULT,
                    subject=f"rows-{role}",
                )
            )
    return findings


def _without_row(pair: TokenizerPair) -> list[Finding]:
    missing = pair.ids_without_row
    if not missing:
        return []
    vocabulary = pair.target_vocabulary
    return [
        Finding(
            code="SD102",
            severity=Severity.ERROR,
            title=f"the drafter has {pair.drafter_rows:,} rows, {counted(len(missing), 'id')} of the target too few",
            evidence={
                "drafter_rows": pair.drafter_rows,
                "target_tokens": vocabulary.size,
                "ids_without_row": len(missing),
                "examples": [{"id": i, "target": vocabulary.text_of(i)} for i in missing[:20]],
            },
            where={"side": "drafter", **_place_of_rows(pair.drafter)},
            fix="The drafter was made for a smaller vocabulary: take one made for this target, or restore its rows.",
            fault="tokenizer.id-map",
            subject="without-row",
        )
    ]


def _padding(pair: TokenizerPair) -> list[Finding]:
    target, drafter = pair.target_rows, pair.drafter_rows
    if target is None or drafter is None or target == drafter or pair.ids_without_row:
        return []
    tokens = pair.target_vocabulary.size
    return [
        Finding(
            code="SD102",
            severity=Severity.INFO,
            title=f"padded to different sizes: target {target:,} rows, drafter {drafter:,}, tokens {tokens:,}",
            evidence={
                "target_rows": target,
                "drafter_rows": drafter,
                "difference": drafter - target,
                "target_tokens": tokens,
                "drafter_tokens": pair.drafter.vocabulary.size if pair.drafter.vocabulary else None,
            },
            where={"side": "drafter", **_place_of_rows(pair.drafter)},
            fix=f"Safe. If an engine refuses the pair, pad or cut the drafter's embedding and vocab_size to {target}.",
            fault=_FAULT,
            subject="padding",
        )
    ]


def _beyond_own_rows(side: TokenizerSide, name: str) -> list[Finding]:
    """Tokens of a side's own tokenizer that its own embedding has no row for."""
    vocabulary, facts = side.vocabulary, side.facts
    rows = facts.rows("embedding") or (facts.vocab_size.value if facts.vocab_size else None)
    if vocabulary is None or rows is None or vocabulary.size <= rows:
        return []
    beyond = [i for i in range(rows, vocabulary.size) if vocabulary.tokens[i] is not None]
    ordinary = [i for i in beyond if i not in vocabulary.added]
    return [
        Finding(
            code="SD102",
            severity=Severity.ERROR if ordinary else Severity.INFO,
            title=f"the {name}'s tokenizer has {counted(len(beyond), 'token')} beyond its own {rows:,} embedding rows",
            evidence={
                "rows": rows,
                "tokens": vocabulary.size,
                "beyond": len(beyond),
                "examples": [{"id": i, "token": vocabulary.text_of(i)} for i in beyond[:20]],
            },
            where={"side": name, "file": vocabulary.file},
            fix="Text that holds such a token cannot be embedded: use the tokenizer that belongs to these weights.",
            fault=_FAULT,
            subject="beyond-rows",
        )
    ]


def _place_of_rows(side: TokenizerSide) -> dict[str, str]:
    place = side.facts.tensors.get("embedding")
    if place is not None:
        return {"file": place.file.name, "tensor": place.name}
    declared = side.facts.vocab_size
    return {"file": declared.file, "key": declared.key} if declared else {}


CHECK = Check("SD102", "Vocabulary sizes: configuration, rows and tokenizer", "static", run)
