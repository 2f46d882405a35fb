"""The sections of a bench: arms, time, positions, categories, and whether the text is the same.

Contract: arms keep one colour and marker, by their place in the document. Nothing is measured here; sums and shares of
what the JSON holds are all that is computed.
"""

from collections.abc import Iterable

from specdoctor.reports import figures
from specdoctor.reports.figures import DotRow
from specdoctor.reports.html_parts import Figure, LegendEntry, Section, point, positions
from specdoctor.reports.html_rows_bench import BenchArm, BenchDocument


def bench_sections(document: BenchDocument, prefix: str) -> list[Section]:
    """All sections of a bench."""
    found = [_arms(document, prefix)]
    if any(arm.verify_share for arm in document.arms):
        found.append(_time(document, prefix))
    if any(arm.marginal for arm in document.arms):
        found.append(positions(_indexed(document), prefix))
    categories = list(dict.fromkeys(name for arm in document.arms for name in arm.by_category))
    if categories:
        rows = [row for arm in document.arms for row in arm.by_category.values()]
        estimates = [value for row in rows for value in (row.tau_step, row.alpha_draft, row.tokens_per_s, row.speedup)]
        data = {"categories": categories, "estimates": estimates}
        found.append(Section("categories", "By category", "bench_categories.html.j2", data))
    compared = [arm for arm in document.arms if arm.greedy_mismatches is not None and _is_compared(document, arm)]
    if compared or document.divergences:
        found.append(Section("texts", "Is the text the same?", "bench_texts.html.j2", {"arms": compared}))
    return found


def _is_compared(document: BenchDocument, arm: BenchArm) -> bool:
    """The first arm is the one that the others are compared with."""
    return arm is not document.arms[0]


def _indexed(document: BenchDocument) -> list[tuple[int, BenchArm]]:
    return list(enumerate(document.arms))


def _arms(document: BenchDocument, prefix: str) -> Section:
    drawn: list[Figure] = []
    taus = [DotRow(arm.name, i, found) for i, arm in _indexed(document) if (found := point(arm.tau_step))]
    if taus:
        title = "Tokens a round (tau_step)"
        svg = figures.dots(f"{prefix}-tau", title, taus, "committed tokens a round", 1.0)
        drawn.append(Figure(title, svg, "Bars: 95 % interval. Dashed: plain decoding, one token a round."))
    speeds = [
        DotRow(arm.name, i, point(arm.speedup), point(arm.expected_speedup))
        for i, arm in _indexed(document)
        if point(arm.speedup) or point(arm.expected_speedup)
    ]
    if speeds:
        title = "Speed-up, measured and expected"
        svg = figures.dots(f"{prefix}-speedup", title, speeds, "times plain decoding", 1.0)
        caption = "Filled: measured. Hollow: what tau and the forwards timed alone add up to. Dashed: plain decoding."
        drawn.append(Figure(title, svg, caption))
    acceptance = ("tau_step", "tau_request", "alpha_draft", "efficiency", "waste")
    names = (*acceptance, "tokens_per_s", "request_tokens_per_s", "speedup")
    estimates = [getattr(arm, name) for arm in document.arms for name in names]
    return Section("arms", "Tokens a round and speed", "bench_arms.html.j2", {"figures": drawn, "estimates": estimates})


def _time(document: BenchDocument, prefix: str) -> Section:
    rows = [(arm.name, phases) for arm in document.arms if (phases := round_phases(document, arm))]
    if not rows:
        return Section("time", "Where the time goes", "bench_time.html.j2", {"figures": [], "phases": None})
    names = _in_order(name for _, phases in rows for name in phases)
    title = "A round, in milliseconds"
    caption = "Means. A drafting round commits tau tokens, a round of plain decoding one."
    legend = [LegendEntry(name, figures.PHASE_SERIES.get(name, figures.OTHER_PHASE), "patch") for name in names]
    drawn = [Figure(title, figures.stacks(f"{prefix}-phases", title, rows), caption, legend)]
    return Section(
        "time",
        "Where the time goes",
        "bench_time.html.j2",
        {"figures": drawn, "phases": {"names": names, "rows": rows}},
    )


def _in_order(names: Iterable[str]) -> list[str]:
    """Phases in the order of a round, unknown ones before the overhead."""
    known = list(figures.PHASE_SERIES)
    return sorted(dict.fromkeys(names), key=lambda name: known.index(name) if name in known else len(known) - 1.5)


def round_phases(document: BenchDocument, arm: BenchArm) -> dict[str, float]:
    """Mean seconds of a round by phase, the rest as overhead; empty where the file does not tell.

    Files without `phases` hold the shares of draft, verify and the rest: those, times the mean round.
    """
    if arm.phases and "round" in arm.phases:
        named = {name: seconds for name, seconds in arm.phases.items() if name not in ("round", "overhead") and seconds}
        return named | {"overhead": max(0.0, arm.phases["round"] - sum(named.values()))}
    rows = [prompt for prompt in document.prompts if prompt.arm == arm.name]
    rounds = sum(row.rounds for row in rows)
    if not rounds:
        return {}
    seconds = sum(row.seconds for row in rows) / rounds
    shares = {"draft": arm.draft_share, "verify": arm.verify_share, "overhead": arm.overhead_share}
    return {name: share.value * seconds for name, share in shares.items() if share and share.value is not None}
