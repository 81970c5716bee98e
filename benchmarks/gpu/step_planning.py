"""Planning on the host of the GPU: ``python -m benchmarks.plan``, and the tensors of a rank plan on the device."""

from __future__ import annotations

import numpy as np
import torch

import spanwise
from benchmarks import plan as bench
from benchmarks.gpu.campaign import write_row
from benchmarks.gpu.clock import device_of, medians
from benchmarks.gpu.steps import Context
from spanwise.attention.kernels.table import KERNELS
from spanwise.attention.rank_plan import build


def run(context: Context) -> None:
    device = device_of(context.device)
    tokens, ranks = (16_384, 4) if context.dry else (131_072, 8)
    mask = spanwise.SpanMask.documents(bench.document_offsets(tokens, seed=0))
    plan = spanwise.make_plan(mask, ranks, balancer="local", exchange="needed", stages=1)
    rank = int(np.argmax(plan.work()))

    def on_device(kernel: str) -> None:
        build(plan, rank, device, kernel=KERNELS[kernel])
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    cases = {kernel: lambda kernel=kernel: on_device(kernel) for kernel in ("reference", "flex", "varlen")}
    for kernel, seconds in medians(cases, torch.device("cpu"), 3 if context.dry else 9).items():
        write_row(context.rows, what="rank tensors on the device", kernel=kernel, tokens=tokens, ms=1e3 * seconds)
    for row in bench.run(quick=True)["rows"]:
        write_row(context.rows, what="plan", **row)
