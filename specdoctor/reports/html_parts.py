"""What the sections of a page are made of, and the figures that several kinds of documents share."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from specdoctor.reports import figure_curves, figures
from specdoctor.reports.figures import Point, Series
from specdoctor.reports.html_rows import EstimateRow


class LegendEntry(NamedTuple):
    name: str
    style: int
    kind: str  # line or patch


class Figure(NamedTuple):
    title: str
    svg: str
    caption: str
    legend: Sequence[LegendEntry] = ()


class Section(NamedTuple):
    anchor: str
    title: str
    template: str
    data: Mapping[str, Any]


class PositionedArm(Protocol):
    """An arm with acceptance by position."""

    @property
    def name(self) -> str: ...
    @property
    def marginal(self) -> list[EstimateRow]: ...
    @property
    def conditional(self) -> list[EstimateRow]: ...
    @property
    def accepted_length_histogram(self) -> Any: ...  # counts, expected counts, or None


def point(row: EstimateRow | None) -> Point | None:
    """A drawable point, or None where there is no value."""
    return None if row is None or row.value is None else Point(row.value, row.low, row.high)


def points(rows: Sequence[EstimateRow]) -> list[tuple[float, Point]]:
    """Drawable points by position, counted from 1."""
    return [(place, found) for place, row in enumerate(rows, 1) if (found := point(row))]


def legend_of(series: Sequence[Series]) -> list[LegendEntry]:
    """The legend of curves."""
    return [LegendEntry(line.name, line.style, "line") for line in series]


def positions(arms: Sequence[tuple[int, PositionedArm]], prefix: str) -> Section:
    """Acceptance by position of arms, each with its style."""
    arms = [(style, arm) for style, arm in arms if arm.marginal]
    drawn = []
    for which, title, words in (
        ("marginal", "Marginal acceptance", "Drafts 1 to i all accepted, of the rounds that verified draft i."),
        ("conditional", "Conditional acceptance", "Draft i accepted, of the rounds in which those before it were."),
    ):
        series = [Series(arm.name, style, points(getattr(arm, which))) for style, arm in arms]
        svg = figure_curves.curves(
            f"{prefix}-{which}", title, series, "position in the draft", "share accepted", whole_x=True, unit_y=True
        )
        drawn.append(Figure(title, svg, f"{words} Bars: 95 % interval.", legend_of(series)))
    counts = [(arm.name, style, arm.accepted_length_histogram) for style, arm in arms if arm.accepted_length_histogram]
    if counts:
        title = "Accepted drafts a round"
        svg = figures.histograms(f"{prefix}-lengths", title, counts, "accepted drafts")
        drawn.append(Figure(title, svg, "Share of rounds; before the cut at a stop token or the length cap."))
    data = {
        "figures": drawn,
        "arms": [arm for _, arm in arms],
        "estimates": [row for _, arm in arms for row in (*arm.marginal, *arm.conditional)],
        "expected": " (expected, given the texts)"
        if any(isinstance(n, float) for *_, row in counts for n in row)
        else "",
        "longest": max((len(values) for *_, values in counts), default=0),
    }
    return Section("positions", "Acceptance by position", "positions.html.j2", data)
