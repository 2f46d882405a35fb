"""May two results be compared at all, and under which definition of a metric?

Contract: results that differ in target, template, K, temperature or prompts answer different questions; they are
refused unless the key is allowed. A setting that one side does not state cannot differ, and is noted. Numbers counted
under two conventions never meet: of the definitions that both sides have, the one with the strongest evidence is taken.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.formats.results.result_set import ResultSet
from specdoctor.measure.prompt_file import did_you_mean
from specdoctor.metrics.change import Change, independent_change, interval_change, paired_change
from specdoctor.metrics.sums import DEFINITIONS, METRICS, Definition

STATED = ("target", "template", "K", "temperature", "prompts")  # every result should say these
STRICT = (*STATED, "tree", "acceptance")
LOOSE = (
    *("draft_temperature", "confidence_threshold", "max_new_tokens", "seed"),
    *("device", "dtype", "processor", "threads", "max_concurrency"),
)
SPEED_NOTE = (
    "measured at different times: how the machine drifts in between is not in the interval; "
    "speedup, over the K = 0 arm of the same run, is free of it"
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that differs; `strict` ones forbid a comparison."""

    key: str
    run: str
    baseline: str
    strict: bool

    @property
    def text(self) -> str:
        return f"{self.key}: {self.run} here, {self.baseline} in the baseline"


def differences(run: ResultSet, baseline: ResultSet) -> list[Difference]:
    """Settings that both sides state and that differ."""
    found = []
    for key in (*STRICT, *LOOSE):
        here, there = run.settings.get(key), baseline.settings.get(key)
        if here is not None and there is not None and not _same(key, here, there):
            found.append(Difference(key, str(here), str(there), key in STRICT))
    if not any(difference.key == "prompts" for difference in found):
        changed = _prompts(run, baseline)
        found += [changed] if changed else []
    return found


def unknown_settings(run: ResultSet, baseline: ResultSet) -> list[str]:
    """Settings that every side should state and this one does not, one note each side."""
    notes = []
    for name, side in (("run", run), ("baseline", baseline)):
        unknown = [key for key in STATED if key not in side.settings and not (key == "prompts" and side.pairable)]
        if unknown:
            notes.append(f"{name} ({side.tool}) does not state {', '.join(unknown)}: taken as equal")
    return notes


def refuse(found: list[Difference], allow: Collection[str]) -> None:
    """Raises when a strict setting differs that is not allowed; names all of them."""
    for key in allow:
        if key not in STRICT:
            raise SpecdoctorError(
                f"--allow: found {key!r}, expected one of {', '.join(STRICT)}{did_you_mean(key, STRICT)}"
            )
    refused = [difference for difference in found if difference.strict and difference.key not in allow]
    if refused:
        keys = " ".join(f"--allow {difference.key}" for difference in refused)
        raise SpecdoctorError(
            f"the runs differ in {'; '.join(difference.text for difference in refused)}: they answer different "
            f"questions; measure with equal settings, or compare them all the same with {keys}"
        )


def definitions_of(metric: str) -> list[Definition]:
    """All definitions of a metric, ours first; raises for an unknown metric, with the nearest ones."""
    if metric not in METRICS:
        raise SpecdoctorError(
            f"metric: found {metric!r}, expected one of {', '.join(METRICS)}{did_you_mean(metric, METRICS)}"
        )
    return [definition for definition in DEFINITIONS.values() if definition.metric == metric]


def change_of(metric: str, run: ResultSet, baseline: ResultSet, seed: int = 0) -> Change | None:
    """The change of a metric under the best definition that both sides have; None when there is none.

    Evidence before definition: counts paired by prompt, then counts of different prompts, then published intervals,
    then bare values.
    """
    candidates = definitions_of(metric)
    if run.prompts and baseline.prompts:
        ways = [independent_change]
        if run.pairable and baseline.pairable and run.prompts.keys() & baseline.prompts.keys():
            ways.insert(0, paired_change)
        for way in ways:
            for definition in candidates:
                change = way(definition, run.prompts, baseline.prompts, seed)
                if change is not None:
                    return _noted(change, run, baseline)
    bare: Change | None = None
    for definition in candidates:
        sides = [side.estimate(definition.name, seed) for side in (run, baseline)]
        if any(side.value is None for side in sides):
            continue
        change = interval_change(definition, *sides)
        if change.evidence == "intervals":
            return _noted(change, run, baseline)
        bare = bare or change
    return None if bare is None else _noted(bare, run, baseline)


def why_not(metric: str, run: ResultSet, baseline: ResultSet) -> str:
    """Why two results share no definition of a metric, in one line."""
    said = []
    for side in (run, baseline):
        known = [d.name for d in definitions_of(metric) if side.estimate(d.name).value is not None]
        missing = side.estimate(definitions_of(metric)[0].name).reason
        said.append(f"({side.tool}) has {', '.join(known)}" if known else f"({side.tool}) has none, as {missing}")
    if said[0] == said[1]:
        return f"neither side {said[0]}".replace(" has none", " has any")
    return f"run {said[0]}; baseline {said[1]}"


def nothing_to_compare(run: ResultSet, baseline: ResultSet, reasons: list[str]) -> SpecdoctorError:
    """The error (exit code 5) when no metric can be compared."""
    return SpecdoctorError(
        f"nothing to compare between {run.path} and {baseline.path}: {' | '.join(reasons)}", ExitCode.NOTHING
    )


def _same(key: str, here: Any, there: Any) -> bool:
    if key in ("target", "draft"):
        return _same_model(str(here), str(there))
    if isinstance(here, int | float) and isinstance(there, int | float):
        return float(here) == float(there)
    return bool(here == there)


def _same_model(here: str, there: str) -> bool:
    """Some tools print only the last part of a path or id: then only that can be compared."""
    parts = [[part for part in name.replace("\\", "/").split("/") if part] for name in (here, there)]
    shortest = min(len(names) for names in parts)
    return shortest > 0 and parts[0][-shortest:] == parts[1][-shortest:]


def _prompts(run: ResultSet, baseline: ResultSet) -> Difference | None:
    """Other ids, or other texts under the same ids."""
    if not (run.prompts and baseline.prompts and run.pairable and baseline.pairable):
        return None
    here, there = run.prompts.keys(), baseline.prompts.keys()
    shared = here & there
    if here != there:
        return Difference("prompts", f"{len(here)} ids ({len(shared)} shared)", f"{len(there)} ids", strict=True)
    known = [prompt for prompt in shared if prompt in run.hashes and prompt in baseline.hashes]
    other = sorted(prompt for prompt in known if run.hashes[prompt] != baseline.hashes[prompt])
    if not other:
        return None
    named = ", ".join(other[:3]) + (", ..." if len(other) > 3 else "")
    return Difference("prompts", f"another text of {len(other)} of {len(here)} ({named})", "the old ones", strict=True)


def _noted(change: Change, run: ResultSet, baseline: ResultSet) -> Change:
    notes = list(change.notes)
    if change.definition.name != definitions_of(change.definition.metric)[0].name:
        notes.append(f"compared as {change.definition.name} = {change.definition.formula}")
    if change.definition.metric == "tokens_per_s":
        notes.append(SPEED_NOTE)
    if run.tool != baseline.tool and run.convention != baseline.convention:
        notes.append(f"counted by different tools: {run.tool} here, {baseline.tool} in the baseline")
    if change.evidence == "independent":
        notes.append("prompts cannot be paired: both sides resampled on their own, which needs many more prompts")
    if change.evidence == "intervals":
        notes.append("published intervals only: taken as independent, which is on the safe side")
    return replace(change, notes=tuple(notes))
