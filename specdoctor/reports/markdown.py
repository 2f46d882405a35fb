"""A gate, a comparison or an evaluation as GitHub-flavoured Markdown: for a step summary, a pull request, a wiki."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdoctor.measure.compare import Comparison
from specdoctor.measure.gate import GateReport
from specdoctor.reports.compare_words import caption, cells, columns
from specdoctor.reports.eval_console import accepted_length, by_domain, comparison, drafters, heading, thresholds
from specdoctor.reports.gate_words import (
    EVIDENCE,
    SIGNS,
    change_form,
    headline,
    notes,
    number,
    power,
    sentence,
    unit,
    value_form,
)

MARKS = {"pass": "✅", "regression": "❌", "inconclusive": "⚠️"}


def gate_markdown(report: GateReport) -> str:
    """Heading, table, one line a metric, notes folded away."""
    rows = []
    for result in report.results:
        change, verdict = result.change, result.verdict
        mark = f"{MARKS[verdict.outcome]} {SIGNS[verdict.outcome].lower()}"
        if change is None:
            rows.append([result.metric, mark, "-", "-", "-", f"{verdict.margin:g}", "-", "-"])
            continue
        form = value_form(result.metric)
        rows.append(
            [
                result.metric,
                mark,
                number(change.baseline, form),
                number(change.run, form),
                number(change.change, change_form(change)),
                unit(change, verdict.margin),
                str(change.change.n or "-"),
                EVIDENCE[change.evidence],
            ]
        )
    header = ["metric", "verdict", "baseline", "run", "change", "margin", "prompts", "evidence"]
    lines = [f"### {MARKS[report.outcome]} {_escape(headline(report))}", "", *_table(header, rows), ""]
    for result in report.results:
        further = power(result)
        lines.append(f"- {_escape(sentence(result))}" + (f" ({_escape(further)})" if further else ""))
    return "\n".join([*lines, "", *_folded(notes(report))]) + "\n"


def compare_markdown(comparison: Comparison) -> str:
    """One table a metric, notes folded away."""
    lines = ["### specdoctor compare", ""]
    for metric, rows in comparison.tables.items():
        lines += [f"**{metric}** ({_escape(caption(comparison, metric))})", ""]
        lines += [*_table(columns(comparison, metric), [cells(comparison, metric, line) for line in rows]), ""]
    return "\n".join([*lines, *_folded(comparison.notes)]) + "\n"


def eval_markdown(result: Mapping[str, Any]) -> str:
    """The table of data sets first, domains, drafters and thresholds below it."""
    lines = ["### specdoctor eval", "", _escape(heading(result)), "", *_table(*accepted_length(result)), ""]
    if len(result["domains"]) < len(result["data_sets"]):
        lines += ["**By domain**", "", *_table(*by_domain(result)), ""]
    lines += ["**Drafters**", "", *_table(*drafters(result)), ""]
    for one in result["drafters"]:
        if one["thresholds"]:
            lines += [f"**Confidence threshold: {_escape(one['name'])}**", ""]
            lines += [*_table(*thresholds(one, result["domains"])), ""]
    lines += [f"- {_escape(comparison(row))}" for row in result["comparisons"]]
    words = [f"{name}: {meaning}" for name, meaning in result["definitions"].items()]
    return "\n".join([*lines, "", *_folded(words)]) + "\n"


def write_markdown(text: str, path: str) -> None:
    """Write to a file, whole or not at all, or to stdout for `-`."""
    if path == "-":
        sys.stdout.write(text)
        return
    target = Path(path)
    part = target.with_name(target.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(target)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(_escape(cell) for cell in row)} |" for row in (header, rule, *rows)]


def _escape(text: str) -> str:
    """Text that must not become markup: a table cell, a file name with underscores."""
    for character in ("\\", "|", "<", "*", "_", "`"):
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())


def _folded(lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    return ["<details><summary>Notes</summary>", "", *(f"- {_escape(line)}" for line in lines), "", "</details>"]
