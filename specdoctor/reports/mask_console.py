"""`check-mask` for a person: drawn from the JSON document, so that both say the same. Nothing is computed here."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from specdoctor.reports.findings import print_closing, print_findings

WIDEST = 48  # rows and columns of a matrix that is still drawn
_STYLES = {"X": "bold red", "o": "bold red", ".": "dim"}
_LEGEND = "1 sees, . does not; wrong: X sees, o does not"


def print_mask_report(document: Mapping[str, Any], console: Console) -> None:
    """What was looked at, the matrices, and the findings, worst first."""
    trees = document["hand_worked_trees"]
    console.print(Text(f"hand-worked trees  {len(trees)}, of 1 to {max(tree['nodes'] for tree in trees)} nodes"))
    if document["mask"] is not None:
        _print_mask(document["mask"], console)
    elif document["tree"] is not None:
        tree = document["tree"]
        console.print(Text(f"\nthe mask of {len(tree['parents'])} nodes ({_LEGEND.split(';')[0]})"))
        _print_matrix([f"node {node}" for node in range(len(tree["parents"]))], tree["visible"], console)
        console.print(Text(f"positions  start + {' '.join(map(str, tree['depths']))}"), soft_wrap=True)
    if document["target"] is not None:
        _print_target(document["target"], console)
    print_findings(document["findings"], console)
    print_closing(document, console)


def _print_mask(mask: Mapping[str, Any], console: Console) -> None:
    parts = [f"{mask['dtype']} {mask['shape']}", f"{mask['context_columns']} context columns"]
    if mask["padding_columns"]:
        parts.append(f"{mask['padding_columns']} columns of padding")
    if mask["anchor_row"]:
        parts.append("one row more than nodes: the first is the anchor's")
    name = f"{mask['file']} {mask['tensor'] or ''}".strip()
    console.print(Text.assemble(("\nmask     ", "bold"), name, (f"  {', '.join(parts)}", "dim")), soft_wrap=True)
    console.print(Text(f"the tree's own columns ({_LEGEND})", "dim"))
    _print_matrix(mask["labels"], mask["visible"], console)


def _print_target(target: Mapping[str, Any], console: Console) -> None:
    path = target["attention_path"]
    facts = f"{target['dtype']} on {target['device']}, attention {path['name']} ({path['reason']})"
    console.print(Text.assemble(("\ntarget   ", "bold"), target["path"], (f"  {facts}", "dim")), soft_wrap=True)
    drawn = [tree for tree in target["trees"] if _is_wrong(tree)] or target["trees"][:1]
    for tree in drawn[:3]:
        console.print(Text(f"rows that move when the token of a column changes, {tree['name']} ({_LEGEND})", "dim"))
        _print_matrix(tree["labels"], tree["moved"], console)
    if target["trees"]:
        error = max((tree["largest_error_against_chains"] or 0.0 for tree in target["trees"]), default=0.0)
        stale = max((tree["change_after_rollback"] or 0.0 for tree in target["trees"]), default=0.0)
        console.print(
            Text(
                f"{len(target['trees'])} trees: paths as chains differ by {error:.2g} of the logits' spread, "
                f"the same tree after a rollback by {stale:.2g}"
            ),
            soft_wrap=True,
        )


def _is_wrong(tree: Mapping[str, Any]) -> bool:
    return any(mark in row for row in tree["moved"] for mark in "Xo")


def _print_matrix(labels: Sequence[str], rows: Sequence[str], console: Console) -> None:
    if len(rows) > WIDEST:
        console.print(Text(f"  ({len(rows)} rows: the matrix is in --json)", "dim"))
        return
    width = max(map(len, labels))
    for label, row in zip(labels, rows, strict=True):
        line = Text(f"  {label:>{width}}  ")
        for mark in row:
            line.append(f"{mark} ", _STYLES.get(mark, ""))
        console.print(line, soft_wrap=True)
