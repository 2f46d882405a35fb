"""Small result documents for tests of reports, with numbers that are easy to follow."""

from typing import Any


def estimate(
    value: float | None, low: float | None = None, high: float | None = None, n: int = 10, reason: str = ""
) -> Any:
    row: dict[str, Any] = {"value": value, "low": low, "high": high, "n": n}
    return row | ({"reason": reason} if reason else {})


ABSENT = estimate(None, n=0, reason="no drafter")


def plain_arm() -> dict[str, Any]:
    """The baseline of a bench."""
    return {
        "name": "ar",
        "draft": None,
        "requests": 2,
        "tokens_per_s": estimate(100.0, 90.0, 110.0, 2),
        "request_tokens_per_s": estimate(95.0, 85.0, 105.0, 2),
        "speedup": estimate(None, n=2, reason="this is the baseline"),
        "greedy_mismatches": 0,
        "near_ties": 0,
        "prefill_share": estimate(0.05, 0.04, 0.06, 2),
        "tau_step": estimate(1.0, 1.0, 1.0, 40, "all prompts equal: percentile interval, no spread seen"),
        "alpha_draft": ABSENT,
        "marginal": [],
        "conditional": [],
        "accepted_length_histogram": [],
        "rounds": 40,
        "draft_share": ABSENT,
        "verify_share": estimate(0.9, 0.88, 0.92, 2),
        "overhead_share": estimate(0.1, 0.08, 0.12, 2),
        "verify_ratio": ABSENT,
        "expected_speedup": ABSENT,
        "limiting_term": None,
        "by_category": {},
    }


def drafting_arm(name: str, tau: float = 2.5, speedup: tuple[float, float, float] = (1.5, 1.2, 1.9)) -> dict[str, Any]:
    """An arm with K = 2."""
    return plain_arm() | {
        "name": name,
        "draft": {"algorithm": "dspark", "family": "deepspec", "layers": 2, "block_size": 3, "draft_tokens": 2},
        "tokens_per_s": estimate(100.0 * speedup[0], 90.0, 200.0, 2),
        "speedup": estimate(*speedup, 2),
        "tau_step": estimate(tau, tau - 0.25, tau + 0.5, 16),
        "tau_request": estimate(tau + 0.01, tau - 0.2, tau + 0.4, 2),
        "alpha_draft": estimate(0.75, 0.6, 0.8, 16),
        "marginal": [estimate(0.9, 0.8, 0.95, 161), estimate(0.6, 0.5, 0.7, 162)],
        "conditional": [estimate(0.9, 0.8, 0.95, 163), estimate(0.667, 0.6, 0.71, 147)],
        "accepted_length_histogram": [2, 4, 10],
        "rounds": 16,
        "draft_share": estimate(0.25, 0.2, 0.3, 2),
        "verify_share": estimate(0.65, 0.6, 0.7, 2),
        "verify_ratio": estimate(1.05, 1.0, 1.1, 8),
        "expected_speedup": estimate(1.6, 1.5, 1.7, 8),
        "limiting_term": {
            "term": "draft",
            "sentence": "Drafting takes 25% of a round.",
            "advice": "draft fewer tokens",
        },
    }


def bench_document(*arms: dict[str, Any]) -> dict[str, Any]:
    """A bench of plain decoding and the given arms (one drafter unless given) on two prompts."""
    drafters = arms or (drafting_arm("small"),)
    names = ["ar", *(arm["name"] for arm in drafters)]
    return {
        "schema_version": 1,
        "kind": "bench",
        "created": "2026-01-02T03:04:05+00:00",
        "command": ["/somewhere/bin/specdoctor", "bench", "--target", "models/big one", "--json", "x.json"],
        "environment": {"python": "3.11.7", "packages": {"torch": "2.13.0"}, "device": "cpu", "dtype": "float32"},
        "settings": {
            "target": "models/big one",
            "temperature": 0.0,
            "max_new_tokens": 24,
            "scenario": None,
            "prompt_hashes": {"code-001": "d939f97506f452c9", "chat-001": "b729b9445d667040"},
        },
        "interrupted": False,
        "definitions": {"tau_step": "committed tokens per verify round, in this file's own words"},
        "arms": [plain_arm(), *drafters],
        "comparisons": [],
        "divergences": [],
        "prompts": [
            {
                "id": prompt,
                "category": category,
                "arm": name,
                "rounds": 10,
                "completion_tokens": 24,
                "prefill_seconds": 0.01,
                "seconds": 0.04 if name == "ar" else 0.08,
            }
            for prompt, category in (("code-001", "code"), ("chat-001", "chat"))
            for name in names
        ],
    }


def comparison(a: str, b: str, ratio: tuple[float, float, float]) -> dict[str, Any]:
    return {"a": a, "b": b, "tau_difference": estimate(0.3, 0.1, 0.5, 2), "tokens_per_s_ratio": estimate(*ratio, 2)}


def category_row(tau: float) -> dict[str, Any]:
    return {
        "requests": 1,
        "tau_step": estimate(tau, tau - 0.1, tau + 0.1, 8),
        "alpha_draft": estimate(0.5, 0.4, 0.6, 8),
        "tokens_per_s": estimate(123.4, 120.0, 130.0, 1),
        "speedup": estimate(1.23, 1.1, 1.3, 1),
    }


def profile_document() -> dict[str, Any]:
    """A profile with two context lengths."""
    phases = {"draft backbone": 0.002, "verify": 0.006, "host": 0.002}
    return {
        "schema_version": 1,
        "kind": "profile",
        "arm": "small",
        "settings": {"target": "models/big one"},
        "environment": {"device": "cpu", "dtype": "float32"},
        "tau_step": estimate(2.5, 2.25, 3.0, 16),
        "speedup_model": {"speedup": 1.6, "break_even_tau": 1.4},
        "phases": [{"phase": p, "seconds_per_round": s, "share": s / 0.01} for p, s in phases.items()],
        "host_reads_per_round": {"tolist": 2.0},
        "machine": {"bytes_per_second": 5.5e9, "operations_per_second": 4.2e10},
        "roofline": [
            {
                "rows": 1,
                "context": 64,
                "memory_seconds": 0.003,
                "compute_seconds": 0.0001,
                "measured_seconds": 0.004,
                "bound": "memory",
                "efficiency": 0.75,
            }
        ],
        "batches": [
            {"requests": r, "speedup_draft_per_request": 1.6 / r, "speedup_draft_shared": 1.6} for r in (1, 2, 4)
        ],
        "sps": [
            {"rows": rows, "context": context, "seconds": 0.004 + 0.0001 * rows}
            for context in (64, 512)
            for rows in (1, 2, 4, 8, 16, 64, 256)
        ],
        "trace": None,
        "verdict": {
            "term": "draft",
            "sentence": "Drafting takes 20% of a round.",
            "advice": "draft fewer tokens",
            "bound_sentence": "A target forward of 1 row takes 4.00 ms.",
            "batch_sentence": "Speculation pays up to 4 requests in a batch.",
        },
    }


def check_document() -> dict[str, Any]:
    """A check with one finding."""
    return {
        "schema_version": 1,
        "command": "check-tokenizer",
        "verdict": "ids-differ",
        "summary": "2 ids differ of 260",
        "target": {"path": "models/big one", "tokens": 260},
        "drafter": {"path": "drafts/small", "tokens": 260},
        "findings": [
            {
                "code": "SD101",
                "severity": "error",
                "title": "2 ids mean other tokens <here>",
                "evidence": {"ids": 2, "examples": [{"id": 7, "target": "a", "drafter": "b"}]},
                "where": {"side": "drafter", "file": "tokenizer.json"},
                "fix": "Use the target's tokenizer files.",
            }
        ],
    }


def accept_document() -> dict[str, Any]:
    """An accept run of a drafter with a calibrated confidence head and of one without a head."""
    head = accept_arm("head") | {"calibration": {"rounds": 264, "before": confidence(0.8), "after": confidence(0.5)}}
    head["what_if"]["best_K"] = {
        "K": 1,
        "tokens_per_s": estimate(45.8, 44.0, 48.0),
        "speedup": estimate(1.16, 1.05, 1.26),
        "plain_tokens_per_s": 39.0,
    }
    bare = accept_arm("bare") | {"calibration": {"reason": "the drafter has no confidence head"}}
    bare["what_if"]["confidence_threshold"] = []
    return {
        "schema_version": 1,
        "kind": "accept",
        "settings": {"target": "models/big one", "temperature": 0.8},
        "definitions": {"tau_anchor": "an average over positions, in this file's own words"},
        "stopped": "budget",
        "corpus": {"folder": "texts", "texts": 10},
        "arms": [head, bare],
        "comparisons": [{"a": "head", "b": "bare", "tau_difference": estimate(0.25, 0.2, 0.37)}],
        "prompts": [{"id": "code-001", "text": "SECRET", "expected_rounds": 30.7}],
    }


def accept_arm(name: str) -> dict[str, Any]:
    """A drafter with K = 2."""
    split = {"tau": estimate(1.6, 1.5, 1.7), "alpha_draft": estimate(0.3, 0.2, 0.4)}
    category = {"prompts": 5, "requests": 5, "tau_anchor": estimate(2.2, 2.0, 2.4), "alpha_draft": estimate(0.3)}
    return {
        "name": name,
        "draft": {"algorithm": "dspark", "family": "deepspec", "draft_tokens": 2},
        "requests": 10,
        "tau_step": estimate(1.78, 1.58, 2.22, 264),
        "tau_anchor": estimate(2.41, 1.84, 3.35, 470),
        "alpha_draft": estimate(0.39, 0.3, 0.5, 264),
        "marginal": [estimate(0.5, 0.4, 0.6, 264), estimate(0.28, 0.2, 0.4, 263)],
        "conditional": [estimate(0.5, 0.4, 0.6, 264), estimate(0.56, 0.5, 0.6, 132)],
        "accepted_length_histogram": [132.25, 57.75, 74.0],
        "by_category": {"code": category | {"tau_step": estimate(1.9)}, "chat": category | {"tau_step": estimate(1.7)}},
        "by_context": {"0-511": split, "512-1023": split},
        "by_answer_position": {"0-15": split},
        "by_token_class": {"digits": estimate(0.1, 0.05, 0.2), "word-start": estimate(0.6, 0.5, 0.7)},
        "splits_average": "round",
        "change_point": {
            "found": True,
            "context": 512,
            "low": 480,
            "high": 530,
            "step": -0.4,
            "p": 0.001,
            "matches": ["target sliding_window 512"],
        },
        "what_if": {
            "draft_tokens": [what_if(1.5, K=1), what_if(1.78, K=2)],
            "confidence_threshold": [what_if(1.7, K=2, threshold=0.3), what_if(1.4, K=2, threshold=0.6)],
            "cumulative_threshold": [],
            "draft_temperature": [what_if(1.66, K=2, draft_temperature="0.5x")],
            "length_rule": [what_if(1.55, rule="last+1", formula="one more than were accepted last")],
            "tree_coverage": [
                {"width": 1, "marginal": [estimate(0.5), estimate(0.2)], "tau_ceiling": estimate(1.7)},
                {"width": 4, "marginal": [estimate(0.8), estimate(0.6)], "tau_ceiling": estimate(2.4)},
            ],
            "vocabulary": [
                {"vocabulary": 256, "coverage": 0.979, "tau_step": estimate(1.77), "tau_ceiling": estimate(2.9)}
            ],
        },
    }


def what_if(tau: float, **setting: Any) -> dict[str, Any]:
    return setting | {
        "tau_step": estimate(tau, tau - 0.1, tau + 0.1),
        "alpha_draft": estimate(0.4, 0.3, 0.5),
        "verified_per_round": estimate(2.0, 2.0, 2.0, 10, "all prompts equal: percentile interval, no spread seen"),
        "tokens_per_s": estimate(30 * tau, 29 * tau, 31 * tau),
        "speedup": estimate(tau / 1.5, tau / 1.6, tau / 1.4),
    }


def confidence(predicted: float) -> dict[str, Any]:
    """Both questions at two positions, with one bin that holds predictions and one that does not."""
    row = {
        "ece": estimate(0.3, 0.2, 0.4, 264),
        "debiased_rms": estimate(0.29, 0.2, 0.35, 264),
        "brier": estimate(0.25, 0.2, 0.3, 264),
        "auroc": estimate(0.61, 0.55, 0.7, 264, "two prompts only: a rough interval"),
        "mean_prediction": predicted,
        "mean_label": 0.5,
        "reliability": [
            {
                "low": 0.0,
                "high": 0.1,
                "count": 0,
                "mean_prediction": None,
                "label": estimate(None, reason="no prediction"),
            },
            {"low": 0.4, "high": 0.9, "count": 264, "mean_prediction": predicted, "label": estimate(0.5, 0.4, 0.6)},
        ],
    }
    return {"conditional": [row, row], "cumulative": [row, row], "mean": 0.3}
