"""Bytes that plans say ranks receive, against every token that travels.

What ranks hold is measured on real ranks, in `tests.ranks.test_memory`.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given

from spanwise import SpanMask, make_plan
from spanwise.planning.plan import Plan
from tests.oracle import chunk_of
from tests.planning.test_traffic import Dense, group_keys, problems, ring_walk


class Heads:
    """Heads of one rank of a group, counted one by one."""

    def __init__(self, plan: Plan, place: int) -> None:
        heads, kv_heads, _, _ = plan.attention_shape("")
        share = heads // plan.inner
        reads = [[h // (heads // kv_heads) for h in range(j * share, (j + 1) * share)] for j in range(plan.inner)]
        # Equally many query heads read each K/V head of a rank, and all ranks get equally many: repeated until so.
        self.queries = share
        self.held = next(
            n
            for n in range(1, share + 1)
            if share % n == 0
            and all(len(set(read[i : i + share // n])) == 1 for read in reads for i in range(0, share, share // n))
        )
        self.repeated = self.held * plan.inner != kv_heads


def came_and_left(plan: Plan, dense: Dense, group: int) -> tuple[list[int], list[int]]:
    """Tokens that a group gets and gives in each piece of "needed", looked up token by token."""
    kv_group, rows = dense.kv_rank // plan.inner, len(dense.mask)
    alike = plan.mask().batch_size == plan.layout.batch_size == 1  # one list for all rows
    pairs = {}
    for receiver in range(plan.num_groups):
        reads = dense.reads(receiver, plan.inner)
        for sender in range(plan.num_groups):
            if sender != receiver:
                pairs[receiver, sender] = int((reads & (kv_group == sender))[: 1 if alike else rows].sum())
    longest = max(pairs.values(), default=0)
    pieces = plan.stages if -(-longest // plan.block_size) >= plan.stages else min(longest, 1)
    came, left = [0] * pieces, [0] * pieces
    for (receiver, sender), count in pairs.items():
        for token in range(count):
            piece = chunk_of(np.array(token), count, pieces, plan.block_size, receiver - sender)
            came[int(piece)] += (receiver == group) * (rows if alike else 1)
            left[int(piece)] += (sender == group) * (rows if alike else 1)
    return came, left


@given(problems())
def test_received_bytes(problem: tuple[Plan, Dense]) -> None:
    plan, dense = problem
    heads, _, qk_dim, v_dim = plan.attention_shape("")
    every = [group_keys(plan, dense, group) for group in range(plan.num_groups)]
    for rank in range(plan.num_ranks):
        group, place = divmod(rank, plan.inner)
        share, elements = Heads(plan, place), 0
        if plan.exchange == "all_gather":
            tokens = max(every) * (plan.num_groups - 1)
        elif plan.exchange == "ring":
            tokens = sum(every[hop[group][1]] for hop in ring_walk(plan, dense))
        else:
            tokens = sum(came_and_left(plan, dense, group)[0]) if plan.num_groups > 1 else 0
        elements += tokens * share.held * (qk_dim + v_dim)
        for other in range(group * plan.inner, (group + 1) * plan.inner):
            if other != rank:  # its tokens for this rank's heads, and this rank's tokens of its heads
                elements += dense.queries(other) * share.queries * qk_dim
                elements += dense.keys(other) * share.held * (qk_dim + v_dim)
                elements += dense.queries(rank) * (heads // plan.inner) * v_dim
        assert plan.recv_bytes()[rank] == elements * plan.itemsize


def test_repeated_heads_are_held_beside_their_packed_form() -> None:
    """Where the four ranks share one K/V head: own q and K/V, K/V for each rank, and what comes."""
    shape = dict(num_q_heads=8, num_kv_heads=1, head_dim=64, v_head_dim=1)
    plan = make_plan(SpanMask.causal(64), 4, exchange="ulysses", **shape)
    q, kv = 16 * 8 * 64 * 2, 16 * (64 + 1) * 2
    assert plan.resident_bytes().tolist() == [(q + kv + 4 * kv) + (q + 4 * kv)] * 4
