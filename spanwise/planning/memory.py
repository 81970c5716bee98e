"""Bytes of a plan: what each rank receives in a forward, and holds for it. Exact; pure; `plan` calls it.

Two parts add up: the exchange of K/V between groups of ranks, and, where the ranks of a group trade heads for tokens
(Ulysses), that trade: q, K and V of the group's other tokens for a rank's share of the heads, and the output back.

What is held at most is the most of a few moments, each a list of the buffers that `exchange` and `kv_pieces` have then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanwise.planning.chunking import piece_tokens
from spanwise.planning.heads import kv_heads_held, kv_heads_of, kv_heads_read

if TYPE_CHECKING:
    from spanwise.planning.plan import Plan

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
    token_bytes = kv_token_bytes(plan)
    exchanging, after = (np.repeat(x, plan.inner) * token_bytes for x in _exchanged_tokens(plan, mask))
    if plan.inner == 1:
        return exchanging
    trade, own = _traded(plan), _dealt(plan)
    came = trade.q + trade.window
    moments = [
        own.q + own.kv * own.copies + trade.q,
        own.q + own.kv + came,
        own.kv + came + trade.q,  # q in order beside q as it came
        2 * came + trade.repeated,  # q and all of K and V so
        trade.q + trade.kv + exchanging,
        trade.q + trade.kv + after + 2 * trade.out + own.out,  # what was computed, in the order of departure, all heads
    ]
    return np.asarray(np.max(moments, axis=0), np.int64)


def saved(plan: Plan, mask: str) -> Int64:
    """See `Plan.saved_bytes`."""
    kept = np.repeat(_kept_tokens(plan, mask), plan.inner) * kv_token_bytes(plan)
    if plan.inner == 1:
        return kept
    trade = _traded(plan)
    return kept + trade.q + trade.kv + trade.out


def _kept_tokens(plan: Plan, mask: str) -> Int64:
    """K/V tokens of other groups that each group keeps for the backward; int64 ``[groups]``."""
    if not plan.keep_kv:
        return np.zeros(plan.num_groups, np.int64)
    if plan.exchange == "ring":
        return _shards_received(plan, mask).sum(axis=0)  # by whatever way they came, each of them once
    return plan.group_traffic(mask).sum(axis=1)


def _exchanged_tokens(plan: Plan, mask: str) -> tuple[Int64, Int64]:
    """K/V tokens that each group holds beside its own, at most while they come, and afterwards; int64 ``[groups]``."""
    own, kept = plan.batch_size * plan.kv_groups.tokens_per_rank, _kept_tokens(plan, mask)
    pieces = plan.num_pieces(mask)
    if not pieces:
        return kept, kept
    if plan.exchange == "all_gather":
        padded, others = int(own.max()), own.sum() - own
        # All shards, first beside the own one that was sent, then beside those of others in order.
        return plan.num_groups * padded + np.maximum(padded, others), kept
    if plan.exchange == "ring":  # a shard that goes on, first a copy of the own one, and the one that arrives
        arriving = _shards_received(plan, mask)
        two = (arriving + np.concatenate([own[None], arriving])[:-1]).max(axis=0)
        return np.maximum(two, kept), kept
    lists, alike = plan.lists(mask)
    tokens = alike * piece_tokens(lists, pieces, plan.block_size)
    came, left = tokens.sum(axis=2), tokens.sum(axis=1)
    later = (came + left)[::-1].cumsum(axis=0)[::-1] - came - left  # under way beside each piece
    before = came.cumsum(axis=0) - came if plan.keep_kv else np.zeros_like(came)
    # Own rows by token, then K and V side by side; those to send picked from them; then piece by piece as it came
    # beside the same in order.
    moments = [2 * own, own + (came + left).sum(axis=0), *(before + 2 * came + later)]
    return np.max(moments, axis=0), kept


def _shards_received(plan: Plan, mask: str) -> Int64:
    """K/V tokens that arrive at each group on each hop of the ring: int64 ``[hops, groups]``."""
    held, group = plan.batch_size * plan.kv_groups.tokens_per_rank, np.arange(plan.num_groups)
    return np.array([held[(group - hop) % plan.num_groups] for hop in plan.hops(mask)], np.int64).reshape(
        -1, len(group)
    )


class _Traded(NamedTuple):
    """Bytes under Ulysses of what each rank computes with: its share of the heads, over the tokens of its group.

    Attributes:
        q, out: of the queries.
        kv: as they are kept.
        window: K/V as they came.
        repeated: K/V heads that had to be repeated, or 0.
    """

    q: Int64
    out: Int64
    kv: Int64
    window: Int64
    repeated: Int64


def _traded(plan: Plan) -> _Traded:
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
    return _Traded(q * share * qk_dim, q * share * v_dim, np.where(copies > 0, copies, window), window, copies)


class _Dealt(NamedTuple):
    """Bytes under Ulysses of each rank's own tokens, all heads: q and K/V as they leave, the output as it comes back.

    Attributes:
        copies: of K/V while they are dealt out; two where the ranks' windows of heads overlap in part.
    """

    q: Int64
    kv: Int64
    out: Int64
    copies: int


def _dealt(plan: Plan) -> _Dealt:
    heads, kv_heads, qk_dim, v_dim = plan.attention_shape
    q, kv = (plan.batch_size * x.tokens_per_rank * plan.itemsize for x in (plan.layout, plan.kv_layout))
    sent = plan.inner * kv_heads_of(heads, kv_heads, plan.inner)[0]
    copies = 1 if sent == kv_heads or plan.inner % kv_heads == 0 else 2
    return _Dealt(q * heads * qk_dim, kv * sent * (qk_dim + v_dim), q * heads * v_dim, copies)
