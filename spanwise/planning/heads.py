"""Heads that each rank computes when the ranks of a group trade tokens for heads (exchange "ulysses"), and their cost.

Pure. Of n ranks, rank j computes the query heads ``[j * Hq / n, (j + 1) * Hq / n)``. K/V heads that do not divide over
the ranks are repeated until they do; then rank j gets the j-th part of them.
"""

from __future__ import annotations

import math

import numpy as np

from spanwise.masks.arrays import Float64, Int64
from spanwise.planning.plan_data import PlanData


def check_heads(num_q_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """``ValueError`` unless `num_ranks` ranks can share the query heads evenly; it lists the numbers that can."""
    if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads are not a multiple of {num_kv_heads} key/value heads")
    if num_q_heads % num_ranks:
        works = ", ".join(str(n) for n in range(1, num_q_heads + 1) if num_q_heads % n == 0)
        raise ValueError(
            f"exchange 'ulysses' cannot divide {num_q_heads} query heads ({num_kv_heads} key/value heads) evenly over "
            f"{num_ranks} ranks; {num_q_heads} heads go with {works} ranks. Let fewer ranks trade heads, "
            f"num_ranks=(outer, inner) with such an inner number, or take another exchange"
        )


def kv_heads_held(num_q_heads: int, num_kv_heads: int, num_ranks: int) -> int:
    """K/V heads that each rank receives and computes with; refuses heads as `check_heads`.

    >>> kv_heads_held(32, 8, 4), kv_heads_held(32, 4, 8), kv_heads_held(12, 4, 6)
    (2, 1, 2)
    """
    check_heads(num_q_heads, num_kv_heads, num_ranks)
    return math.lcm(num_kv_heads, num_ranks) // num_ranks


def trades(plan: PlanData, *, backward: bool = False) -> tuple[Int64, Int64]:
    """Bytes that each rank gets from each other rank of its group: q, K and V on the way in, the output back.

    Args:
        backward: of the gradients, which travel the other way; the tables still mean the way in and the way back.
            Gradients of K/V heads that several ranks read are summed, so they travel in float32 at least.

    Returns:
        Two int64 ``[G, receivers, senders]``; the diagonals are 0.
    """
    heads, kv_heads, qk_dim, v_dim = plan.attention_shape
    inner, share = plan.inner, heads // plan.inner
    q, kv = (plan.batch_size * x.tokens_per_rank.reshape(-1, inner) for x in (plan.layout, plan.kv_layout))
    others = 1 - np.eye(inner, dtype=np.int64)
    window = kv_heads_held(heads, kv_heads, inner)
    summed = backward and window * inner > kv_heads
    kv_bytes = window * (qk_dim + v_dim) * (plan.sum_itemsize if summed else plan.itemsize)
    into = (q * share * qk_dim * plan.itemsize + kv * kv_bytes)[:, None, :] * others
    back = (q * share * v_dim * plan.itemsize)[:, :, None] * others
    return into, back


def received(plan: PlanData) -> Int64:
    """Bytes that each rank receives in a forward; int64 ``[num_ranks]``."""
    into, back = trades(plan)
    return (into + back).sum(axis=2).ravel()


def resident_and_saved(plan: PlanData, exchanging: Int64, after: Int64) -> tuple[Int64, Int64]:
    """Most bytes that each rank holds, and what it keeps for the backward; int64 ``[num_ranks]`` each.

    Args:
        exchanging, after: bytes held for the exchange between groups: most during it, and after it.
    """
    heads, kv_heads, qk_dim, v_dim = plan.attention_shape
    share, count = heads // plan.inner * plan.itemsize, kv_heads_held(heads, kv_heads, plan.inner)
    # Own tokens with all heads: q and K/V as they leave, the output as it comes back.
    tokens, keys = (plan.batch_size * x.tokens_per_rank * plan.itemsize for x in (plan.layout, plan.kv_layout))
    own_q, own_kv = tokens * heads * qk_dim, keys * plan.inner * count * (qk_dim + v_dim)
    own_out = tokens * heads * v_dim
    packed = keys * kv_heads * (qk_dim + v_dim) * (plan.inner * count > kv_heads)  # before heads are repeated
    # The group's tokens with the rank's fraction of the heads: queries, output, K/V as received.
    tokens, keys = (plan.batch_size * np.repeat(x.tokens_per_rank, plan.inner) for x in (plan.groups, plan.kv_groups))
    q, out = tokens * share * qk_dim, tokens * share * v_dim
    kv = keys * count * (qk_dim + v_dim) * plan.itemsize
    moments = [
        own_q + packed + own_kv + q + kv,
        own_kv + 2 * q + kv,  # q in order, and q as received
        q + 2 * kv,  # q, K and V in order, and K and V as received
        q + kv + exchanging,
        q + kv + after + 2 * out + own_out,  # output in order of departure, then all heads
    ]
    return np.asarray(np.max(moments, axis=0), np.int64), after + q + kv + out


def copied(plan: PlanData, kv_bytes: Float64) -> tuple[Float64, Float64]:
    """Bytes of q, K and V, and of the output, that each rank splits by head and puts in order; ``[P]`` each."""
    heads, _, qk_dim, v_dim = plan.attention_shape
    # All heads of its own tokens on one side, its share of the heads of all the group's tokens on the other.
    q, kv = (
        plan.batch_size * (own.tokens_per_rank + np.repeat(group.tokens_per_rank, plan.inner) / plan.inner)
        for own, group in ((plan.layout, plan.groups), (plan.kv_layout, plan.kv_groups))
    )
    return q * heads * qk_dim * plan.itemsize + kv * plan.inner * kv_bytes, q * heads * v_dim * plan.itemsize


def trade_seconds(plan: PlanData, *, backward: bool) -> tuple[float, float]:
    """Seconds of the way in and of the way back; all groups trade at the same time."""
    group, of_ranks = np.arange(plan.num_groups), np.zeros((2, *(plan.num_groups, plan.inner) * 2))
    for table, of_groups in zip(of_ranks, trades(plan, backward=backward), strict=True):
        table[group, :, group, :] = of_groups
    into, back = map(plan.hardware.all_to_all_seconds, of_ranks.reshape(2, plan.num_ranks, plan.num_ranks))
    return into, back
