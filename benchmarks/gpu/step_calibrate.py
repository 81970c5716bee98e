"""The rates that `spanwise calibrate` measures, on one device; and its prediction of attention it was not fitted to.

Calibration also measures links between devices, so the command needs two. With one device this runs all the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.clock import device_of
from benchmarks.gpu.rows import Context, write_row
from spanwise.attention.kernels.table import resolve
from spanwise.calibrate.compute import copy_rate, matmul_rate, time_attention
from spanwise.calibrate.fit import fit_attention
from spanwise.calibrate.measure import _device_name, _memory
from spanwise.calibrate.ranks import Ranks
from spanwise.cli.calibrate import CalibrateOptions, calibrate


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
    calls, seconds = time_attention(alone, kernel, heads, dtype, [*fitted, *others], repeats)
    known = [any(call.what.startswith(f"{n} tokens in documents of {m},") for n, m in fitted) for call in calls]
    pairs = [pair for pair, is_known in zip(zip(calls, seconds, strict=True), known, strict=True) if is_known]
    try:
        rates, _ = fit_attention(*(list(x) for x in zip(*pairs, strict=True)))
    except ValueError as error:
        # Times of a busy host need not grow with the work; those of a GPU must.
        write_row(context.rows, what="fit", status="not possible" if context.dry else "failed", error=str(error))
    else:
        write_row(context.rows, what="fit", **rates)
        _predict(context, rates, calls, seconds, known)
    _command(context)


def _predict(
    context: Context, rates: dict[str, float], calls: list[Any], seconds: list[float], known: list[bool]
) -> None:
    for call, measured, was_fitted in zip(calls, seconds, known, strict=True):
        if was_fitted:
            continue
        rate = rates["attention_backward_flops" if call.backward else "attention_flops"]
        work = call.flops + rates["edge_pairs"] * call.tokens * call.pair_flops
        row = {"call": call.what, "backward": call.backward, "measured_ms": 1e3 * measured}
        write_row(context.rows, what="prediction", **row, predicted_ms=1e3 * (rates["kernel_seconds"] + work / rate))


def _command(context: Context) -> None:
    """The command itself, where there are two devices for it."""
    if context.dry or torch.cuda.device_count() < 2:
        reason = "it measures links between devices; there is one"
        write_row(context.rows, what="spanwise calibrate", status="not possible", error=reason)
        return
    options = CalibrateOptions(ranks=2, device="cuda", dtype="bfloat16", out=str(Path(context.rows.parent, "hw.json")))
    code = calibrate(options, None)
    write_row(context.rows, what="spanwise calibrate", status="failed" if code else "ok")
