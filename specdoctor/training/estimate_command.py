"""`specdoctor data estimate` from its options to its result."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.formats.sources import resolve_model
from specdoctor.training.estimate import DTYPE_BYTES, SHARD_BYTES, TOKENS_PER_SAMPLE, estimate_cache
from specdoctor.training.samples import read_samples
from specdoctor.training.target_config import TargetConfig
from specdoctor.training.target_states import check_taps


@dataclass(slots=True)
class EstimateRequest:
    """The options of the command. Sizes come from `target` or are given; samples from `data` or are given."""

    target: str = ""
    hidden_size: int | None = None
    taps: Sequence[int] = ()
    tap_count: int | None = None
    data: Path | None = None
    samples: int | None = None
    tokens_per_sample: float | None = None
    max_length: int | None = None
    dtype: str = "auto"
    shard_bytes: int = SHARD_BYTES
    out: Path | None = None


def run_estimate(request: EstimateRequest) -> dict[str, Any]:
    """The estimate as plain values; its `exit_code` is that of an environment which cannot do it if `out` is too small.

    Raises `SpecdoctorError` when neither data nor numbers are given.
    """
    config = TargetConfig.read(resolve_model(request.target)) if request.target else None
    hidden = request.hidden_size or (config.hidden_size if config else None)
    if hidden is None:
        raise SpecdoctorError("estimate: no hidden size; give --target or --hidden-size")
    if request.taps and config:
        check_taps(request.taps, config.num_layers)
    taps = len(request.taps) or request.tap_count
    if taps is None:
        raise SpecdoctorError("estimate: no taps; give --taps 1,9,17, --tap-count 5 or --draft DRAFTER")
    dtype = request.dtype
    if dtype == "auto":
        dtype = config.dtype if config and config.dtype in DTYPE_BYTES else "bfloat16"
    samples, tokens, assumed = _amount(request)
    estimate = estimate_cache(samples, tokens, taps, hidden, dtype, request.shard_bytes)
    document = estimate.document(request.out)
    fits = document["fits"] is not False
    return document | {
        "tokens_per_sample": tokens / samples,
        "tokens_assumed": assumed,
        "exit_code": int(ExitCode.OK if fits else ExitCode.ENVIRONMENT),
    }


def _amount(request: EstimateRequest) -> tuple[int, int, bool]:
    """Samples, their tokens, and whether the tokens of a sample are our assumption."""
    if request.data is not None:
        data = read_samples(request.data, request.max_length)
        if request.samples is None:
            return len(data), data.tokens, False
        return request.samples, round(request.samples * data.tokens / len(data)), False
    if request.samples is None:
        raise SpecdoctorError("estimate: no samples; give --data FOLDER, or --samples with --tokens-per-sample")
    each = request.tokens_per_sample
    tokens = round(request.samples * (TOKENS_PER_SAMPLE if each is None else each))
    return request.samples, tokens, each is None
