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


def resident(plan: PlanData, mask: str) -> Int64:
    """The bytes of `Plan.resident_bytes`."""
    plan.mask(mask)
    plan.require_shape("resident_bytes()")
    token_bytes, kept = kv_token_bytes(plan), _kept_tokens(plan, mask)
    route = plan.route(mask)
    most = np.maximum(route.most_held(keep=plan.keep_kv), kept) if route.steps else kept
    exchanging, after = (np.repeat(tokens, plan.inner) * token_bytes for tokens in (most, kept))
    return exchanging if plan.inner == 1 else heads.resident(plan, exchanging, after)


def saved(plan: PlanData, mask: str) -> Int64:
    """The bytes of `Plan.saved_bytes`."""
    plan.mask(mask)
    plan.require_shape("saved_bytes()")
    kept = np.repeat(_kept_tokens(plan, mask), plan.inner) * kv_token_bytes(plan)
    return kept if plan.inner == 1 else kept + heads.saved(plan)


def _kept_tokens(plan: PlanData, mask: str) -> Int64:
    """K/V tokens of other groups that each group keeps for the backward; int64 ``[G]``."""
    return plan.route(mask).tokens.sum(axis=(0, 2)) * plan.keep_kv


def held(plan: PlanData) -> int:
    """Bytes that the busiest rank holds for exchanges: saved by all layers, plus the transient bytes of one."""
    saved_bytes = {name: saved(plan, name) for name in plan.masks}
    kept = sum(weight * saved_bytes[name] for name, weight in plan.weights.items())
    transient = np.max([resident(plan, name) - saved_bytes[name] for name in plan.masks], axis=0)
    return int(np.ceil(np.max(kept + np.maximum(transient, 0))))
