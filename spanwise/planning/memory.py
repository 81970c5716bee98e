"""Bytes that travel and that ranks hold: readings of a plan's routes, and of the heads that ranks trade for tokens.

Under Ulysses, of n ranks, rank j computes the query heads ``[j * Hq / n, (j + 1) * Hq / n)``. K/V heads that do not
divide over the ranks are repeated until they do; then rank j gets the j-th part of them.
"""

# P ranks; G groups of ranks that trade heads

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from spanwise.masks.arrays import Int64
from spanwise.planning.plan_data import PlanData


def check_heads(num_q_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """``ValueError`` unless `num_ranks` ranks can share the query heads evenly; it lists the numbers that can."""
    if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads are not a multiple of {num_kv_heads} key/value heads")
    if num_q_heads % num_ranks:
        works = ", ".join(str(n) for n in range(1, num_q_heads + 1) if num_q_heads % n == 0)
        raise ValueError(
            f"exchange 'ulysses' cannot divide {num_q_heads} query heads over {num_ranks} ranks; they go with {works} "
            f"ranks: give num_ranks=(outer, inner) with such an inner number"
        )


def kv_heads_held(num_q_heads: int, num_kv_heads: int, num_ranks: int) -> int:
    """K/V heads that each rank receives and computes with; refuses heads as `check_heads`.

    >>> kv_heads_held(32, 8, 4), kv_heads_held(32, 4, 8), kv_heads_held(12, 4, 6)
    (2, 1, 2)
    """
    check_heads(num_q_heads, num_kv_heads, num_ranks)
    return math.lcm(num_kv_heads, num_ranks) // num_ranks


def is_compact(plan: PlanData) -> bool:
    """Whether rows travel in place of K and V; ranks that trade heads expand them first."""
    return plan.kv_row_dim is not None and plan.inner == 1


def kv_token_bytes(plan: PlanData, shape: tuple[int, int, int, int] | None = None) -> int:
    """Bytes of K and V of one token, or of its row in their place, between groups.

    All heads, or under Ulysses the heads that a rank computes. `shape`: `PlanData.attention_shape`, where it is known.
    """
    if is_compact(plan):
        assert plan.kv_row_dim is not None
        return plan.kv_row_dim * plan.itemsize
    num_heads, kv_heads, qk_dim, v_dim = shape or plan.attention_shape("bytes of K/V")
    held = kv_heads if plan.inner == 1 else kv_heads_held(num_heads, kv_heads, plan.inner)
    return held * (qk_dim + v_dim) * plan.itemsize


def trades(plan: PlanData, *, backward: bool = False) -> tuple[Int64, Int64]:
    """Bytes that each rank gets from each other rank of its group: q, K and V on the way in, the output back.

    Args:
        backward: of the gradients, which travel the other way; the tables still mean the way in and the way back.
            Gradients of K/V heads that several ranks read are summed, so they travel in float32 at least.

    Returns:
        Two int64 ``[G, receivers, senders]``; the diagonals are 0.
    """
    num_heads, kv_heads, qk_dim, v_dim = plan.attention_shape("bytes of heads")
    inner, heads = plan.inner, num_heads // plan.inner
    q, kv = (plan.batch_size * x.tokens_per_rank.reshape(-1, inner) for x in (plan.layout, plan.kv_layout))
    others = 1 - np.eye(inner, dtype=np.int64)
    held = kv_heads_held(num_heads, kv_heads, inner)
    summed = backward and held * inner > kv_heads
    kv_bytes = held * (qk_dim + v_dim) * (plan.sum_itemsize if summed else plan.itemsize)
    into = (q * heads * qk_dim * plan.itemsize + kv * kv_bytes)[:, None, :] * others
    back = (q * heads * v_dim * plan.itemsize)[:, :, None] * others
    return into, back


def received(plan: PlanData, mask: str) -> Int64:
    """The bytes of `Plan.recv_bytes`."""
    plan.attention_shape("recv_bytes()")
    exchanged = np.repeat(plan.route(mask).wire_tokens.sum(axis=(0, 2)), plan.inner) * kv_token_bytes(plan)
    if plan.inner == 1:
        return exchanged
    into, back = trades(plan)
    return exchanged + (into + back).sum(axis=2).ravel()


def resident_and_saved(plan: PlanData, mask: str, what: str = "resident_bytes()") -> tuple[Int64, Int64]:
    """The bytes of `Plan.resident_bytes` and of `Plan.saved_bytes`."""
    shape = plan.attention_shape(what)
    route, token_bytes = plan.route(mask), kv_token_bytes(plan, shape)
    kept = route.tokens.sum(axis=(0, 2)) * plan.keep_kv
    most = np.maximum(route.most_held(keep=plan.keep_kv), kept) if route.sources else kept
    exchanging, after = (np.repeat(tokens, plan.inner) * token_bytes for tokens in (most, kept))
    if is_compact(plan) and route.sources:  # K and V of one chunk at a time
        exchanging = exchanging + route.tokens.sum(axis=2).max(axis=0) * shape[1] * sum(shape[2:]) * plan.itemsize
    return (exchanging, after) if plan.inner == 1 else _with_trades(plan, exchanging, after)


def _with_trades(plan: PlanData, exchanging: Int64, after: Int64) -> tuple[Int64, Int64]:
    """Most bytes that each rank holds, and what it keeps for the backward, where ranks trade heads; ``[P]`` each.

    Args:
        exchanging, after: bytes held for the exchange between groups: most during it, and after it.
    """
    num_heads, kv_heads, qk_dim, v_dim = plan.attention_shape("bytes of heads")
    heads, count = num_heads // plan.inner * plan.itemsize, kv_heads_held(num_heads, kv_heads, plan.inner)
    # Own tokens with all heads: q and K/V as they leave, the output as it comes back.
    tokens, keys = (plan.batch_size * x.tokens_per_rank * plan.itemsize for x in (plan.layout, plan.kv_layout))
    own_q, own_kv = tokens * num_heads * qk_dim, keys * plan.inner * count * (qk_dim + v_dim)
    own_out = tokens * num_heads * v_dim
    packed = keys * kv_heads * (qk_dim + v_dim) * (plan.inner * count > kv_heads)  # before heads are repeated
    # The group's tokens with the rank's fraction of the heads: queries, output, K/V as received.
    tokens, keys = (plan.batch_size * np.repeat(x.tokens_per_rank, plan.inner) for x in (plan.groups, plan.kv_groups))
    q, out = tokens * heads * qk_dim, tokens * heads * v_dim
    kv = keys * count * (qk_dim + v_dim) * plan.itemsize
    moments = [
        own_q + packed + own_kv + q + kv,
        own_kv + 2 * q + kv,  # q in order, and q as received
        q + 2 * kv,  # q, K and V in order, and K and V as received
        q + kv + exchanging,
        q + kv + after + 2 * out + own_out,  # output in order of departure, then all heads
    ]
    return np.asarray(np.max(moments, axis=0), np.int64), after + q + kv + out


def held(plan: PlanData) -> int:
    """Bytes that the busiest rank holds for exchanges: saved by all layers, plus the transient bytes of one."""
    found = {name: resident_and_saved(plan, name) for name in plan.masks}
    kept = sum(weight * found[name][1] for name, weight in plan.weights.items())
    transient = np.max([resident - saved for resident, saved in found.values()], axis=0)
    return int(np.ceil(np.max(kept + np.maximum(transient, 0))))


class HostTraffic(NamedTuple):
    """K/V tokens that all ranks receive in a forward, by where they come from.

    Attributes:
        host_size: ranks of a host.
        inside: from ranks of the same host.
        between: from other hosts; a token counts for each rank that receives it.
    """

    host_size: int
    inside: int
    between: int


def host_traffic(plan: PlanData, mask: str, size: int | None = None) -> HostTraffic:
    """The counts of `Plan.host_traffic`."""
    size = size or plan.hardware.groups_on_a_host(plan.num_ranks)
    if size is None or size < 1:
        raise ValueError(f"hardware {plan.hardware.name!r} has no hosts below {plan.num_ranks} ranks: give host_size")
    tokens, host = plan.traffic(mask), np.arange(plan.num_ranks) // size
    inside = int(tokens[host[:, None] == host].sum())
    return HostTraffic(size, inside, int(tokens.sum()) - inside)
