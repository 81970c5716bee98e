"""Bytes that plans say ranks receive and hold, against every token that travels and a ledger of buffers.

`tests.ranks.test_memory` measures the same on real ranks; this goes where no process could follow, example by example.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

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


class Ledger:
    """Buffers by name, and the most bytes that they had together."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.most = 0

    def hold(self, **buffers: int) -> None:
        assert not buffers.keys() & self.held.keys()
        self.held.update(buffers)
        self.most = max(self.most, sum(self.held.values()))

    def drop(self, *names: str) -> None:
        for name in names:
            del self.held[name]


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


def forward(plan: Plan, dense: Dense, rank: int) -> tuple[int, int]:
    """Bytes that a rank holds at most in a forward, and after it, by keeping a ledger of what `exchange` does."""
    group, place = divmod(rank, plan.inner)
    heads, _, qk_dim, v_dim = plan.attention_shape("")
    share, ledger = Heads(plan, place), Ledger()
    rows = sum(dense.queries(group * plan.inner + i) for i in range(plan.inner))
    q_head, kv_head, out_head = (dim * plan.itemsize for dim in (qk_dim, qk_dim + v_dim, v_dim))
    own = group_keys(plan, dense, group)
    if plan.inner > 1:
        window = own * share.held * kv_head
        leaving = dense.keys(rank) * plan.inner * share.held * kv_head
        ledger.hold(q_sent=dense.queries(rank) * heads * q_head)
        ledger.hold(q_came=rows * share.queries * q_head)
        ledger.hold(packed=dense.keys(rank) * plan.num_kv_heads * kv_head * share.repeated)
        ledger.hold(kv_sent=leaving)
        ledger.hold(kv_came=window)
        ledger.drop("packed")
        ledger.drop("q_sent")
        ledger.hold(q=rows * share.queries * q_head)
        ledger.drop("q_came", "kv_sent")
        ledger.hold(kv=window)
        ledger.drop("kv_came")
    kept = exchange(plan, dense, group, ledger, share.held * kv_head)
    if not plan.keep_kv:
        ledger.drop(*kept)
    if plan.inner > 1:
        ledger.hold(result=rows * share.queries * out_head)
        ledger.hold(in_order=rows * share.queries * out_head)
        ledger.hold(out_came=dense.queries(rank) * heads * out_head)
        ledger.drop("in_order", "out_came")
    return ledger.most, sum(ledger.held.values())


def exchange(plan: Plan, dense: Dense, group: int, ledger: Ledger, token: int) -> list[str]:
    """K/V of other groups come; returns the names of what is still held afterwards."""
    own, every = group_keys(plan, dense, group), [group_keys(plan, dense, g) for g in range(plan.num_groups)]
    if plan.num_groups == 1:
        return []
    if plan.exchange == "all_gather":
        ledger.hold(own_rows=own * token)
        ledger.hold(padded=max(every) * token)
        ledger.drop("own_rows")
        ledger.hold(gathered=plan.num_groups * max(every) * token)
        ledger.drop("padded")
        ledger.hold(others=(sum(every) - own) * token)
        ledger.drop("gathered")
        return ["others"]
    if plan.exchange == "ring":
        hops = [every[hop[group][1]] for hop in ring_walk(plan, dense)]
        names = [f"shard_{i}" for i in range(len(hops))]
        for i, size in enumerate(hops):  # the next departs as soon as one has come
            if i == 0:
                ledger.hold(copy=own * token)
            ledger.hold(**{names[i]: size * token})
            if i == 0:
                ledger.drop("copy")
            elif not plan.keep_kv:
                ledger.drop(names[i - 1])
        return names if plan.keep_kv else names[-1:]
    came, left = came_and_left(plan, dense, group)
    if not came:
        return []
    if plan.route().of_shards:  # what is read happens to be one shard
        ledger.hold(copy=own * token)
        ledger.hold(shard=sum(came) * token)
        ledger.drop("copy")
        return ["shard"]
    ledger.hold(side_by_side=own * token)
    for i in range(len(came)):
        ledger.hold(**{f"left_{i}": left[i] * token, f"came_{i}": came[i] * token})
    ledger.drop("side_by_side")
    for i in range(len(came)):
        if i and not plan.keep_kv:
            ledger.drop(f"piece_{i - 1}")
        ledger.drop(f"left_{i}")
        ledger.hold(**{f"piece_{i}": came[i] * token})
        ledger.drop(f"came_{i}")
    return [f"piece_{i}" for i in range(0 if plan.keep_kv else len(came) - 1, len(came))]


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


def check_held(plan: Plan, dense: Dense) -> None:
    resident, saved = plan.resident_bytes(), plan.saved_bytes()
    assert resident.dtype == saved.dtype == np.int64
    for rank in range(plan.num_ranks):
        assert (resident[rank], saved[rank]) == forward(plan, dense, rank)
    assert (saved <= resident).all()


@settings(max_examples=150)
@given(problems())
def test_held_bytes(problem: tuple[Plan, Dense]) -> None:
    check_held(*problem)


@pytest.mark.parametrize("exchange", ["needed", "ring"])
@settings(max_examples=75)
@given(data=st.data())
def test_held_bytes_of_pieces_on_one_level(exchange: str, data: st.DataObject) -> None:
    check_held(*data.draw(problems(exchange, 1)))
