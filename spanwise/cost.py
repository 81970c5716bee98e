"""What a step costs: attention FLOPs from exact mask areas, and α–β times of collectives.

The bottom of the house: the planner prices layouts with it, and the overlap half will price collectives with the
same :class:`Hardware`. Numbers only, no torch.
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of one rank, as the planner sees them.

    Attributes:
        name: shown in reports.
        attention_flops: FLOP/s that the attention kernel reaches, forward and backward together.
        bandwidth: bytes/s that a rank receives while all ranks receive (the β of the α–β model, inverted).
        latency: seconds before the first byte of a collective arrives (α).
    """

    name: str
    attention_flops: float
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        for field in ("attention_flops", "bandwidth", "latency"):
            value = getattr(self, field)
            positive = value > 0 or (field == "latency" and value == 0)
            if not (math.isfinite(value) and positive):
                raise ValueError(f"Hardware.{field} must be a positive number, got {value!r}")

    def attention_seconds(self, flops: float) -> float:
        """Seconds that one rank computes for ``flops`` floating-point operations."""
        return flops / self.attention_flops

    def collective_seconds(self, received_bytes: float) -> float:
        """Seconds of a collective in which the busiest rank receives ``received_bytes`` (Hockney's α–β model)."""
        return self.latency + received_bytes / self.bandwidth if received_bytes else 0.0


# Data sheet of the H100 SXM: 989.4 TFLOP/s dense bf16 and 900 GB/s NVLink in both directions together, so 450 GB/s
# each way. That attention reaches half of the matmul peak and a collective starts in 20 µs are assumptions, not
# measurements; they only decide ties between layouts, and `Hardware(...)` replaces them.
H100 = Hardware("H100 SXM, nominal", attention_flops=0.5 * 989.4e12, bandwidth=450e9, latency=20e-6)


def attention_flops(area: float, num_q_heads: int, head_dim: int, v_head_dim: int, *, backward: bool) -> float:
    """FLOPs of exact attention over ``area`` (query, key) pairs.

    Forward: two matrix products, ``QKᵀ`` and ``PV``, a multiply and an add each. Backward: five products (scores
    again, dV, dP, dQ, dK), as in FlashAttention-2 (Dao, 2023, section 4.1).

    Args:
        area: visible (query, key) pairs, summed over batch rows.
        backward: count the backward pass instead of the forward.
    """
    qk, pv = 2.0 * area * num_q_heads * head_dim, 2.0 * area * num_q_heads * v_head_dim
    return 3 * qk + 2 * pv if backward else qk + pv
