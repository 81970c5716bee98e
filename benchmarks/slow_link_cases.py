"""What `slow_link.py` measures: masks, data, plans, and the float64 results that they are compared with."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from plan import document_offsets

import spanwise
from spanwise.hardware import Hardware
from spanwise.masks.span_mask import SpanMask

HEADS, HEAD_DIM = 8, 64
RESULTS = ("out", "dq", "dk", "dv")
Results = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """One mask over one slow network.

    Attributes:
        kind: "documents" (causal, lengths log-normal, median 1,024, sigma 1), "window" or "causal".
        rate: bits/s of each link.
        seed: of documents and data.
        window: keys to the left, of kind "window".
        per_host: ranks of a host.
    """

    name: str
    kind: str
    seq_len: int
    num_hosts: int
    rate: float
    balancer: str = "local"
    seed: int = 0
    window: int | None = None
    kv_heads: int = HEADS
    per_host: int = 1

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.per_host

    def offsets(self) -> np.ndarray:
        """Document offsets ``[num_docs + 1]``; one document unless the mask has several."""
        if self.kind == "documents":
            return document_offsets(self.seq_len, self.seed, median=1024)
        return np.array([0, self.seq_len])

    def mask(self) -> SpanMask:
        if self.kind == "documents":
            return SpanMask.documents(self.offsets())
        if self.kind == "window":
            assert self.window is not None
            return SpanMask.sliding_window(self.seq_len, self.window)
        return SpanMask.causal(self.seq_len)


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One way to bring keys to queries.

    Attributes:
        exchange: as `make_plan` takes it.
        stages: in how many pieces what is needed arrives; None: the plan's choice.
        keep_kv: whether what arrived is kept for the backward; None: the plan's choice.
        two_level: Ulysses inside a host, `exchange` between hosts.
    """

    name: str
    exchange: str
    stages: int | None = None
    keep_kv: bool | None = None
    two_level: bool = False


def make_plan(scenario: Scenario, variant: Variant, hardware: Hardware | None) -> spanwise.Plan:
    """The plan of one variant; the layout is the same for all of a scenario that do not trade heads for tokens."""
    num_ranks = (scenario.num_hosts, scenario.per_host) if variant.two_level else scenario.num_ranks
    return spanwise.make_plan(
        scenario.mask(), num_ranks, balancer=scenario.balancer, exchange=variant.exchange,
        num_q_heads=HEADS, num_kv_heads=scenario.kv_heads, head_dim=HEAD_DIM, dtype=torch.float32,
        stages=variant.stages, keep_kv=variant.keep_kv, hardware=hardware, cu_seqlens=scenario.offsets(),
    )  # fmt: skip


def draw(scenario: Scenario) -> tuple[torch.Tensor, ...]:
    """q, k, v and the cotangent of the output of the whole sequence, float32 ``[1, heads, seq_len, head_dim]``."""
    generator = torch.Generator().manual_seed(scenario.seed)
    heads = HEADS, scenario.kv_heads, scenario.kv_heads, HEADS
    return tuple(torch.randn((1, n, scenario.seq_len, HEAD_DIM), generator=generator) for n in heads)


def reference(scenario: Scenario, chunk: int = 512) -> Results:
    """out, dq, dk, dv of the whole sequence in float64 on one device, free of spanwise's kernels.

    Dense attention, `chunk` query rows at a time over the keys between the first and the last that any of them reads.
    Backward as in FlashAttention-2 (Dao, 2023, section 2.3): dS = P ∘ (dP − rowsum(dO ∘ O)).
    """
    q, k, v, grad = (x[0].double() for x in draw(scenario))
    k, v = (x.repeat_interleave(HEADS // scenario.kv_heads, dim=0) for x in (k, v))
    mask = scenario.mask()
    out, dq, dk, dv = (torch.zeros_like(q) for _ in range(4))
    scale = 1 / math.sqrt(HEAD_DIM)
    positions = torch.arange(scenario.seq_len)
    for low in range(0, scenario.seq_len, chunk):
        rows = slice(low, low + chunk)
        starts, ends = (torch.from_numpy(x[0, :, rows].copy()) for x in (mask.start, mask.end))
        used = ends > starts
        if not used.any():
            continue
        keys = slice(int(starts[used].min()), int(ends[used].max()))
        at = positions[keys]
        visible = ((at >= starts.unsqueeze(-1)) & (at < ends.unsqueeze(-1))).any(0)
        scores = (scale * q[:, rows] @ k[:, keys].transpose(1, 2)).masked_fill_(~visible, -math.inf)
        weights = torch.softmax(scores, -1)
        out[:, rows] = weights @ v[:, keys]
        dv[:, keys] += weights.transpose(1, 2) @ grad[:, rows]
        slope = grad[:, rows] @ v[:, keys].transpose(1, 2)
        slope = weights * (slope - (grad[:, rows] * out[:, rows]).sum(-1, keepdim=True)) * scale
        dq[:, rows] = slope @ k[:, keys]
        dk[:, keys] += slope.transpose(1, 2) @ q[:, rows]
    dk, dv = (x.unflatten(0, (scenario.kv_heads, -1)).sum(1) for x in (dk, dv))
    return tuple(x.unsqueeze(0) for x in (out, dq, dk, dv))
