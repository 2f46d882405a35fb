"""What the HTML report says first: no more than the interval carries."""

from typing import Any

import pytest
from html_outline import Outline
from report_documents import accept_document, bench_document, comparison, drafting_arm, estimate

from specdoctor.reports.html import render_report, verdicts


def test_winner_is_named_with_its_interval_and_its_limit() -> None:
    fast, slow = drafting_arm("fast", speedup=(1.8, 1.5, 2.1)), drafting_arm("slow", speedup=(1.3, 1.1, 1.5))
    document = bench_document(slow, fast)
    document["comparisons"] = [comparison("slow", "fast", (0.8, 0.5, 0.9))]
    (found,) = verdicts([document])
    assert found.tone == "good"
    assert found.headline == (
        "fast wins: it decodes 1.80x as fast as plain decoding (95 % interval 1.50 to 2.10, 2 prompts); "
        "what limits it is the drafter's own time."
    )
    assert found.notes[0] == "fast decodes 1.25x as fast as slow (95 % interval 1.11 to 2.00): a clear difference."


@pytest.mark.parametrize(
    ("speedup", "tone", "words"),
    [
        ((1.4, 1.1, 1.8), "good", "small decodes 1.40x"),
        ((1.4, 0.9, 1.8), "unclear", "No speed-up is shown"),
        ((0.7, 0.6, 0.9), "bad", "Speculation costs time here"),
        ((1.4, None, None), "unclear", "no interval"),
    ],
)
def test_verdict_claims_only_what_the_interval_carries(speedup: Any, tone: str, words: str) -> None:
    (found,) = verdicts([bench_document(drafting_arm("small", speedup=speedup))])
    assert (found.tone, words in found.headline) == (tone, True)


def test_changed_text_comes_before_any_speed() -> None:
    arm = drafting_arm("small") | {"greedy_mismatches": 1}
    (found,) = verdicts([bench_document(arm)])
    assert found.tone == "bad" and "Not lossless: with small, 1 of 2 greedy texts" in found.alerts[0]
    outline = Outline(render_report([bench_document(arm)]))
    assert outline.text.index("Not lossless") < outline.text.index("1.50x as fast")


def test_accept_verdict_prices_the_best_length_and_names_a_jump() -> None:
    (found,) = verdicts([accept_document()])
    assert found.tone == "good"
    assert found.headline == (
        "head, the best of 2 drafters, commits 1.78 tokens a round at K = 2 (95 % interval 1.58 to 2.22, 10 texts); by "
        "the cost table K = 1 is the fastest, at 1.16x plain decoding (95 % interval 1.05 to 1.26)."
    )
    assert "+0.25 tokens a round" in found.notes[0]
    assert (
        "head: accepted drafts change by -0.40 a round at a context of 512, which matches target sliding"
        in found.notes[1]
    )
    losing: Any = accept_document()
    losing["arms"][0]["what_if"]["best_K"] |= {"K": 0, "speedup": estimate(0.9, 0.8, 1.0)}
    (found,) = verdicts([losing])
    assert found.tone == "bad" and "no draft length beats plain decoding" in found.headline


def test_sampled_anchors_are_not_passed_off_as_decoding() -> None:
    document: Any = accept_document()
    arm = document["arms"][0]
    absent = estimate(None, n=0, reason="anchors were sampled")
    arm |= {
        "tau_step": absent,
        "accepted_length_histogram": None,
        "marginal": [absent] * 2,
        "conditional": [absent] * 2,
    }
    arm["what_if"] = {"reason": "anchors were sampled", "tree_coverage": arm["what_if"]["tree_coverage"]}
    document["arms"] = [arm]
    (found,) = verdicts([document])
    assert "2.41 tokens a round, averaged over positions of the texts (not what decoding shows)" in found.headline
    outline = Outline(render_report([document]))
    assert outline.cells("head")[0][3] == "–" and "head: anchors were sampled." in outline.text
