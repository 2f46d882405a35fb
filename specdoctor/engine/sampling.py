"""From logits to the distribution that is really sampled, and sampling by inverse CDF.

One uniform number a draw, from the request's own generator on the host, so a request's text does not depend on its
neighbours in a batch, nor on the device. Target and drafter share `probabilities`: top-k and top-p apply to p and q
alike.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdoctor.errors import SpecdoctorError

LOWEST_TEMPERATURE = 1e-30  # below it float32 logits overflow when divided, and softmax is NaN; it is an argmax already


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request samples. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    draft_temperature: str = "1x"  # absolute ("0.5"), or a factor of the target's ("0.7x")
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise SpecdoctorError(f"--temperature {self.temperature}: expected a number of 0 or more")
        if self.top_k < 0:
            raise SpecdoctorError(f"--top-k {self.top_k}: expected 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise SpecdoctorError(f"--top-p {self.top_p}: expected a number above 0, at most 1 (1 is off)")
        if not -(2**63) <= self.seed < 2**63:
            raise SpecdoctorError(f"--seed {self.seed}: expected a whole number that fits in 64 bits")
        _ = self.drafting_temperature

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def drafting_temperature(self) -> float:
        """The temperature that the drafter samples at."""
        text = self.draft_temperature.strip().lower()
        try:
            value = float(text.removesuffix("x"))
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise SpecdoctorError(
                f"--draft-temperature {self.draft_temperature}: expected a temperature such as 0.5, or a factor of the "
                "target's such as 0.7x"
            )
        return value * self.temperature if text.endswith("x") else value

    @property
    def distribution(self) -> tuple[float, int, float, str]:
        """What two requests must share to be processed in one batch."""
        return self.temperature, self.top_k, self.top_p, self.draft_temperature


def probabilities(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Float32 probabilities [..., V] after temperature, then top-k, then top-p (the order that transformers uses).

    Ties at the top-k boundary are all kept. `temperature` must be above 0; greedy is an argmax, not a distribution.
    """
    scores = logits.float() / max(temperature, LOWEST_TEMPERATURE)
    V = scores.shape[-1]
    if 0 < top_k < V:
        lowest = scores.topk(top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    probs = scores.softmax(-1)
    if top_p < 1:
        ordered, index = probs.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # mass above each token: the one that crosses top_p stays
        ordered = ordered.masked_fill(before >= top_p, 0.0)
        probs = torch.zeros_like(probs).scatter_(-1, index, ordered)
        probs /= probs.sum(-1, keepdim=True)
    return probs


def widest_float(device: torch.device) -> torch.dtype:
    """Dtype of running sums and of the uniform numbers beside them: float64, which Apple's GPUs do not have."""
    return torch.float32 if device.type == "mps" else torch.float64


def sample(probs: Tensor, uniform: Tensor) -> Tensor:
    """Draw one id [...] from each row of `probs` [..., V] (any scale) with the uniform numbers [...] given.

    The running sum is kept in float64 where the device has it: float32 would round away rare tokens of a large V.
    """
    wide = widest_float(probs.device)
    cdf = probs.to(wide).cumsum(-1)
    total = cdf[..., -1:]
    # Below the total even where rounding makes `uniform` 1: beyond it lies a last token of perhaps no probability.
    threshold = torch.minimum(uniform.to(wide).unsqueeze(-1) * total, total * (1 - torch.finfo(wide).eps))
    return torch.searchsorted(cdf, threshold, right=True).squeeze(-1).clamp_max_(probs.shape[-1] - 1)
