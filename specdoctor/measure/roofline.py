"""What the machine could do: bytes and operations of a forward against bandwidth and matrix rate measured on the spot.

Counting rules. Bytes: every weight that a forward of N rows must read once (the embedding table only as head), plus the
KV columns of the context. Operations: 2 a weight and row, plus 4 a row, context column and query dimension.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from specdoctor.engine.target import Target
from specdoctor.measure.cost_table import timed

COPY_BYTES = 256 * 2**20
MATRIX = 1536


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured rates of this device at this dtype."""

    bytes_per_second: float  # reading; a matrix-vector product, as decoding does
    operations_per_second: float  # matrix product


@dataclass(frozen=True, slots=True)
class Roofline:
    """One forward of `rows` rows against the machine."""

    rows: int
    context: int
    bytes: float
    operations: float
    memory_seconds: float
    compute_seconds: float
    measured_seconds: float

    @property
    def bound(self) -> str:
        """The nearer roof: `memory` or `compute`; `host` when the forward takes over twice as long as either."""
        roof = max(self.memory_seconds, self.compute_seconds)
        if self.measured_seconds > 2 * roof:
            return "host"
        return "memory" if self.memory_seconds >= self.compute_seconds else "compute"

    @property
    def efficiency(self) -> float:
        """Share of the nearer roof that is reached."""
        return max(self.memory_seconds, self.compute_seconds) / self.measured_seconds

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"bound": self.bound, "efficiency": self.efficiency}


@torch.inference_mode()
def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Bandwidth of a large matrix-vector product, and the rate of a square matrix product; best of several."""
    item = torch.empty(0, dtype=dtype).element_size()
    columns = 4096
    big = torch.ones(COPY_BYTES // item // columns, columns, dtype=dtype, device=device)
    vector = torch.ones(columns, 1, dtype=dtype, device=device)
    square = torch.ones(MATRIX, MATRIX, dtype=dtype, device=device)
    reading = min(timed(device, lambda: big @ vector) for _ in range(6))
    product = min(timed(device, lambda: square @ square) for _ in range(6))
    return Machine(big.numel() * item / reading, 2 * MATRIX**3 / product)


def weights_read(target: Target) -> int:
    """Weights that a forward reads: all but the embedding table, and the head (which may be that table)."""
    total = sum(p.numel() for p in target.model.parameters())
    embedding, head = target.embedding.weight, target.lm_head.weight
    tied = embedding.data_ptr() == head.data_ptr()
    return total if tied else total - embedding.numel()


def roofline(target: Target, machine: Machine, rows: int, context: int, measured: float) -> Roofline:
    """The roofs of one forward."""
    config, weights = target.config, weights_read(target)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    item = torch.empty(0, dtype=target.dtype).element_size()
    cache = 2 * config.num_hidden_layers * kv_heads * head_dim * context * item
    attention = 4 * rows * context * config.num_attention_heads * head_dim * config.num_hidden_layers
    size, operations = weights * item + cache, 2 * weights * rows + attention
    return Roofline(
        rows,
        context,
        size,
        operations,
        size / machine.bytes_per_second,
        operations / machine.operations_per_second,
        measured,
    )
