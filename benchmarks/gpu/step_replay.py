"""The whole call of one rank of 8, its collectives replayed as copies, beside torch's attention on one device.

Each row is the busiest rank of a plan: forward and backward in milliseconds of the device, the host's part, the peak of
memory, the bytes that arrive. An eighth of one device's time over the whole sequence is the floor: what is above it is
imbalance, pieces of another shape, packing, merging and gaps.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from benchmarks.gpu.calls import allocated, call_of_a_rank
from benchmarks.gpu.clock import device_of, host_seconds, masks, medians, one_device
from benchmarks.gpu.rows import Context, Row, attempt

RANKS = 8


def run(context: Context) -> None:
    device, until = device_of(context.device), time.monotonic() + context.seconds - 8
    dtype = torch.float32 if context.dry else torch.bfloat16
    sizes = (512,) if context.dry else (65_536, 131_072)
    kernels = ("sdpa",) if context.dry else ("flex", "varlen")
    repeats = 1 if context.dry else 7
    floors: dict[tuple[str, int], dict[str, float]] = {}
    for tokens, kernel, (name, mask) in itertools.product(sizes, kernels, masks(sizes[0]).items()):
        mask = mask if tokens == sizes[0] else masks(tokens)[name]
        if (name, tokens) not in floors and time.monotonic() < until:
            with attempt(context.rows, what="one device", mask=name, tokens=tokens) as found:
                attend, leaves = one_device(name, tokens, device, dtype)
                floors[name, tokens] = _times(attend, leaves, None, device, repeats)
                found |= floors[name, tokens]
        for chunks in (1, 2, 4):
            if time.monotonic() > until:
                return
            row = {"what": "rank of 8", "mask": name, "tokens": tokens, "kernel": kernel, "chunks": chunks}
            with attempt(context.rows, **row) as found:
                floor = floors.get((name, tokens), {})
                with call_of_a_rank(mask, RANKS, kernel, device, dtype, exchange="needed", stages=chunks) as call:
                    found |= _times(call.attend, call.leaves, call.cotangent, device, repeats)
                    host = medians({"": call.step}, device, repeats, host_seconds)[""]
                    call.group.received = 0
                    call.attend()
                    found |= {"host ms": 1e3 * host, "received": call.group.received}
                    found |= {"peak": allocated(call.step, device), "imbalance": call.plan.imbalance()}
                found |= {f"{part} over an eighth": found[part] / floor[part] * RANKS for part in floor}


def _times(attend: Any, leaves: Any, cotangent: torch.Tensor | None, device: torch.device, repeats: int) -> Row:
    """Milliseconds of the device, forward and backward; with a cotangent of ones if none is given."""
    cotangent = torch.ones_like(attend()) if cotangent is None else cotangent
    out = attend()
    cases = {
        "forward ms": attend,
        "backward ms": lambda: torch.autograd.grad(out, leaves, cotangent, retain_graph=True),
    }
    return {name: 1e3 * found for name, found in medians(cases, device, repeats).items()}
