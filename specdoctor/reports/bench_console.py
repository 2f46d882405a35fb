"""The bench report for a person, drawn from the JSON result: nothing is computed here that the JSON does not hold."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from specdoctor.reports.output import result_table

FEW_PROMPTS = 5
FAR_OFF = 1.25  # expected over measured speed-up, either way

Json = Mapping[str, Any]


def print_bench(result: Json, console: Console) -> None:
    """Heading, arms, positions, categories, comparisons, greedy check, and what limits each drafter."""
    _heading(result, console)
    _arms(result, console)
    for arm in result["arms"]:
        if arm["draft"]:
            _positions(arm, console)
    _categories(result, console)
    _sentences(result, console)


def estimate(row: Json | None, form: str = "{:.2f}", interval: bool = True) -> str:
    """`1.72 [1.61, 1.83]`, or `-` where there is no value."""
    if row is None or row["value"] is None:
        return "-"
    text = form.format(row["value"])
    if interval and row["low"] is not None:
        text += f" [{form.format(row['low'])}, {form.format(row['high'])}]"
    return text


def _heading(result: Json, console: Console) -> None:
    settings, env = result["settings"], result["environment"]
    temperature = settings["temperature"]
    sampling = "greedy" if temperature == 0 else f"T {temperature:g}, draft {settings['draft_temperature']}"
    prompts = len({row["id"] for row in result["prompts"]})
    line = (
        f"{settings['target']} · {env['device']} {env['dtype']}, {env['attention_path']['name']} attention · "
        f"{prompts} prompts, at most {settings['max_new_tokens']} tokens · {sampling} · seed {settings['seed']}"
    )
    console.print(Text(line), soft_wrap=True)
    acceptance = settings.get("acceptance") or {"lossless": True}
    if not acceptance["lossless"]:
        text = (
            f"LOSSY: {acceptance['rule']} acceptance (threshold {acceptance['threshold']:g}, alpha "
            f"{acceptance['alpha']:g}); the drafters' text does not have the target's distribution"
        )
        console.print(Text(text, "bold red"), soft_wrap=True)
    if result["interrupted"]:
        console.print(Text("interrupted: what follows is what was complete", "bold yellow"))
    console.print()


def _arms(result: Json, console: Console) -> None:
    table = result_table(console, "Arms", "arm", "K", "tau_step", "alpha_draft", "tokens/s", "speed-up")
    for arm in result["arms"]:
        table.add_row(
            arm["name"],
            str(arm["draft"]["draft_tokens"]) if arm["draft"] else "-",
            estimate(arm.get("tau_step")),
            estimate(arm.get("alpha_draft"), interval=False),
            estimate(arm["tokens_per_s"], "{:.1f}", interval=False),
            estimate(arm["speedup"]),
        )
    console.print(table)
    definitions = result["definitions"]
    _note(
        console,
        f"tau_step: {definitions['tau_step']}. Brackets: {definitions['interval']}. tokens/s: tokens after the first, "
        "prefill not counted. speed-up: over ar, paired by prompt.",
    )
    drafting = [arm for arm in result["arms"] if arm["draft"]]
    if not drafting:
        return
    columns = ("arm", "draft", "verify", "overhead", "T(K+1)/T(1)", "expected", "measured")
    table = result_table(console, "Where the time goes", *columns)
    for arm in drafting:
        table.add_row(
            arm["name"],
            estimate(arm["draft_share"], "{:.1%}", interval=False),
            estimate(arm["verify_share"], "{:.1%}", interval=False),
            estimate(arm["overhead_share"], "{:.1%}", interval=False),
            estimate(arm["verify_ratio"], interval=False),
            estimate(arm["expected_speedup"]),
            estimate(arm["speedup"], interval=False),
        )
    console.print(table)
    _note(
        console,
        "draft, verify, overhead: shares of the decode time. expected speed-up: tau T(1) / (draft + T(K+1) + overhead)"
        ", the forwards timed bare, between the requests.",
    )


def _note(console: Console, text: str) -> None:
    console.print(Text(text, "dim"))
    console.print()


def _positions(arm: Json, console: Console) -> None:
    table = result_table(
        console, f"Acceptance by position: {arm['name']}", "position", "marginal", "rounds", "conditional", "at risk"
    )
    for i, (marginal, conditional) in enumerate(zip(arm["marginal"], arm["conditional"], strict=True)):
        table.add_row(str(i + 1), estimate(marginal), str(marginal["n"]), estimate(conditional), str(conditional["n"]))
    console.print(table)
    _note(
        console, "marginal: drafts 1..i all accepted. conditional: draft i accepted, given that those before it were."
    )


def _categories(result: Json, console: Console) -> None:
    arms = [arm for arm in result["arms"] if len(arm.get("by_category", {})) > 1]
    if not arms:
        return
    table = result_table(
        console, "By category", "category", "arm", "requests", "tau_step", "tokens/s", "speed-up", left=2
    )
    for category in arms[0]["by_category"]:
        for arm in arms:
            row = arm["by_category"][category]
            table.add_row(
                category or "(none)",
                arm["name"],
                str(row["requests"]),
                estimate(row["tau_step"]),
                estimate(row["tokens_per_s"], "{:.1f}", interval=False),
                estimate(row["speedup"]),
            )
    console.print(table)
    console.print()


def _sentences(result: Json, console: Console) -> None:
    trees = {arm["name"] for arm in result["arms"] if (arm.get("draft") or {}).get("tree")}
    for row in result["comparisons"]:
        tau, speed = estimate(row["tau_difference"], "{:+.2f}"), estimate(row["tokens_per_s_ratio"])
        _line(
            console, "compare", f"{row['a']} against {row['b']}: tau_step {tau}, tokens/s x{speed} (paired by prompt)"
        )
        if row["a"] in trees:
            _line(console, "tree", f"{row['a']}: {_tree_verdict(row)}")
    for arm in result["arms"]:
        if arm["greedy_mismatches"] is None or arm["name"] == "ar":
            continue
        wrong, ties = arm["greedy_mismatches"], arm["near_ties"]
        same = arm["requests"] - wrong - ties
        text = f"{arm['name']}: {same} of {arm['requests']} texts equal ar token for token"
        text += f", {ties} part at a near tie" if ties else ""
        text += f", {wrong} DIFFER" if wrong else ""
        _line(console, "greedy", text, "bold red" if wrong else "")
    for difference in result["divergences"]:
        if not difference["near_tie"]:
            text = (
                f"{difference['arm']}, prompt {difference['prompt_id']}, token {difference['position']}: expected id "
                f"{difference['expected']}, found {difference['found']}"
            )
            if difference["gap"] is not None:
                text += f"; logit gap {difference['gap']:.3g}, noise {difference['noise']:.3g}"
            _line(console, "differs", text, "red")
    for arm in result["arms"]:
        ids = (arm["draft"] or {}).get("draft_vocabulary")
        if ids is not None:
            _line(console, "drafts", f"{arm['name']}: {ids:,} ids of the target's vocabulary, no others")
    few = len({row["id"] for row in result["prompts"]})
    if few < FEW_PROMPTS:
        _line(console, "note", f"only {few} prompts: intervals of so few are too narrow, and no verdict is worth much")
    unsteady = [arm["name"] for arm in result["arms"] if arm["draft"] and _unsteady(arm)]
    if unsteady:
        text = "the forwards timed alone do not agree with the rounds, so the machine was busy or drifted: take"
        _line(console, "note", f"{', '.join(unsteady)}: {text} `expected` and `limit` with caution", "yellow")
    for name, limit in result["limiting_term"].items():
        _line(console, "limit", f"{name}: {limit['sentence']} Try: {limit['advice']}.")


def _unsteady(arm: Json) -> bool:
    """Whether a wider forward seemed cheaper than one row, or the expected speed-up is far from the measured one."""
    ratio, expected, measured = (arm[key].get("value") for key in ("verify_ratio", "expected_speedup", "speedup"))
    if ratio is not None and ratio < 0.9:
        return True
    return bool(expected and measured) and not 1 / FAR_OFF < expected / measured < FAR_OFF


def _tree_verdict(row: Json) -> str:
    """Whether a tree gained over its chain, in tokens a round and in tokens a second."""
    tau, speed = row["tau_difference"], row["tokens_per_s_ratio"]
    more = "no clear gain in tokens a round"
    if (tau["low"] or 0) > 0:
        more = "more tokens a round"
    elif (tau["high"] or 0) < 0:
        more = "fewer tokens a round"
    if speed["low"] is None:
        return f"{more}; whether it is faster cannot be told from these prompts"
    if speed["low"] > 1:
        return f"{more}; faster on this machine"
    if speed["high"] < 1:
        return f"{more}; slower on this machine: the extra rows cost more than they bring"
    return f"{more}; no clear difference in speed on this machine"


def _line(console: Console, label: str, text: str, style: str = "") -> None:
    console.print(Text.assemble((f"{label:<8} ", "bold"), (text, style)), soft_wrap=True)
