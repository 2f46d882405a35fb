"""Made runs for the gate: a chain drafter whose acceptance differs from prompt to prompt.

K = 3, acceptance of a prompt ~ Beta(6, 4), 20 to 120 rounds a prompt. The second run decodes the same text lengths with
its own acceptance, so its rounds differ in number and in outcome, as those of another checkpoint or seed do.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from specdoctor.metrics.sums import Sums

K = 3
Run = dict[str, Sums]


def accepted_per_round(acceptance: Any) -> Any:
    """Expected accepted drafts of a round: the sum of the marginals."""
    return sum(acceptance**k for k in range(1, K + 1))


def factor_for(drop: float) -> float:
    """What to multiply every acceptance by so that the pooled excess tau - 1 falls by `drop`."""
    rng = np.random.default_rng(0)
    acceptance, rounds = rng.beta(6, 4, 100_000), rng.integers(20, 121, 100_000)
    tokens = rounds * (1 + accepted_per_round(acceptance))

    def excess(factor: float) -> float:
        return float(tokens.sum() / (tokens / (1 + accepted_per_round(acceptance * factor))).sum() - 1)

    low, high = 0.5, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < excess(1.0) * (1 - drop) else (low, middle)
    return high


def simulate(rng: np.random.Generator, prompts: int, factor: float, unrest: float = 0.02) -> tuple[Run, Run]:
    """(run, baseline) over the same prompts. `unrest`: how far the change varies from prompt to prompt, relative."""
    acceptance = rng.beta(6, 4, prompts)
    rounds = rng.integers(20, 121, prompts)
    tokens = rounds * (1 + accepted_per_round(acceptance))
    changed = np.clip(acceptance * factor * (1 + rng.normal(0, unrest, prompts)), 0.01, 0.995)
    other_rounds = np.maximum(1, np.round(tokens / (1 + accepted_per_round(changed)))).astype(int)
    names = [f"p{i:03d}" for i in range(prompts)]
    run = {n: request(rng, a, r) for n, a, r in zip(names, changed, other_rounds, strict=True)}
    baseline = {n: request(rng, a, r) for n, a, r in zip(names, acceptance, rounds, strict=True)}
    return run, baseline


def request(rng: np.random.Generator, acceptance: float, rounds: int) -> Sums:
    """One prompt's rounds, each drafting K tokens."""
    accepted = int((rng.random((rounds, K)) < acceptance).cumprod(axis=1).sum())
    return Sums.of_request(
        rounds=int(rounds),
        committed=accepted + int(rounds),
        draft_rounds=int(rounds),
        drafted=K * int(rounds),
        accepted=accepted,
        completion=accepted + int(rounds) + 1,
        seconds=0.05 * int(rounds),
    )


def write_bench(path: Path, run: Run, arm: str = "drafter", **settings: Any) -> Path:
    """A bench JSON that holds these counts."""
    described = {
        "target": "models/target",
        "template": {"kind": "chat", "name": "default", "sha256": "ab" * 32, "options": {}},
        "temperature": 0.0,
        "draft_tokens": {arm: K},
        "prompt_hashes": {prompt: f"hash-{prompt}" for prompt in run},
    } | settings
    names = ("rounds", "committed", "drafted", "accepted", "seconds")
    rows = [
        {"id": prompt, "arm": arm, "category": "code"} | {name: getattr(sums, name) for name in names}
        for prompt, sums in run.items()
    ]
    document = {
        "schema_version": 1,
        "kind": "bench",
        "created": "2026-11-29T12:00:00+00:00",
        "environment": {"device": "cpu", "dtype": "float32", "packages": {"specdoctor": "0.1.0"}},
        "settings": described,
        "arms": [{"name": arm, "draft": {"name": arm, "draft_tokens": K}}],
        "prompts": rows,
        "records": None,
    }
    path.write_text(json.dumps(document), encoding="utf-8")
    return path
