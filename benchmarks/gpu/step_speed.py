"""A rank's share of attention, and flex on whole masks, against torch's attention: milliseconds and TFLOP/s.

TFLOP/s count the pairs that the mask allows: 4 · head_dim FLOPs a head forward and 2.5 times that backward, the
convention of the FlashAttention papers. So kernels and masks compare by rate. Beside each stands its part of the
device's rate of matrix products, measured in the same run.
"""

from __future__ import annotations

import torch

import spanwise
from benchmarks.gpu.campaign import write_row
from benchmarks.gpu.clock import device_of, medians
from benchmarks.gpu.rank_share import HEAD_DIM, HEADS, KV_HEADS, RANKS, WINDOW, documents, share, whole
from benchmarks.gpu.steps import Context
from spanwise import SpanMask

HEADS_OF_PLAN = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}


def run(context: Context) -> None:
    device = device_of(context.device)
    tokens, ranks = (256, 2) if context.dry else (65_536, RANKS)
    dtype = torch.float32 if context.dry else torch.bfloat16
    roofline = matmul_rate(device, dtype, 256 if context.dry else 8192)
    write_row(context.rows, what="matrix product", tflops=roofline / 1e12)
    cu_seqlens = documents(tokens, 0)
    masks = {
        "causal": SpanMask.causal(tokens),
        "documents": SpanMask.documents(cu_seqlens),
        "window": SpanMask.sliding_window(tokens, min(WINDOW, tokens // 4)),
    }
    for name, mask in masks.items():
        plan = spanwise.make_plan(mask, ranks, exchange="needed", stages=1, **HEADS_OF_PLAN)
        area, of_rank = int(mask.area().sum()), int(plan.work().max())
        failures = {}
        cases = {}
        for case in ("torch, one device", "sdpa") if context.dry else ("torch, one device", "flex", "varlen"):
            try:  # a kernel that fails is a row of its own, beside the others' times
                if case == "torch, one device":
                    cases[case] = whole(name, mask, cu_seqlens, device, dtype)
                else:
                    cases[case], _ = share(plan, case, device, dtype)
                cases[case]()
            except Exception as error:
                cases.pop(case, None)
                failures[case] = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        for case, seconds in medians(cases, device, 2 if context.dry else 10).items():
            pairs = area if case == "torch, one device" else of_rank
            rate = 3.5 * 4 * HEAD_DIM * HEADS * pairs / seconds
            row = {
                "what": "attention",
                "mask": name,
                "case": case,
                "tokens": tokens,
                "ranks": ranks,
                "ms": 1e3 * seconds,
            }
            write_row(context.rows, **row, tflops=rate / 1e12, of_matmul=rate / roofline, imbalance=plan.imbalance())
        for case, error in failures.items():
            write_row(context.rows, what="attention", mask=name, case=case, status="failed", error=error)


def matmul_rate(device: torch.device, dtype: torch.dtype, n: int) -> float:
    """FLOP/s of a square matrix product."""
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / medians({"": lambda: a @ b}, device, 5)[""]
