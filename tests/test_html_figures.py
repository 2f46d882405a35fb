"""The figures of the HTML report: drawn where their numbers are, legible in light and dark, and to the colour-blind."""

import re
from itertools import combinations

import numpy as np
import pytest
from report_documents import bench_document, drafting_arm

from specdoctor.reports.html import PALETTE, render_report


def _places(page: str, figure: str, series: int, axis: str) -> list[float]:
    """Where the marks of a series stand along an axis: values and the caps of their intervals."""
    svg = re.search(rf'<svg[^>]*aria-label="{figure}.*?</svg>', page, re.S)
    assert svg
    marks = re.findall(rf'<use(?=[^>]*series-{series}\))[^>]* {axis}="([\d.]+)"', svg[0])
    return sorted({round(float(mark), 3) for mark in marks}, reverse=axis == "y")


def _stand_straight(places: list[float], values: list[float]) -> None:
    """Places are a straight line of the values, so the figure draws these numbers and no others."""
    assert len(places) == len(values)
    scale = (places[-1] - places[0]) / (values[-1] - values[0])
    assert places == pytest.approx([places[0] + scale * (value - values[0]) for value in values], abs=0.01)


def test_figures_draw_values_and_intervals_where_they_are() -> None:
    page = render_report([bench_document(drafting_arm("a", tau=1.5), drafting_arm("b", tau=3.0))])
    dots = [place for series in (1, 2) for place in _places(page, "Tokens a round", series, "x")]
    _stand_straight(dots, [1.25, 1.5, 2.0, 2.75, 3.0, 3.5])
    _stand_straight(_places(page, "Marginal acceptance", 1, "y"), [0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
    _stand_straight(_places(page, "Conditional acceptance", 2, "y"), [0.6, 0.667, 0.71, 0.8, 0.9, 0.95])


def test_bars_are_as_long_as_their_numbers() -> None:
    page = render_report([bench_document()])

    def sizes(figure: str, series: int, axis: int) -> list[float]:
        svg = re.search(rf'<svg[^>]*aria-label="{figure}.*?</svg>', page, re.S)
        assert svg
        paths = re.findall(rf'<path d="([^"]+)"[^>]*fill: var\(--series-{series}\)', svg[0])
        corners = [re.findall(r"[ML] ([\d.]+) ([\d.]+)", path) for path in paths]
        return [max(float(c[axis]) for c in bar) - min(float(c[axis]) for c in bar) for bar in corners]

    heights = sizes("Accepted drafts a round", 1, 1)
    assert [height / heights[0] for height in heights] == pytest.approx([1, 2, 5], rel=1e-3)  # 2, 4, 10 rounds
    (draft,), (_, verify) = sizes("A round, in milliseconds", 0, 0), sizes("A round, in milliseconds", 1, 0)
    assert verify / draft == pytest.approx(5.2 / 2.0, rel=1e-3)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    """WCAG 2.2, contrast ratio."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_are_legible_in_light_and_dark() -> None:
    page = render_report([bench_document()])
    light, dark = page.split("@media (prefers-color-scheme: dark)")[:2]
    for scheme, css in enumerate((light, dark)):
        colours = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", css.split("</style>")[0].split("* {")[0]))
        for paper in (colours["paper"], colours["card"]):
            assert all(_contrast(pair[scheme], paper) >= 3 for pair in PALETTE)
            assert all(
                _contrast(colours[name], paper) >= 4.5 for name in ("ink", "muted", "link", "good", "bad", "unclear")
            )
    assert _contrast("#777777", "#888888") < 1.5  # the measure can fail


# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
_BLINDNESS = {
    "none": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def _seen(colour: str, blindness: str) -> np.ndarray:
    """CIELAB of a colour as it is seen."""
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(_BLINDNESS[blindness]) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ linear / np.array([0.9505, 1.0, 1.0888])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("scheme", [0, 1])
@pytest.mark.parametrize("blindness", list(_BLINDNESS))
def test_series_are_told_apart_by_the_colour_blind(scheme: int, blindness: str) -> None:
    """Distances in CIELAB: 2.3 is just noticeable. The first five, which most figures need, stand further apart."""
    seen = [_seen(pair[scheme], blindness) for pair in PALETTE]
    apart = {pair: float(np.linalg.norm(seen[pair[0]] - seen[pair[1]])) for pair in combinations(range(8), 2)}
    assert min(apart.values()) >= 12
    assert min(distance for pair, distance in apart.items() if max(pair) < 5) >= 20
    assert np.linalg.norm(_seen("#c24a00", "protanopia") - _seen("#8a6100", "protanopia")) < 3  # the measure can fail
