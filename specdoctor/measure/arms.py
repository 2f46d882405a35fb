"""The arms of a bench: ways to decode the same prompts, measured alike.

Contract: an arm runs one prompt to its end and returns what it produced and how long the decoding took. `ar` is this
engine with K = 0, the baseline of every speed-up; `hf` is transformers' own generate, a second baseline.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria

from specdoctor.engine.engine import Engine
from specdoctor.engine.sampling import Sampling
from specdoctor.engine.sequence import Sequence
from specdoctor.engine.target import Target
from specdoctor.measure.prompts import Prompt
from specdoctor.metrics.record import RoundRecord


@dataclass(slots=True)
class RequestRun:
    """One prompt decoded by one arm. The first token comes from the prefill and counts in neither time nor tau."""

    arm: str
    prompt_id: str
    category: str
    completion_ids: list[int]
    prefill_seconds: float
    decode_seconds: float  # wall time from the end of the prefill to the last token, host gaps included
    stop_reason: str
    records: list[RoundRecord] = field(default_factory=list)

    @property
    def decoded(self) -> int:
        """Tokens after the first."""
        return max(0, len(self.completion_ids) - 1)


class Arm(Protocol):
    name: str

    def run(self, prompt: Prompt, max_new_tokens: int, sampling: Sampling, stop_ids: frozenset[int]) -> RequestRun:
        """Decode one prompt alone."""


class EngineArm:
    """Our engine: plain (`drafter` None) or with a drafter."""

    def __init__(self, name: str, engine: Engine, on_round: Callable[[RoundRecord], None] | None = None) -> None:
        self.name, self.engine, self.on_round = name, engine, on_round

    def run(self, prompt: Prompt, max_new_tokens: int, sampling: Sampling, stop_ids: frozenset[int]) -> RequestRun:
        sequence = Sequence(
            prompt.ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_ids=stop_ids,
            prompt_id=prompt.id,
            category=prompt.category,
        )
        device = self.engine.target.device
        try:
            self.engine.prefill([sequence])
            began = _now(device)
            while not sequence.finished:
                self.engine.step([sequence])
                if self.on_round:
                    self.on_round(sequence.records[-1])
            seconds = _now(device) - began
        finally:
            self.engine.release([sequence])
        for record in sequence.records:
            record.arm = self.name
        return RequestRun(
            self.name,
            prompt.id,
            prompt.category,
            sequence.completion_ids,
            sequence.prefill_seconds,
            seconds,
            sequence.stop_reason or "",
            sequence.records,
        )


class HuggingFaceArm:
    """transformers' generate with whichever of its attention forms is fastest here."""

    name = "hf"

    def __init__(self, target: Target) -> None:
        assert target.folder is not None
        self.attention, self.model = _fastest_attention(target)
        self.limit = target.max_positions + 1  # as in the engine: the last position still gives a token
        # A model may ship penalties, a top-k or stop ids as defaults; both engines must decode alike.
        self.model.generation_config = GenerationConfig()

    def run(self, prompt: Prompt, max_new_tokens: int, sampling: Sampling, stop_ids: frozenset[int]) -> RequestRun:
        device = self.model.device
        ids = torch.tensor([prompt.ids], device=device)
        options: dict[str, Any] = {"do_sample": False}
        if not sampling.greedy:
            options = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,  # 0 is off; None would be the library's own default of 50
                "top_p": sampling.top_p,
            }
        room = self.limit - len(prompt.ids)
        first = _FirstToken(device)
        torch.manual_seed(sampling.seed)
        began = _now(device)
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=min(max_new_tokens, room),
                eos_token_id=sorted(stop_ids) or None,
                pad_token_id=min(stop_ids, default=0),
                stopping_criteria=[first],
                **options,
            )
        ended = _now(device)
        produced = out[0, len(prompt.ids) :].tolist()
        stopped = "length" if room >= max_new_tokens else "context"
        if produced and produced[-1] in stop_ids:
            stopped = "stop"
        return RequestRun(self.name, prompt.id, prompt.category, produced, first.at - began, ended - first.at, stopped)


class _FirstToken(StoppingCriteria):
    """Notes when the first token is there, and stops nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.at = device, 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not self.at:
            self.at = _now(self.device)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _fastest_attention(target: Target) -> tuple[str, Any]:
    """Load the target once for each attention form, decode a few tokens, keep the fastest."""
    best: tuple[float, str, Any] | None = None
    ids = torch.arange(8, device=target.device).unsqueeze(0) % target.vocab_size
    for name in ("sdpa", "eager"):
        model = AutoModelForCausalLM.from_pretrained(
            target.folder, dtype=target.dtype, attn_implementation=name, local_files_only=True
        )
        model = model.to(target.device).eval()
        seconds = []
        for _ in range(2):  # the first run warms up
            began = _now(target.device)
            with torch.inference_mode():
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0
                )
            seconds.append(_now(target.device) - began)
        if best is None or seconds[-1] < best[0]:
            best = seconds[-1], name, model
    assert best is not None
    return best[1], best[2]


def _now(device: torch.device) -> float:
    """Monotonic seconds, after the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
