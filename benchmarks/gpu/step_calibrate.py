"""The rates that `spanwise calibrate` measures, on one device; and its prediction of attention it was not fitted to.

Calibration also measures links between devices, so the command needs two. With one device this runs all the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.gpu.clock import device_of
from benchmarks.gpu.rows import Context, attempt, write_row
from spanwise.attention.kernels.table import resolve
from spanwise.calibrate.fit import fit_attention
from spanwise.calibrate.measure import _device_name, _memory
from spanwise.calibrate.rates import Ranks, copy_rate, matmul_rate, time_attention


class Alone(Ranks):
    """One device by itself: there is nobody to wait for."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.size, self.rank = device, 1, 0

    def over_ranks(self, values: Sequence[float], *, largest: bool = True) -> list[float]:
        return list(values)


def run(context: Context) -> None:
    device = device_of(context.device)
    alone, heads = Alone(device), (8, 2, 64)
    dtype, repeats = (torch.float32, 1) if context.dry else (torch.bfloat16, 5)
    longer = 1 if context.dry else 16
    # Two lengths: FlexAttention compiles for each number of queries.
    fitted = [(longer * n, longer * m) for n, m in ((1024, 64), (1024, 512), (2048, 128), (2048, 1024))]
    others = [(longer * n, longer * m) for n, m in ((1024, 256), (2048, 512))]
    write_row(context.rows, what="device", name=_device_name(device), memory=_memory(alone, 1))
    write_row(context.rows, what="matrix product", tflops=matmul_rate(alone, dtype, repeats) / 1e12)
    write_row(context.rows, what="memory, read and written", gb_per_s=copy_rate(alone, repeats) / 1e9)
    kernel = resolve("auto", device)
    known = time_attention(alone, kernel, heads, dtype, fitted, repeats)
    try:
        rates, _ = fit_attention(*known)
    except ValueError as error:
        # Times of a busy host need not grow with the work; those of a GPU must.
        write_row(context.rows, what="fit", status="not possible" if context.dry else "failed", error=str(error))
        return
    write_row(context.rows, what="fit", **rates)
    for call, seconds in zip(*time_attention(alone, kernel, heads, dtype, others, repeats), strict=True):
        with attempt(context.rows, what="prediction", call=call.what, backward=call.backward) as found:
            rate = rates["attention_backward_flops" if call.backward else "attention_flops"]
            work = call.flops + rates["edge_pairs"] * call.tokens * call.pair_flops
            found |= {"measured_ms": 1e3 * seconds, "predicted_ms": 1e3 * (rates["kernel_seconds"] + work / rate)}
