"""What a document says, in one sentence that a serving engineer understands.

Contract: nothing is claimed that the interval does not carry: an interval with 1 in it is "no speed-up shown", whatever
the middle says. Text that changed comes before any speed.
"""

from typing import NamedTuple

from specdoctor.reports.html_rows import CheckDocument, Document, EstimateRow, LimitRow
from specdoctor.reports.html_rows_accept import AcceptArm, AcceptDocument
from specdoctor.reports.html_rows_bench import BenchArm, BenchDocument
from specdoctor.reports.html_rows_profile import ProfileDocument

# What limits an arm, as the end of "what limits it is ...".
_TERMS = {
    "draft": "the drafter's own time",
    "verify": "the cost of verifying several tokens at once",
    "overhead": "work between the two models' forwards",
    "tau": "acceptance: too few drafts are right",
    "prefill": "the prompt, which drafts cannot shorten",
}


class Verdict(NamedTuple):
    """`tone`: good, bad, unclear, or plain where nothing is judged. It only colours what the words say."""

    tone: str
    headline: str
    alerts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def verdict(document: Document) -> Verdict:
    """The verdict of any document."""
    if isinstance(document, BenchDocument):
        found = _bench(document)
    elif isinstance(document, AcceptDocument):
        found = _accept(document)
    elif isinstance(document, ProfileDocument):
        found = _profile(document)
    elif isinstance(document, CheckDocument):
        found = _check(document)
    else:
        found = _costs(document)
    stopped = "The run was interrupted: this is what was complete by then."
    return found._replace(alerts=(stopped, *found.alerts)) if document.interrupted else found


def interval_words(row: EstimateRow, form: str = "{:.2f}") -> str:
    """`95 % interval 0.86 to 1.50`."""
    if row.low is None or row.high is None:
        return "no interval" + (f": {row.reason}" if row.reason else "")
    return f"95 % interval {form.format(row.low)} to {form.format(row.high)}"


def _bench(document: BenchDocument) -> Verdict:
    measured = [arm for arm in document.drafting if arm.speedup.value is not None]
    alerts = tuple(_changed(arm) for arm in document.arms if arm.greedy_mismatches)
    if not document.drafting:
        plain = next((arm for arm in document.arms if arm.tokens_per_s.value is not None), None)
        speed = (
            f": {plain.tokens_per_s.value:.1f} tokens/s ({interval_words(plain.tokens_per_s, '{:.1f}')})"
            if plain
            else ""
        )
        return Verdict("plain", f"Only plain decoding was measured{speed}; there is no drafter to judge.", alerts)
    if not measured:
        reason = document.drafting[0].speedup.reason or "no reason was recorded"
        return Verdict("unclear", f"No speed-up could be measured: {reason}.", alerts)
    best = max(measured, key=lambda arm: arm.speedup.value or 0.0)
    tone, sentence = _speed(document, best, several=len(measured) > 1)
    tone = "bad" if any(arm.greedy_mismatches for arm in document.arms) else tone
    limit = best.limiting_term
    words = f"; what limits it is {_TERMS[limit.term]}" if limit and limit.term in _TERMS else ""
    notes = [_advice(arm.name, arm.limiting_term) for arm in measured if arm.limiting_term]
    return Verdict(tone, f"{sentence}{words}.", alerts, (*_against_second(document, best), *notes))


def _speed(document: BenchDocument, best: BenchArm, several: bool) -> tuple[str, str]:
    row = best.speedup
    prompts = len({prompt.id for prompt in document.prompts}) or best.requests
    figure = f"{row.value:.2f}x as fast as plain decoding"
    on = f"{interval_words(row)}, {prompts} prompt{'s' * (prompts != 1)}"
    if row.low is None or row.high is None:
        return "unclear", f"{best.name} decodes {figure} ({on})"
    if row.low > 1:
        wins = f"{best.name} wins: it" if several else best.name
        return "good", f"{wins} decodes {figure} ({on})"
    if row.high < 1:
        even = f"even {best.name}, the best drafter," if several else best.name
        return "bad", f"Speculation costs time here: {even} decodes only {figure} ({on})"
    who = f"{best.name}, the best drafter," if several else best.name
    return "unclear", f"No speed-up is shown: {who} decodes {figure} ({on})"


def _against_second(document: BenchDocument, best: BenchArm) -> tuple[str, ...]:
    """The winner against the next drafter, paired by prompt."""
    others = [arm for arm in document.drafting if arm is not best and arm.speedup.value is not None]
    if not others:
        return ()
    second = max(others, key=lambda arm: arm.speedup.value or 0.0)
    for row in document.comparisons:
        ratio = row.tokens_per_s_ratio
        if {row.a, row.b} == {best.name, second.name} and ratio.value:
            ratio = ratio if row.a == best.name else _inverse(ratio)
            clear = ratio.low is not None and ratio.low > 1
            words = f"{best.name} decodes {ratio.value:.2f}x as fast as {second.name} ({interval_words(ratio)})"
            return (f"{words}: a clear difference." if clear else f"{words}: no clear winner of the two.",)
    return ()


def _inverse(ratio: EstimateRow) -> EstimateRow:
    low, high = (1 / bound if bound else None for bound in (ratio.high, ratio.low))
    return EstimateRow(
        value=1 / ratio.value if ratio.value else None, low=low, high=high, n=ratio.n, reason=ratio.reason
    )


def _changed(arm: BenchArm) -> str:
    texts = f"{arm.greedy_mismatches} of {arm.requests} greedy texts"
    return (
        f"Not lossless: with {arm.name}, {texts} differ from plain decoding beyond near ties. Cure that first; until "
        "then its speed means nothing."
    )


def _advice(name: str, limit: LimitRow) -> str:
    return f"{name}: {limit.sentence}" + (f" Try: {limit.advice}." if limit.advice else "")


def _accept(document: AcceptDocument) -> Verdict:
    """Tokens a round of the best drafter and, where costs were given, the predicted speed at its best K."""
    if not document.arms:
        return Verdict("plain", "No drafter was measured.")
    best = max(document.arms, key=_rank)
    lead = f"{best.name}, the best of {len(document.arms)} drafters," if len(document.arms) > 1 else best.name
    row, what = best.tau_step, "tokens a round"
    if row.value is None:
        row, what = best.tau_anchor, "tokens a round, averaged over positions of the texts (not what decoding shows)"
    if row.value is None:
        return Verdict("plain", f"Nothing could be measured: {row.reason}.")
    texts = f"{best.requests} text{'s' * (best.requests != 1)}"
    sentence = (
        f"{lead} commits {row.value:.2f} {what} at K = {best.draft.draft_tokens} ({interval_words(row)}, {texts})"
    )
    tone, speed = _predicted(best)
    compared = [
        f"{d.a} against {d.b}: {d.tau_difference.value:+.2f} tokens a round "
        f"({interval_words(d.tau_difference, '{:+.2f}')}), paired by prompt."
        for d in document.comparisons
        if d.tau_difference.value is not None
    ]
    jumps = [note for arm in document.arms if (note := _jump(arm))]
    stopped = {"budget": "Stopped when the time was spent.", "precision": "Stopped at the precision asked for."}
    notes = (*compared, *jumps, *([stopped[document.stopped]] if document.stopped in stopped else []))
    return Verdict(tone, f"{sentence}{speed}.", (), notes)


def _rank(arm: AcceptArm) -> float:
    best = arm.what_if.best_K if arm.what_if else None
    if best and best.speedup and best.speedup.value is not None:
        return 1000.0 + best.speedup.value  # a predicted speed tells more than tau
    return arm.tau_step.value or arm.tau_anchor.value or 0.0


def _predicted(arm: AcceptArm) -> tuple[str, str]:
    """Tone, and the end of the sentence."""
    best = arm.what_if.best_K if arm.what_if else None
    if best is None or best.K is None or best.speedup is None or best.speedup.value is None:
        return "plain", ""
    figure = f"{best.speedup.value:.2f}x plain decoding ({interval_words(best.speedup)})"
    if best.K == 0:
        return "bad", f"; by the cost table no draft length beats plain decoding: {figure} at the best"
    clear = best.speedup.low is not None and best.speedup.low > 1
    return "good" if clear else "unclear", f"; by the cost table K = {best.K} is the fastest, at {figure}"


def _jump(arm: AcceptArm) -> str:
    change = arm.change_point
    if change is None or not change.found or change.step is None or change.context is None:
        return ""
    cause = f"which matches {', '.join(change.matches)}" if change.matches else "which matches no configuration number"
    return (
        f"{arm.name}: accepted drafts change by {change.step:+.2f} a round at a context of {change.context:g}, {cause}."
    )


def _profile(document: ProfileDocument) -> Verdict:
    limit, model = document.verdict, document.speedup_model
    tau = f"{document.tau_step.value:.2f}" if document.tau_step.value is not None else "an unknown number of"
    pays = "pays" if model.speedup > 1 else "does not pay"
    where = f"what limits it is {_TERMS[limit.term]}" if limit.term in _TERMS else "no part of a round stands out"
    sentence = (
        f"{document.arm} {pays} on this machine: {model.speedup:.2f}x plain decoding is expected, since a round "
        f"commits {tau} tokens and breaks even at {model.break_even_tau:.2f}; {where}."
    )
    notes = (_advice(document.arm, limit), limit.bound_sentence, limit.batch_sentence)
    return Verdict("good" if model.speedup > 1 else "bad", sentence, (), tuple(note for note in notes if note))


def _check(document: CheckDocument) -> Verdict:
    severities = {finding.severity for finding in document.findings}
    bad = severities & {"error", "crash"}
    tone = "bad" if bad else "unclear" if "warning" in severities else "good"
    sentence = document.summary or document.verdict
    return Verdict(tone, f"{sentence[:1].upper()}{sentence[1:]}.")


def _costs(document: Document) -> Verdict:
    """How many rows ride along before a forward takes half as long again."""
    context = min(point.context for point in document.sps)
    line = sorted((point.rows, point.seconds) for point in document.sps if point.context == context)
    (first, base), (most, _) = line[0], line[-1]
    free = max(rows for rows, seconds in line if seconds <= 1.5 * base)
    words = f"up to {free} rows" if free < most else f"all {most} rows that were measured"
    return Verdict(
        "plain",
        f"A target forward of {first} row{'s' * (first != 1)} takes {1000 * base:.3g} ms at {context} tokens of "
        f"context; {words} cost at most half as much again.",
    )
