"""The sections of a profile and of a cost table: steps of a round, and what a target forward costs."""

from collections.abc import Sequence

from specdoctor.reports import figure_curves, figures
from specdoctor.reports.figures import Point, Series
from specdoctor.reports.html_parts import Figure, Section, legend_of
from specdoctor.reports.html_rows import Document, SpsRow
from specdoctor.reports.html_rows_profile import BatchRow, ProfileDocument


def round_section(document: ProfileDocument, prefix: str) -> Section:
    title = "A round, step by step"
    rows = [(row.phase, row.seconds_per_round) for row in document.phases]
    drawn = (
        [
            Figure(
                title,
                figures.waterfall(f"{prefix}-round", title, rows),
                "Each step begins where the one before it ended. Blue: drafter; orange: target; grey: neither.",
            )
        ]
        if rows
        else []
    )
    return Section("round", "Where the time goes", "profile_round.html.j2", {"figures": drawn})


def cost_section(document: Document, prefix: str) -> Section:
    contexts = sorted({row.context for row in document.sps})
    series = [
        Series(f"{context} tokens of context", i, _steps_per_second(document.sps, context))
        for i, context in enumerate(contexts)
    ]
    title = "Target steps per second, SPS(N)"
    svg = figure_curves.curves(
        f"{prefix}-sps", title, series, "rows in a forward", "steps/s", log_x=True, from_zero=True, form="{:.3g}"
    )
    drawn = [
        Figure(title, svg, "1 / measured seconds. Flat: further rows are free; falling: they cost.", legend_of(series))
    ]
    batches = document.batches if isinstance(document, ProfileDocument) else []
    if batches:
        drawn.append(_batches(batches, prefix))
    by_rows: dict[int, dict[int, float]] = {}
    for row in sorted(document.sps, key=lambda row: row.rows):
        by_rows.setdefault(row.rows, {})[row.context] = row.seconds
    data = {"figures": drawn, "contexts": contexts, "rows": list(by_rows.items()), "batches": batches}
    return Section("costs", "What a target forward costs", "cost_curve.html.j2", data)


def _steps_per_second(sps: Sequence[SpsRow], context: int) -> list[tuple[float, Point]]:
    rows = sorted((row.rows, row.seconds) for row in sps if row.context == context)
    return [(float(count), Point(1 / seconds)) for count, seconds in rows if seconds > 0]


def _batches(batches: Sequence[BatchRow], prefix: str) -> Figure:
    title = "Expected speed-up by batch"
    names = {"draft shared": "speedup_draft_shared", "draft per request": "speedup_draft_per_request"}
    series = [
        Series(name, i, [(float(row.requests), Point(getattr(row, key))) for row in batches])
        for i, (name, key) in enumerate(names.items())
    ]
    svg = figure_curves.curves(
        f"{prefix}-batches", title, series, "requests in a batch", "times plain decoding", log_x=True, reference=1.0,
        from_zero=True,
    )  # fmt: skip
    return Figure(title, svg, "The truth lies between the two. Dashed: plain decoding.", legend_of(series))
