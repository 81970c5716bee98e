"""Balance and traffic of each balancer: ``python -m benchmarks.layout``.

One sequence of 131,072 tokens, masks of every kind. The imbalance is that of exact mask areas. The traffic is the K/V
tokens that a rank reads of other ranks, the least of any exchange, next to those of a full gather. All figures come
from the plan; nothing is executed. For some masks MagiAttention's own dispatch solver was run, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plan import document_offsets
from benchmarks.publish import main, publish
from spanwise.layouts.local import Local
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.make_plan import make_plan

SEQ_LEN = 131_072
RANKS = (8, 64)
BALANCERS = ("contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "local")
_WINDOW = 4_096

# MagiAttention MinHeap/ToppHeap, from its own dispatch solver run on the same masks: (imbalance, mean K/V tokens that a
# rank receives) by mask and ranks. MinHeap is its default.
MAGI = {
    ("causal", 8): {"MinHeap": (1.000, 107_520), "ToppHeap": (1.375, 75_264)},
    ("documents 0", 8): {"MinHeap": (1.001, 28_309), "ToppHeap": (1.005, 16_321)},
    ("documents 1", 8): {"MinHeap": (1.025, 23_222), "ToppHeap": (1.039, 15_002)},
    ("documents 2", 8): {"MinHeap": (1.014, 33_543), "ToppHeap": (1.027, 17_175)},
    ("window", 8): {"MinHeap": (1.016, 32_000), "ToppHeap": (1.016, 32_000)},
    ("documents 0", 64): {"MinHeap": (1.005, 29_193), "ToppHeap": (1.093, 11_121)},
    ("documents 1", 64): {"MinHeap": (1.009, 25_728), "ToppHeap": (1.078, 9_757)},
    ("documents 2", 64): {"MinHeap": (1.005, 33_723), "ToppHeap": (1.149, 15_313)},
    ("window", 64): {"MinHeap": (1.016, 32_224), "ToppHeap": (1.016, 32_224)},
}  # fmt: skip


def masks(seq_len: int = SEQ_LEN) -> dict[str, tuple[SpanMask, np.ndarray]]:
    """The masks by name, each with its document offsets: those of `MAGI`, then one of every other kind.

    "documents s" are documents of log-normal length (median 4,096), causal, with seed s; "window" reads 4,096 keys to
    the left. Of each document of "prefix LM" a quarter is bidirectional; "shared prefix" is one prompt of a quarter of
    the sequence and twelve answers; "video" has frames of 1,024 tokens that read themselves, four frames back, and the
    first 512 tokens; "documents + window" is documents 0 with 1,024 keys to the left.
    """
    offsets = [document_offsets(seq_len, seed) for seed in range(3)]
    whole = np.array([0, seq_len])
    prefix = seq_len // 4
    answers = np.diff(np.linspace(0, seq_len - prefix, 13).astype(np.int64))
    return {
        "causal": (SpanMask.causal(seq_len), whole),
        **{f"documents {seed}": (SpanMask.documents(cu), cu) for seed, cu in enumerate(offsets)},
        "window": (SpanMask.sliding_window(seq_len, _WINDOW), whole),
        "prefix LM": (SpanMask.prefix_lm(offsets[0], np.diff(offsets[0]) // 4), offsets[0]),
        "shared prefix": (SpanMask.shared_prefix(prefix, answers), whole),
        "video": (SpanMask.block_causal(seq_len, 1_024, 4, global_tokens=512), whole),
        "documents + window": (SpanMask.documents(offsets[0], window=(1_024, 0)), offsets[0]),
    }


def run(out: Path | None = None, quick: bool = False) -> dict[str, Any]:
    """Plan, print a table, and write JSON to `out`; `quick`: 8 ranks only.

    A row has ``mask``, ``num_ranks``, ``balancer``, ``imbalance`` (busiest over mean mask area), ``recv_mean``,
    ``recv_max`` and ``gather`` (K/V tokens a rank); rows with a ``source`` were measured elsewhere.
    """
    rows: list[dict[str, Any]] = []
    for num_ranks in RANKS[:1] if quick else RANKS:
        for name, (mask, cu_seqlens) in masks().items():
            rows += [_row(name, mask, cu_seqlens, num_ranks, each) for each in BALANCERS]
            for solver, (imbalance, received) in MAGI.get((name, num_ranks), {}).items():
                rows.append(
                    {
                        "mask": name, "num_ranks": num_ranks, "balancer": f"MagiAttention {solver}",
                        "imbalance": imbalance, "recv_mean": received, "recv_max": None,
                        "gather": rows[-1]["gather"],
                        "source": "MagiAttention's own dispatch solver run on the same mask",
                    }
                )  # fmt: skip
    return publish({"seq_len": SEQ_LEN, "rows": rows}, out)


def _row(name: str, mask: SpanMask, cu_seqlens: np.ndarray, num_ranks: int, balancer: str) -> dict[str, Any]:
    given: Any = Local() if balancer == "local" else balancer  # a token counts alike wherever it comes from
    plan = make_plan(mask, num_ranks, balancer=given, exchange="needed", cu_seqlens=cu_seqlens)
    received = plan.recv_tokens()
    return {
        "mask": name, "num_ranks": num_ranks, "balancer": balancer, "imbalance": plan.imbalance(),
        "recv_mean": float(received.mean()), "recv_max": int(received.max()),
        "gather": plan.seq_len - plan.seq_len // num_ranks,
    }  # fmt: skip


if __name__ == "__main__":
    main(run, __doc__ or "")
