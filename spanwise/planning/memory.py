"""Bytes that each rank receives, holds and saves in a layer's forward. Exact; pure.

Each is a sum of two parts: K/V that travel between groups of ranks (the plan's `kv_exchange`), and the trade of heads
for tokens inside groups (its `head_exchange`).
"""

# G groups

from __future__ import annotations

import numpy as np

from spanwise.masks.arrays import Int64
from spanwise.planning.plan_data import PlanData


def kv_token_bytes(plan: PlanData) -> Int64:
    """Bytes of K and V of one token, in compute and between groups; int64 ``[num_ranks]``.

    All heads, or under Ulysses the heads that the rank computes.
    """
    _, kv_heads, qk_dim, v_dim = plan.attention_shape
    heads = np.full(plan.num_ranks, kv_heads) if plan.head_exchange is None else plan.head_exchange.kv_heads(plan)
    return heads.astype(np.int64) * (qk_dim + v_dim) * plan.itemsize


def received(plan: PlanData, mask: str) -> Int64:
    """The bytes of `Plan.recv_bytes`."""
    plan.mask(mask)
    plan.require_shape("recv_bytes()")
    tokens = plan.moved(mask).sum(axis=(0, 2))
    exchanged = np.repeat(tokens, plan.inner) * kv_token_bytes(plan)
    return exchanged if plan.head_exchange is None else exchanged + plan.head_exchange.received(plan)


def resident(plan: PlanData, mask: str) -> Int64:
    """The bytes of `Plan.resident_bytes`."""
    plan.mask(mask)
    plan.require_shape("resident_bytes()")
    token_bytes, kept = kv_token_bytes(plan), _kept_tokens(plan, mask)
    most = np.maximum(plan.kv_exchange.most_held(plan, mask), kept) if plan.num_chunks(mask) else kept
    exchanging, after = (np.repeat(tokens, plan.inner) * token_bytes for tokens in (most, kept))
    return exchanging if plan.head_exchange is None else plan.head_exchange.resident(plan, exchanging, after)


def saved(plan: PlanData, mask: str) -> Int64:
    """The bytes of `Plan.saved_bytes`."""
    plan.mask(mask)
    plan.require_shape("saved_bytes()")
    kept = np.repeat(_kept_tokens(plan, mask), plan.inner) * kv_token_bytes(plan)
    return kept if plan.head_exchange is None else kept + plan.head_exchange.saved(plan)


def _kept_tokens(plan: PlanData, mask: str) -> Int64:
    """K/V tokens of other groups that each group keeps for the backward; int64 ``[G]``."""
    return plan.kv_exchange.traffic(plan, mask).sum(axis=1) * plan.keep_kv


def held(plan: PlanData) -> int:
    """Bytes that the busiest rank holds for exchanges: saved by all layers, plus the transient bytes of one."""
    saved_bytes = {name: saved(plan, name) for name in plan.masks}
    kept = sum(weight * saved_bytes[name] for name, weight in plan.weights.items())
    transient = np.max([resident(plan, name) - saved_bytes[name] for name in plan.masks], axis=0)
    return int(np.ceil(np.max(kept + np.maximum(transient, 0))))
