"""A tiny target, packed batches of it, and recipes for the tests of training."""

from collections.abc import Iterator
from typing import Any

import torch
from tiny_models import tiny_target

from specdoctor.engine.rows import PackedRows
from specdoctor.engine.target import FINAL_NORMED, Target
from specdoctor.training.batch import TrainingBatch
from specdoctor.training.recipe import Recipe

VOCAB = 40


def made_target(vocab: int = VOCAB, **more: Any) -> Target:
    """A random float32 target that writes no special tokens."""
    return Target(tiny_target(vocab=vocab, layers=4, **more))


def made_texts(lengths: list[int], vocab: int = VOCAB, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def made_batch(target: Target, taps: tuple[int, ...], texts: list[list[int]], prompt: int = 3) -> TrainingBatch:
    """Texts whose first `prompt` tokens are the prompt, with the target's own states."""
    slots = [target.open() for _ in texts]
    counts = [len(text) for text in texts]
    ids = torch.tensor([token for text in texts for token in text])
    out = target.forward(PackedRows(slots, [0] * len(texts), counts, target.device), ids, taps=(*taps, FINAL_NORMED))
    for slot in slots:
        target.close(slot)
    assert out.taps is not None
    states = out.taps.clone()
    H = target.hidden_size
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    loss_mask = torch.ones(len(ids), dtype=torch.bool)
    for start in starts[:-1]:
        loss_mask[start : start + prompt] = False
    return TrainingBatch(ids, loss_mask, starts, states[:, :-H].clone(), states[:, -H:].clone())


class MadeFeatures:
    """A feature source over made texts: `count` batches an epoch, their order drawn from epoch and seed."""

    def __init__(self, target: Target, taps: tuple[int, ...], count: int = 4, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world
        self.made = [
            made_batch(target, taps, made_texts([14 + i, 9, 18 - i], vocab=target.vocab_size, seed=10 + i))
            for i in range(count)
        ]

    def count(self, epoch: int, seed: int) -> int:
        return len(self.made) // self.world

    def batches(self, epoch: int, seed: int, skip: int = 0) -> Iterator[TrainingBatch]:
        order = torch.randperm(len(self.made), generator=torch.Generator().manual_seed(1000 * seed + epoch)).tolist()
        for index in order[self.rank :: self.world][skip:]:
            yield self.made[index]


def made_recipe(**changes: Any) -> Recipe:
    """A DSpark recipe in float32; `changes` replace keys, those of a section one by one."""
    values: dict[str, Any] = {
        "algorithm": "dspark",
        "target": "made",
        "output": "out",
        "autocast": False,
        "data": {"samples": "none.jsonl"},
        "draft": {
            "layers": 2,
            "taps": [1, 2, 3],
            "block_size": 4,
            "mask_id": 0,
            "markov": "vanilla",
            "markov_rank": 8,
            "confidence": "hidden+markov",
        },
        "sampling": {"anchors": 5, "head_chunk": 7},
        "optimiser": {"lr": 3e-3, "schedule": "constant", "warmup": 0.0},
        "length": {"steps": 6},
        "save_every": 1,
        "log_every": 1,
    }
    for key, value in changes.items():
        values[key] = (
            {**values[key], **value} if isinstance(value, dict) and isinstance(values.get(key), dict) else value
        )
    if values["algorithm"] == "dflash":
        values["draft"] = {k: v for k, v in values["draft"].items() if k not in ("markov", "markov_rank", "confidence")}
    return Recipe.model_validate(values)
