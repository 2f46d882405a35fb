"""`check-tokenizer` as data: both sides read, the SD1 checks run, verdict, counts and findings in one document.

The document is what `--json` writes and what the console report is drawn from.
"""

import time
from pathlib import Path
from typing import Any

from specdoctor import __version__
from specdoctor.checks.finding import by_severity, counted
from specdoctor.checks.registry import Check, family, run_checks
from specdoctor.checks.tokenizer_pair import DIFFERENT_FAMILIES, IDENTICAL, IDS_DIFFER, TokenizerPair, rows_of
from specdoctor.formats.json_file import collection_paused
from specdoctor.formats.tokenizer_files import TokenizerSide

SCHEMA_VERSION = 1
LISTED_IDS = 500  # differing ids written out; the counts are complete


def examine_tokenizers(target: Path, drafter: Path) -> dict[str, Any]:
    """The whole result of `check-tokenizer`. Raises SpecdoctorError when a side cannot be read."""
    began = time.perf_counter()
    checks = family("SD1")
    with collection_paused():
        document = _examined(target, drafter, checks)
    document["seconds"] = round(time.perf_counter() - began, 3)
    return document


def _examined(target: Path, drafter: Path, checks: list[Check]) -> dict[str, Any]:
    pair = TokenizerPair.read(target, drafter)
    findings = by_severity(list(run_checks(checks, pair)))
    return {
        **_document(pair),
        "checks": [{"code": check.code, "title": check.title} for check in checks],
        "findings": [finding.as_json() for finding in findings],
    }


def _document(pair: TokenizerPair) -> dict[str, Any]:
    table = pair.table
    mapping = None
    if table is not None and pair.verdict in (IDS_DIFFER, DIFFERENT_FAMILIES):
        of_vocabulary, of_sample = table.coverage
        mapping = {"of_vocabulary": of_vocabulary, "of_sample": of_sample}
    encoded = pair.target_encoded if pair.verdict != IDENTICAL else None
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "specdoctor", "version": __version__},
        "command": "check-tokenizer",
        "verdict": pair.verdict,
        "summary": _summary(pair),
        "target": _side(pair.target),
        "drafter": _side(pair.drafter),
        "counts": _counts(pair),
        "differing_ids": [entry.as_json() for entry in table.differing[:LISTED_IDS]] if table else [],
        "string_mapping": mapping,
        "sample": {
            "texts": len(pair.sample.texts),
            "conversations": len(pair.sample.conversations),
            "tokens": sum(encoded.counts().values()) if encoded else None,
            "encoded_exactly": encoded.exact if encoded else None,
        },
    }


def _side(side: TokenizerSide) -> dict[str, Any]:
    vocabulary, facts = side.vocabulary, side.facts
    return {
        "path": str(side.path),
        "file": vocabulary.file if vocabulary else None,
        "kind": vocabulary.kind if vocabulary else None,
        "family": vocabulary.family if vocabulary else None,
        "tokens": vocabulary.size if vocabulary else None,
        "added_tokens": len(vocabulary.added) if vocabulary and vocabulary.lists_added else None,
        "rows": rows_of(side),
        "config_vocab_size": facts.vocab_size.value if facts.vocab_size else None,
        "embedding_rows": facts.rows("embedding"),
        "head_rows": facts.rows("head"),
        "draft_vocab_size": facts.draft_vocab_size.value if facts.draft_vocab_size else None,
        "roles": {name: {"id": role.id, "token": role.text} for name, role in side.roles.items()},
        "eos_ids": sorted(side.eos_ids()),
        "mask_ids": [entry.value for entry in facts.mask_ids],
        "chat_template": side.template_file,
    }


def _counts(pair: TokenizerPair) -> dict[str, Any]:
    table, drafter = pair.table, pair.drafter.vocabulary
    return {
        "target_tokens": pair.target_vocabulary.size,
        "drafter_tokens": drafter.size if drafter else None,
        "target_rows": pair.target_rows,
        "drafter_rows": pair.drafter_rows,
        "shared_range": table.shared_range if table else None,
        "same_ids": table.shared_range - table.unequal if table else None,
        "differing_ids": table.differing_count if table else len(pair.ids_without_row),
        "differing_weight": table.differing_weight if table else None,
        "idle_ids": len(table.idle) if table else None,
        "ids_without_row": len(pair.ids_without_row),
    }


def _summary(pair: TokenizerPair) -> str:
    """The verdict in one line."""
    table, target = pair.table, pair.target_vocabulary
    if pair.verdict == DIFFERENT_FAMILIES:
        assert table is not None and pair.drafter.vocabulary is not None
        families = f"{target.family} of {target.size:,} against {pair.drafter.vocabulary.family}"
        same = f"{table.same_share:.1%} of the shared ids agree"
        return f"different families: {same} ({families} of {pair.drafter.vocabulary.size:,})"
    if pair.verdict == IDS_DIFFER:
        count = table.differing_count if table and table.differing else len(pair.ids_without_row)
        weight = table.differing_weight if table else None
        share = "" if weight is None else f", {weight:.2%} of the sample's tokens"
        return (
            f"{counted(count, 'id')} differ{'s' * (count == 1)} of {table.all_ids if table else target.size:,}{share}"
        )
    if table is None:
        alike = "as many rows as" if pair.verdict == IDENTICAL else "other padding than"
        words = pair.verdict.replace("-", " ")
        return f"{words}: the drafter has no tokenizer of its own, and {alike} the target ({_sizes(pair)})"
    if pair.verdict == IDENTICAL:
        return f"identical: all {target.size:,} ids mean the same on both sides"
    return f"padding only: every id that texts use agrees ({_sizes(pair)})"


def _sizes(pair: TokenizerPair) -> str:
    """What is not equal, in numbers."""
    drafter, parts = pair.drafter.vocabulary, []
    if pair.target_rows is not None and pair.drafter_rows is not None:
        parts.append(f"rows {pair.target_rows:,} and {pair.drafter_rows:,}")
    if drafter is not None and drafter.size != pair.target_vocabulary.size:
        parts.append(f"tokens {pair.target_vocabulary.size:,} and {drafter.size:,}")
    if pair.table is not None and pair.table.idle:
        parts.append(f"{len(pair.table.idle):,} unused ids differ")
    return ", ".join(parts) or "sizes unknown"
