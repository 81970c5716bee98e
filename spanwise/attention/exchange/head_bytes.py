"""Bytes of q, K/V and the output where the ranks of a group trade heads for tokens (exchange "ulysses")."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spanwise.attention.exchange.heads import kv_heads_held, kv_heads_of, kv_heads_read
from spanwise.masks.arrays import Int64
from spanwise.planning.plan_data import PlanData


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
