"""What every report of a gate says, in the same words: numbers as text, one line a metric."""

from specdoctor.measure.gate import GateReport, MetricResult
from specdoctor.metrics.change import Change
from specdoctor.metrics.estimate import Estimate
from specdoctor.metrics.gate import MINIMUM_PROMPTS

SIGNS = {"pass": "PASS", "regression": "REGRESSION", "inconclusive": "INCONCLUSIVE"}
EVIDENCE = {
    "paired": "paired by prompt",
    "independent": "different prompts",
    "intervals": "published intervals",
    "points": "values only",
}


def number(estimate: Estimate, form: str = "{:.3f}", interval: bool = True) -> str:
    """`1.72 [1.61, 1.83]`, or `-` where there is no value."""
    if estimate.value is None:
        return "-"
    text = form.format(estimate.value)
    if interval and estimate.low is not None and estimate.high is not None:
        text += f" [{form.format(estimate.low)}, {form.format(estimate.high)}]"
    return text


def value_form(metric: str) -> str:
    """How a value of this metric is written."""
    return "{:.1f}" if metric == "tokens_per_s" else "{:.1%}" if metric == "alpha" else "{:.3f}"


def change_form(change: Change) -> str:
    """How a change of this metric is written: a share, or for absolute changes a number."""
    return "{:+.3f}" if change.definition.scale == "absolute" else "{:+.1%}"


def unit(change: Change, share: float) -> str:
    """A margin or an effect in the unit of the change."""
    return f"{share:.3f}" if change.definition.scale == "absolute" else f"{share:.1%}"


def headline(report: GateReport) -> str:
    """The verdict in one line."""
    return f"gate {SIGNS[report.outcome]}: {report.run.label} against {report.baseline.label}"


def sentence(result: MetricResult) -> str:
    """One metric in one line: verdict, values, reason."""
    if result.change is None:
        return f"{result.metric} {SIGNS[result.verdict.outcome]}: {result.verdict.reason}"
    form = value_form(result.metric)
    values = "{} -> {}".format(
        *(
            "-" if side.value is None else form.format(side.value)
            for side in (result.change.baseline, result.change.run)
        )
    )
    how = EVIDENCE[result.change.evidence] + (f", {result.change.change.n} prompts" * bool(result.change.change.n))
    return f"{result.metric} {SIGNS[result.verdict.outcome]}: {values}; {result.verdict.reason} ({how})"


def power(result: MetricResult) -> str:
    """What these prompts could have shown, and how many more are needed; '' when nothing can be said."""
    verdict, change = result.verdict, result.change
    parts = []
    if change is not None and verdict.minimum_detectable_effect:
        effect = unit(change, verdict.minimum_detectable_effect)
        if float(effect.rstrip("%")) > 0:
            parts.append(f"this much evidence shows a true drop of {effect} or more in 95 % of cases")
    if verdict.outcome == "inconclusive" and verdict.further_prompts is not None:
        more = f"{verdict.further_prompts} further prompts on both sides would settle it in 95 % of cases"
        parts.append(more if change is not None and change.change.n >= MINIMUM_PROMPTS else f"at a rough guess, {more}")
    return "; ".join(parts)


def notes(report: GateReport) -> list[str]:
    """Everything a reader should know about the comparison, each once."""
    lines = [f"allowed to differ in {difference.text}" for difference in report.allowed]
    lines += [f"{side}: {result.convention}" for side, result in (("run", report.run), ("baseline", report.baseline))]
    if report.run.convention == report.baseline.convention:
        lines[-2:] = [f"both sides: {report.run.convention}"]
    for result in report.results:
        lines += [f"{result.metric}: {note}" for note in (result.change.notes if result.change else ())]
    return list(dict.fromkeys(lines + report.notes))
