"""Confidence of a drafter against what happens to its drafts, from the replayed rounds of `accept`.

Contract: the population is the rounds that decoding would have had (`ReplayedRounds`), so the figures are those that a
bench with a confidence head would give, without its noise. Two questions:

- conditional, position k: over rounds whose drafts 0..k-1 were accepted. Prediction c_k; label min(1, q/p) of the
  text's token, the probability that draft k is accepted. Its mean over the text's token is 1 - TV(p, q), which is what
  the head is trained on, and given the accepted prefix it is unbiased for that.
- cumulative, position k: over all rounds. Prediction c_0 * ... * c_k along the drafts really made, rejected ones too;
  label 1 if drafts 0..k were all accepted. Along the text's own tokens instead, the product would be biased.

Calibration error depends on the temperature that the rounds were sampled at; a head trained at T = 1 is not expected
to be calibrated in greedy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdoctor.errors import SpecdoctorError
from specdoctor.metrics import calibration
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.text_acceptance import TextAcceptance

NO_HEAD = "the drafter has no confidence head"
NO_PATHS = "rejected drafts were not followed"
RELIABILITY_BINS = 10


@dataclass(slots=True)
class ConfidenceRounds:
    """Rounds of all texts whose confidences are known. R rounds, K positions."""

    prompt: NDArray[np.int64]  # [R]
    accepted: NDArray[np.int64]  # [R]
    shown: NDArray[np.int64]  # [R] drafts of which the text shows the true token
    confidence: NDArray[np.float64]  # [R, K] as decoding sees it
    logit: NDArray[np.float64]  # [R, K] of the head, before any stored temperature
    acceptance: NDArray[np.float64]  # [R, K] along y


def confidence_report(
    texts: Sequence[TextAcceptance], K: int, temperatures: Sequence[float] | None = None, seed: int = 0
) -> dict[str, Any]:
    """`conditional` and `cumulative`, a list by position each, `before` and, given `temperatures`, `after` them.

    Or `{"reason": ...}` when there is nothing to judge. `temperatures` [at least K] divide the confidence's logit;
    `before` is the head without any. `ece` is of what decoding sees: with those that the drafter itself applies.
    """
    if not any(text.confidence is not None for text in texts):
        return {"reason": NO_HEAD}
    rounds = gather_rounds(texts, K)
    if rounds is None:
        return {"reason": NO_PATHS}
    report = {"rounds": len(rounds.prompt), "ece": _pooled(rounds, K, seed), "before": _both(rounds, None, K, seed)}
    if temperatures is not None:
        if len(temperatures) < K or not all(t > 0 for t in temperatures):
            raise SpecdoctorError(
                f"confidence temperatures: found {list(temperatures)}, expected {K} numbers above 0, one for each draft"
            )
        report["after"] = _both(rounds, temperatures[:K], K, seed)
        report["temperatures"] = [float(t) for t in temperatures[:K]]
    return report


def confidence_bins(texts: Sequence[TextAcceptance], K: int) -> dict[str, list[float]]:
    """Per prompt [2 * BINS]: drafts that were decided upon by their predicted acceptance, then sums of prediction less
    acceptance. What a paired comparison of calibration error takes; prompts without confidences are left out."""
    rounds = gather_rounds(texts, K)
    if rounds is None:
        return {}
    prompts = list(dict.fromkeys(text.prompt_id for text in texts))
    decided = (rounds.accepted[:, None] >= np.arange(K)) & (rounds.shown[:, None] > np.arange(K))
    BINS = calibration.BINS
    out = {}
    for i, prompt in enumerate(prompts):
        mine = decided & (rounds.prompt == i)[:, None]
        if mine.any():
            pred, label = rounds.confidence[mine], rounds.acceptance[mine]
            cell = np.minimum((pred * BINS).astype(np.int64), BINS - 1)
            counts = np.bincount(cell, minlength=BINS).astype(np.float64)
            out[prompt] = [*counts.tolist(), *np.bincount(cell, pred - label, minlength=BINS).tolist()]
    return out


def apply_temperatures(confidence: NDArray, temperatures: Sequence[float]) -> NDArray[np.float64]:
    """sigmoid(logit(c) / T) by position [..., K]; 0 and 1 stay what they are."""
    return scaled(_logit(confidence), temperatures)


def scaled(logit: NDArray, temperatures: Sequence[float] | float) -> NDArray[np.float64]:
    """sigmoid(logit / T), float64; `temperatures` by position [K] or one for all."""
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-logit / np.asarray(temperatures, np.float64))))


def gather_rounds(texts: Sequence[TextAcceptance], K: int) -> ConfidenceRounds | None:
    """The rounds whose K confidences are known; None when there is no such text."""
    parts = []
    prompts: dict[str, int] = {}
    for text in texts:
        prompt = prompts.setdefault(text.prompt_id, len(prompts))
        if text.rounds is None or text.confidence is None:
            continue
        at = text.rounds.anchor
        confidence = text.rounds.confidence if text.reads_drafts else text.confidence[at]
        if confidence is None:
            continue
        stored = text.rounds.confidence_logit if text.reads_drafts else text.confidence_logit
        logit = _logit(confidence) if stored is None else _wide(stored if text.reads_drafts else stored[at])
        followed = ~np.isnan(confidence[:, :K]).any(axis=-1)
        at, confidence, logit = at[followed], confidence[followed, :K], logit[followed, :K]
        shown = np.minimum((~np.isnan(text.accept[at, :K])).sum(axis=-1), text.room[at])
        accepted = text.rounds.accepted[followed]
        parts.append(
            ConfidenceRounds(
                np.full(len(at), prompt),
                accepted,
                shown,
                _wide(confidence),
                logit,
                _wide(text.accept[at, :K]),
            )
        )
    if not parts:
        return None
    columns = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("prompt", "accepted", "shown", "confidence", "logit", "acceptance")
    )
    return ConfidenceRounds(*columns)


def _logit(confidence: NDArray) -> NDArray[np.float64]:
    wide = _wide(confidence)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(wide) - np.log1p(-wide))


def _wide(values: NDArray) -> NDArray[np.float64]:
    return np.asarray(values, np.float64)


def _both(rounds: ConfidenceRounds, temperatures: Sequence[float] | None, K: int, seed: int) -> dict[str, Any]:
    sure = scaled(rounds.logit, 1.0 if temperatures is None else temperatures)
    product = np.cumprod(sure, axis=-1)
    conditional, cumulative = [], []
    for k in range(K):
        seen = rounds.shown > k
        risk = seen & (rounds.accepted >= k)
        conditional.append(_figures(sure[risk, k], rounds.acceptance[risk, k], rounds.prompt[risk], seed))
        cumulative.append(_figures(product[seen, k], rounds.accepted[seen] > k, rounds.prompt[seen], seed))
    return {"conditional": conditional, "cumulative": cumulative, "mean": _mean_ece(cumulative)}


def _pooled(rounds: ConfidenceRounds, K: int, seed: int) -> Estimate:
    """ECE of the conditional prediction over all positions together, each draft that was decided upon once."""
    decided = (rounds.accepted[:, None] >= np.arange(K)) & (rounds.shown[:, None] > np.arange(K))
    prompt = np.broadcast_to(rounds.prompt[:, None], decided.shape)
    return calibration.expected_calibration_error(
        rounds.confidence[decided], rounds.acceptance[decided], prompt[decided], seed=seed
    )


def _figures(pred: NDArray, label: NDArray, prompt: NDArray[np.int64], seed: int) -> dict[str, Any]:
    bins = calibration.reliability_bins(pred, label, prompt, bins=RELIABILITY_BINS, seed=seed)
    return {
        "ece": calibration.expected_calibration_error(pred, label, prompt, seed=seed),
        "debiased_rms": calibration.debiased_calibration_error(pred, label, prompt, seed=seed),
        "brier": calibration.brier_score(pred, label, prompt, seed=seed),
        "auroc": calibration.auroc(pred, label, prompt, seed=seed),
        "mean_prediction": float(pred.mean()) if len(pred) else None,
        "mean_label": float(np.mean(label)) if len(pred) else None,
        "reliability": bins,
    }


def _mean_ece(positions: Sequence[dict[str, Any]]) -> float | None:
    """ECE averaged over positions by their counts, as DeepSpec's evaluation prints it."""
    pairs: list[tuple[float, int]] = []
    for row in positions:
        ece: Estimate = row["ece"]
        if ece.value is not None:
            pairs.append((ece.value, ece.n))
    total = sum(n for _, n in pairs)
    return sum(value * n for value, n in pairs) / total if total else None
