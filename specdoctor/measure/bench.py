"""Run arms over prompts, interleaved, and keep everything that was measured.

Contract: every arm decodes every prompt, one prompt after the other, the order of the arms turning each time, so that a
drifting machine hits all alike. Warm-up lasts until an arm is steady. Ctrl-C ends the run and keeps what is complete.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdoctor.engine.sampling import Sampling
from specdoctor.engine.target import Target
from specdoctor.measure.arms import Arm, EngineArm, RequestRun
from specdoctor.measure.costs import BareCosts, sample_costs
from specdoctor.measure.near_ties import Divergence, explain_divergence
from specdoctor.measure.prompts import Prompt
from specdoctor.metrics.record import RoundRecord

WARM_UP_TOKENS = 12
WARM_UP_TRIES = 6
STEADY = 0.10  # two warm-ups in a row within this share of each other
COST_SAMPLES = 8  # per drafter, spread over the run

OTHER_KERNELS = 8  # rows of the forward that stands for the roundings of an arm with kernels of its own

BASELINE = "ar"


@dataclass(slots=True)
class BenchSettings:
    """What was asked for; all of it goes into the result."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    draft_temperature: str = "1x"
    seed: int = 0
    ignore_stop: bool = False

    def sampling(self, index: int) -> Sampling:
        """Sampling of the prompt with this index: its seed is the same in every arm."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.draft_temperature, self.seed + index)


@dataclass(slots=True)
class BenchRun:
    """Everything measured. A prompt counts for all arms or not at all."""

    target: Target
    arms: list[Arm]
    settings: BenchSettings
    requests: list[RequestRun] = field(default_factory=list)
    costs: dict[str, BareCosts] = field(default_factory=dict)
    divergences: list[Divergence] = field(default_factory=list)
    interrupted: bool = False

    def of(self, arm: str) -> list[RequestRun]:
        return [request for request in self.requests if request.arm == arm]

    def records(self, arm: str | None = None) -> list[RoundRecord]:
        return [record for request in self.requests if arm in (None, request.arm) for record in request.records]


@dataclass(frozen=True, slots=True)
class Progress:
    """What a progress bar shows after each round and each request."""

    done: int
    total: int
    arm: str
    tokens_per_s: float | None
    tau: float | None


def run_bench(
    target: Target,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    on_progress: Callable[[Progress], None] | None = None,
) -> BenchRun:
    """Decode `prompts` with every arm; see the module's contract."""
    run = BenchRun(target, list(arms), settings)
    stop_ids = frozenset() if settings.ignore_stop else target.stop_ids
    total = len(prompts) * len(arms)
    try:
        _warm_up(run, prompts[0], stop_ids)
        every = max(1, len(prompts) // COST_SAMPLES)
        for index, prompt in enumerate(prompts):
            turn = index % len(arms)
            batch: list[RequestRun] = []
            for arm in [*arms[turn:], *arms[:turn]]:
                batch.append(arm.run(prompt, settings.max_new_tokens, settings.sampling(index), stop_ids))
                if on_progress:
                    on_progress(_progress(run, batch, total, arm.name))
            if index % every == 0:
                _sample_costs(run, batch, prompt)
            run.requests += batch
    except KeyboardInterrupt:
        run.interrupted = True
    if settings.temperature == 0:
        try:
            _find_divergences(run, {prompt.id: prompt.ids for prompt in prompts})
        except KeyboardInterrupt:  # explaining them may take long; what was decoded is not lost for that
            run.interrupted = True
    return run


def _warm_up(run: BenchRun, prompt: Prompt, stop_ids: frozenset[int]) -> None:
    """Run each arm on a short piece until two runs in a row take the same time."""
    for arm in run.arms:
        before = None
        for _ in range(WARM_UP_TRIES):
            request = arm.run(prompt, WARM_UP_TOKENS, run.settings.sampling(0), stop_ids)
            seconds = request.decode_seconds / max(1, request.decoded)
            if before is not None and abs(seconds - before) <= STEADY * before:
                break
            before = seconds


def _sample_costs(run: BenchRun, batch: list[RequestRun], prompt: Prompt) -> None:
    for arm in run.arms:
        if not isinstance(arm, EngineArm) or arm.engine.drafter is None:
            continue
        request = next(r for r in batch if r.arm == arm.name)
        if not request.records or run.target.max_positions <= arm.engine.draft_rows + 1:
            continue
        # The middle of the answer stands for its context length.
        ids = prompt.ids + request.completion_ids[: len(request.completion_ids) // 2]
        tau = sum(r.committed for r in request.records) / len(request.records)
        drafted = sum(r.drafted for r in request.records) / len(request.records)  # below K where its length varies
        costs = run.costs.setdefault(arm.name, BareCosts())
        sample_costs(arm.engine, ids, costs, round(tau), run.settings.sampling(0), max(1, round(drafted)))


def _find_divergences(run: BenchRun, prompt_ids: dict[str, list[int]]) -> None:
    """Where greedy text differs from the baseline's, and whether a near tie explains it."""
    baseline = {request.prompt_id: request.completion_ids for request in run.of(BASELINE)}
    for arm in run.arms:
        if arm.name == BASELINE:
            continue
        block = arm.engine.draft_rows + 1 if isinstance(arm, EngineArm) else OTHER_KERNELS
        for request in run.of(arm.name):
            difference = explain_divergence(
                run.target,
                arm.name,
                request.prompt_id,
                prompt_ids[request.prompt_id],
                baseline[request.prompt_id],
                request.completion_ids,
                block,
                [(record.verified + 1, record.committed) for record in request.records],
            )
            if difference is not None:
                run.divergences.append(difference)


def _progress(run: BenchRun, batch: list[RequestRun], total: int, arm: str) -> Progress:
    mine = [r for r in [*run.requests, *batch] if r.arm == arm]
    seconds, tokens = sum(r.decode_seconds for r in mine), sum(r.decoded for r in mine)
    rounds = sum(len(r.records) for r in mine)
    return Progress(
        len(run.requests) + len(batch),
        total,
        arm,
        tokens / seconds if seconds else None,
        sum(r.committed for one in mine for r in one.records) / rounds if rounds else None,
    )


def prompt_totals(requests: Sequence[RequestRun], value: Callable[[RequestRun], tuple[float, float]]) -> dict[str, Any]:
    """Per prompt id the sums that paired statistics take: (numerator, denominator)."""
    totals: dict[str, tuple[float, float]] = {}
    for request in requests:
        top, bottom = value(request)
        before = totals.get(request.prompt_id, (0.0, 0.0))
        totals[request.prompt_id] = before[0] + top, before[1] + bottom
    return totals
