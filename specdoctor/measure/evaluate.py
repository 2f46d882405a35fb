"""`specdoctor eval`: accepted length of drafters by data set and domain, and what confidence thresholds do to it.

Contract: everything is a ratio of sums over prompts (`Totals`), whichever way they came: expected sums of `accept`'s
pass over texts of the target, or sums over the rounds of real decoding (`rollouts`), which takes any drafter. A prompt
counts for all drafters or for none. Ctrl-C keeps what is complete.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdoctor.engine.engine import Engine
from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.measure.accept_command import AcceptRequest, MeasuredAcceptance, measure_request, round_costs
from specdoctor.measure.arms import EngineArm, RequestRun
from specdoctor.measure.bench import Progress
from specdoctor.measure.drafting import Drafting, drafting_engine
from specdoctor.measure.workload import Workload, load_workload
from specdoctor.metrics.round_cost import RoundCost
from specdoctor.metrics.whatif import Totals, Variant, follow

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

Threshold = float | None  # None: every draft is verified


@dataclass(slots=True)
class EvaluatedDrafter:
    """One row of the table: sums by prompt [P] for each threshold."""

    name: str
    facts: dict[str, Any]
    totals: dict[Threshold, Totals]
    cost: RoundCost | None = None


@dataclass(slots=True)
class Evaluation:
    """Everything measured. `prompts` [P] are ids; `headline` is the threshold that was asked for."""

    load: Workload
    prompts: list[str]
    drafters: list[EvaluatedDrafter]
    headline: Threshold
    method: str  # accept, rollouts
    interrupted: bool = False
    corpus: dict[str, Any] | None = field(default=None)


def evaluate_texts(
    request: AcceptRequest, thresholds: Sequence[float], on_progress: Callable[[Progress], None] | None = None
) -> Evaluation:
    """By `accept`'s pass: exact given the texts, and every threshold from the same pass.

    Raises `SpecdoctorError` as `accept` does; other drafters than DSpark and DFlash need `evaluate_rollouts`.
    """
    request.what_if = False
    measured = measure_request(request, on_progress)
    run = measured.run
    prompts = list(dict.fromkeys(text.prompt_id for text in run.arms[0].texts))
    drafters = []
    for arm in run.arms:
        headline = arm.variant.threshold
        wanted: list[Threshold] = [None, headline, *(thresholds if arm.drafter.confidence is not None else ())]
        wanted = list(dict.fromkeys(wanted))
        found = follow(arm.texts, [Variant(str(t), arm.draft_tokens, t) for t in wanted])
        facts = _facts(arm.drafter, arm.draft_tokens)
        totals = dict(zip(wanted, found, strict=True))
        drafters.append(EvaluatedDrafter(arm.name, facts, totals, measured.costs.get(arm.name)))
    evaluation = Evaluation(measured.load, prompts, drafters, run.arms[0].variant.threshold, "accept")
    evaluation.interrupted = run.stopped == "interrupted"
    evaluation.corpus = _corpus(measured)
    return evaluation


def evaluate_rollouts(
    request: AcceptRequest, thresholds: Sequence[float], on_progress: Callable[[Progress], None] | None = None
) -> Evaluation:
    """By decoding, prompt after prompt; each threshold is a run of its own. Takes every drafter."""
    load = load_workload(request.workload)
    arms = [arm for arm in load.arms if isinstance(arm, EngineArm) and arm.engine.drafter is not None]
    headline = load.described["confidence_threshold"]
    costs = round_costs(request.costs, request.workload.target, load, [arm.name for arm in arms])
    runs: dict[tuple[str, Threshold], EngineArm] = {}
    for arm in arms:
        runs[arm.name, headline] = arm
        drafter: Any = arm.engine.drafter
        if getattr(drafter.spec, "confidence", None) is not None:
            for threshold in dict.fromkeys(t for t in thresholds if t != headline):
                runs[arm.name, threshold] = EngineArm(arm.name, _with_threshold(arm.engine, threshold))
    done: list[str] = []
    rows: dict[tuple[str, Threshold], list[RequestRun]] = {key: [] for key in runs}
    interrupted = False
    try:
        for index, prompt in enumerate(load.prompts):
            requests = {}
            for place, (key, arm) in enumerate(runs.items()):
                stops = frozenset() if load.settings.ignore_stop else load.target.stop_ids
                sampling = load.settings.sampling(index)
                requests[key] = arm.run(prompt, load.settings.max_new_tokens, sampling, stops)
                if on_progress:
                    on_progress(
                        Progress(index * len(runs) + place + 1, len(load.prompts) * len(runs), key[0], None, None)
                    )
            done.append(prompt.id)
            for key, one in requests.items():
                rows[key].append(one)
    except KeyboardInterrupt:
        interrupted = True
        if not done:
            raise
    drafters = [
        EvaluatedDrafter(
            arm.name,
            _facts(arm.engine.drafter, arm.engine.draft_tokens),
            {threshold: totals_of(found) for (name, threshold), found in rows.items() if name == arm.name},
            costs.get(arm.name),
        )
        for arm in arms
    ]
    if not drafters:
        raise SpecdoctorError("no drafter is left to evaluate", ExitCode.NOTHING)
    return Evaluation(load, done, drafters, headline, "rollouts", interrupted)


def totals_of(requests: Sequence[RequestRun]) -> Totals:
    """Sums over the rounds of each request, a row a request."""
    deepest = max((r.verified for request in requests for r in request.records), default=0)
    sums = [
        [
            len(request.records),
            sum(r.committed for r in request.records),
            sum(r.accepted for r in request.records),
            sum(r.drafted for r in request.records),
        ]
        for request in requests
    ]
    lengths = np.zeros((len(requests), deepest + 1))
    for row, request in zip(lengths, requests, strict=True):
        np.add.at(row, [r.verified for r in request.records], 1.0)
    rounds, committed, accepted, drafted = np.array(sums, np.float64).reshape(-1, 4).T
    return Totals(rounds, committed, accepted, drafted, lengths)


def _with_threshold(engine: Engine, threshold: float) -> Engine:
    assert engine.drafter is not None
    return drafting_engine(
        engine.target, engine.drafter, Drafting(draft_tokens=engine.draft_tokens, threshold=threshold)
    )


def _facts(drafter: Any, draft_tokens: int) -> dict[str, Any]:
    """What tells one variant of a recipe from another."""
    spec = drafter.spec
    return {
        "family": spec.family,
        "algorithm": spec.algorithm,
        "head": getattr(spec, "markov", None),
        "layers": len(getattr(spec, "layers", ())),
        "block_size": getattr(spec, "block_size", None),
        "draft_tokens": draft_tokens,
        "calibrated": getattr(drafter, "temperatures", None) is not None,
    }


def _corpus(measured: MeasuredAcceptance) -> dict[str, Any]:
    corpus = measured.run.corpus
    return {
        "key": corpus.manifest.key,
        "target_hash": corpus.manifest.target_hash,
        "texts": len(measured.run.arms[0].texts),
        "written_now": measured.run.texts_written,
    }
