"""From an accept run to the one JSON object that reports and `gate` read.

Contract: pure functions of what was measured. Every estimate is {value, low, high, n[, reason]}. `prompts` holds one
row for each arm and prompt, with the expected sums that a paired comparison needs and no text.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from specdoctor.measure.accept import AcceptArm, AcceptRun
from specdoctor.measure.accept_whatif import what_if
from specdoctor.measure.environment import environment
from specdoctor.measure.landmarks import landmarks
from specdoctor.measure.token_classes import CLASSES, ClassOf
from specdoctor.metrics.accept_calibration import confidence_bins, confidence_report
from specdoctor.metrics.accept_summary import (
    AcceptanceFigures,
    answer_bins,
    by_anchor,
    by_round,
    context_bins,
    prompt_sums,
)
from specdoctor.metrics.change_point import ContextCurve, find_change_point
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.renewal import survival
from specdoctor.metrics.round_cost import RoundCost
from specdoctor.metrics.statistics import paired_difference
from specdoctor.metrics.whatif import trimmed

SCHEMA_VERSION = 1
DEFINITIONS = {
    "tau_step": "expected committed tokens / expected rounds given the texts, rounds followed from the first token on; "
    "bonus in, prefill token out, cut at EOS and at the length cap: what bench measures",
    "tau_anchor": "the same average with a round anchored at every position of the texts: not what decoding shows, "
    "since rounds pile up where drafts fail",
    "alpha_draft": "accepted drafts / drafted tokens, by round",
    "marginal": "drafts 1..i all accepted, over rounds",
    "conditional": "draft i accepted, over rounds in which those before it were",
    "interval": "95 %, bootstrap clustered by prompt",
}


def accept_result(
    run: AcceptRun,
    settings: Mapping[str, Any],
    *,
    class_of: ClassOf | None = None,
    costs: Mapping[str, RoundCost] | None = None,
) -> dict[str, Any]:
    """The `--json` object. `settings` are the command's own; `costs` by arm."""
    arms = [_arm(run, arm, class_of, (costs or {}).get(arm.name)) for arm in run.arms]
    manifest = run.corpus.manifest
    return _plain(
        {
            "schema_version": SCHEMA_VERSION,
            "kind": "accept",
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": environment()
            | {
                "device": str(run.target.device),
                "dtype": str(run.target.dtype).removeprefix("torch."),
                "attention_path": {"name": run.target.attention.name, "reason": run.target.attention.reason},
            },
            "settings": dict(settings),
            "definitions": DEFINITIONS,
            "stopped": run.stopped,
            "interrupted": run.stopped == "interrupted",
            "corpus": {
                "folder": run.corpus.folder.name,
                "key": manifest.key,
                "target_hash": manifest.target_hash,
                "texts": len(run.arms[0].texts),
                "written_now": run.texts_written,
            },
            "seconds": {
                "all": run.seconds,
                "writing_texts": run.writing_seconds,
                **{f"pass_{arm.name}": arm.seconds for arm in run.arms},
            },
            "arms": arms,
            "comparisons": _comparisons(run),
            "prompts": [row for arm in run.arms for row in _prompt_rows(run, arm)],
        }
    )


def _arm(run: AcceptRun, arm: AcceptArm, class_of: ClassOf | None, cost: RoundCost | None) -> dict[str, Any]:
    seed, spec = run.settings.seed, arm.drafter.spec
    rounds = AcceptanceFigures(arm.texts, arm.variant, by_round, seed)
    anchors = AcceptanceFigures(arm.texts, arm.variant, by_anchor, seed)
    whole = all(text.whole for text in arm.texts)
    return {
        "name": arm.name,
        "draft": {
            "name": arm.drafter.name,
            "family": spec.family,
            "algorithm": spec.algorithm,
            "head": spec.markov,
            "layers": len(spec.layers),
            "block_size": spec.block_size,
            "draft_tokens": arm.draft_tokens,
            "device": str(arm.drafter.device),
            "dtype": str(arm.drafter.head.dtype).removeprefix("torch."),
        },
        "requests": len(arm.texts),
        "tau_step": rounds.tau(),
        "tau_anchor": anchors.tau(),
        "alpha_draft": rounds.alpha(),
        "marginal": rounds.marginal(),
        "conditional": rounds.conditional(),
        "marginal_anchor": anchors.marginal(),
        "conditional_anchor": anchors.conditional(),
        "accepted_length_histogram": rounds.histogram() if whole else None,
        "by_category": _by_category(arm, seed),
        **_splits(rounds if whole else anchors, class_of),
        "splits_average": "round" if whole else "anchor",
        "change_point": _change_point(run, arm),
        "what_if": what_if(arm, run.settings, cost) if run.settings.what_if else None,
        "calibration": _calibration(arm, seed),
        "numerics": _numerics(run, arm),
    }


def _by_category(arm: AcceptArm, seed: int) -> dict[str, Any]:
    rows = {}
    for category in sorted({text.category for text in arm.texts}):
        texts = [text for text in arm.texts if text.category == category]
        figures = AcceptanceFigures(texts, arm.variant, by_round, seed)
        rows[category or "uncategorised"] = {
            "prompts": len(figures.prompts),
            "requests": len(texts),
            "tau_step": figures.tau(),
            "tau_anchor": AcceptanceFigures(texts, arm.variant, by_anchor, seed).tau(),
            "alpha_draft": figures.alpha(),
        }
    return rows


def _splits(figures: AcceptanceFigures, class_of: ClassOf | None) -> dict[str, Any]:
    by_class: Any = {"reason": "no tokenizer to tell what ids stand for"}
    if class_of is not None:
        by_class = figures.by_class(CLASSES, class_of)
    return {
        "by_context": figures.split(*context_bins()),
        "by_answer_position": figures.split(*answer_bins()),
        "by_token_class": by_class,
    }


def _change_point(run: AcceptRun, arm: AcceptArm) -> dict[str, Any]:
    curves = []
    for text in arm.texts:
        shown = ~np.isnan(text.accept[:, : arm.draft_tokens]).any(axis=-1)
        accepted = survival(trimmed(text, arm.variant)).sum(axis=-1)
        curves.append(ContextCurve(text.prompt_id, (text.prompt_tokens + text.anchors)[shown], accepted[shown]))
    return find_change_point(curves, landmarks(run.target, arm.drafter), run.settings.seed).to_json()


def _calibration(arm: AcceptArm, seed: int) -> dict[str, Any]:
    """The head as it is, and with the temperatures that the drafter applies where it was calibrated."""
    stored = arm.drafter.temperatures
    return confidence_report(arm.texts, arm.draft_tokens, None if stored is None else stored.tolist(), seed)


def _numerics(run: AcceptRun, arm: AcceptArm) -> dict[str, Any]:
    """How far this pass and the run that wrote the texts agree: rounding differs with the shape of a forward."""
    rows = sum(max(0, text.length - 1) for text in arm.texts)
    if run.settings.sampling.greedy:
        wrong = sum(text.disagreements for text in arm.texts)
        return {"rows": rows, "argmax_disagreements": wrong, "meaning": "the prefill's best token is not the text's"}
    wrong = sum(text.impossible for text in arm.texts)
    return {"rows": rows, "outside_top_k_top_p": wrong, "meaning": "the prefill cuts the text's token off"}


def _comparisons(run: AcceptRun) -> list[dict[str, Any]]:
    """Every pair of drafters on the same texts."""
    rows = []
    sums = {arm.name: prompt_sums(arm.texts, arm.variant) for arm in run.arms}
    totals = {
        name: {one.id: (one.expected_committed, one.expected_rounds) for one in prompts if one.expected_rounds}
        for name, prompts in sums.items()
    }
    names = list(totals)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            difference = paired_difference(totals[a], totals[b], run.settings.seed)  # type: ignore[arg-type]
            rows.append({"a": a, "b": b, "tau_difference": difference})
    return rows


def _prompt_rows(run: AcceptRun, arm: AcceptArm) -> list[dict[str, Any]]:
    bins = confidence_bins(arm.texts, arm.draft_tokens)
    rows = []
    for one in prompt_sums(arm.texts, arm.variant):
        row = one.to_json()
        row["requests"] = row.pop("texts")
        row |= {"arm": arm.name, "K": arm.draft_tokens}
        if one.id in bins:
            row["confidence_bins"] = bins[one.id]
        rows.append(row)
    return rows


def _plain(value: Any) -> Any:
    """Estimates and bins to JSON, NaN to null."""
    if isinstance(value, Estimate) or hasattr(value, "to_json"):
        return _plain(value.to_json())
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value
