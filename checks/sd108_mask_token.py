"""Mask token: block drafters fill their block with an id that is a mask and nothing else.

## What it checks
For DFlash, DSpark and other drafters that draft a block at once: that `mask_token_id` is given, is the same wherever
it is given, lies within the embedding in use, is no id that ends, begins or pads a text, is no ordinary token of the
sample, and that its embedding row is not zero or broken.

## Why it matters
All but one row of a block are the mask. With the wrong id the drafter still drafts, worse: trainers fall back to the
pad or eos id without a word, converters drop the id, and a mask row added by resizing does not exist in the target's
embedding that is used at run time.

## How it is measured
Ids come from config.json, `dflash_config` or `tokenizer.ggml.mask_token_id`. The row is read alone from the drafter's
embedding, or the target's where the drafter has none, and its norm compared with the median of rows spread over the
table; below a thousandth of it counts as zero. A padded row that no token uses is a good mask.

## Fix
Take `mask_token_id` from the training run. If the run itself fell back to eos or pad, the drafter works with that id,
and would gain from being trained with an unused one.

## References
- The mask id silently fell back to pad: https://github.com/NVIDIA-NeMo/Automodel/pull/2461
- A mask row that is neither trained nor exported: https://github.com/NVIDIA/Model-Optimizer/pull/1621
"""

from typing import Any

from specdoctor.checks.finding import Finding, Severity
from specdoctor.checks.registry import Check
from specdoctor.checks.tokenizer_pair import TokenizerPair
from specdoctor.formats.model_facts import Declared
from specdoctor.formats.tensor_headers import TensorPlace, read_row
from specdoctor.formats.vocabulary import is_unused_slot

_FAULT = "tokenizer.mask-token"
_FROM_TRAINING = "Take mask_token_id from the drafter's training run."
_NEAR_ZERO = 1e-3  # of the median row norm
_SPREAD_ROWS = 256


def run(pair: TokenizerPair) -> list[Finding]:
    """Findings on the mask id; none for drafters that need no mask."""
    facts = pair.drafter.facts
    if not facts.mask_ids:
        return [_absent(pair)] if facts.drafts_blocks else []
    declared = facts.mask_ids[0]
    wrong = [entry for entry in facts.mask_ids if isinstance(entry.value, bool) or not isinstance(entry.value, int)]
    if wrong:
        return [_finding(wrong[0], "type", f"{wrong[0].key} is {wrong[0].value!r}, expected a token id", {})]
    findings = _disagreements(pair, facts.mask_ids)
    rows, source = _rows_in_use(pair)
    if declared.value < 0 or (rows is not None and declared.value >= rows):
        title = (
            f"mask id {declared.value} is beyond the {rows:,} rows of {source}" if rows else f"mask id {declared.value}"
        )
        return [*findings, _finding(declared, "range", title, {"mask_id": declared.value, "rows": rows})]
    aliases = _aliases(pair, declared)
    findings += aliases or _ordinary(pair, declared)
    return findings + _row(pair, declared)


def _absent(pair: TokenizerPair) -> Finding:
    facts = pair.drafter.facts
    key = "tokenizer.ggml.mask_token_id" if facts.absolute_map else "mask_token_id"
    name = pair.drafter.path.name if facts.absolute_map else "config.json"
    return Finding(
        code="SD108",
        severity=Severity.ERROR,
        title=f"{facts.architecture or 'a block drafter'} needs a mask token, and {key} is missing",
        evidence={"mask_ids": 0},
        where={"side": "drafter", "file": name, "key": key},
        fix=_FROM_TRAINING,
        fault=_FAULT,
        subject="missing",
    )


def _disagreements(pair: TokenizerPair, declared: list[Declared]) -> list[Finding]:
    values = {entry.key: entry.value for entry in declared}
    named = [(side, side.roles["mask"]) for side in (pair.target, pair.drafter) if "mask" in side.roles]
    named_ids = {f"{role.key} of {role.file}": role.id for _, role in named if role.id is not None}
    if len(set(values.values())) > 1:
        title = "mask ids disagree: " + ", ".join(f"{key} {value}" for key, value in values.items())
        return [_finding(declared[0], "disagree", title, values)]
    if named_ids and declared[0].value not in named_ids.values():
        title = f"{declared[0].key} is {declared[0].value}, but the tokenizer's mask token has id "
        title += ", ".join(map(str, sorted(set(named_ids.values()))))
        return [
            _finding(declared[0], "not-the-mask", title, {"mask_id": declared[0].value, **named_ids}, Severity.WARNING)
        ]
    return []


def _rows_in_use(pair: TokenizerPair) -> tuple[int | None, str]:
    """Rows of the embedding that feeds the block: the drafter's own, else the target's."""
    if (rows := pair.drafter.facts.rows("embedding")) is not None:
        return rows, "the drafter's embedding"
    if (rows := pair.target.facts.rows("embedding")) is not None:
        return rows, "the target's embedding"
    if pair.target_rows is not None:
        return pair.target_rows, "the target's embedding"
    return pair.drafter_rows, "the configured vocabulary"


def _aliases(pair: TokenizerPair, declared: Declared) -> list[Finding]:
    roles: dict[str, set[int]] = {}
    for side in (pair.target, pair.drafter):
        for role in ("eos", "bos", "pad", "unk"):
            found = side.roles.get(role)
            ids = {entry.value for entry in side.facts.special_ids.get(role, [])}
            roles.setdefault(role, set()).update(ids | ({found.id} if found and found.id is not None else set()))
    shared = [role for role, ids in roles.items() if declared.value in ids]
    if not shared:
        return []
    text = pair.target_vocabulary.text_of(declared.value)
    harmless = shared == ["unk"]  # text never holds it
    title = f"mask id {declared.value} ({text!r}) is also {' and '.join(shared)}"
    evidence = {"mask_id": declared.value, "roles": shared, "token": text}
    fix = "Nothing to do if the drafter was trained so." if harmless else _FROM_TRAINING
    return [
        _finding(declared, f"alias-{shared[0]}", title, evidence, Severity.INFO if harmless else Severity.WARNING, fix)
    ]


def _ordinary(pair: TokenizerPair, declared: Declared) -> list[Finding]:
    vocabulary, mask_id = pair.target_vocabulary, declared.value
    token = vocabulary.tokens[mask_id] if mask_id < vocabulary.size else None
    if token is None:
        title = f"mask id {mask_id} is a padded row that no token uses, as it should be"
        evidence = {"mask_id": mask_id, "tokens": vocabulary.size}
        return [_finding(declared, "padded-row", title, evidence, Severity.INFO, "Nothing to do.")]
    if is_unused_slot(token) or (mask_id in vocabulary.added and not pair.target_uses(mask_id)):
        return []
    uses = pair.target_encoded.counts().get(mask_id, 0) if pair.target_encoded else 0
    in_use = pair.target_uses(mask_id)
    title = (
        f"mask id {mask_id} is a token of ordinary texts: {vocabulary.text_of(mask_id)!r}, {uses} times in the sample"
    )
    evidence = {"mask_id": mask_id, "token": vocabulary.text_of(mask_id), "uses_in_sample": uses}
    return [_finding(declared, "ordinary", title, evidence, Severity.WARNING if in_use else Severity.INFO)]


def _row(pair: TokenizerPair, declared: Declared) -> list[Finding]:
    """The mask's own embedding row, where a weights file is here to read it from."""
    if "mask_embedding" in pair.drafter.facts.tensors:
        return []  # a stored vector is used in its place
    place = pair.drafter.facts.tensors.get("embedding") or pair.target.facts.tensors.get("embedding")
    if place is None:
        return []
    row = read_row(place, declared.value)
    if row is None:
        return []
    norm, median = _norm(row), _median_norm(place)
    evidence = {"mask_id": declared.value, "row_norm": norm, "median_row_norm": median}
    if norm is None:
        return [_finding(declared, "row-nan", f"row {declared.value} of {place.name} holds NaN or infinity", evidence)]
    if median is not None and norm <= _NEAR_ZERO * median:
        title = f"row {declared.value} of {place.name}, the mask, is zero (norm {norm:.3g}, median row {median:.3g})"
        return [_finding(declared, "row-zero", title, evidence, Severity.WARNING)]
    return []


def _norm(row: Any) -> float | None:
    """Euclidean norm; None for a row that is not finite."""
    import numpy as np

    norm = float(np.linalg.norm(row.astype("f8")))
    return norm if np.isfinite(norm) else None


def _median_norm(place: TensorPlace) -> float | None:
    import numpy as np

    ids = sorted({int(i) for i in np.linspace(0, place.rows - 1, _SPREAD_ROWS)})
    norms = [norm for i in ids if (row := read_row(place, i)) is not None and (norm := _norm(row)) is not None]
    return float(np.median(norms)) if norms else None


def _finding(
    declared: Declared,
    subject: str,
    title: str,
    evidence: dict[str, Any],
    severity: Severity = Severity.ERROR,
    fix: str = _FROM_TRAINING,
) -> Finding:
    where = {"side": "drafter", "file": declared.file, "key": declared.key}
    return Finding("SD108", severity, title, evidence, where, fix, _FAULT, subject)


CHECK = Check("SD108", "Mask token of block drafters", "static", run)
