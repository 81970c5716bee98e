"""Every exchange and kernel, forward and backward, while torch refuses any call that would wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.gpu.calls import call_of_a_rank
from benchmarks.gpu.clock import device_of
from benchmarks.gpu.rows import Context, attempt
from spanwise import SpanMask

EXCHANGES = {"needed": {"stages": 2}, "all_gather": {}, "ring": {}, "ulysses": {}, "hierarchical": {}}


def run(context: Context) -> None:
    device = device_of(context.device)
    tokens, ranks = (256, 4) if context.dry else (8192, 4)
    dtype = torch.float32 if context.dry else torch.bfloat16
    mask = SpanMask.documents([0, tokens // 3, tokens // 2, tokens])
    for kernel in ("sdpa",) if context.dry else ("varlen", "flex"):
        for exchange, options in EXCHANGES.items():
            row = {"what": "exchange without a wait", "exchange": exchange, "kernel": kernel}
            with (
                attempt(context.rows, **row) as found,
                call_of_a_rank(mask, ranks, kernel, device, dtype, exchange=exchange, **options) as call,
            ):
                for _ in range(2):
                    call.step()  # compiles, and makes what a plan's first call makes
                call.group.received = call.group.launches = 0
                with no_waits(device):
                    call.step()
                found |= {"collectives": call.group.launches, "bytes received": call.group.received}


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Calls that wait for the device raise."""
    if device.type == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
