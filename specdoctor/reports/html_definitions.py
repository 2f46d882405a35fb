"""What each number of the HTML report means. One glossary, cut to what a page shows."""

from collections.abc import Sequence
from typing import NamedTuple

from specdoctor.reports.html_rows import CheckDocument, Document
from specdoctor.reports.html_rows_accept import AcceptDocument
from specdoctor.reports.html_rows_bench import BenchDocument
from specdoctor.reports.html_rows_profile import ProfileDocument


class Definition(NamedTuple):
    term: str
    meaning: str


_ACCEPTANCE = {
    "round": "draft, trim, verify, accept, commit: one forward of the target.",
    "tau_step": "committed tokens per verify round, bonus included, cut at EOS and at the length cap, the token of the "
    "prefill not counted; pooled over rounds (a ratio of sums). Plain decoding: 1.",
    "tau_request": "mean over requests of each request's committed tokens per round.",
    "alpha_draft": "accepted drafts / drafted tokens, trimmed ones included in the denominator.",
    "marginal": "at position i: the share of rounds in which drafts 1 to i were all accepted, of the rounds that "
    "verified draft i. With a fixed draft length tau = 1 + the sum of the marginals.",
    "conditional": "at position i: the share of rounds in which draft i was accepted, of the rounds at risk: draft i "
    "verified and all before it accepted. It may rise with i, since the survivors are the easy places.",
    "K": "draft tokens proposed in a round.",
}
_BENCH = {
    "waste": "drafted and not accepted tokens per committed token.",
    "efficiency": "tau_step / (K + 1): the part of the possible that was reached.",
    "tokens/s": "tokens after the first, per second of decoding, prefill not counted; pooled over requests.",
    "request tokens/s": "all tokens of an answer per second of the whole request, prefill included.",
    "speed-up": "tokens/s of an arm over tokens/s of plain decoding (ar, the same engine with K = 0) on the same "
    "prompts, paired by prompt.",
    "expected speed-up": "tau T(1) / (draft + T(K+1) + overhead), the forwards timed alone; its interval is that of "
    "the forwards. Far from the measured one: something slows the loop that is in neither forward.",
    "T(N)": "seconds of one target forward that carries N tokens; T(K+1)/T(1) tells what verifying costs over a plain "
    "step.",
    "draft, verify, accept, commit, overhead": "parts of the decode time of a round; overhead is what lies in no named "
    "part (sampling, cache, records, gaps), and holds accept and commit where these were not kept apart.",
    "greedy equal": "texts that equal plain decoding's token for token. A near tie is a first difference where the "
    "target's logits of the two tokens are closer than its own rounding noise.",
}
_ACCEPT = {
    "tau_anchor": "the average of committed tokens with a round anchored at every position of the texts: not what "
    "decoding shows, since rounds pile up where drafts fail.",
    "what if": "the same texts with one setting changed: exact given the texts. Only the drafts that a confidence "
    "threshold sends beyond the first rejected one, which cost time and never acceptance, are estimated from replays.",
    "verified": "drafts sent to the target a round.",
    "predicted tokens/s, speed-up": "tau_step and the rows verified, priced with the cost table; over plain decoding.",
    "tree coverage": "at position i: true tokens 1 to i were all among the w likeliest drafts. tau ceiling: of a tree "
    "with w children at every node, verified at no cost.",
    "vocabulary": "a draft vocabulary of the most frequent ids, counted in the other half of the prompts. tau "
    "ceiling: of a perfect drafter within it.",
    "conditional confidence": "predicted: the confidence at position i, over rounds that got there; happened: the "
    "probability that draft i was accepted.",
    "cumulative confidence": "predicted: the product of confidences 1 to i; happened: drafts 1 to i were all accepted.",
    "ECE": "expected calibration error: mean over bins of |predicted - happened|, weighted by predictions. Biased "
    "upwards by noise.",
    "debiased RMS": "root mean square calibration error without that bias (Kumar, Liang and Ma 2019).",
    "Brier": "mean of (prediction - outcome) squared. 0 is perfect.",
    "AUROC": "P(an accepted draft had the higher confidence than a rejected one). 0.5 tells nothing apart.",
}
_PROFILE = {
    "host": "time of a round between the steps of target and drafter: Python, launches, waiting.",
    "SPS(N)": "target steps per second when a forward carries N tokens: 1 / T(N), measured.",
    "roof": "the shortest time a forward can take: bytes read / measured bandwidth, or operations / measured rate, "
    "whichever is longer. Host bound: over twice that.",
    "draft shared, draft per request": "the two ends of what drafting costs in a batch: once for all requests, or once "
    "for each.",
}
_FINDINGS = {
    "severity": "error: the pair cannot work, or next to nothing is accepted; warning: works, with less acceptance or "
    "trouble in some engine; info: nothing to do; crash: the check itself failed, so nothing is known.",
}
_ALWAYS = {"interval": "95 %, bootstrap clustered by prompt: repeats and tokens of one prompt are no new evidence."}


def definitions(documents: Sequence[Document]) -> list[Definition]:
    """The glossary of a page: the documents' own wording where they have one, each of them where they differ."""
    terms: dict[str, str] = {}
    for document in documents:
        if isinstance(document, BenchDocument):
            terms |= _ACCEPTANCE | _BENCH
        if isinstance(document, AcceptDocument):
            shared = ("round", "tau_step", "alpha_draft", "marginal", "conditional", "K")
            terms |= {name: _ACCEPTANCE[name] for name in shared} | _ACCEPT
        if isinstance(document, ProfileDocument):
            terms |= {name: _ACCEPTANCE[name] for name in ("round", "tau_step", "K")} | {"T(N)": _BENCH["T(N)"]}
        if document.sps:
            terms |= _PROFILE if isinstance(document, ProfileDocument) else {"SPS(N)": _PROFILE["SPS(N)"]}
        if document.findings or isinstance(document, CheckDocument):
            terms |= _FINDINGS
    if set(terms) - set(_FINDINGS):
        terms |= _ALWAYS
    found = []
    for name in dict.fromkeys([*terms, *(name for document in documents for name in document.definitions)]):
        own = {document.definitions[name]: document.kind for document in documents if name in document.definitions}
        for meaning, kind in (own or {terms.get(name, ""): ""}).items():
            found.append(Definition(f"{name} ({kind})" if len(own) > 1 else name, meaning))
    return found
