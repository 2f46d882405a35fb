"""What the tests of training objectives share: a tiny target, texts that it wrote, batches, plain losses, rollouts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_target
from torch import Tensor

from specdoctor.drafters.load import load_drafter
from specdoctor.engine.engine import Engine
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.training.batch import TrainingBatch
from specdoctor.training.features import OnlineFeatures
from specdoctor.training.objective import OBJECTIVES, Objective
from specdoctor.training.recipe import Recipe
from specdoctor.training.samples import Sample

V, LAYERS = 40, 4
PROMPTS = [[3, 17, 8, 25, 11], [1, 2, 30, 9], [22, 5, 38, 14, 6, 7]]


def make_target(**more: Any) -> Target:
    return Target(tiny_target(vocab=V, layers=LAYERS, **more))


def recipe(algorithm: str, draft: dict[str, Any] | None = None, **more: Any) -> Recipe:
    """A recipe in float32 that looks at every anchor; a learning loop is not part of it."""
    values: dict[str, Any] = {
        "algorithm": algorithm,
        "target": "tiny",
        "output": Path("out"),
        "autocast": False,
        "data": {"samples": "samples.jsonl"},
        "draft": draft or {},
        "losses": {"ce": 0.7, "kl": 0.4, "l1": 0.3, "decay": 3.0},
        "sampling": {"anchors": 1000, "head_chunk": 7},
        "length": {"steps": 1},
    }
    return Recipe.model_validate(values | more)


def mixed_samples(seed: int = 5) -> list[Sample]:
    """Texts of several lengths: with two answer spans, one that ends in an answer, one without any answer."""
    generator = torch.Generator().manual_seed(seed)
    spans = {14: [(4, 9), (11, 13)], 11: [(5, 11)], 6: [], 9: [(3, 9)]}
    samples = []
    for length, answer in spans.items():
        ids = torch.randint(0, V, (length,), generator=generator).tolist()
        mask = [any(start <= i < end for start, end in answer) for i in range(length)]
        samples.append(Sample(str(length), ids, mask))
    return samples


def written(target: Target, length: int = 24) -> list[Sample]:
    """Greedy answers of the target to `PROMPTS`, the answer marked."""
    sequences = [Sequence(prompt, max_new_tokens=length) for prompt in PROMPTS]
    Engine(target).generate(sequences)
    return [Sample(str(i), s.ids, [j >= s.prompt_length for j in range(len(s.ids))]) for i, s in enumerate(sequences)]


def one_batch(target: Target, samples: list[Sample], objective: Objective) -> TrainingBatch:
    """All samples in one batch, in their order."""
    features = OnlineFeatures(target, samples, objective.taps, 10_000)
    return features._batch(samples)


def shaken(objective: Objective, scale: float = 0.1, seed: int = 2) -> Objective:
    """Noise on every parameter, so that no norm is 1, no bias 0 and no two heads alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in objective.module.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return objective


def make(target: Target, made: Recipe, start: Path | None = None) -> Any:
    return OBJECTIVES[made.algorithm](made, target, start)


def anchors_of(sample: Sample, steps: int) -> list[tuple[int, int]]:
    """(anchor, k) of every row that counts, from what the brief of the batch says, by plain loops."""
    mask, rows = sample.loss_mask, []
    for a in range(1, len(mask)):
        for k in range(steps):
            inside = a + 1 + k < len(mask)
            if not inside or not all(mask[a : a + 2 + k]):
                break
            rows.append((a, k))
    return rows


def plain_loss(
    target: Target, samples: list[Sample], made: Recipe, steps: int, draft_logits: Callable[[Sample, int, int], Tensor]
) -> tuple[float, dict[str, float]]:
    """The loss and acceptance by step, row by row; `draft_logits(sample, anchor, k)` -> [V], -inf where no row is."""
    total, weights = 0.0, 0.0
    accept: dict[int, list[float]] = {k: [] for k in range(steps)}
    losses = made.losses
    for sample in samples:
        for a, k in anchors_of(sample, steps):
            with torch.inference_mode():
                p = next_law(target, sample.ids[: a + k + 1])
                z = draft_logits(sample, a, k)
            q, there = z.softmax(-1), z > -torch.inf
            cut = p[there] / p[there].sum()
            label = sample.ids[a + 1 + k]
            ce = -float(q[label].log()) if bool(there[label]) else 0.0
            kl = float((cut * (cut.log() - q[there].log())).sum())
            l1 = float((p - q).abs().sum())
            weight = losses.position_weight(k)
            total += weight * (losses.ce * ce + losses.kl * kl + losses.l1 * l1)
            weights += weight
            accept[k].append(float(torch.minimum(p, q).sum()))
    means = {f"accept_{k + 1}": sum(values) / len(values) for k, values in accept.items() if values}
    return total / weights, means


def next_law(target: Target, ids: list[int]) -> Tensor:
    """The target's distribution [V] after `ids`, by the library's own attention over everything."""
    model = tiny_target(vocab=V, layers=LAYERS)
    model.load_state_dict(target.model.state_dict())
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0, -1].softmax(-1)


def train(objective: Objective, batch: TrainingBatch, steps: int, lr: float = 3e-3) -> list[float]:
    """Adam on one batch; the loss of each step."""
    optimiser = torch.optim.Adam(objective.module.parameters(), lr=lr)
    seen = []
    for step in range(steps):
        losses = objective.loss(batch, torch.Generator().manual_seed(step))
        optimiser.zero_grad()
        losses.total.backward()
        optimiser.step()
        seen.append(float(losses.total.detach()))
    return seen


def tau(target: Target, folder: Path, draft_tokens: int, length: int = 24) -> float:
    """Committed tokens per round of greedy rollouts from `PROMPTS`, the first token not counted."""
    engine = Engine(target, load_drafter(folder, target), draft_tokens=draft_tokens)
    sequences = [Sequence(prompt, max_new_tokens=length) for prompt in PROMPTS]
    engine.generate(sequences)
    records = [record for sequence in sequences for record in sequence.records]
    return sum(len(record.committed_ids) for record in records) / len(records)
