"""The HTML report: one file that opens anywhere, for good.

Contract: self-contained (no script, no network; the page's own policy forbids both), the same documents give the same
bytes, and every text out of a document is escaped. No prompt and no answer enters: only ids and hashes.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdoctor import __version__
from specdoctor.errors import SpecdoctorError
from specdoctor.reports.html_definitions import definitions
from specdoctor.reports.html_documents import load_document, read_document
from specdoctor.reports.html_facts import command_words, facts
from specdoctor.reports.html_parts import LegendEntry
from specdoctor.reports.html_rows import CheckDocument, CostDocument, Document, EstimateRow
from specdoctor.reports.html_sections import sections
from specdoctor.reports.html_verdict import Verdict, verdict

# Series by index, on light and on dark paper: the hues of Okabe and Ito (2008), their lightness set so that each has a
# contrast of 3 to 1 and no two look alike with any common colour blindness (the tests measure both).
PALETTE = (
    ("#10589c", "#397ba9"),
    ("#e46413", "#c87425"),
    ("#3d9b76", "#4addad"),
    ("#761150", "#fd9cf6"),
    ("#6a4a02", "#f1d65b"),
    ("#8864dc", "#8c8cf3"),
    ("#6f7686", "#97a4b1"),
    ("#d12730", "#f7726a"),
)
_TONES = {"good": "Verdict: good", "bad": "Verdict: bad", "unclear": "Verdict: open", "plain": "Measured"}
_TITLES = {"bench": "Bench", "profile": "Profile", "check": "Check", "cost-table": "Cost table", "accept": "Acceptance"}


def render_report(
    documents: Sequence[Mapping[str, Any]], command: Sequence[str] | str | None = None, names: Sequence[str] = ()
) -> str:
    """The page of one or several JSON results.

    `command` is what made the page, `names` the files, for messages and headings. Raises SpecdoctorError with one line
    (file, key, found, expected) for a document that no report can be made of.
    """
    if not documents:
        raise SpecdoctorError("report: found no documents, expected at least one JSON result")
    names = names or ["document"] * len(documents)
    checked = [read_document(document, name) for document, name in zip(documents, names, strict=True)]
    parts = [_part(document, place) for place, document in enumerate(checked, 1)]
    page = _templates().get_template("report.html.j2")
    return page.render(
        title=f"specdoctor: {', '.join(part['title'] for part in parts)}",
        parts=parts,
        definitions=definitions(checked),
        command=command_words(command),
        palette=PALETTE,
        tones=_TONES,
        version=__version__,
    )


def write_report(
    path: Path,
    documents: Sequence[Mapping[str, Any]],
    command: Sequence[str] | str | None = None,
    names: Sequence[str] = (),
) -> None:
    """Write the page, whole or not at all. Raises as `render_report`."""
    text = render_report(documents, command, names)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, "utf-8", errors="backslashreplace")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def verdicts(documents: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> list[Verdict]:
    """What each document says, as at the top of the page."""
    names = names or ["document"] * len(documents)
    return [verdict(read_document(document, name)) for document, name in zip(documents, names, strict=True)]


def load_documents(paths: Iterable[Path]) -> list[Any]:
    """The JSON of each file, as `render_report` takes it."""
    return [load_document(path) for path in paths]


def _part(document: Document, place: int) -> dict[str, Any]:
    """A document's share of the page."""
    prefix = f"p{place}"
    target = document.target if isinstance(document, CostDocument) else document.settings.get("target", "")
    what = str(target).rstrip("/").rsplit("/", 1)[-1]
    kind = _TITLES[document.kind]
    return {
        "anchor": prefix,
        "document": document,
        "title": f"{kind}: {what}" if what else kind,
        "short": f"{kind} {place}",
        "about": _about(document),
        "verdict": verdict(document),
        "sections": sections(document, prefix),
    }


def _about(document: Document) -> str:
    """Target, device and sampling in one line, as far as the document tells."""
    settings, env = document.settings, document.environment
    if isinstance(document, CostDocument):
        settings, env = {"target": document.target}, {"device": document.device, "dtype": document.dtype}
    parts = [str(settings["target"])] if "target" in settings else []
    if "device" in env:
        parts.append(f"{env['device']} {env.get('dtype', '')}".strip())
    if isinstance(settings.get("prompt_hashes"), Mapping):
        parts.append(f"{len(settings['prompt_hashes'])} prompts")
    if isinstance(settings.get("max_new_tokens"), int):
        parts.append(f"at most {settings['max_new_tokens']} tokens")
    if isinstance(settings.get("temperature"), float | int):
        parts.append("greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}")
    if document.created:
        parts.append(document.created.replace("T", " ").replace("+00:00", " UTC"))
    if isinstance(document, CheckDocument):
        parts += [f"{side} {facts['path']}" for side, facts in _sides(document) if "path" in facts]
    return " · ".join(parts) or "a file without settings"


def _sides(document: CheckDocument) -> list[tuple[str, dict[str, Any]]]:
    return [("target", document.target), ("drafter", document.drafter)]


def _templates() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    env = Environment(
        loader=PackageLoader("specdoctor.reports", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    env.filters |= {"reasons": _reasons, "facts": facts, "mark": _mark}
    return env


def _reasons(rows: Iterable[EstimateRow | None]) -> list[str]:
    """What the stars of a table stand for."""
    return list(dict.fromkeys(row.reason for row in rows if row and row.value is not None and row.reason))


def _mark(entry: LegendEntry) -> Any:
    """The swatch of a legend entry."""
    from markupsafe import Markup

    from specdoctor.reports.figure_svg import legend_mark

    return Markup(legend_mark(entry.style, entry.kind))
