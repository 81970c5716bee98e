"""What planning takes, and what plans of the balancers are worth; nothing is executed.

    python -m benchmarks.plan times --out benchmarks/results/plan-cpu.json
    python -m benchmarks.plan layouts --out benchmarks/results/layout-cpu.json

times: one core, everything a rank needs before its first kernel: the mask from document lengths, the layout, the
traffic between ranks, the fingerprint, this rank's index tensors and FlexAttention block tables. "auto" prices its
candidates for the attention of Llama 3 8B on H100s; every other balancer plans the exchange "needed", in one chunk.

layouts: one sequence of 131,072 tokens, masks of every kind. The imbalance is that of exact mask areas. The traffic is
the K/V tokens that a rank reads of other ranks, the least of any exchange, next to those of a full gather. For some
masks MagiAttention's own dispatch solver was run, too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.publish import Result, main, take_turns
from spanwise.attention import rank_plan
from spanwise.attention.kernels.table import KERNELS
from spanwise.layouts.local import Local
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.make_plan import make_plan

SIZES = ((131_072, 8), (131_072, 64), (1_048_576, 64))
BALANCERS = ("contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "local")
SEQ_LEN, WINDOW = 131_072, 4_096

# MagiAttention MinHeap/ToppHeap, from its own dispatch solver run on the same masks: (imbalance, mean K/V tokens that a
# rank receives) by mask and ranks. MinHeap is its default.
MAGI = {
    ("causal", 8): {"MinHeap": (1.000, 107_520), "ToppHeap": (1.375, 75_264)},
    ("documents 0", 8): {"MinHeap": (1.001, 28_309), "ToppHeap": (1.005, 16_321)},
    ("window", 8): {"MinHeap": (1.016, 32_000), "ToppHeap": (1.016, 32_000)},
    ("documents 0", 64): {"MinHeap": (1.005, 29_193), "ToppHeap": (1.093, 11_121)},
    ("window", 64): {"MinHeap": (1.016, 32_224), "ToppHeap": (1.016, 32_224)},
}  # fmt: skip


def document_offsets(seq_len: int, seed: int, *, median: int = 4096, sigma: float = 1.0, least: int = 64) -> np.ndarray:
    """Offsets of documents of log-normal length, at least `least` tokens each, that fill `seq_len` tokens."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := seq_len - sum(lengths)) > 0:
        lengths.append(int(min(max(least, rng.lognormal(math.log(median), sigma)), left)))
    return np.concatenate([[0], np.cumsum(lengths)])


def times(quick: bool = False) -> Result:
    """Milliseconds of planning, medians of nine repeats."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sizes = [(*size, balancer) for size in SIZES[: 1 if quick else None] for balancer in ("auto", *BALANCERS)]
        return {"num_threads": 1, "rows": [_timed(*size, 3 if quick else 9) for size in sizes]}
    finally:
        torch.set_num_threads(threads)


def _timed(seq_len: int, num_ranks: int, balancer: str, repeats: int) -> Result:
    offsets = document_offsets(seq_len, seed=0)
    options: dict[str, Any] = {} if balancer == "auto" else {"exchange": "needed", "stages": 1}
    options |= {"balancer": balancer, "cu_seqlens": offsets}
    made: dict[str, Any] = {}
    steps: dict[str, Callable[[], Any]] = {
        "mask": lambda: made.update(mask=SpanMask.documents(offsets)),
        "plan": lambda: made.update(plan=make_plan(made["mask"], num_ranks, **options)),
        "traffic": lambda: made["plan"].needed_tokens(),
        "fingerprint": lambda: made["plan"].fingerprint,
        "rank_tensors": lambda: rank_plan.build(made["plan"], num_ranks // 2, kernel=KERNELS["flex"]),
    }
    take_turns(steps, 1)  # warms allocators and caches
    medians = {part: 1e3 * statistics.median(found) for part, found in take_turns(steps, repeats).items()}
    plan = made["plan"]
    return {
        "seq_len": seq_len, "num_ranks": num_ranks, "documents": len(offsets) - 1, "balancer": balancer,
        "chosen": f"{plan.balancer}, {plan.exchange}, {plan.stages}", "ms": medians, "total_ms": sum(medians.values()),
        "imbalance": plan.imbalance(), "reads_tokens_mean": float(plan.needed_tokens().mean()),
        "reads_tokens_max": int(plan.needed_tokens().max()),
        "all_gather_tokens_mean": float((seq_len - plan.layout.tokens_per_rank).mean()),
    }  # fmt: skip


def masks(seq_len: int = SEQ_LEN) -> dict[str, tuple[SpanMask, np.ndarray]]:
    """The masks by name, each with its document offsets: those of `MAGI`, then one of every other kind.

    "documents 0" are documents of log-normal length (median 4,096), causal; "window" reads 4,096 keys to the left. Of
    each document of "prefix LM" a quarter is bidirectional; "shared prefix" is one prompt of a quarter of the sequence
    and twelve answers; "video" has frames of 1,024 tokens that read themselves, four frames back, and the first 512
    tokens.
    """
    offsets, whole, prefix = document_offsets(seq_len, 0), np.array([0, seq_len]), seq_len // 4
    answers = np.diff(np.linspace(0, seq_len - prefix, 13).astype(np.int64))
    return {
        "causal": (SpanMask.causal(seq_len), whole),
        "documents 0": (SpanMask.documents(offsets), offsets),
        "window": (SpanMask.sliding_window(seq_len, WINDOW), whole),
        "prefix LM": (SpanMask.prefix_lm(offsets, np.diff(offsets) // 4), offsets),
        "shared prefix": (SpanMask.shared_prefix(prefix, answers), whole),
        "video": (SpanMask.block_causal(seq_len, 1_024, 4, global_tokens=512), whole),
    }


def layouts(quick: bool = False) -> Result:
    """Imbalance (busiest over mean mask area), and K/V tokens a rank; rows with a source were measured elsewhere."""
    rows: list[Result] = []
    for num_ranks in (8,) if quick else (8, 64):
        gather = SEQ_LEN - SEQ_LEN // num_ranks
        for name, (mask, cu_seqlens) in masks().items():
            about = {"mask": name, "num_ranks": num_ranks, "gather": gather}
            for balancer in BALANCERS:
                # For `local`, a token counts alike wherever it comes from.
                given: Any = Local() if balancer == "local" else balancer
                plan = make_plan(mask, num_ranks, balancer=given, exchange="needed", cu_seqlens=cu_seqlens)
                received = plan.recv_tokens()
                figures = {"imbalance": plan.imbalance(), "recv_mean": float(received.mean())}
                rows.append(about | {"balancer": balancer, **figures, "recv_max": int(received.max())})
            for solver, (imbalance, mean) in MAGI.get((name, num_ranks), {}).items():
                source = "MagiAttention's own dispatch solver run on the same mask"
                figures = {"imbalance": imbalance, "recv_mean": mean, "recv_max": None, "source": source}
                rows.append(about | {"balancer": f"MagiAttention {solver}", **figures})
    return {"seq_len": SEQ_LEN, "rows": rows}


if __name__ == "__main__":
    main({"times": times, "layouts": layouts}, __doc__ or "")
