"""Bytes of a plan: what each rank receives in a forward, and holds for it. Exact; pure; `plan` calls it.

Two parts add up: the exchange of K/V between groups of ranks, and, where the ranks of a group trade heads for tokens
(Ulysses), that trade: q, K and V of the group's other tokens for a rank's share of the heads, and the output back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spanwise.heads import kv_heads_held, kv_heads_of, kv_heads_read

if TYPE_CHECKING:
    from spanwise.plan import Plan

Int64 = NDArray[np.int64]


def kv_token_bytes(plan: Plan) -> Int64:
    """Bytes of K and V of a token as each rank computes with them, and as they travel between groups; ``[num_ranks]``.

    All heads, or under Ulysses those of the rank.
    """
    heads, kv_heads, qk_dim, v_dim = plan.attention_shape
    if plan.inner == 1:
        return np.full(plan.num_ranks, kv_heads * (qk_dim + v_dim) * plan.itemsize, np.int64)
    held = [kv_heads_held(heads, kv_heads, plan.inner, rank) for rank in range(plan.inner)]
    return np.tile(np.array(held, np.int64) * (qk_dim + v_dim) * plan.itemsize, plan.num_groups)


def traded_bytes(plan: Plan, *, backward: bool = False) -> tuple[Int64, Int64]:
    """Bytes that each rank gets from each other one of its group: q, K and V on the way in, the output on the way back.

    Args:
        backward: of the gradients, which travel the other way (the tables are still those of the way in and back).
            Gradients of K/V heads that several ranks read are summed, so they travel in float32 at least.

    Returns:
        Two int64 ``[groups, receivers, senders]``; the diagonals are 0.
    """
    heads, kv_heads, qk_dim, v_dim = plan.attention_shape
    inner, share = plan.inner, heads // plan.inner
    q, kv = (plan.batch_size * x.tokens_per_rank.reshape(-1, inner) for x in (plan.layout, plan.kv_layout))
    others = 1 - np.eye(inner, dtype=np.int64)
    window = kv_heads_of(heads, kv_heads, inner)[0]
    summed = backward and window * inner > kv_heads
    kv_bytes = window * (qk_dim + v_dim) * (plan.sum_itemsize if summed else plan.itemsize)
    into = (q * share * qk_dim * plan.itemsize + kv * kv_bytes)[:, None, :] * others
    back = (q * share * v_dim * plan.itemsize)[:, :, None] * others
    return into, back


def received(plan: Plan, mask: str) -> Int64:
    """See `Plan.recv_bytes`."""
    if plan.exchange == "all_gather":
        padded = plan.batch_size * (plan.num_groups - 1) * int(plan.kv_groups.tokens_per_rank.max())
        tokens = np.full(plan.num_groups, padded, np.int64)
    else:
        tokens = plan.group_traffic(mask).sum(axis=1)
    exchanged = np.repeat(tokens, plan.inner) * kv_token_bytes(plan)
    if plan.inner == 1:
        return exchanged
    into, back = traded_bytes(plan)
    return exchanged + (into + back).sum(axis=2).ravel()


def resident(plan: Plan, mask: str) -> Int64:
    """See `Plan.resident_bytes`."""
    if plan.exchange == "all_gather":
        padded = plan.batch_size * plan.num_groups * int(plan.kv_groups.tokens_per_rank.max())
        tokens = np.full(plan.num_groups, padded * (plan.num_groups > 1), np.int64)
    elif plan.exchange == "ring":  # a shard that goes on, first a copy of the own one, and the one that arrives
        arriving = _shards_received(plan, mask)
        own = (plan.batch_size * plan.kv_groups.tokens_per_rank)[None]
        tokens = (arriving + np.concatenate([own, arriving])[:-1]).max(axis=0, initial=0)
        if plan.keep_kv:
            tokens = np.maximum(tokens, arriving.sum(axis=0))
    else:
        tokens = plan.group_traffic(mask).sum(axis=1)
    return np.repeat(tokens, plan.inner) * kv_token_bytes(plan) + _traded(plan)


def saved(plan: Plan, mask: str) -> Int64:
    """See `Plan.saved_bytes`."""
    tokens = np.zeros(plan.num_groups, np.int64)
    if plan.keep_kv and plan.exchange == "ring":
        tokens = _shards_received(plan, mask).sum(axis=0)  # by whatever way they came, each of them once
    elif plan.keep_kv:
        tokens = plan.group_traffic(mask).sum(axis=1)
    return np.repeat(tokens, plan.inner) * kv_token_bytes(plan) + _traded(plan)


def _shards_received(plan: Plan, mask: str) -> Int64:
    """K/V tokens that arrive at each group on each hop of the ring: int64 ``[hops, groups]``."""
    held, group = plan.batch_size * plan.kv_groups.tokens_per_rank, np.arange(plan.num_groups)
    return np.array([held[(group - hop) % plan.num_groups] for hop in plan.hops(mask)], np.int64).reshape(
        -1, len(group)
    )


def _traded(plan: Plan) -> Int64:
    """Bytes of the q, K, V and output that each rank computes with under Ulysses, beside its own shards."""
    if plan.inner == 1:
        return np.zeros(plan.num_ranks, np.int64)
    heads, kv_heads, qk_dim, v_dim = plan.attention_shape
    q, kv = (plan.batch_size * np.repeat(x.tokens_per_rank, plan.inner) for x in (plan.groups, plan.kv_groups))
    # The heads that are read lie in the window that was received, unless they had to be repeated.
    window, ranks = kv_heads_of(heads, kv_heads, plan.inner)[0], range(plan.inner)
    repeated = [kv_heads_held(heads, kv_heads, plan.inner, rank) for rank in ranks]
    distinct = [len(set(kv_heads_read(heads, kv_heads, plan.inner, rank))) for rank in ranks]
    stored = [n if n > read else window for n, read in zip(repeated, distinct, strict=True)]
    kv_bytes = np.tile(np.array(stored, np.int64) * (qk_dim + v_dim) * plan.itemsize, plan.num_groups)
    return q * (heads // plan.inner) * (qk_dim + v_dim) * plan.itemsize + kv * kv_bytes
