"""The accept report for a person, drawn from the JSON result: nothing is computed here that the JSON does not hold."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from specdoctor.reports.bench_console import estimate
from specdoctor.reports.output import result_table

Json = Mapping[str, Any]

_STOPPED = {
    "prompts": "all prompts",
    "precision": "stopped: precision reached",
    "budget": "stopped: budget spent",
    "interrupted": "interrupted: what follows is what was complete",
}


def print_accept(result: Json, console: Console) -> None:
    """Heading, drafters, positions, splits, what-if curves, confidence, and what stands out."""
    _heading(result, console)
    _arms(result, console)
    for arm in result["arms"]:
        _positions(arm, console)
    _splits(result["arms"], console)
    for arm in result["arms"]:
        _curves(arm, console)
        _confidence(arm, console)
    _sentences(result, console)


def _heading(result: Json, console: Console) -> None:
    settings, env, corpus = result["settings"], result["environment"], result["corpus"]
    temperature = settings["temperature"]
    sampling = "greedy" if temperature == 0 else f"T {temperature:g}, draft {settings['draft_temperature']}"
    prompts = len({row["id"] for row in result["prompts"]})
    written = f", {corpus['written_now']} written now" if corpus["written_now"] else ""
    line = (
        f"{settings['target']} · {env['device']} {env['dtype']} · {corpus['texts']} texts of {prompts} prompts, at "
        f"most {settings['max_new_tokens']} tokens (corpus {corpus['folder']}{written}) · {sampling} · "
        f"seed {settings['seed']}"
    )
    console.print(Text(line), soft_wrap=True)
    style = "bold yellow" if result["interrupted"] else ""
    console.print(Text(f"{_STOPPED[result['stopped']]}; {result['seconds']['all']:.1f} s", style))
    console.print()


def _arms(result: Json, console: Console) -> None:
    table = result_table(console, "Drafters", "drafter", "K", "tau_step", "tau_anchor", "alpha_draft")
    for arm in result["arms"]:
        table.add_row(
            arm["name"],
            str(arm["draft"]["draft_tokens"]),
            estimate(arm["tau_step"], "{:.3f}"),
            estimate(arm["tau_anchor"], "{:.3f}"),
            estimate(arm["alpha_draft"], "{:.3f}"),
        )
    console.print(table)
    words = result["definitions"]
    _note(console, f"tau_step: {words['tau_step']}. tau_anchor: {words['tau_anchor']}. Brackets: {words['interval']}.")


def _positions(arm: Json, console: Console) -> None:
    columns = ("position", "marginal", "conditional", "at risk", "marginal by anchor")
    table = result_table(console, f"Acceptance by position: {arm['name']}", *columns)
    by_round = arm["marginal"]
    for i, marginal in enumerate(by_round):
        conditional = arm["conditional"][i]
        table.add_row(
            str(i + 1),
            estimate(marginal, "{:.3f}"),
            estimate(conditional, "{:.3f}"),
            str(conditional["n"]),
            estimate(arm["marginal_anchor"][i], "{:.3f}", interval=False),
        )
    console.print(table)
    console.print()


def _splits(arms: Sequence[Json], console: Console) -> None:
    for key, title, column in (
        ("by_category", "By category", "category"),
        ("by_context", "By context length", "tokens before"),
        ("by_answer_position", "By position in the answer", "position"),
    ):
        labels = list(dict.fromkeys(label for arm in arms for label in arm[key]))
        if len(labels) < 2:
            continue
        table = result_table(console, title, column, "drafter", "tau", "alpha_draft", left=2)
        for label in labels:
            for arm in arms:
                row = arm[key].get(label)
                if row is not None:
                    tau = row.get("tau_step") or row["tau"]
                    table.add_row(label, arm["name"], estimate(tau), estimate(row["alpha_draft"]))
        console.print(table)
        console.print()
    _token_classes(arms, console)


def _token_classes(arms: Sequence[Json], console: Console) -> None:
    known = [arm for arm in arms if "reason" not in arm["by_token_class"]]
    if not known:
        return
    table = result_table(console, "By class of the true token", "class", "drafter", "conditional", "at risk", left=2)
    for name in dict.fromkeys(name for arm in known for name in arm["by_token_class"]):
        for arm in known:
            row = arm["by_token_class"].get(name)
            if row is not None:
                table.add_row(name, arm["name"], estimate(row), str(row["n"]))
    console.print(table)
    console.print()


def _curves(arm: Json, console: Console) -> None:
    curves = arm["what_if"]
    if curves is None:
        return
    for key, title, column, setting in (
        ("draft_tokens", "What if: draft length", "K", "K"),
        ("confidence_threshold", "What if: confidence threshold", "threshold", "threshold"),
        ("cumulative_threshold", "What if: threshold on the product of confidences", "threshold", "threshold"),
        ("draft_temperature", "What if: draft temperature", "temperature", "draft_temperature"),
        ("length_rule", "What if: draft length by rule", "rule", "rule"),
    ):
        if curves.get(key):
            _curve(curves[key], f"{title} ({arm['name']})", column, setting, console)
    _trees(curves, arm, console)
    _vocabularies(curves, arm, console)


def _curve(rows: Sequence[Json], title: str, column: str, setting: str, console: Console) -> None:
    timed = "tokens_per_s" in rows[0]
    more = ("tokens/s", "speed-up") if timed else ()
    table = result_table(console, title, column, "tau_step", "alpha_draft", "verified", *more)
    for row in rows:
        cells = [
            str(row[setting]),
            estimate(row["tau_step"], "{:.3f}"),
            estimate(row["alpha_draft"], "{:.3f}", interval=False),
            estimate(row["verified_per_round"], interval=False),
        ]
        if timed:
            cells += [estimate(row["tokens_per_s"], "{:.1f}"), estimate(row["speedup"], "{:.2f}", interval=False)]
        table.add_row(*cells)
    console.print(table)
    console.print()


def _trees(curves: Json, arm: Json, console: Console) -> None:
    rows = curves.get("tree_coverage")
    if not rows:
        return
    depth = len(rows[0]["marginal"])
    columns = ("width", *(str(k + 1) for k in range(depth)), "tau ceiling")
    table = result_table(console, f"Tree coverage: true tokens among the likeliest ({arm['name']})", *columns)
    for row in rows:
        cells = [estimate(cell, "{:.3f}", interval=False) for cell in row["marginal"]]
        table.add_row(str(row["width"]), *cells, estimate(row["tau_ceiling"]))
    console.print(table)
    console.print()


def _vocabularies(curves: Json, arm: Json, console: Console) -> None:
    rows = curves.get("vocabulary")
    if not rows:
        return
    columns = ("most frequent", "ids counted", "coverage", "tau_step", "tau ceiling")
    table = result_table(console, f"What if: draft vocabulary ({arm['name']})", *columns)
    for row in rows:
        coverage = "-" if row["coverage"] is None else f"{row['coverage']:.1%}"
        ids = (str(row["vocabulary"]), str(row["ids_counted"]))
        table.add_row(*ids, coverage, estimate(row["tau_step"]), estimate(row["tau_ceiling"]))
    console.print(table)
    console.print()


def _confidence(arm: Json, console: Console) -> None:
    report = arm["calibration"]
    if "before" not in report:
        return
    for question in ("conditional", "cumulative"):
        columns = ("position", "n", "predicted", "happened", "ECE", "debiased RMS", "Brier", "AUROC")
        after = report.get("after")
        table = result_table(
            console, f"Confidence, {question} ({arm['name']})", *columns, *(("ECE after",) if after else ())
        )
        for i, row in enumerate(report["before"][question]):
            cells = [
                str(i + 1),
                str(row["ece"]["n"]),
                _number(row["mean_prediction"]),
                _number(row["mean_label"]),
                estimate(row["ece"], "{:.3f}"),
                estimate(row["debiased_rms"], "{:.3f}", interval=False),
                estimate(row["brier"], "{:.3f}", interval=False),
                estimate(row["auroc"], "{:.3f}", interval=False),
            ]
            if after:
                cells.append(estimate(after[question][i]["ece"], "{:.3f}"))
            table.add_row(*cells)
        console.print(table)
        console.print()


def _sentences(result: Json, console: Console) -> None:
    for row in result["comparisons"]:
        tau = estimate(row["tau_difference"], "{:+.3f}")
        _line(console, "compare", f"{row['a']} against {row['b']}: tau_step {tau} (paired by prompt)")
    for arm in result["arms"]:
        _speed(arm, console)
        _ceiling(arm, console)
        _step(arm, console)
        numerics = arm["numerics"]
        odd = numerics.get("argmax_disagreements") or numerics.get("outside_top_k_top_p") or 0
        if odd:
            _line(console, "numerics", f"{arm['name']}: {odd} of {numerics['rows']} positions: {numerics['meaning']}")


def _speed(arm: Json, console: Console) -> None:
    best = (arm["what_if"] or {}).get("best_K")
    if best is None:
        return
    if best["K"] is None:
        _line(console, "best K", f"{arm['name']}: not known: {best['reason']}")
        return
    text = f"{arm['name']}: predicted fastest at K = {best['K']}" if best["K"] else f"{arm['name']}: no K beats plain"
    _line(
        console,
        "best K",
        f"{text}: {estimate(best['tokens_per_s'], '{:.1f}')} tokens/s against {best['plain_tokens_per_s']:.1f} without "
        f"drafts, x{estimate(best['speedup'])}",
    )


def _ceiling(arm: Json, console: Console) -> None:
    own = (arm["what_if"] or {}).get("draft_vocabulary")
    if not own or own["coverage"] is None:
        return
    _line(
        console,
        "ceiling",
        f"{arm['name']}: its {own['rows']} draft ids hold {own['coverage']:.1%} of the texts' tokens; a perfect "
        f"drafter with them has tau_step {estimate(own['tau_ceiling'])}",
    )


def _step(arm: Json, console: Console) -> None:
    change = arm["change_point"]
    if not change["found"]:
        return
    where = f"context {change['context']} (between {change['low']} and {change['high']})"
    cause = "; matches " + ", ".join(change["matches"]) if change["matches"] else "; matches no configuration number"
    text = f"{arm['name']}: accepted drafts change by {change['step']:+.2f} a round at {where}, p = {change['p']:.3f}"
    _line(console, "step", text + cause, "yellow")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _note(console: Console, text: str) -> None:
    console.print(Text(text, "dim"))
    console.print()


def _line(console: Console, label: str, text: str, style: str = "") -> None:
    console.print(Text.assemble((f"{label:<8} ", "bold"), (text, style)), soft_wrap=True)
