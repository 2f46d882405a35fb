"""Figures over a number: curves with intervals, and reliability diagrams. Contract: as `figures`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from specdoctor.reports.figure_svg import FONT_SIZE, MUTED, PAPER, figure, series_colour, series_marker, to_svg
from specdoctor.reports.figures import Point, Series, errors, words

_MOST_TICKS = 16
PANELS_A_ROW = 3


def curves(
    prefix: str,
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    whole_x: bool = False,
    log_x: bool = False,
    unit_y: bool = False,
    from_zero: bool = False,
    labels: Sequence[str] = (),
    reference: float | None = None,
    form: str = "{:.2f}",
) -> str:
    """Lines with intervals over x. `whole_x`: ticks at whole numbers; `unit_y`: y is a probability; `labels`
    stand at x = 0, 1, 2, ..."""
    with figure(2.5) as (drawn, axes):
        if reference is not None:
            axes.axhline(reference, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        for place, line in enumerate(series):
            # Side by side, so that intervals at one x do not hide each other.
            shift = 0.08 * (place - (len(series) - 1) / 2) if whole_x and not log_x else 0.0
            points = [point for _, point in line.points]
            axes.errorbar(
                [x + shift for x, _ in line.points],
                [point.value for point in points],
                yerr=errors(points),
                color=series_colour(line.style),
                marker=series_marker(line.style),
                elinewidth=1.1,
            )
        _scale(axes, [x for line in series for x, _ in line.points], whole_x, log_x)
        if unit_y:
            axes.set_ylim(-0.03, 1.03)
        elif from_zero:
            axes.set_ylim(bottom=0)
        if labels:
            axes.set_xticks(range(len(labels)), labels, rotation=30 if len(labels) > 5 else 0)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        return to_svg(drawn, prefix, f"{title}: " + "; ".join(_series_words(line, form, labels) for line in series))


def _scale(axes: Any, xs: Sequence[float], whole: bool, log: bool) -> None:
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, ScalarFormatter

    if log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        ticks = sorted(set(xs))
        axes.xaxis.set_major_locator(FixedLocator(ticks[:: 1 + len(ticks) // 9]))
    elif whole and xs and len(set(xs)) <= _MOST_TICKS:
        axes.xaxis.set_major_locator(FixedLocator(sorted(set(xs))))
    elif whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _series_words(line: Series, form: str, labels: Sequence[str] = ()) -> str:
    return f"{line.name} " + ", ".join(
        f"{words(point, form)} at {labels[int(x)] if labels else f'{x:g}'}" for x, point in line.points
    )


class Panel(NamedTuple):
    """One reliability diagram: (predicted, observed with interval, predictions) by bin, and the same afterwards."""

    title: str
    before: Sequence[tuple[float, Point, int]]
    after: Sequence[tuple[float, Point, int]] = ()


def reliability(prefix: str, title: str, panels: Sequence[Panel]) -> str:
    """Observed share over predicted probability, a panel a position; the larger a dot, the more predictions.

    `before` filled, `after` hollow; on the diagonal a prediction means what it says.
    """
    rows = -(-len(panels) // PANELS_A_ROW)
    with figure(0.5 + 1.35 * rows, rows, PANELS_A_ROW, sharex=True, sharey=True, squeeze=False) as (drawn, grid):
        for axes, panel in zip(grid.flat, panels, strict=False):
            axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
            for style, bins in ((0, panel.before), (1, panel.after)):
                _reliability_line(axes, style, bins)
            axes.set_title(panel.title)
            axes.set(xlim=(-0.05, 1.05), ylim=(-0.05, 1.05))
            axes.set_xticks((0, 0.5, 1), ("0", "0.5", "1"))
            axes.set_yticks((0, 0.5, 1), ("0", "0.5", "1"))
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes in grid.flat[max(0, len(panels) - PANELS_A_ROW) : len(panels)]:
            axes.tick_params(labelbottom=True)
        drawn.supxlabel("predicted", fontsize=FONT_SIZE)
        drawn.supylabel("observed", fontsize=FONT_SIZE)
        return to_svg(drawn, prefix, f"{title}: " + "; ".join(_panel_words(panel) for panel in panels))


def _reliability_line(axes: Any, style: int, bins: Sequence[tuple[float, Point, int]]) -> None:
    most = max((count for *_, count in bins), default=1)
    colour = series_colour(style)
    found = [point for _, point, _ in bins]
    xs, ys = [x for x, *_ in bins], [point.value for point in found]
    axes.errorbar(xs, ys, yerr=errors(found), color=colour, linewidth=1, elinewidth=0.9, capsize=1.5)
    sizes = [4 + 26 * count / most for *_, count in bins]
    axes.scatter(
        xs, ys, sizes, color=PAPER if style else colour, edgecolors=colour, marker="D" if style else "o", zorder=3
    )


def _panel_words(panel: Panel) -> str:
    def told(bins: Sequence[tuple[float, Point, int]]) -> str:
        return ", ".join(f"{point.value:.2f} at {x:.2f} (n {count})" for x, point, count in bins)

    return f"{panel.title} {told(panel.before)}" + (f"; after calibration {told(panel.after)}" if panel.after else "")
