"""The figures of the HTML report: numbers in, inline SVG out.

Contract: each function returns SVG whose label says what the figure says. Series are told apart by colour AND by
marker; the legend is the page's (it wraps on a telephone), in the order of the series. Absent values are left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specdoctor.reports.figure_svg import MUTED, PAPER, figure, series_colour, to_svg

_LONGEST_NAME = 40
_MOST_TICKS = 18

# In the order of a round.
PHASE_SERIES = {"draft": 0, "schedule": 4, "verify": 1, "accept": 2, "commit": 3, "overhead": 6}
OTHER_PHASE = 5
# Whose time the steps of a profiled round are; the others are nobody's.
_WHOSE = dict.fromkeys(
    (
        "draft",
        "draft backbone",
        "draft context",
        "draft LM head",
        "draft sampling",
        "sequential head",
        "confidence head",
    ),
    "draft",
) | {"verify": "verify"}


class Point(NamedTuple):
    """A value with its interval."""

    value: float
    low: float | None = None
    high: float | None = None


class Series(NamedTuple):
    """Points over x; `style` chooses colour and marker."""

    name: str
    style: int
    points: Sequence[tuple[float, Point]]


class DotRow(NamedTuple):
    """One line of a dot plot: a name, and up to two values (the second drawn hollow)."""

    name: str
    style: int
    value: Point | None
    second: Point | None = None


def short_name(name: str) -> str:
    """A name that fits the figure, without characters that XML forbids; both ends stay."""
    name = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in name)
    if len(name) <= _LONGEST_NAME:
        return name
    half = (_LONGEST_NAME - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def dots(prefix: str, title: str, rows: Sequence[DotRow], axis: str, reference: float, form: str = "{:.2f}") -> str:
    """Values with intervals, one line an arm, and a line at the value of plain decoding."""
    with figure(0.62 + 0.42 * len(rows)) as (drawn, axes):
        axes.axvline(reference, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        for line, row in enumerate(rows):
            pair = row.value is not None and row.second is not None
            _name_above(axes, line - 0.22, row.name)
            for point, y, hollow in ((row.value, line - 0.02, False), (row.second, line + 0.22 * pair, True)):
                if point is not None:
                    _dot(axes, point, y, row.style, hollow)
        axes.set_ylim(len(rows) - 0.45, -0.75)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.margins(x=0.08)
        axes.set_xlabel(axis)
        label = f"{title}: " + "; ".join(_row_words(row, form) for row in rows)
        return to_svg(drawn, prefix, label)


def _name_above(axes: Any, y: float, name: str) -> None:
    """A row's name on a line of its own, where no name is too long; paper behind it hides the grid."""
    paper = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.6}
    transform = axes.get_yaxis_transform()
    axes.text(0.0, y, short_name(name), transform=transform, va="bottom", bbox=paper, zorder=1.5)


def _number_after(axes: Any, x: float, y: float, value: float) -> None:
    """A bar's number, a little behind its end."""
    axes.annotate(f"{value:.3g}", (x, y), xytext=(3, 0), textcoords="offset points", va="center")


def _dot(axes: Any, point: Point, y: float, index: int, hollow: bool) -> None:
    axes.errorbar(
        [point.value],
        [y],
        xerr=errors([point]),
        fmt="D" if hollow else "o",
        color=series_colour(index),
        markerfacecolor=PAPER if hollow else series_colour(index),
        elinewidth=1.6,
    )


def _row_words(row: DotRow, form: str) -> str:
    values = [words(point, form) for point in (row.value, row.second) if point is not None]
    return f"{row.name} {' and '.join(values) or 'no value'}"


def histograms(prefix: str, title: str, counts: Sequence[tuple[str, int, Sequence[int]]], x_label: str) -> str:
    """Shares of counts by 0, 1, 2, ...: one panel a series, one scale, so that they compare by eye."""
    longest = max(len(values) for _, _, values in counts)
    with figure(0.55 + 1.0 * len(counts), rows=len(counts), sharex=True, sharey=True, squeeze=False) as (drawn, grid):
        for (name, index, values), axes in zip(counts, grid[:, 0], strict=True):
            total = sum(values) or 1
            axes.bar(range(len(values)), [value / total for value in values], color=series_colour(index), width=0.78)
            axes.set_title(short_name(name))
            axes.grid(axis="x", visible=False)
            axes.yaxis.set_major_formatter(_percent())
        grid[-1, 0].set_xticks(range(0, longest, 1 + longest // _MOST_TICKS))
        grid[-1, 0].set_xlabel(x_label)
        return to_svg(
            drawn, prefix, f"{title}: " + "; ".join(_histogram_words(name, values) for name, _, values in counts)
        )


def _histogram_words(name: str, values: Sequence[int]) -> str:
    total = sum(values) or 1
    return f"{name} " + ", ".join(f"{value / total:.0%} at {place}" for place, value in enumerate(values))


def _percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0, decimals=0)


def stacks(prefix: str, title: str, rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Milliseconds of a round by phase, one bar an arm."""
    with figure(0.6 + 0.5 * len(rows)) as (drawn, axes):
        for line, (name, phases) in enumerate(rows):
            left = 0.0
            for phase, seconds in phases.items():
                axes.barh(
                    line + 0.14,
                    1000 * seconds,
                    height=0.4,
                    left=left,
                    color=series_colour(PHASE_SERIES.get(phase, OTHER_PHASE)),
                    edgecolor=PAPER,
                    linewidth=0.8,
                )
                left += 1000 * seconds
            _number_after(axes, left, line + 0.14, left)
            _name_above(axes, line - 0.1, name)
        axes.set_ylim(len(rows) - 0.5, -0.6)
        axes.set_yticks([])
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.12)
        axes.set_xlim(left=0)
        axes.set_xlabel("milliseconds a round")
        return to_svg(drawn, prefix, f"{title}: " + "; ".join(_stack_words(name, phases) for name, phases in rows))


def _stack_words(name: str, phases: Mapping[str, float]) -> str:
    parts = ", ".join(f"{phase} {1000 * seconds:.3g}" for phase, seconds in phases.items())
    return f"{name} {1000 * sum(phases.values()):.3g} ms ({parts})"


def waterfall(prefix: str, title: str, steps: Sequence[tuple[str, float]]) -> str:
    """Milliseconds of the steps of one round, each bar beginning where the one before it ended."""
    with figure(0.55 + 0.24 * len(steps)) as (drawn, axes):
        left = 0.0
        for line, (name, seconds) in enumerate(steps):
            index = PHASE_SERIES[_WHOSE.get(name, "overhead")]
            axes.barh(line, 1000 * seconds, height=0.62, left=left, color=series_colour(index))
            left += 1000 * max(0.0, seconds)
            _number_after(axes, left, line, 1000 * seconds)
        axes.set_yticks(range(len(steps)), [short_name(name) for name, _ in steps])
        axes.set_ylim(len(steps) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.16)
        axes.set_xlim(left=0)
        axes.set_xlabel("milliseconds a round")
        words = ", ".join(f"{name} {1000 * seconds:.3g} ms" for name, seconds in steps)
        return to_svg(drawn, prefix, f"{title}: {words}")


def errors(points: Sequence[Point]) -> list[list[float]]:
    """[2, n] lengths below and above; zero where there is no interval. A bootstrap interval may miss its value."""
    below = [0.0 if point.low is None else max(0.0, point.value - point.low) for point in points]
    above = [0.0 if point.high is None else max(0.0, point.high - point.value) for point in points]
    return [below, above]


def words(point: Point, form: str) -> str:
    interval = (
        "" if point.low is None or point.high is None else f" [{form.format(point.low)}, {form.format(point.high)}]"
    )
    return form.format(point.value) + interval
