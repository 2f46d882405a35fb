"""An HTML page as tests want to look at it: parsed by the standard library, which forgives nothing silently here."""

from html.parser import HTMLParser
from typing import NamedTuple

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Element(NamedTuple):
    tag: str
    attributes: dict[str, str]


class Outline(HTMLParser):
    """All elements, the text of each table cell and heading, and what was left open."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self.open: list[str] = []
        self.trouble: list[str] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.headings: list[tuple[int, str]] = []
        self.feed(page)
        self.close()
        self.trouble += [f"<{tag}> never closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag in ("h1", "h2", "h3", "h4"):
            self.headings.append((int(tag[1]), ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1] != tag:
            self.trouble.append(f"</{tag}> closes <{self.open[-1] if self.open else 'nothing'}>")
        else:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)
        if self.rows and ("td" in self.open or "th" in self.open):
            self.rows[-1][-1] = f"{self.rows[-1][-1]} {data}".strip()
        if self.open and self.open[-1] in ("h1", "h2", "h3", "h4"):
            level, text = self.headings[-1]
            self.headings[-1] = (level, text + data)

    @property
    def text(self) -> str:
        """The text of the page, white space folded."""
        return " ".join(" ".join(self.words).split())

    def cells(self, first: str) -> list[list[str]]:
        """Table rows whose first cell is `first`, white space folded."""
        rows = [[" ".join(cell.split()) for cell in row] for row in self.rows]
        return [row for row in rows if row and row[0] == first]

    def all(self, tag: str) -> list[dict[str, str]]:
        """The attributes of every element of a kind."""
        return [element.attributes for element in self.elements if element.tag == tag]
