"""A gate for GitHub Actions: workflow commands that become annotations, and the step summary.

GitHub shows ten annotations of a kind a step and drops the rest without a word, so the worst come first and the last
one says how many are in the summary only. Source: "Workflow commands for GitHub Actions" in GitHub's documentation.
"""

from pathlib import Path

from specdoctor.measure.gate import GateReport
from specdoctor.reports.gate_words import headline, power, sentence
from specdoctor.reports.markdown import gate_markdown

MOST = 10  # annotations of one kind
SUMMARY_BYTES = 1_000_000  # GitHub refuses a step summary above 1 MiB
KINDS = {"regression": "error", "inconclusive": "warning", "pass": "notice"}


def annotations(report: GateReport, inconclusive: str = "fail") -> list[str]:
    """`::error title=...::...` lines, at most ten of a kind."""
    lines: dict[str, list[str]] = {"error": [], "warning": [], "notice": []}
    for result in report.results:
        kind = KINDS[result.verdict.outcome]
        if result.verdict.outcome == "inconclusive" and inconclusive == "fail":
            kind = "error"
        elif result.verdict.outcome == "inconclusive" and inconclusive == "pass":
            kind = "notice"
        text = "\n".join(part for part in (sentence(result), power(result), headline(report)) if part)
        lines[kind].append(f"::{kind} title={_property(f'specdoctor gate: {result.metric}')}::{_message(text)}")
    found = []
    for kind, rows in lines.items():
        found += rows[: MOST - 1] if len(rows) > MOST else rows
        if len(rows) > MOST:
            rest = f"{len(rows) - MOST + 1} more metrics are in the step summary"
            found.append(f"::{kind} title={_property('specdoctor gate')}::{_message(rest)}")
    return found


def append_summary(report: GateReport, path: Path) -> None:
    """Append the report to the step summary, which other commands of the step may have begun."""
    text = gate_markdown(report)
    with path.open("a", encoding="utf-8") as file:
        file.write(text if len(text.encode()) <= SUMMARY_BYTES else f"### {headline(report)}\n")


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
