"""The HTML report in a real browser: opened from a file, in light and dark, on a desk and on a telephone."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from headless_chromium import REQUIRED, Page, chromium_page, find_chromium
from report_documents import (
    accept_document,
    bench_document,
    category_row,
    check_document,
    drafting_arm,
    profile_document,
)

from specdoctor.reports.html import write_report

pytestmark = pytest.mark.integration

DESK, TELEPHONE = (1280, 900), (390, 844)
VIEWS = [(size, scheme) for size in (DESK, TELEPHONE) for scheme in ("light", "dark")]


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    program = find_chromium()
    if program is None and os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{REQUIRED}=1, but no Chromium is on the PATH (Debian: apt-get install chromium)")
    if program is None:
        pytest.skip("no Chromium on the PATH (Debian: apt-get install chromium)")
    with chromium_page(program) as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything on it, and names longer than any telephone is wide."""
    long = drafting_arm("a-drafter-with-a-name-that-nobody-would-type-twice-" + "x" * 60)
    document = bench_document(drafting_arm("small"), long)
    for arm in document["arms"]:
        arm["by_category"] = {"code": category_row(2.0), "chat": category_row(3.0)}
    document["settings"]["target"] = "models/" + "deep/" * 30 + "target"
    path = tmp_path_factory.mktemp("report") / "out put.html"
    write_report(
        path, [document, accept_document(), profile_document(), check_document()], ["specdoctor", "report", "y" * 200]
    )
    return path


@pytest.mark.parametrize(("size", "scheme"), VIEWS)
def test_page_opens_from_a_file_without_complaint(page: Page, report: Path, size: tuple[int, int], scheme: str) -> None:
    page.open(report, *size, scheme)
    assert page.complaints() == []
    assert page.requests() == [report.resolve().as_uri()]
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= size[0], f"the page is {wide} px wide in a window of {size[0]}"
    # What is wider than the window scrolls in its own box.
    escaped = page.evaluate(
        "[...document.querySelectorAll('table')].filter(t => !t.closest('.scroll')).length"
        " + [...document.querySelectorAll('p, li, dd, pre, figure, h2, h3, summary')].filter("
        "e => !e.closest('.scroll') && e.getBoundingClientRect().right > innerWidth + 0.5).length"
    )
    assert escaped == 0
    drawn = page.evaluate(
        "[...document.querySelectorAll('figure > svg')].map(s => s.getBoundingClientRect()).filter("
        "r => r.width > 250 && r.height > 60).length"
    )
    assert drawn == page.evaluate("document.querySelectorAll('figure').length") >= 7


def test_schemes_differ_and_figures_follow(page: Page, report: Path) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        page.open(report, *DESK, scheme)
        colours[scheme] = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.querySelector('figure > svg text')).fill,"
            " getComputedStyle(document.querySelector('figure > svg use[style*=series]')).stroke]"
        )
    assert all(one != other for one, other in zip(colours["light"], colours["dark"], strict=True))
    assert colours["light"][0] == "rgb(255, 255, 255)"


def test_text_of_figures_is_readable_and_inside(page: Page, report: Path) -> None:
    """On a telephone: letters of at least 9 px, and no text that a figure cuts off."""
    page.open(report, *TELEPHONE, "light")
    smallest = page.evaluate(
        "Math.min(...[...document.querySelectorAll('figure > svg text')].map(t => { const s = t.ownerSVGElement; return"
        " parseFloat(getComputedStyle(t).fontSize) * s.getBoundingClientRect().width / s.viewBox.baseVal.width; }))"
    )
    assert smallest >= 9
    outside = page.evaluate(
        "[...document.querySelectorAll('figure > svg text')].filter(t => { const s = t.ownerSVGElement"
        ".getBoundingClientRect(), r = t.getBoundingClientRect(); return r.left < s.left - 1 || r.right > s.right + 1"
        " || r.top < s.top - 1 || r.bottom > s.bottom + 1; }).map(t => t.textContent)"
    )
    assert outside == []


def test_complaints_loads_and_width_are_noticed(page: Page, tmp_path: Path) -> None:
    """The checks above can fail: a page that does everything wrong is caught at each."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<!DOCTYPE html><meta name="viewport" content="width=device-width"><img src="http://127.0.0.1:9/x.png">'
        '<div style="width: 2000px">wide</div><script>console.error("oh"); undefined.oh</script>'
    )
    page.open(bad, *TELEPHONE, "light")
    assert len(page.complaints()) >= 2
    assert "http://127.0.0.1:9/x.png" in page.requests()
    assert page.evaluate("document.documentElement.scrollWidth") >= 2000
