"""An evaluation for a person, and as Markdown, drawn from the JSON result: nothing is computed here."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from specdoctor.reports.bench_console import estimate
from specdoctor.reports.output import result_table

Json = Mapping[str, Any]
WIDE = 4  # columns of figures up to which an interval stands beside its value, not below it


def print_evaluation(result: Json, console: Console) -> None:
    """Heading, the table of data sets, domains, what the drafters are, thresholds, comparisons."""
    console.print(Text(heading(result)), soft_wrap=True)
    if result["interrupted"]:
        console.print(Text("interrupted: what follows is what was complete", "bold yellow"))
    console.print()
    header, rows = accepted_length(result)
    _print(console, "Accepted length (tau_step) by data set", header, rows)
    if len(result["domains"]) < len(result["data_sets"]):
        _print(console, "Accepted length (tau_step) by domain", *by_domain(result))
    _print(console, "Drafters", *drafters(result), left=4)
    for one in result["drafters"]:
        if one["thresholds"]:
            _print(console, f"Confidence threshold ({one['name']})", *thresholds(one, result["domains"]))
    for row in result["comparisons"]:
        console.print(Text.assemble(("compare  ", "bold"), comparison(row)), soft_wrap=True)
    words = result["definitions"]
    text = f"tau_step: {words['tau_step']}. alpha: {words['alpha_verified']}. Brackets: {words['interval']}."
    console.print(Text(text, "dim"), soft_wrap=True)


def heading(result: Json) -> str:
    """Target, device, prompts, method and sampling on one line."""
    settings, env = result["settings"], result["environment"]
    drawn = "greedy" if settings["temperature"] == 0 else f"T {settings['temperature']:g}"
    prompts = sum(one["prompts"] for one in result["data_sets"])
    method = "texts of the target" if result["method"] == "accept" else "decoding"
    return (
        f"{settings['target']} · {env['device']} {env['dtype']} · {prompts} prompts, at most "
        f"{settings['max_new_tokens']} tokens · by {method} · {drawn} · seed {settings['seed']}"
    )


def accepted_length(result: Json) -> tuple[list[str], list[list[str]]]:
    """The paper's table: a row a drafter, a column a data set (its domain above it), all prompts last."""
    header = ["drafter", *(_column(one) for one in result["data_sets"]), "all"]
    rows = [
        [one["name"], *(estimate(cell["tau_step"]) for cell in one["by_data_set"]), estimate(one["tau_step"])]
        for one in result["drafters"]
    ]
    return header, rows


def by_domain(result: Json) -> tuple[list[str], list[list[str]]]:
    """A row a drafter, a column a domain."""
    header = ["drafter", *result["domains"]]
    rows = [
        [one["name"], *(estimate(one["by_domain"][domain]["tau_step"]) for domain in result["domains"])]
        for one in result["drafters"]
    ]
    return header, rows


def drafters(result: Json) -> tuple[list[str], list[list[str]]]:
    """What tells variants of a recipe apart: depth, block, head."""
    header = ["drafter", "algorithm", "head", "calibrated", "layers", "block", "K"]
    rows = []
    for one in result["drafters"]:
        facts = one["draft"]
        calibrated = "yes" if facts["calibrated"] else "-"
        words = [one["name"], facts["algorithm"], facts["head"] or "-", calibrated, str(facts["layers"] or "-")]
        rows.append([*words, str(facts["block_size"] or "-"), str(facts["draft_tokens"])])
    return header, rows


def thresholds(one: Json, domains: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """A row a threshold; speeds where a cost table was given; the paper's acceptance rate by domain."""
    timed = "speedup" in one["thresholds"][0]
    header = ["threshold", "tau_step", "verified", "in vain", *(["tokens/s", "speed-up"] if timed else []), "alpha"]
    header += [f"alpha {domain}" for domain in domains] if len(domains) > 1 else []
    rows = []
    for row in one["thresholds"]:
        cells = ["none" if row["threshold"] is None else f"{row['threshold']:g}", estimate(row["tau_step"])]
        cells += [estimate(row["verified_per_round"], interval=False), _percent(row["verified_waste"])]
        if timed:
            cells += [estimate(row["tokens_per_s"], "{:.1f}", interval=False), estimate(row["speedup"])]
        cells.append(_percent(row["alpha_verified"]))
        if len(domains) > 1:
            cells += [_percent(row["by_domain"][domain]["alpha_verified"]) for domain in domains]
        rows.append(cells)
    return header, rows


def comparison(row: Json) -> str:
    """One sentence on two drafters."""
    ratio, difference = estimate(row["tau_ratio"]), estimate(row["tau_difference"], "{:+.2f}")
    return f"{row['a']} against {row['b']}: tau_step x{ratio}, {difference} (paired by prompt)"


def _column(one: Json) -> str:
    return one["name"] if one["name"] == one["domain"] else f"{one['domain']}: {one['name']}"


def _percent(row: Json) -> str:
    return estimate(row, "{:.1%}", interval=False)


def _print(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    narrow = len(header) > 1 + WIDE
    table = result_table(console, title, *(name.replace(": ", ":\n") if narrow else name for name in header), left=left)
    for row in rows:
        table.add_row(*(cell.replace(" [", "\n[") if narrow else cell for cell in row))
    console.print(table)
    console.print()
