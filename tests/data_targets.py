"""A tiny target folder, prompts for it and samples: what the data tools are tested with."""

import json
import random
from pathlib import Path

from tiny_models import tiny_target

V = 29
STOP = 3


def target_folder(folder: Path, seed: int = 0, **more: object) -> Path:
    """A random Qwen3 that stops at one token; positions 512, states of 64 float32 values."""
    settings = {"eos_token_id": STOP, "initializer_range": 0.4} | more
    tiny_target(V, seed=seed, **settings).save_pretrained(folder)  # type: ignore[arg-type]
    return folder


def write_prompts(path: Path, count: int, seed: int = 0, longest: int = 9) -> Path:
    """Prompts of ids, all different."""
    chooser = random.Random(seed)
    seen: set[tuple[int, ...]] = set()
    while len(seen) < count:
        seen.add(tuple(chooser.randrange(4, V) for _ in range(chooser.randrange(2, longest))))
    rows = [{"id": f"p{i}", "category": "chat", "prompt_ids": list(ids)} for i, ids in enumerate(sorted(seen))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_samples(path: Path, count: int, seed: int = 0, longest: int = 60) -> Path:
    """Samples without a target behind them."""
    chooser = random.Random(seed)
    rows = []
    for _ in range(count):
        ids = [chooser.randrange(V) for _ in range(chooser.randrange(6, longest))]
        rows.append({"ids": ids, "answer": [[chooser.randrange(1, 5), len(ids)]]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
