"""K/V that each exchange holds, by the length of the sequence: ``python -m benchmarks.memory``.

From plans, for lengths that no CPU computes: `Plan.resident_bytes`, the most that a rank holds in a layer's forward in
addition to its own shards, and `Plan.saved_bytes`, the part that it keeps for the backward. tests/ranks/test_memory.py
measures both on real ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.plan import document_offsets
from benchmarks.publish import main, publish
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.make_plan import make_plan
from spanwise.planning.plan import Plan

RANKS = 8
LENGTHS = tuple(2**n for n in range(14, 21))
SHAPE: dict[str, Any] = dict(num_q_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
WINDOW = 4096
# Ways to exchange: ranks, or (outer, inner) of two levels; exchange.
WAYS: dict[str, tuple[int | tuple[int, int], str]] = {
    "all_gather": (RANKS, "all_gather"),
    "needed": (RANKS, "needed"),
    "ring": (RANKS, "ring"),
    "ulysses": (RANKS, "ulysses"),
    "ulysses x 2, needed": ((RANKS // 2, 2), "needed"),
    "ulysses x 2, ring": ((RANKS // 2, 2), "ring"),
}
BALANCERS = {"documents": "local", "causal": "head_tail", "window": "contiguous"}


def masks(seq_len: int) -> dict[str, SpanMask]:
    """The masks by name."""
    return {
        "documents": SpanMask.documents(document_offsets(seq_len, 0)),
        "causal": SpanMask.causal(seq_len),
        "window": SpanMask.sliding_window(seq_len, min(WINDOW, seq_len // 4)),
    }


def plan_of(way: str, name: str, mask: SpanMask, shape: dict[str, Any]) -> Plan:
    """The plan of one way to exchange. K/V are kept by default, except in a ring."""
    ranks, exchange = WAYS[way]
    return make_plan(mask, ranks, balancer=BALANCERS[name], exchange=exchange, **shape)


def run(out: Path | None = None, quick: bool = False) -> dict[str, Any]:
    """Plan, print rows, and write JSON to `out` if it is given; `quick`: lengths to 65,536 tokens.

    ``{"torch", "ranks", "shape", "planned": [...]}``; all sizes in bytes, of the rank with the most. A row has
    ``tokens``, ``mask``, ``way``, ``shard`` (K/V that a rank holds anyway), ``resident`` and ``saved``.
    """
    planned = []
    for seq_len in LENGTHS[:3] if quick else LENGTHS:
        for name, mask in masks(seq_len).items():
            planned += [_row(way, name, plan_of(way, name, mask, SHAPE)) for way in WAYS]
    return publish({"torch": torch.__version__, "ranks": RANKS, "shape": SHAPE, "planned": planned}, out)


def _row(way: str, name: str, plan: Plan) -> dict[str, Any]:
    _, kv_heads, qk_dim, v_dim = plan.attention_shape
    return {
        "tokens": plan.seq_len,
        "mask": name,
        "way": way,
        "shard": int(plan.kv_layout.tokens_per_rank.max()) * kv_heads * (qk_dim + v_dim) * plan.itemsize,
        "resident": int(plan.resident_bytes().max()),
        "saved": int(plan.saved_bytes().max()),
    }


if __name__ == "__main__":
    main(run, __doc__ or "")
