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

    def offsets(self) -> np.ndarray:
        """Document offsets ``[num_docs + 1]``; one document unless the mask has several."""
        if self.kind == "documents":
            return document_offsets(self.seq_len, self.seed, median=1024)
        return np.array([0, self.seq_len])

    def mask(self) -> SpanMask:
        return SpanMask.documents(self.offsets(), window=None if self.window is None else (self.window, 0))


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One way to bring keys to queries, with the options of `make_plan`; `two_level`: Ulysses inside a host."""

    name: str
    exchange: str
    stages: int | None = None
    keep_kv: bool | None = None
    two_level: bool = False


def make_plan(scenario: Scenario, variant: Variant, hardware: Hardware | None) -> spanwise.Plan:
    """The plan of one variant; the layout is the same for all of a scenario that do not trade heads for tokens."""
    hosts, inside = scenario.num_hosts, scenario.per_host
    return spanwise.make_plan(
        scenario.mask(), (hosts, inside) if variant.two_level else hosts * inside, balancer=scenario.balancer,
        exchange=variant.exchange, num_q_heads=HEADS, num_kv_heads=scenario.kv_heads, head_dim=HEAD_DIM,
        dtype=torch.float32, stages=variant.stages, keep_kv=variant.keep_kv, hardware=hardware,
        cu_seqlens=scenario.offsets(),
    )  # fmt: skip


def draw(scenario: Scenario) -> Results:
    """q, k, v and the cotangent of the output of the whole sequence, float32 ``[1, heads, seq_len, head_dim]``."""
    generator = torch.Generator().manual_seed(scenario.seed)
    heads = HEADS, scenario.kv_heads, scenario.kv_heads, HEADS
    return tuple(torch.randn((1, n, scenario.seq_len, HEAD_DIM), generator=generator) for n in heads)


def reference(scenario: Scenario, rows: int = 512) -> Results:
    """out, dq, dk, dv of the whole sequence in float64 on one device: dense attention of a few rows at a time."""
    q, k, v, grad = (x.double() for x in draw(scenario))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask, outs = scenario.mask(), []
    start, end = (torch.from_numpy(x[0, 0].copy()) for x in (mask.start, mask.end))
    for part in torch.arange(scenario.seq_len).split(rows):
        low, high = int(start[part].min()), int(end[part].max())
        at = torch.arange(low, high)
        visible = (at >= start[part, None]) & (at < end[part, None])
        keys, values = (x[:, :, low:high].repeat_interleave(HEADS // scenario.kv_heads, dim=1) for x in (k, v))
        scores = (q[:, :, part] @ keys.mT / math.sqrt(HEAD_DIM)).masked_fill(~visible, -math.inf)
        out = torch.softmax(scores, -1) @ values
        out.backward(grad[:, :, part])
        outs.append(out.detach())
    return torch.cat(outs, dim=2), *(x.grad for x in leaves)
