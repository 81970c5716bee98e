"""What attention really holds of K/V against what the plan says of it, on real ranks: storages, to the byte."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from spanwise import SpanMask
from spanwise.bench import memory
from spanwise.bench.memory import held
from spanwise.pieces import piece_tokens
from tests.oracle import Problem, make_problem
from tests.ranks.gloo import GlooPool
from tests.ranks.test_attention import mesh_of

LENGTH = 67  # divides by nothing


def of_rank(
    rank: int, mesh: DeviceMesh, plan: spanwise.Plan, problem: Problem, expected: list[int]
) -> tuple[dict[str, int], ...]:
    """What `spanwise.bench.memory.held` finds on one rank, for the problem's shards."""
    leaves = [spanwise.shard(plan, mesh, x, dim=2).requires_grad_() for x in problem[:3]]
    return held(plan, mesh, leaves, spanwise.shard(plan, mesh, problem.grad_out, dim=2), expected[rank])


def pairs(shards: list[int]) -> int:
    """The most that two shards which follow each other have together."""
    return max((a + b for a, b in itertools.pairwise(shards)), default=0)


class Share:
    """Bytes of one rank, worked out without `spanwise.footprint`; K/V windows of the ranks that trade do not overlap.

    Attributes:
        own: its K/V shard, all heads.
        lse: of its queries.
        out: of its queries, all heads.
        traded_q, traded_out, group: what it computes with under Ulysses; `group` without, too: its K/V shard then.
    """

    def __init__(self, plan: spanwise.Plan, rank: int) -> None:
        heads, kv_heads, dim, v_dim = plan.attention_shape
        self.plan, self.at, inner = plan, rank // plan.inner, plan.inner
        tokens, rows = plan.layout.num_tokens(rank), plan.groups.num_tokens(self.at)
        self.key = kv_heads // inner * (dim + v_dim) * plan.itemsize
        self.own = tokens * kv_heads * (dim + v_dim) * plan.itemsize
        self.out, self.lse = tokens * heads * v_dim * plan.itemsize, rows * heads // inner * 4
        self.traded_q, self.traded_out = (rows * heads // inner * x * plan.itemsize for x in (dim, v_dim))
        self.group = plan.kv_groups.num_tokens(self.at) * self.key
        if inner == 1:
            self.traded_q = self.traded_out = 0
        self.traded_kv = self.group if inner > 1 else 0

    def shards(self) -> list[int]:
        """What a ring brings, its own first."""
        hops = (0, *self.plan.hops())
        return [self.plan.kv_groups.num_tokens((self.at - hop) % self.plan.num_groups) * self.key for hop in hops]

    def pieces(self) -> tuple[list[int], list[int]]:
        """What "needed" brings and takes away, piece by piece."""
        plan = self.plan
        tokens = self.key * piece_tokens(plan.lists()[0], plan.num_pieces(), plan.block_size)
        return tokens[:, self.at].sum(axis=1).tolist(), tokens[:, :, self.at].sum(axis=1).tolist()

    def resident(self) -> int:
        """K/V of others while a rank computes; a ring's first hop takes a copy of its own along."""
        plan = self.plan
        if plan.num_groups == 1:
            return 0
        if plan.exchange == "all_gather":
            return plan.num_groups * int(plan.kv_groups.tokens_per_rank.max()) * self.key
        if plan.exchange == "needed":
            return sum(self.pieces()[0])
        shards = self.shards()
        return max(pairs(shards), sum(shards[1:]) * plan.keep_kv)

    def moments(self) -> list[int]:
        """Copies of K/V at each moment of a forward at which there may be most."""
        plan, found = self.plan, []
        if plan.inner > 1:  # all heads of its own tokens leave; what came is put in order
            found += [self.own + self.traded_kv, 2 * self.traded_kv]
        if plan.exchange == "ring":
            found += [self.traded_kv + self.resident()]
        elif plan.exchange == "all_gather":  # its own rows packed, then what came in order
            padded, others = self.resident() // plan.num_groups, plan.kv_len * self.key - self.group
            found += [self.traded_kv + self.resident() + max(padded, others)]
        elif plan.exchange == "needed":
            came, left = self.pieces()
            # Its own rows, K and V each by token, then side by side; these, those to send picked, and what comes.
            found += [self.traded_kv + 2 * self.group * bool(came), self.traded_kv + self.group + sum(came) + sum(left)]
            for i, one in enumerate(came):  # each piece as it came and in order
                before = sum(came[:i]) * plan.keep_kv
                found += [self.traded_kv + before + 2 * one + sum(came[i + 1 :]) + sum(left[i + 1 :])]
        return found

    def saved(self) -> int:
        """K/V of others and what was traded of its own group's, for the backward."""
        plan = self.plan
        if not plan.keep_kv or plan.num_groups == 1:
            return self.traded_kv
        if plan.exchange == "all_gather":
            return self.traded_kv + plan.kv_len * self.key - self.group
        return self.traded_kv + sum(self.pieces()[0] if plan.exchange == "needed" else self.shards()[1:])


WAYS = [
    {"exchange": "all_gather", "keep_kv": True}, {"exchange": "all_gather", "keep_kv": False},
    {"exchange": "needed", "stages": 1}, {"exchange": "needed", "stages": 3},
    {"exchange": "needed", "stages": 3, "keep_kv": False},
    {"exchange": "ring", "keep_kv": True}, {"exchange": "ring"},
]  # fmt: skip
CASES = [*((4, way) for way in WAYS), *(((2, 2), way) for way in WAYS), (4, {"exchange": "ulysses"})]
MASKS = {
    "documents": SpanMask.documents([0, 1, 2, 19, 19, 40, LENGTH]),
    "causal": SpanMask.causal(LENGTH),
    "window": SpanMask.sliding_window(LENGTH, 5),
}
SHAPE = dict(num_q_heads=8, num_kv_heads=4, head_dim=8, v_head_dim=6, dtype=torch.float32)


@pytest.mark.parametrize(
    ("mask", "balancer"), [("documents", "head_tail"), ("causal", "contiguous"), ("window", "head_tail")]
)
@pytest.mark.parametrize(("ranks", "way"), CASES, ids=str)
def test_what_is_held_is_what_the_plan_says(
    gloo_pool: GlooPool, ranks: Any, way: dict[str, Any], mask: str, balancer: str
) -> None:
    plan = spanwise.make_plan(MASKS[mask], ranks, balancer=balancer, block_size=4, **way, **SHAPE)
    problem = make_problem(MASKS[mask].dense(), heads=(8, 4), dims=(8, 6), dtype=torch.float32)
    resident, saved = plan.resident_bytes(), plan.saved_bytes()
    shares = [Share(plan, rank) for rank in range(4)]
    found = gloo_pool.run(4, of_rank, plan, problem, [share.saved() for share in shares], **mesh_of(plan))
    for rank, (share, (forward, kept, backward)) in enumerate(zip(shares, found, strict=True)):
        traded = share.traded_q + share.traded_kv + share.traded_out
        assert resident[rank] == share.resident() + traded
        most = max(share.moments(), default=0)
        packed = share.resident() // plan.num_groups if plan.exchange == "all_gather" else 0
        # gloo's thread lets go of what an all-gather sent when it gets round to it.
        assert forward.get("kv", 0) in (most, most + packed)
        # Between forward and backward.
        assert kept.get("kv", 0) == share.saved() and kept.get("q", 0) == share.traded_q
        assert saved[rank] == share.saved() + share.traded_q + share.traded_out
        assert kept["out"] == share.out + share.lse + share.traded_out
        if plan.exchange == "ring" and plan.inner == 1:  # no copies but the shards themselves, in either direction
            shards = share.shards()
            assert forward.get("kv", 0) == resident[rank]
            back = sum(shards[1:]) if plan.keep_kv else pairs([shards[0], *shards[:0:-1]])
            assert backward.get("kv", 0) == back
            assert plan.keep_kv or max(resident[rank], back) <= 2 * max(shards)


@pytest.mark.parametrize("way", [{"exchange": "ring"}, {"exchange": "needed"}, {"exchange": "ulysses"}], ids=str)
def test_the_benchmark_measures_what_it_plans(gloo_pool: GlooPool, way: dict[str, Any]) -> None:
    plan = spanwise.make_plan(SpanMask.causal(64), 4, balancer="contiguous", block_size=8, **way, **SHAPE)
    for rank, (resident, saved) in enumerate(gloo_pool.run(4, memory.measure_plan, plan)):
        assert saved == plan.saved_bytes()[rank] and resident >= plan.resident_bytes()[rank]
        if plan.exchange == "ring":
            assert resident == plan.resident_bytes()[rank] == 2 * 16 * 4 * 14 * 4  # shards, tokens, heads, dims, bytes
