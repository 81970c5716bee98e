"""Bytes that each rank receives, holds and saves in a layer's forward. Exact; pure.

Each is a sum of two parts: K/V that travel between groups of ranks (`Plan.route`), and the trade of heads for tokens
inside groups (`heads`).
"""

# G groups

from __future__ import annotations

import numpy as np

from spanwise.masks.arrays import Int64
from spanwise.planning import heads
from spanwise.planning.plan_data import PlanData


def kv_token_bytes(plan: PlanData) -> Int64:
    """Bytes of K and V of one token, in compute and between groups; int64 ``[num_ranks]``.

    All heads, or under Ulysses the heads that the rank computes.
    """
    _, kv_heads, qk_dim, v_dim = plan.attention_shape
    held = np.full(plan.num_ranks, kv_heads) if plan.inner == 1 else heads.kv_heads_of_ranks(plan)
    return held.astype(np.int64) * (qk_dim + v_dim) * plan.itemsize


def received(plan: PlanData, mask: str) -> Int64:
    """The bytes of `Plan.recv_bytes`."""
    plan.mask(mask)
    plan.require_shape("recv_bytes()")
    tokens = plan.route(mask).padded.sum(axis=(0, 2))
    exchanged = np.repeat(tokens, plan.inner) * kv_token_bytes(plan)
    return exchanged if plan.inner == 1 else exchanged + heads.received(plan)


def resident_and_saved(plan: PlanData, mask: str, what: str = "resident_bytes()") -> tuple[Int64, Int64]:
    """The bytes of `Plan.resident_bytes` and of `Plan.saved_bytes`."""
    plan.mask(mask)
    plan.require_shape(what)
    route, token_bytes = plan.route(mask), kv_token_bytes(plan)
    kept = route.tokens.sum(axis=(0, 2)) * plan.keep_kv
    most = np.maximum(route.most_held(keep=plan.keep_kv), kept) if route.sources else kept
    exchanging, after = (np.repeat(tokens, plan.inner) * token_bytes for tokens in (most, kept))
    if plan.inner == 1:
        return exchanging, after
    return heads.resident(plan, exchanging, after), after + heads.saved(plan)


def held(plan: PlanData) -> int:
    """Bytes that the busiest rank holds for exchanges: saved by all layers, plus the transient bytes of one."""
    found = {name: resident_and_saved(plan, name) for name in plan.masks}
    kept = sum(weight * found[name][1] for name, weight in plan.weights.items())
    transient = np.max([resident - saved for resident, saved in found.values()], axis=0)
    return int(np.ceil(np.max(kept + np.maximum(transient, 0))))
