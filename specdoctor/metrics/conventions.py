"""What other tools would print for the same trace, and the formula of every metric that specdoctor prints.

Contract: each convention is one small function over records of one arm, with its formula as text; absent is None.
Two facts are inferred, as a record does not state them: a round was cut when it committed fewer tokens than
accepted + 1, and each request has one prefill token besides its rounds. Sources: the tools' own code, as of 2026.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdoctor.errors import SpecdoctorError
from specdoctor.metrics.record import RoundRecord

Records = Sequence[RoundRecord]
Value = float | list[float | None] | None


@dataclass(frozen=True, slots=True)
class Convention:
    """A public definition: who prints it under which name, its formula, and the function that computes it."""

    name: str
    printed_by: str
    formula: str
    compute: Callable[[Records], Value]


CONVENTIONS: dict[str, Convention] = {}


def _convention(printed_by: str, formula: str) -> Callable[[Callable[[Records], Value]], Callable[[Records], Value]]:
    def register(compute: Callable[[Records], Value]) -> Callable[[Records], Value]:
        name = compute.__name__
        CONVENTIONS[name] = Convention(name, printed_by, formula, compute)
        return compute

    return register


@_convention(
    "vLLM mean_acceptance_length; llama.cpp; NeMo bench_vllm; AIPerf token-weighted; speculators eval",
    "1 + accepted / rounds with drafts, pooled, not cut at EOS or at the cap",
)
def vllm_mean_acceptance_length(records: Records) -> Value:
    drafts = _with_drafts(records)
    return None if not drafts else 1 + sum(r.accepted for r in drafts) / len(drafts)


@_convention("AIPerf Acceptance Length (avg)", "mean over requests of 1 + accepted / rounds with drafts, not cut")
def aiperf_acceptance_length(records: Records) -> Value:
    return _mean_over_requests(_with_drafts(records), lambda rows: 1 + sum(r.accepted for r in rows) / len(rows))


@_convention("z-lab DFlash benchmark.py", "mean over responses of mean(accepted + 1) over rounds, not cut")
def dflash_acceptance_length(records: Records) -> Value:
    return _mean_over_requests(records, lambda rows: sum(r.accepted + 1 for r in rows) / len(rows))


@_convention("DeepSpec accept_len", "committed tokens / rounds, pooled, cut at EOS")
def deepspec_accept_len(records: Records) -> Value:
    return _ratio(sum(r.committed for r in records), len(records))


@_convention("true decode tokens per target step", "(output tokens - prefill tokens) / rounds, pooled")
def decode_tokens_per_step(records: Records) -> Value:
    requests = len(_by_request(records))
    output_tokens = sum(r.committed for r in records) + requests
    return _ratio(output_tokens - requests, len(records))


@_convention(
    "SGLang accept_length (spec_accept_length), SpecForge",
    "completion tokens / verify forwards, pooled; the prefill token counts",
)
def sglang_accept_length(records: Records) -> Value:
    return _ratio(sum(r.committed for r in records) + len(_by_request(records)), len(records))


@_convention("DFlash on SGLang", "mean over requests of completion tokens / verify forwards; the prefill token counts")
def sglang_accept_length_per_request(records: Records) -> Value:
    return _mean_over_requests(records, lambda rows: (sum(r.committed for r in rows) + 1) / len(rows))


@_convention("gpt-fast Mean Accepted", "accepted / rounds, pooled; no bonus token")
def gpt_fast_mean_accepted(records: Records) -> Value:
    return _ratio(sum(r.accepted for r in records), len(records))


@_convention(
    "vLLM draft acceptance rate; llama.cpp; flashspec; AIPerf overall",
    "accepted / draft tokens sent to the target, pooled",
)
def vllm_draft_acceptance_rate(records: Records) -> Value:
    return _ratio(sum(r.accepted for r in records), sum(r.verified for r in records))


@_convention("AIPerf Draft Acceptance Rate (avg)", "mean over requests of accepted / draft tokens sent to the target")
def aiperf_draft_acceptance_rate(records: Records) -> Value:
    drafts = _with_drafts(records)
    return _mean_over_requests(drafts, lambda rows: sum(r.accepted for r in rows) / sum(r.verified for r in rows))


@_convention(
    "DeepSpec verify_rate; DSpark paper's acceptance rate (bonus included)",
    "committed / (effective proposal length + 1), pooled; drafts after an accepted EOS are no part of the proposal",
)
def deepspec_verify_rate(records: Records) -> Value:
    return _ratio(sum(r.committed for r in records), sum(_effective_length(r) + 1 for r in records))


@_convention("AIPerf Accepted per Verified", "mean over requests of (accepted + rounds) / (draft tokens + rounds)")
def aiperf_accepted_per_verified(records: Records) -> Value:
    return _mean_over_requests(
        _with_drafts(records), lambda rows: sum(r.accepted + 1 for r in rows) / sum(r.verified + 1 for r in rows)
    )


@_convention(
    "vLLM per-position acceptance rate",
    "[i] = rounds that accepted more than i drafts / all rounds with drafts, also those too short to reach i",
)
def vllm_per_position(records: Records) -> Value:
    drafts = _with_drafts(records)
    return [_ratio(sum(r.accepted > i for r in drafts), len(drafts)) for i in range(_depth(records))]


@_convention(
    "DeepSpec accept_rate@i",
    "[i] = rounds that accepted more than i drafts / rounds with an effective proposal longer than i, cut at EOS",
)
def deepspec_accept_rate(records: Records) -> Value:
    lengths = [(_cut_accepted(r), _effective_length(r)) for r in records]
    return [
        _ratio(sum(accepted > i for accepted, _ in lengths), sum(length > i for _, length in lengths))
        for i in range(_depth(records))
    ]


@_convention(
    "Model-Optimizer conditional acceptance; DSpark paper's figure by position",
    "[i] = rounds that accepted more than i drafts / rounds that verified draft i and accepted those before it",
)
def conditional_per_position(records: Records) -> Value:
    return [
        _ratio(sum(r.accepted > i for r in records), sum(r.verified > i and r.accepted >= i for r in records))
        for i in range(_depth(records))
    ]


def _with_drafts(records: Records) -> list[RoundRecord]:
    return [r for r in records if r.verified]


def _by_request(records: Records) -> list[list[RoundRecord]]:
    requests: dict[tuple[str, int], list[RoundRecord]] = {}
    for record in records:
        requests.setdefault((record.prompt_id, record.repeat), []).append(record)
    return list(requests.values())


def _mean_over_requests(records: Records, value: Callable[[list[RoundRecord]], float]) -> float | None:
    values = [value(rows) for rows in _by_request(records)]
    return _ratio(sum(values), len(values))


def _ratio(top: float, bottom: float) -> float | None:
    return top / bottom if bottom else None


def _depth(records: Records) -> int:
    return max((r.verified for r in records), default=0)


def _cut_accepted(record: RoundRecord) -> int:
    """Accepted drafts that entered the text."""
    return min(record.accepted, record.committed)


def _effective_length(record: RoundRecord) -> int:
    """Drafts that DeepSpec counts as proposed: those up to the one at which the round was cut."""
    return record.committed if record.committed <= record.accepted else record.verified


FORMULAS: dict[str, str] = {
    "tau_step": "committed tokens / verify rounds, pooled over requests; the bonus token counts, the prefill token "
    "does not, and tokens after EOS or the length cap do not",
    "tau_request": "mean over requests of (committed tokens / verify rounds)",
    "alpha_draft": "accepted drafts / drafted tokens, pooled; drafts trimmed before verification count as drafted",
    "alpha_verified": "committed tokens / (verified drafts + rounds), pooled: per row sent to the target",
    "marginal": "marginal[i] = rounds that accepted drafts 0..i / rounds that verified draft i; "
    "tau_step = 1 + sum(marginal) for a fixed K without cuts",
    "conditional": "conditional[i] = rounds that accepted drafts 0..i / rounds that verified draft i and accepted "
    "0..i-1",
    "waste": "(drafted - accepted) / committed tokens",
    "efficiency": "tau_step / (K + 1)",
    "tokens_per_second": "committed tokens / seconds, ratio of sums over requests",
    "speedup": "tau_step * T(1) / (t_draft + T(K+1) + t_overhead); T(n) = seconds of a target forward over n rows",
    "end_to_end_speedup": "(prefill + tokens * T(1)) / (prefill + tokens / tau_step * (t_draft + T(K+1) + t_overhead))",
    "measured_speedup": "(tokens / seconds of the arm) / (tokens / seconds of the same engine with K = 0), ratios of "
    "sums over the prompts that both ran",
    "break_even_tau": "(t_draft + T(K+1) + t_overhead) / T(1): the tau_step at which decoding is as fast as without "
    "drafts",
    "draft_share": "t_draft / (t_draft + T(K+1) + t_overhead)",
    "overhead_share": "t_overhead / (t_draft + T(K+1) + t_overhead)",
    "verify_growth": "T(K+1) / T(1)",
    "prefill_share": "prefill / (prefill + tokens / tau_step * (t_draft + T(K+1) + t_overhead))",
    "alpha": "the constant acceptance a with (1 - a^(K+1)) / (1 - a) = tau_step",
    "sps": "SPS(N) = target steps per second when a forward carries N tokens, measured",
    "minimum_detectable_effect": "(z(0.975) + z(power)) * clustered standard error of the paired comparison",
    "expected_calibration_error": "sum over 20 equal-width bins of (predictions in bin / all) * |mean prediction - "
    "mean label|",
    "adaptive_calibration_error": "the same over 20 bins that hold equally many predictions",
    "debiased_calibration_error": "sqrt(max(0, sum over bins of (predictions in bin / all) * squared gap)), the gap "
    "estimated only from pairs of predictions of different requests (Kumar et al. 2019, extended to clusters)",
    "brier_score": "mean of (prediction - label)^2; for a label that is a probability its expectation over the outcome",
    "auroc": "P(a success was predicted higher than a failure), ties count one half; a probability as label is a "
    "success of that weight and a failure of the rest",
}


def explain(metric_name: str) -> str:
    """The formula of any metric that specdoctor prints, such as `tau_step`, `marginal[2]` or `vllm_per_position`.

    Raises for an unknown name, with the nearest ones.
    """
    name = metric_name.strip().split("[")[0].split("@")[0]
    if name in FORMULAS:
        return f"{name} = {FORMULAS[name]}" if not FORMULAS[name].startswith(name) else FORMULAS[name]
    if name in CONVENTIONS:
        convention = CONVENTIONS[name]
        return f"{name} = {convention.formula} (printed by: {convention.printed_by})"
    near = difflib.get_close_matches(name, [*FORMULAS, *CONVENTIONS], n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join([*FORMULAS, *CONVENTIONS])}"
    raise SpecdoctorError(f"metric: found {metric_name!r}, expected the name of a metric; {hint}")
