"""A matplotlib figure as SVG that belongs to the page: its colours, its font, no trace of when it was drawn.

Contract: the same figure gives the same bytes. Colours are named by role and become CSS variables, so a figure is as
legible in the dark as in the light; text stays text; ids carry the caller's prefix, so figures share a page.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 4.3  # inches: one column of a telephone, so that text need not shrink there
FONT_SIZE = 9.0  # points, in a viewBox WIDTH * 72 wide
SERIES = 8  # colours of series; the ninth is the first again, with another marker
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
_MARKS = {  # the same shapes around (12, 6), for the legend
    "o": "M9 6a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
    "s": "M9 3h6v6h-6z",
    "^": "M12 2.5l3.5 6.5h-7z",
    "D": "M12 2l4 4l-4 4l-4-4z",
    "v": "M12 9.5l3.5-6.5h-7z",
    "P": "M11 2h2v3h3v2h-3v3h-2v-3h-3v-2h3z",
    "X": "M9.5 2.5l2.5 2.5l2.5-2.5l1.5 1.5l-2.5 2l2.5 2l-1.5 1.5l-2.5-2.5l-2.5 2.5l-1.5-1.5l2.5-2l-2.5-2z",
    "p": "M12 2.5l3.6 2.6l-1.4 4.2h-4.4l-1.4-4.2z",
}

# matplotlib knows no CSS variables, so each role is drawn in a colour of its own that no figure uses otherwise.
INK, MUTED, GRID, PAPER = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04"
_ROLES = {INK: "fig-ink", MUTED: "fig-muted", GRID: "fig-grid", PAPER: "fig-paper"}
_ROLES |= {f"#0a0c{index:02x}": f"series-{index}" for index in range(SERIES)}
_ROLE = re.compile("|".join(_ROLES))

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_FONT = re.compile(r"\s*font-family:[^;]*;?")
_TURNED_BY_NOTHING = re.compile(r"^rotate\(-?0 ")


def series_colour(index: int) -> str:
    """The colour of a series, turned into `var(--series-N)` by `to_svg`."""
    return f"#0a0c{index % SERIES:02x}"


def series_marker(index: int) -> str:
    """matplotlib's marker of a series: shape tells series apart where colour does not."""
    return MARKERS[(index + index // SERIES) % len(MARKERS)]


def legend_mark(index: int, kind: str) -> str:
    """The swatch of a series for the page's legend: a line with its marker, or a patch of its colour."""
    colour = f"var(--series-{index % SERIES})"
    if kind == "patch":
        return (
            f'<svg viewBox="0 0 12 12" width="12" aria-hidden="true"><path d="M0 0h12v12h-12z" fill="{colour}"/></svg>'
        )
    line = f'<path d="M0 6h24" stroke="{colour}" stroke-width="2"/>'
    marker = f'<path d="{_MARKS[series_marker(index)]}" fill="{colour}"/>'
    return f'<svg viewBox="0 0 24 12" width="24" aria-hidden="true">{line}{marker}</svg>'


@contextmanager
def figure(height: float, rows: int = 1, columns: int = 1, **options: Any) -> "Iterator[tuple[Figure, Any]]":
    """A figure and its axes, by default one above the other. The report's own settings, whatever the user's are."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with warnings.catch_warnings(), mpl.rc_context():
        warnings.simplefilter("ignore")  # glyphs that the layout font lacks: the browser has others
        mpl.rcdefaults()
        settings: Any = _settings()  # matplotlib's types know only literal names
        mpl.rcParams.update(settings)
        drawn = Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.03))
        yield drawn, drawn.subplots(rows, columns, **options)


def _settings() -> dict[str, Any]:
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "specdoctor",
        "text.parse_math": False,  # an arm may be called $x$
        "font.size": FONT_SIZE,
        "font.family": "DejaVu Sans",  # measured in the font that matplotlib brings, wider than most pages' fonts
        "axes.titlesize": FONT_SIZE,
        "axes.titlelocation": "left",
        "axes.titlepad": 3.0,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "axes.edgecolor": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "text.color": INK,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "lines.linewidth": 1.6,
        "lines.markersize": 5.0,
        "errorbar.capsize": 2.5,
    }


def to_svg(drawn: "Figure", prefix: str, label: str) -> str:
    """Inline SVG with `label` for those who cannot see it. Draw within `figure`, whose settings it needs."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(buffer.getvalue())
    _drop(root, ("metadata", "style"))
    _rename_ids(root, prefix)
    for element in root.iter():
        _restyle(element)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"role": "img", "aria-label": label}
    return _serialised(root)


def _drop(root: ElementTree.Element, names: tuple[str, ...]) -> None:
    wanted = {f"{{{_SVG}}}{name}" for name in names}
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag in wanted]:
            parent.remove(child)


def _rename_ids(root: ElementTree.Element, prefix: str) -> None:
    """Only ids that something refers to stay, numbered under the prefix."""
    href = f"{{{_XLINK}}}href"
    used: dict[str, str] = {}
    for element in root.iter():
        names = [element.attrib[href].removeprefix("#")] if href in element.attrib else []
        for value in element.attrib.values():
            names += _REFERENCE.findall(value)
        for name in names:
            used.setdefault(name, f"{prefix}-{len(used) + 1}")
    for element in root.iter():
        if href in element.attrib:
            element.attrib["href"] = "#" + used[element.attrib.pop(href).removeprefix("#")]
        name = element.attrib.pop("id", "")
        if name in used:
            element.attrib["id"] = used[name]
        for key, value in element.attrib.items():
            element.attrib[key] = _REFERENCE.sub(lambda match: f"url(#{used[match[1]]})", value)


def _restyle(element: ElementTree.Element) -> None:
    style = element.attrib.get("style")
    if style is not None:
        style = _ROLE.sub(lambda match: f"var(--{_ROLES[match[0]]})", _FONT.sub("", style)).strip()
        element.attrib["style"] = style
    if _TURNED_BY_NOTHING.match(element.attrib.get("transform", "")):
        del element.attrib["transform"]
    if "d" in element.attrib:
        element.attrib["d"] = " ".join(element.attrib["d"].split())
    element.tail = None
    if element.text is not None and not element.text.strip():
        element.text = None


def _serialised(root: ElementTree.Element) -> str:
    """Without a namespace: an HTML parser knows what an <svg> is."""
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
    return ElementTree.tostring(root, encoding="unicode")
