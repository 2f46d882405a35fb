"""`specdoctor bench --records`: one line per round. Everything can be counted from it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from specdoctor.formats.results.result_set import ResultSet, present
from specdoctor.formats.results.source import ResultSource
from specdoctor.metrics.acceptance import Rounds, marginal
from specdoctor.metrics.calibration import BINS
from specdoctor.metrics.record import RoundRecord, read_jsonl
from specdoctor.metrics.sums import Sums, total

NAME = "specdoctor records (JSONL of rounds)"
CONVENTION = "counted round by round: bonus in, prefill token out, cut at EOS and at the length cap"
KEYS = {"arm", "prompt_id", "round", "drafted", "committed_ids"}


def recognises(source: ResultSource) -> bool:
    return source.first.keys() >= KEYS


def read(source: ResultSource) -> list[ResultSet]:
    arms: dict[str, list[RoundRecord]] = {}
    for record in read_jsonl(source.path):
        arms.setdefault(record.arm, []).append(record)
    plain = prompt_sums(arms.get("ar", []))
    return [_arm(source, name, records, plain) for name, records in arms.items()]


def prompt_sums(records: Sequence[RoundRecord]) -> dict[str, Sums]:
    """Counts per prompt of one arm, repeats of a prompt added."""
    requests: dict[tuple[str, int], list[RoundRecord]] = {}
    for record in records:
        requests.setdefault((record.prompt_id, record.repeat), []).append(record)
    prompts: dict[str, list[Sums]] = {}
    for (prompt, _), rounds in requests.items():
        prompts.setdefault(prompt, []).append(_request(rounds))
    return {prompt: total(sums) for prompt, sums in prompts.items()}


def beside_plain(prompts: Mapping[str, Sums], plain: Mapping[str, Sums]) -> dict[str, Sums]:
    """The counts of an arm with those of the K = 0 arm on the same prompt beside them, for its speed-up."""
    nothing = Sums()
    partners = {prompt: plain.get(prompt, nothing) for prompt in prompts}
    return {
        prompt: replace(sums, plain_committed=partners[prompt].committed, plain_seconds=partners[prompt].seconds)
        for prompt, sums in prompts.items()
    }


def _arm(source: ResultSource, name: str, records: list[RoundRecord], plain: Mapping[str, Sums]) -> ResultSet:
    prompts = beside_plain(prompt_sums(records), plain)
    longest = max(r.committed for r in records)
    histogram = [0] * (longest + 1)
    for record in records:
        histogram[record.committed] += 1
    return ResultSet(
        tool="specdoctor records",
        path=str(source.path),
        arm=name,
        convention=CONVENTION,
        pooled=total(prompts.values()),
        prompts=prompts,
        pairable=True,
        settings=present(K=max(r.drafted for r in records)),
        histogram=histogram,
        marginal=[e.value for e in marginal(Rounds.of(records)) if e.value is not None],
        notes=("records carry no settings: target, template and temperature are not compared",),
    )


def _request(rounds: list[RoundRecord]) -> Sums:
    committed = sum(r.committed for r in rounds)
    timed = all("round" in r.times for r in rounds)
    return Sums.of_request(
        rounds=len(rounds),
        committed=committed,
        draft_rounds=sum(r.verified > 0 for r in rounds),
        drafted=sum(r.drafted for r in rounds),
        accepted=sum(r.accepted for r in rounds),
        completion=committed + 1,
        seconds=sum(r.times["round"] for r in rounds) if timed else None,
        confidence=_confidence(rounds),
    )


def _confidence(rounds: list[RoundRecord]) -> tuple[float, ...] | None:
    """Predicted acceptance of each draft against its outcome, in bins; drafts never decided upon have none."""
    if any(r.drafted and (r.confidence is None or not r.outcomes) for r in rounds):
        return None
    bins = [0.0] * (2 * BINS)
    for record in rounds:
        for predicted, outcome in zip(record.confidence or [], record.outcomes, strict=False):
            if outcome in ("accepted", "rejected"):
                index = min(int(predicted * BINS), BINS - 1)
                bins[index] += 1
                bins[BINS + index] += predicted - (outcome == "accepted")
    return tuple(bins)
