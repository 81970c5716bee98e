"""Heads that each rank computes when the ranks of a group trade tokens for heads (exchange "ulysses"), and their cost.

Pure. Of n ranks, rank j computes the query
heads ``[j * Hq / n, (j + 1) * Hq / n)``. It receives a window of K/V heads that holds all heads which these read.
Windows are equally wide on all ranks, because they travel as rows of one collective. They do not overlap where n
divides Hkv, and are one head wide where Hkv divides n. Otherwise a rank may receive a head that it does not read.
"""

from __future__ import annotations

from typing import NamedTuple

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


def kv_heads_read(num_q_heads: int, num_kv_heads: int, num_ranks: int, rank: int) -> tuple[int, ...]:
    """The K/V head that each of the rank's query heads reads, ascending."""
    own = num_q_heads // num_ranks
    return tuple(head // (num_q_heads // num_kv_heads) for head in range(rank * own, (rank + 1) * own))


def kv_heads_held(num_q_heads: int, num_kv_heads: int, num_ranks: int, rank: int) -> int:
    """K/V heads that the rank computes with: the distinct heads that its query heads read.

    Kernels want equally many query heads for each K/V head. Where that fails, K/V heads are repeated, one for each
    query head.

    >>> [kv_heads_held(12, 4, 2, rank) for rank in range(2)], [kv_heads_held(24, 6, 8, rank) for rank in range(4)]
    ([2, 2], [1, 3, 3, 1])
    """
    read = kv_heads_read(num_q_heads, num_kv_heads, num_ranks, rank)
    readers = {read.count(head) for head in read}
    return len(set(read)) if len(readers) == 1 else len(read)


def kv_heads_of(num_q_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[int, tuple[int, ...]]:
    """How many K/V heads a rank receives, and the first one of each rank's window; refuses heads as `check_heads`.

    >>> kv_heads_of(32, 4, 8)
    (1, (0, 0, 1, 1, 2, 2, 3, 3))
    >>> kv_heads_of(12, 4, 6)
    (2, (0, 0, 1, 2, 2, 2))
    """
    check_heads(num_q_heads, num_kv_heads, num_ranks)
    read = [kv_heads_read(num_q_heads, num_kv_heads, num_ranks, rank) for rank in range(num_ranks)]
    count = max(heads[-1] + 1 - heads[0] for heads in read)
    return count, tuple(min(heads[0], num_kv_heads - count) for heads in read)


class Traded(NamedTuple):
    """Bytes of the tensors that each rank computes with: its share of the heads, over the tokens of its group.

    Attributes:
        q, out: queries and output.
        kv: K/V that are kept.
        window: K/V as received.
        repeated: copies of K/V heads that had to be repeated, or 0.
    """

    q: Int64
    out: Int64
    kv: Int64
    window: Int64
    repeated: Int64


class Own(NamedTuple):
    """Bytes of each rank's own tokens, all heads: q and K/V as they leave, the output as it comes back.

    Attributes:
        copies: number of copies of K/V during the split; 2 where the ranks' windows of heads overlap in part.
    """

    q: Int64
    kv: Int64
    out: Int64
    copies: int


def traded_bytes(plan: PlanData) -> Traded:
    """Bytes of `Traded`; int64 ``[num_ranks]`` each."""
    heads, kv_heads, qk_dim, v_dim = plan.attention_shape
    q, kv = (plan.batch_size * np.repeat(x.tokens_per_rank, plan.inner) for x in (plan.groups, plan.kv_groups))
    # The heads that are read lie in the window that was received, unless they had to be repeated.
    ranks, share = range(plan.inner), heads // plan.inner * plan.itemsize
    held = [kv_heads_held(heads, kv_heads, plan.inner, rank) for rank in ranks]
    distinct = [len(set(kv_heads_read(heads, kv_heads, plan.inner, rank))) for rank in ranks]
    repeated = [n if n > read else 0 for n, read in zip(held, distinct, strict=True)]
    head = kv * (qk_dim + v_dim) * plan.itemsize
    window = head * kv_heads_of(heads, kv_heads, plan.inner)[0]
    copies = head * np.tile(np.array(repeated, np.int64), plan.num_groups)
    return Traded(q * share * qk_dim, q * share * v_dim, np.where(copies > 0, copies, window), window, copies)


def own_bytes(plan: PlanData) -> Own:
    """Bytes of `Own`; int64 ``[num_ranks]`` each."""
    heads, kv_heads, qk_dim, v_dim = plan.attention_shape
    q, kv = (plan.batch_size * x.tokens_per_rank * plan.itemsize for x in (plan.layout, plan.kv_layout))
    sent = plan.inner * kv_heads_of(heads, kv_heads, plan.inner)[0]
    copies = 1 if sent == kv_heads or plan.inner % kv_heads == 0 else 2
    return Own(q * heads * qk_dim, kv * sent * (qk_dim + v_dim), q * heads * v_dim, copies)


def kv_heads_of_ranks(plan: PlanData) -> Int64:
    """K/V heads that each rank computes with; int64 ``[num_ranks]``."""
    heads, kv_heads, _, _ = plan.attention_shape
    held = [kv_heads_held(heads, kv_heads, plan.inner, rank) for rank in range(plan.inner)]
    return np.tile(np.array(held, np.int64), plan.num_groups)


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
    window = kv_heads_of(heads, kv_heads, inner)[0]
    summed = backward and window * inner > kv_heads
    kv_bytes = window * (qk_dim + v_dim) * (plan.sum_itemsize if summed else plan.itemsize)
    into = (q * share * qk_dim * plan.itemsize + kv * kv_bytes)[:, None, :] * others
    back = (q * share * v_dim * plan.itemsize)[:, :, None] * others
    return into, back


def received(plan: PlanData) -> Int64:
    """Bytes that each rank receives in a forward; int64 ``[num_ranks]``."""
    into, back = trades(plan)
    return (into + back).sum(axis=2).ravel()


def resident(plan: PlanData, exchanging: Int64, after: Int64) -> Int64:
    """Most bytes that each rank holds; int64 ``[num_ranks]``.

    Args:
        exchanging, after: bytes held for the exchange between groups: most during it, and after it.
    """
    trade, own = traded_bytes(plan), own_bytes(plan)
    came = trade.q + trade.window
    moments = [
        own.q + own.kv * own.copies + trade.q,
        own.q + own.kv + came,
        own.kv + came + trade.q,  # q in order, and q as received
        came + trade.window + trade.repeated,  # q, K and V in order, and K and V as received
        trade.q + trade.kv + exchanging,
        trade.q + trade.kv + after + 2 * trade.out + own.out,  # output in order of departure, then all heads
    ]
    return np.asarray(np.max(moments, axis=0), np.int64)


def saved(plan: PlanData) -> Int64:
    """Bytes that each rank keeps for the backward; int64 ``[num_ranks]``."""
    trade = traded_bytes(plan)
    return trade.q + trade.kv + trade.out


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
    into, back = (plan.hardware.all_to_all_seconds(_over_ranks(table)) for table in trades(plan, backward=backward))
    return into, back


def _over_ranks(of_groups: np.ndarray) -> np.ndarray:
    """Tables of each group ``[G, inner, inner]`` as one table of all ranks."""
    groups, inner, _ = of_groups.shape
    table = np.zeros((groups, inner, groups, inner))
    table[np.arange(groups), :, np.arange(groups), :] = of_groups
    return table.reshape(groups * inner, groups * inner)
