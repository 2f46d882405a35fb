"""The sections of an accept run: acceptance, what-if curves, confidence, and what acceptance depends on."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from specdoctor.reports import figure_curves, figures
from specdoctor.reports.figure_curves import Panel
from specdoctor.reports.figures import DotRow, Point, Series
from specdoctor.reports.html_parts import Figure, Section, legend_of, point, points, positions
from specdoctor.reports.html_rows import EstimateRow
from specdoctor.reports.html_rows_accept import AcceptArm, AcceptDocument, ConfidenceRow, WhatIf, WhatIfRow

_CURVES = {  # key of the file: title, axis, the setting of a row
    "draft_tokens": ("draft length", "K", lambda row: row.K),
    "confidence_threshold": ("threshold on each confidence", "threshold", lambda row: row.threshold),
    "cumulative_threshold": ("threshold on the product of confidences", "threshold", lambda row: row.threshold),
    "draft_temperature": ("draft temperature", "temperature", lambda row: row.draft_temperature),
    "length_rule": ("draft length by rule", "rule", lambda row: row.rule),
}
_DRAWN = ("draft_tokens", "confidence_threshold", "cumulative_threshold")
_SPLITS = {"by_context": "tokens of context", "by_answer_position": "position in the answer"}
_MOST_PANELS = 9
_MOST_WIDTHS = 5


def accept_sections(document: AcceptDocument, prefix: str) -> list[Section]:
    """All sections of an accept run."""
    arms = list(enumerate(document.arms))
    found = [_arms(document, prefix)] if arms else []
    if any(arm.marginal for _, arm in arms):
        found.append(positions(arms, prefix))
    if any(arm.what_if for _, arm in arms):
        found.append(_what_if(arms, prefix))
    if any(arm.calibration for _, arm in arms):
        found.append(_confidence(arms, prefix))
    return found + _splits(arms, prefix)


def _arms(document: AcceptDocument, prefix: str) -> Section:
    rows = [DotRow(arm.name, i, point(arm.tau_step), point(arm.tau_anchor)) for i, arm in enumerate(document.arms)]
    title = "Tokens a round"
    svg = figures.dots(f"{prefix}-tau", title, rows, "committed tokens a round", 1.0)
    caption = "Filled: tau_step. Hollow: tau_anchor. Bars: 95 % interval. Dashed: plain decoding."
    estimates = [row for arm in document.arms for row in (arm.tau_step, arm.tau_anchor, arm.alpha_draft)]
    data = {"figures": [Figure(title, svg, caption)], "estimates": estimates}
    return Section("arms", "Tokens a round", "accept_arms.html.j2", data)


def _what_if(arms: Sequence[tuple[int, AcceptArm]], prefix: str) -> Section:
    known = [(i, arm, arm.what_if) for i, arm in arms if arm.what_if]
    drawn = []
    for key in _DRAWN:
        title, axis, setting = _CURVES[key]
        for field, words, y_label in (
            ("tau_step", "Tokens a round", "tau_step"),
            ("speedup", "Predicted speed-up", "times plain decoding"),
        ):
            series = [
                Series(arm.name, i, found)
                for i, arm, curves in known
                if (found := _points(getattr(curves, key), setting, field))
            ]
            if any(len(line.points) > 1 for line in series):
                name = f"{words} by {title}"
                svg = figure_curves.curves(
                    f"{prefix}-{key}-{field}", name, series, axis, y_label, whole_x=key == "draft_tokens", reference=1.0
                )
                caption = "Bars: 95 % interval. Dashed: plain decoding."
                drawn.append(Figure(name, svg, caption, legend_of(series)))
    drawn += [_trees(arm, curves, f"{prefix}-tree-{i}") for i, arm, curves in known if curves.tree_coverage]
    tables = [
        {
            "title": f"What if: {title}",
            "setting": axis,
            "rows": rows,
            "timed": any(row.speedup for *_, row in rows),
            "drawn": key in _DRAWN,
            "formulas": {row.rule: row.formula for *_, row in rows if row.formula},
        }
        for key, (title, axis, setting) in _CURVES.items()
        if (rows := [(_shown(setting(row)), arm.name, row) for _, arm, curves in known for row in getattr(curves, key)])
    ]
    tried = [row for _, _, curves in known for key in _CURVES for row in getattr(curves, key)]
    estimates = [value for row in tried for value in (row.tau_step, row.tokens_per_s, row.speedup)]
    for _, _, curves in known:
        estimates += [value for row in curves.tree_coverage for value in (*row.marginal, row.tau_ceiling)]
        estimates += [value for row in curves.vocabulary for value in (row.tau_step, row.tau_ceiling)]
    reasons = [f"{arm.name}: {curves.reason}." for _, arm, curves in known if curves.reason]
    data = {
        "figures": drawn,
        "tables": tables,
        "curves": [(arm, curves) for _, arm, curves in known],
        "reasons": reasons,
        "estimates": estimates,
    }
    return Section("what-if", "What if", "accept_what_if.html.j2", data)


def _points(rows: Sequence[WhatIfRow], setting: Callable[[Any], Any], field: str) -> list[tuple[float, Point]]:
    return [(float(setting(row)), found) for row in rows if (found := point(getattr(row, field)))]


def _shown(setting: Any) -> str:
    return f"{setting:g}" if isinstance(setting, float) else str(setting)


def _trees(arm: AcceptArm, curves: WhatIf, prefix: str) -> Figure:
    rows = curves.tree_coverage[:_MOST_WIDTHS]
    title = f"Tree coverage: {arm.name}"
    series = [Series(f"{row.width} likeliest", i, points(row.marginal)) for i, row in enumerate(rows)]
    svg = figure_curves.curves(prefix, title, series, "position in the draft", "share", whole_x=True, unit_y=True)
    return Figure(title, svg, "True tokens 1 to i were all among the likeliest drafts.", legend_of(series))


def _confidence(arms: Sequence[tuple[int, AcceptArm]], prefix: str) -> Section:
    drawn: list[Figure] = []
    tables: list[dict[str, Any]] = []
    reasons: list[str] = []
    for i, arm in arms:
        found = arm.calibration
        if found is None or found.before is None:
            reasons.append(f"{arm.name}: {found.reason if found else 'no confidence was measured'}.")
            continue
        for which, words in (
            ("conditional", "Draft i, over the rounds that got there."),
            ("cumulative", "Drafts 1 to i together, over all rounds."),
        ):
            before = getattr(found.before, which)
            after = getattr(found.after, which) if found.after else []
            title = f"Reliability, {which}: {arm.name}"
            panels = [
                Panel(f"draft {place + 1}", _bins(row), _bins(after[place]) if place < len(after) else ())
                for place, row in enumerate(before[:_MOST_PANELS])
            ]
            if any(panel.before for panel in panels):
                svg = figure_curves.reliability(f"{prefix}-reliability-{i}-{which}", title, panels)
                caption = f"{words} Large dots: many predictions. Dashed: a prediction that means what it says."
                caption += " Hollow: after the stored temperatures." if after else ""
                drawn.append(Figure(title, svg, caption))
            tables.append({"title": f"Confidence, {which}: {arm.name}", "rows": before, "after": after})
    shown = [row for table in tables for row in (*table["rows"], *table["after"])]
    estimates = [value for row in shown for value in (row.ece, row.debiased_rms, row.brier, row.auroc)]
    data = {"figures": drawn, "tables": tables, "reasons": reasons, "estimates": estimates}
    return Section("confidence", "Does the confidence mean what it says?", "accept_confidence.html.j2", data)


def _bins(row: ConfidenceRow) -> list[tuple[float, Point, int]]:
    return [
        (item.mean_prediction, found, item.count)
        for item in row.reliability
        if item.mean_prediction is not None and (found := point(item.label))
    ]


def _splits(arms: Sequence[tuple[int, AcceptArm]], prefix: str) -> list[Section]:
    """By category, context, position and token class; one bin only is no split."""
    drawn, tables = [], []
    for key, axis in _SPLITS.items():
        labels = _labels([getattr(arm, key) for _, arm in arms])
        if len(labels) < 2:
            continue
        series = [
            Series(arm.name, i, [(float(labels.index(name)), found) for name, row in getattr(arm, key).items()
                                 if (found := point(row.tau))])
            for i, arm in arms
        ]  # fmt: skip
        title = f"Tokens a round by {axis}"
        svg = figure_curves.curves(f"{prefix}-{key}", title, series, axis, "tau", reference=1.0, labels=labels)
        average = "" if all(arm.splits_average == "round" for _, arm in arms) else " Averaged over positions."
        drawn.append(Figure(title, svg, f"Rounds that start there. Bars: 95 % interval.{average}", legend_of(series)))
        tables.append((axis, _table(arms, labels, attrgetter(key), ("tau", "alpha_draft"))))
    categories = _labels([arm.by_category for _, arm in arms])
    if categories:
        names = ("tau_step", "tau_anchor", "alpha_draft")
        tables.insert(0, ("category", _table(arms, categories, attrgetter("by_category"), names)))
    classes = _labels([arm.token_classes for _, arm in arms])
    if len(classes) > 1:
        rows = [
            (name, arm.name, {"conditional": arm.token_classes[name]})
            for name in classes
            for _, arm in arms
            if name in arm.token_classes
        ]
        tables.append(("class of the true token", rows))
    estimates = [value for _, rows in tables for *_, values in rows for value in values.values()]
    data = {"figures": drawn, "tables": tables, "estimates": estimates}
    return [Section("splits", "What acceptance depends on", "accept_splits.html.j2", data)] if tables else []


def _labels(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _table(
    arms: Sequence[tuple[int, AcceptArm]],
    labels: Sequence[str],
    of: Callable[[AcceptArm], Mapping[str, Any]],
    names: Sequence[str],
) -> list[tuple[str, str, dict[str, EstimateRow]]]:
    return [
        (label, arm.name, {name: getattr(of(arm)[label], name) for name in names})
        for label in labels
        for _, arm in arms
        if label in of(arm)
    ]
