"""Time of planning, and the plans of the balancers: ``python -m benchmarks.plan``.

One core, everything a rank needs before its first kernel: the mask from document lengths, the layout, the traffic
between ranks, the fingerprint, this rank's index tensors and FlexAttention block tables. Next to each time stand the
imbalance of the plan, and the K/V tokens that a rank reads of other ranks and that all_gather brings. "auto" prices
its candidates for the attention of Llama 3 8B on H100s; every other balancer plans the exchange "needed", in one chunk.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.publish import main, publish
from spanwise.attention import rank_plan
from spanwise.attention.kernels.table import KERNELS
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.make_plan import make_plan
from spanwise.planning.plan import Plan

SIZES = ((131_072, 8), (131_072, 64), (1_048_576, 64))
BALANCERS = ("auto", "contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "local")


def document_offsets(seq_len: int, seed: int, *, median: int = 4096, sigma: float = 1.0, least: int = 64) -> np.ndarray:
    """Offsets of documents of log-normal length, at least `least` tokens each, that fill `seq_len` tokens."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    left = seq_len
    while left:
        lengths.append(int(min(max(least, rng.lognormal(math.log(median), sigma)), left)))
        left -= lengths[-1]
    return np.concatenate([[0], np.cumsum(lengths)])


def run(out: Path | None = None, quick: bool = False) -> dict[str, Any]:
    """Measure, print a table, and write JSON to `out`; `quick`: the smaller size, three repeats instead of nine.

    ``{"rows": [...], "num_threads": 1}``; times are medians in milliseconds.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sizes = SIZES[:1] if quick else SIZES
        rows = [_row(*size, balancer, 3 if quick else 9) for size in sizes for balancer in BALANCERS]
    finally:
        torch.set_num_threads(threads)
    return publish({"num_threads": 1, "rows": rows}, out)


def _row(seq_len: int, num_ranks: int, balancer: str, repeats: int) -> dict[str, Any]:
    offsets = document_offsets(seq_len, seed=0)
    options: dict[str, Any] = {} if balancer == "auto" else {"exchange": "needed", "stages": 1}
    times: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        steps: dict[str, Callable[[Any], Any]] = {
            "mask": lambda _: SpanMask.documents(offsets),
            "plan": lambda mask: make_plan(mask, num_ranks, balancer=balancer, cu_seqlens=offsets, **options),
            "traffic": lambda plan: (plan.needed_tokens(), plan)[1],
            "fingerprint": lambda plan: (plan.fingerprint, plan)[1],
            "rank_tensors": lambda plan: (rank_plan.build(plan, num_ranks // 2, kernel=KERNELS["flex"]), plan)[1],
        }
        value: Any = None
        for part, step in steps.items():
            begin = time.perf_counter()
            value = step(value)
            if repeat:  # the first round warms allocators and caches
                times.setdefault(part, []).append((time.perf_counter() - begin) * 1e3)
    plan: Plan = value
    medians = {part: statistics.median(values) for part, values in times.items()}
    return {
        "seq_len": seq_len, "num_ranks": num_ranks, "documents": len(offsets) - 1, "balancer": balancer,
        "chosen": f"{plan.balancer}, {plan.exchange}, {plan.stages}", "ms": medians, "total_ms": sum(medians.values()),
        "imbalance": plan.imbalance(), "reads_tokens_mean": float(plan.needed_tokens().mean()),
        "reads_tokens_max": int(plan.needed_tokens().max()),
        "all_gather_tokens_mean": float((seq_len - plan.layout.tokens_per_rank).mean()),
    }  # fmt: skip


if __name__ == "__main__":
    main(run, __doc__ or "")
