"""The what-if curves of one drafter: other lengths, thresholds, temperatures, rules, trees and vocabularies.

Contract: every row has `tau_step` with an interval and, where a cost table is given, `tokens_per_s` and its `speedup`
over plain decoding, predicted from tau and the table. Rows are variants of the run's own settings, one thing changed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specdoctor.measure.accept import TREE_WIDTH, AcceptArm, AcceptSettings, draft_temperature
from specdoctor.metrics.accept_summary import NO_ANCHORS, SAMPLED, by_anchor, by_round
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.renewal import length_rules
from specdoctor.metrics.round_cost import RoundCost
from specdoctor.metrics.statistics import ratio_of_sums
from specdoctor.metrics.text_acceptance import TextAcceptance
from specdoctor.metrics.whatif import Totals, Variant, follow, follow_rule, frequency_ranks, tree_coverage

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
WIDTHS = (1, 2, 3, 4, TREE_WIDTH)
SMALLEST_VOCABULARY = 256


def what_if(arm: AcceptArm, settings: AcceptSettings, cost: RoundCost | None) -> dict[str, Any]:
    """All curves of an arm. Without every anchor only those over anchors: lengths by anchor and tree coverage."""
    seed, texts = settings.seed, arm.texts
    if not all(text.whole for text in texts):
        return {"reason": SAMPLED, "tree_coverage": _trees(texts, arm, seed)}
    lengths = [Variant(f"K={k}", k, arm.variant.threshold) for k in range(1, arm.drafter.max_draft + 1)]
    groups: dict[str, list[Variant]] = {"draft_tokens": lengths}
    if arm.drafter.confidence is not None:
        groups["confidence_threshold"] = [Variant(f"c>={t}", arm.draft_tokens, t) for t in THRESHOLDS]
        groups["cumulative_threshold"] = [Variant(f"prod c>={t}", arm.draft_tokens, t, True) for t in THRESHOLDS]
    groups["draft_temperature"] = _temperatures(arm, settings)
    groups["vocabulary"] = _vocabularies(texts, arm)
    totals = iter(follow(texts, [variant for group in groups.values() for variant in group]))
    rows = {
        name: [_row(variant, next(totals), cost, seed) for variant in variants] for name, variants in groups.items()
    }
    for row in rows["draft_temperature"]:
        row.setdefault("draft_temperature", settings.sampling.draft_temperature)  # the run's own
    rows["vocabulary"] = _paired_ceilings(rows["vocabulary"], texts, arm)
    own = _own_vocabulary(texts, arm, seed)
    rules = [
        {"rule": rule.name, "formula": rule.formula} | variant_figures(follow_rule(texts, rule), cost, seed)
        for rule in length_rules(arm.draft_tokens)
    ]
    result: dict[str, Any] = rows | {
        "draft_vocabulary": own,
        "length_rule": rules,
        "tree_coverage": _trees(texts, arm, seed),
    }
    if cost is not None:
        result["best_K"] = _best_length(rows["draft_tokens"], cost)
    return result


def _temperatures(arm: AcceptArm, settings: AcceptSettings) -> list[Variant]:
    """The draft temperatures that were tried and the run's own among them, rising; none if there was nothing to try."""
    sampling = settings.sampling
    values = {label: draft_temperature(sampling, label) for label in arm.texts[0].by_temperature}
    if not values:
        return []
    rising = sorted([*values.items(), (None, sampling.drafting_temperature)], key=lambda pair: pair[1])
    return [Variant(str(label), arm.draft_tokens, arm.variant.threshold, temperature=label) for label, _ in rising]


def _row(variant: Variant, totals: Totals, cost: RoundCost | None, seed: int) -> dict[str, Any]:
    setting: dict[str, Any] = {"K": variant.draft_tokens}
    if variant.threshold is not None:
        setting["threshold"] = variant.threshold
    if variant.temperature is not None:
        setting["draft_temperature"] = variant.temperature
    return setting | variant_figures(totals, cost, seed)


def variant_figures(totals: Totals, cost: RoundCost | None, seed: int) -> dict[str, Any]:
    """tau_step, alpha_draft and drafts verified a round of one variant; with a cost table the predicted speed too."""
    n = round(float(totals.rounds.sum()))
    verified = totals.lengths @ np.arange(totals.lengths.shape[1])
    row: dict[str, Any] = {
        "tau_step": ratio_of_sums(totals.committed, totals.rounds, n, NO_ANCHORS, seed),
        "alpha_draft": ratio_of_sums(totals.accepted, totals.drafted, n, NO_ANCHORS, seed),
        "verified_per_round": ratio_of_sums(verified, totals.rounds, n, NO_ANCHORS, seed),
    }
    if cost is not None:
        row |= _speed(totals, cost, n, seed)
    return row


def _speed(totals: Totals, cost: RoundCost, n: int, seed: int) -> dict[str, Any]:
    """Predicted tokens/s, and over plain decoding."""
    by_length = cost.round_seconds(totals.lengths.shape[1] - 1)
    used = totals.lengths.sum(axis=0) > 0
    if np.isnan(by_length[used]).any() or np.isnan(cost.plain_seconds):
        needed = int(np.flatnonzero(used).max()) + 1
        absent = Estimate.absent(
            f"the cost table has {cost.rows[0]} to {cost.rows[-1]} rows, expected 1 to {needed}; measure more of them",
            n,
        )
        return {"tokens_per_s": absent, "speedup": absent}
    seconds = totals.lengths[:, used] @ by_length[used]
    return {
        "tokens_per_s": ratio_of_sums(totals.committed, seconds, n, NO_ANCHORS, seed),
        "speedup": ratio_of_sums(totals.committed * cost.plain_seconds, seconds, n, NO_ANCHORS, seed),
    }


def _best_length(rows: Sequence[dict[str, Any]], cost: RoundCost) -> dict[str, Any]:
    """The K of the highest predicted speed, and whether any beats plain decoding."""
    known = [row for row in rows if row["tokens_per_s"].value is not None]
    if not known:
        return {"K": None, "reason": rows[0]["tokens_per_s"].reason}
    best = max(known, key=lambda row: row["tokens_per_s"].value)
    plain = 1 / cost.plain_seconds
    return {
        "K": best["K"] if best["tokens_per_s"].value > plain else 0,
        "tokens_per_s": best["tokens_per_s"],
        "speedup": best["speedup"],
        "plain_tokens_per_s": plain,
    }


def _vocabularies(texts: Sequence[TextAcceptance], arm: AcceptArm) -> list[Variant]:
    """For each vocabulary size two variants: this drafter, unable to propose other ids (floor), and a perfect one
    within the vocabulary (ceiling)."""
    size = arm.drafter.spec.vocab_size
    ranks, side = frequency_ranks(texts, size)
    variants = []
    for limit in _sizes(ranks, size):

        def allowed(text: TextAcceptance, limit: int = limit) -> Any:
            return ranks[side[text.prompt_id]] < limit

        for perfect in (False, True):
            name = f"{'ceiling' if perfect else 'floor'} {limit}"
            variants.append(Variant(name, arm.draft_tokens, arm.variant.threshold, allowed=allowed, perfect=perfect))
    return variants


def _sizes(ranks: np.ndarray, vocabulary: int) -> list[int]:
    """Powers of two from `SMALLEST_VOCABULARY` up to the first that holds every id seen."""
    seen = int(np.isfinite(ranks).sum(axis=1).max())
    sizes = [min(SMALLEST_VOCABULARY, vocabulary)]
    while sizes[-1] < min(seen, vocabulary):
        sizes.append(min(2 * sizes[-1], vocabulary))
    return sizes


def _paired_ceilings(
    rows: Sequence[dict[str, Any]], texts: Sequence[TextAcceptance], arm: AcceptArm
) -> list[dict[str, Any]]:
    """One row for each size: coverage of the texts, tau of this drafter and of a perfect one within the vocabulary."""
    size = arm.drafter.spec.vocab_size
    ranks, side = frequency_ranks(texts, size)
    out = []
    for limit, floor, ceiling in zip(_sizes(ranks, size), rows[::2], rows[1::2], strict=True):
        inside = sum(int((ranks[side[t.prompt_id]][t.tokens[1 : t.length]] < limit).sum()) for t in texts)
        total = sum(max(0, t.length - 1) for t in texts)
        out.append(
            {
                "vocabulary": limit,
                "ids_counted": int(np.isfinite(ranks).sum(axis=1).min()),
                "coverage": inside / total if total else None,
                "tau_step": floor["tau_step"],
                "tau_ceiling": ceiling["tau_step"],
            }
        )
    return out


def _own_vocabulary(texts: Sequence[TextAcceptance], arm: AcceptArm, seed: int) -> dict[str, Any] | None:
    """Of a drafter whose vocabulary is a part of the target's: the share of the texts' tokens that it can propose, and
    tau of a drafter that is perfect on those: no training lifts this one above it (formats page 3.11). Else None."""
    d2t = arm.drafter.d2t
    if d2t is None:
        return None
    reachable = np.zeros(arm.drafter.spec.vocab_size, np.bool_)
    reachable[d2t.cpu().numpy()] = True
    ceiling = Variant("ceiling", arm.draft_tokens, arm.variant.threshold, allowed=lambda text: reachable, perfect=True)
    inside = sum(int(reachable[text.tokens[1 : text.length]].sum()) for text in texts)
    total = sum(max(0, text.length - 1) for text in texts)
    return {
        "rows": len(d2t),
        "coverage": inside / total if total else None,
        "tau_ceiling": variant_figures(follow(texts, [ceiling])[0], None, seed)["tau_step"],
    }


def _trees(texts: Sequence[TextAcceptance], arm: AcceptArm, seed: int) -> list[dict[str, Any]]:
    """How often the text's tokens are among the `width` likeliest drafts, all the way down: what a tree could reach.

    `tau_ceiling`: of a tree with that many children at every node, verified at no cost.
    """
    if not texts or texts[0].rank is None:
        return []
    whole = all(text.whole for text in texts)
    full = [Variant(f"tree {width}", arm.draft_tokens, tree_width=width) for width in WIDTHS]
    ceilings = [variant_figures(totals, None, seed)["tau_step"] for totals in follow(texts, full)] if whole else []
    weigh = by_round if whole else by_anchor
    rows = []
    for i, width in enumerate(WIDTHS):
        covered, reached = tree_coverage(texts, width, lambda text: weigh(text, arm.variant))
        marginal = [_share(covered[:, k], reached[:, 0], seed) for k in range(covered.shape[1])]
        conditional = [_share(covered[:, k], reached[:, k], seed) for k in range(covered.shape[1])]
        rows.append(
            {
                "width": width,
                "average": "round" if whole else "anchor",
                "marginal": marginal,
                "conditional": conditional,
                "tau_ceiling": ceilings[i] if whole else Estimate.absent(SAMPLED),
            }
        )
    return rows


def _share(top: np.ndarray, bottom: np.ndarray, seed: int) -> Estimate:
    return ratio_of_sums(top, bottom, round(float(bottom.sum())), "no block got so far", seed)
