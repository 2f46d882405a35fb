"""Findings and verdicts for a person: drawn from the JSON document, so that both say the same.

Contract: no colour and no box drawing when piped or with NO_COLOR (Rich sees to the colour, tables have no boxes).
Nothing is computed here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_LOOK = {
    "error": ("✗", "bold red"),
    "warning": ("!", "bold yellow"),
    "crash": ("☠", "bold magenta"),
    "info": ("i", "cyan"),
}
_PLAIN = {"✗": "x", "☠": "#"}
_SHOWN_EXAMPLES = 8
_OWN_WORDS = ("why", "text", "conversation")


def print_tokenizer_report(document: Mapping[str, Any], console: Console) -> None:
    """Both sides, the verdict in one line, and the findings, worst first."""
    for side in ("target", "drafter"):
        facts = document[side]
        console.print(Text.assemble((f"{side:<8} ", "bold"), str(facts["path"])), soft_wrap=True)
        console.print(Text(f"         {_describe(facts)}", "dim"), soft_wrap=True)
    good = document["verdict"] in ("identical", "padding-only")
    console.print(
        Text.assemble(("verdict  ", "bold"), (document["summary"], "green" if good else "red")), soft_wrap=True
    )
    print_findings(document["findings"], console)
    print_closing(document, console)


def print_findings(findings: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Each finding with place, evidence and fix."""
    unicode = console.encoding.lower().startswith("utf")
    for finding in findings:
        symbol, style = _LOOK[finding["severity"]]
        symbol = symbol if unicode else _PLAIN.get(symbol, symbol)
        console.print()
        head = (f"{symbol} {finding['code']} {finding['severity']}", style)
        console.print(Text.assemble(head, f"  {finding['title']}"), soft_wrap=True)
        if finding["where"]:
            console.print(Text(f"  at   {_place(finding['where'])}", "dim"), soft_wrap=True)
        if finding["severity"] != "info":
            _print_evidence(finding["evidence"], console)
        if finding["fix"]:
            console.print(Text(f"  fix  {finding['fix']}"), soft_wrap=True)


def print_closing(document: Mapping[str, Any], console: Console) -> None:
    """How many checks ran and what they found, in one line."""
    console.print(Text(_closing(document), "dim"), soft_wrap=True)


def print_rule(code: str, title: str, cost: str, documentation: str, console: Console) -> None:
    """A check's documentation: Markdown on a terminal, the plain text elsewhere."""
    text = f"# {code} {title}\n\n{documentation}\n\nNeeds: {cost}.  Explain another: specdoctor rule CODE"
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        console.print(text, soft_wrap=True)


def print_rules(rules: Sequence[Mapping[str, str]], console: Console) -> None:
    """All codes, a line each."""
    table = Table("code", "needs", "what it checks", box=None, pad_edge=False, header_style="bold")
    for rule in rules:
        table.add_row(rule["code"], rule["cost"], rule["title"])
    console.print(table)


def _describe(facts: Mapping[str, Any]) -> str:
    if facts["tokens"] is None:
        parts = ["no tokenizer files"]
    else:
        added = f" ({facts['added_tokens']:,} added)" if facts["added_tokens"] is not None else ""
        parts = [facts["file"], facts["family"], f"{facts['tokens']:,} tokens{added}"]
    for key, words in (
        ("config_vocab_size", "vocab_size"),
        ("embedding_rows", "embedding rows"),
        ("head_rows", "head rows"),
    ):
        if facts[key] is not None:
            parts.append(f"{words} {facts[key]:,}")
    parts += [f"{role} {entry['id']}" for role, entry in facts["roles"].items() if entry["id"] is not None]
    parts += [f"mask id {mask_id}" for mask_id in facts["mask_ids"]]
    return ", ".join(parts)


def _place(where: Mapping[str, Any]) -> str:
    return ", ".join(
        str(where[key]) if key in ("side", "file") else f"{key} {where[key]}" for key in where if where[key]
    )


def _print_evidence(evidence: Mapping[str, Any], console: Console) -> None:
    facts = {key: value for key, value in evidence.items() if key != "examples" and value not in (None, {}, [])}
    if facts:
        words = ", ".join(f"{key.replace('_', ' ')} {_value(value)}" for key, value in facts.items())
        console.print(Text(f"  seen {words}"), soft_wrap=True)
    examples = evidence.get("examples") or []
    if examples and isinstance(examples[0], Mapping):
        console.print(Padding(_example_table(examples[:_SHOWN_EXAMPLES]), (0, 0, 0, 7)))
    else:
        for example in examples[:_SHOWN_EXAMPLES]:
            console.print(Text(f"       {example}"), soft_wrap=True)
    if len(examples) > _SHOWN_EXAMPLES:
        console.print(Text("       more with --json", "dim"))


def _example_table(examples: Sequence[Mapping[str, Any]]) -> Table:
    columns = list(dict.fromkeys(key for example in examples for key in example))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for example in examples:
        table.add_row(*(Text(_cell(column, example.get(column))) for column in columns))
    return table


def _cell(column: str, value: Any) -> str:
    # Token texts are quoted, so that white space shows; our own words are not.
    return value if isinstance(value, str) and column in _OWN_WORDS else _value(value)


def _value(value: Any) -> str:
    """Numbers grouped, shares with four digits, texts quoted so that white space shows."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 1_000_000 else str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_value(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(_value(inner) for inner in value) or "-"
    return repr(value)


def _closing(document: Mapping[str, Any]) -> str:
    counts = {severity: sum(f["severity"] == severity for f in document["findings"]) for severity in _LOOK}
    found = ", ".join(f"{n} {severity}{'s' * (n != 1 and severity != 'info')}" for severity, n in counts.items() if n)
    done = f"{len(document['checks'])} checks in {document['seconds']:.1f} s: {found or 'nothing found'}"
    return f"\n{done}. `specdoctor rule CODE` explains a finding." if found else f"\n{done}."
