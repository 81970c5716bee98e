"""What plans count of work, needs and traffic, against dense masks walked token by token."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, strategies as st

from spanwise import make_plan
from spanwise.layouts.layout import Layout
from spanwise.planning.plan import Plan
from spanwise.planning.seconds import _pairs
from spanwise.routes.exchanges import EXCHANGES
from tests.masks.test_properties import masks


@dataclasses.dataclass
class Dense:
    """A plan's masks and layouts as plain tables.

    Attributes:
        mask: bool ``[batch, queries, keys]``.
        q_rank, kv_rank: the rank of each token, ``[batch, tokens]``.
    """

    mask: np.ndarray
    q_rank: np.ndarray
    kv_rank: np.ndarray

    def reads(self, group: int, inner: int) -> np.ndarray:
        """Keys that a group's queries read; bool ``[batch, keys]``."""
        rows = self.q_rank // inner == group
        return (self.mask & rows[:, :, None]).any(axis=1)

    def keys(self, rank: int) -> int:
        return int((self.kv_rank == rank).sum())

    def queries(self, rank: int) -> int:
        return int((self.q_rank == rank).sum())


@st.composite
def layouts(draw, length: int, num_ranks: int, batch: int) -> Layout:
    """Any token to any rank, shards of any size, none at all too; rows of a batch may differ."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    share = rng.dirichlet(np.ones(num_ranks) * draw(st.sampled_from([0.3, 5.0])))
    owner = rng.choice(num_ranks, length, p=share)
    if draw(st.booleans()):
        owner = np.sort(owner)
    rows = [owner, *(rng.permutation(owner) for _ in range(batch - 1))] if draw(st.booleans()) else [owner]
    return Layout.from_owners(np.stack(rows), num_ranks, length, 1)


@st.composite
def problems(draw, exchange: str | None = None, inner: int | None = None) -> tuple[Plan, Dense]:
    """Plans of every exchange on one level and two, self- and cross-attention."""
    inner, outer = inner or draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 4, 4, 4]))
    q_len, batch = draw(st.integers(1, 24)), draw(st.integers(1, 2))
    cross = draw(st.booleans())
    kv_len = draw(st.integers(1, 24)) if cross else q_len
    mask = draw(masks((q_len, kv_len), draw(st.sampled_from([1, batch]))))
    beside = draw(masks((q_len, kv_len), batch))  # another mask of the model may have more batch rows
    layout = draw(layouts(q_len, outer * inner, batch))
    # Of self-attention keys lie where queries lie; a mask with one row serves layouts with several.
    kv_layout = layout
    while kv_layout is layout and cross:
        kv_layout = draw(layouts(kv_len, outer * inner, batch))
        if kv_layout.batch_size != layout.batch_size:
            rows = max(layout.batch_size, kv_layout.batch_size)
            layout, kv_layout = (
                Layout([x.pieces(min(b, x.batch_size - 1)) for b in range(rows)], x.num_ranks, x.seq_len)
                for x in (layout, kv_layout)
            )
    if layout.batch_size > mask.batch_size or draw(st.booleans()):
        layout = Layout([layout.pieces(0)], layout.num_ranks, layout.seq_len)
        kv_layout = Layout([kv_layout.pieces(0)], kv_layout.num_ranks, kv_layout.seq_len)
    kv_heads, dims = draw(st.integers(1, 4)), draw(st.tuples(st.integers(1, 3), st.integers(1, 6)))
    heads = np.lcm(kv_heads, inner) * draw(st.integers(1, 2))
    how = exchange or draw(st.sampled_from(["all_gather", "needed", "ring"] if outer > 1 else ["all_gather"]))
    plan = make_plan(
        {"default": mask, "beside": beside}, 1, exchange="all_gather", num_q_heads=int(heads), num_kv_heads=kv_heads,
        head_dim=dims[0], v_head_dim=dims[1], block_size=draw(st.sampled_from([1, 4])),
        dtype=draw(st.sampled_from(["bfloat16", "float32", "float64"])),
    ).replace(
        layout=layout, kv_layout=kv_layout, num_ranks=outer * inner, inner=inner,
        kv_exchange=EXCHANGES["ulysses" if outer == 1 and inner > 1 else how],
        stages=draw(st.integers(1, 3)) if how == "needed" else 1, keep_kv=draw(st.booleans()),
    )  # fmt: skip
    q_rank, kv_rank = np.zeros((batch, q_len), np.int64), np.zeros((batch, kv_len), np.int64)
    for table, of in ((q_rank, layout), (kv_rank, kv_layout)):
        for row in range(batch):
            for rank in range(of.num_ranks):
                table[row, of.indices(rank, min(row, of.batch_size - 1))] = rank
    return plan, Dense(np.broadcast_to(mask.dense(), (batch, q_len, kv_len)), q_rank, kv_rank)


def ring_walk(plan: Plan, dense: Dense) -> list[list[tuple[int, int]]]:
    """For each hop that some group reads, for each group: from which group it gets a shard, and whose that is."""
    groups = plan.num_groups
    held, before, walk = list(range(groups)), 0, []
    for hop in range(1, groups):
        owners = [(group - hop) % groups for group in range(groups)]
        read = [
            (dense.reads(group, plan.inner) & (dense.kv_rank // plan.inner == owners[group])).any()
            for group in range(groups)
        ]
        if any(read):
            sender = [(group - (hop - before)) % groups for group in range(groups)]
            held = [held[sender[group]] for group in range(groups)]
            assert held == owners
            walk.append([(sender[group], held[group]) for group in range(groups)])
            before = hop
    return walk


def group_keys(plan: Plan, dense: Dense, group: int) -> int:
    return sum(dense.keys(group * plan.inner + i) for i in range(plan.inner))


@given(problems())
def test_work_and_needs(problem: tuple[Plan, Dense]) -> None:
    plan, dense = problem
    pairs = np.zeros(plan.num_ranks)
    local = np.zeros(plan.num_ranks)
    for rank in range(plan.num_ranks):
        mine, own = dense.q_rank // plan.inner == rank // plan.inner, dense.kv_rank // plan.inner == rank // plan.inner
        computed = dense.mask & mine[:, :, None]
        pairs[rank], local[rank] = computed.sum() / plan.inner, (computed & own[:, None, :]).sum() / plan.inner
        elsewhere = dense.reads(rank // plan.inner, plan.inner) & ~own
        for row in range(len(dense.mask)):
            needs = plan.needs(rank, row=row)
            told = np.zeros(plan.kv_len, int)
            for start, stop in needs:
                told[start:stop] += 1
            assert told.tolist() == elsewhere[row].astype(int).tolist()
            assert (needs[1:, 0] > needs[:-1, 1]).all()  # ascending, merged
        assert plan.needed_tokens()[rank] == elsewhere.sum()
    np.testing.assert_allclose(plan.work(), pairs, rtol=1e-12)
    np.testing.assert_allclose(plan.local_work(), local, rtol=1e-12)
    np.testing.assert_allclose(plan.work().sum(), dense.mask.sum(), rtol=1e-12)


@given(problems())
def test_traffic(problem: tuple[Plan, Dense]) -> None:
    plan, dense = problem
    ranks, inner = plan.num_ranks, plan.inner
    traffic = np.zeros((ranks, ranks), np.int64)
    for rank in range(ranks):
        group, place = divmod(rank, inner)
        own, reads = dense.kv_rank // inner == group, dense.reads(group, inner)
        for owner in dense.kv_rank[own]:  # the trade inside the group
            traffic[rank, owner] += owner != rank
        if plan.exchange in ("all_gather", "needed"):
            for owner in dense.kv_rank[~own & (reads | (plan.exchange == "all_gather"))]:
                traffic[rank, owner // inner * inner + place] += 1
        if plan.exchange == "ring":
            for hop in ring_walk(plan, dense):
                sender, owner = hop[group]
                traffic[rank, sender * inner + place] += group_keys(plan, dense, owner)
    assert plan.traffic().tolist() == traffic.tolist()
    assert plan.recv_tokens().tolist() == traffic.sum(axis=1).tolist()


@given(problems(exchange="needed"), st.sampled_from([1, 2, 4]))
def test_tokens_counted_without_moves_are_those_of_the_moves(problem: tuple[Plan, Dense], stages: int) -> None:
    plan, _ = problem
    if plan.exchange == "ulysses":
        return
    plan = plan.replace(exchange="needed", stages=stages)
    for name in plan.masks:
        route = plan.route(name)
        assert route.counted is not None and route.sources == [step.source for step in route.steps]
        assert dataclasses.replace(route, counted=None).tokens.tolist() == route.tokens.tolist()


@given(problems(exchange="ring"))
def test_hops(problem: tuple[Plan, Dense]) -> None:
    """What each hop brings, and how much of the mask lies on it."""
    plan, dense = problem
    walk, groups, route = ring_walk(plan, dense), plan.num_groups, plan.route()
    held = np.array([group_keys(plan, dense, group) for group in range(groups)])
    if plan.exchange == "ulysses":
        return
    areas = _pairs(plan, "default", route)[:: plan.inner, 1:]
    assert len(route.steps) == len(walk)
    for i, hop in enumerate(walk):
        for group, (sender, owner) in enumerate(hop):
            assert route.tokens[i, group].tolist() == [held[owner] * (g == sender) for g in range(groups)]
            rows, keys = dense.q_rank // plan.inner == group, dense.kv_rank // plan.inner == owner
            if len(walk) > 1 and route.tokens.sum() > plan.needed_tokens().sum():
                assert areas[group, i] == (dense.mask & rows[:, :, None] & keys[:, None, :]).sum()
    if walk:  # nothing that is read is left out
        local = plan.readings().local_area
        assert (areas.sum(axis=1).round() + local).tolist() == (plan.work() * plan.inner)[
            :: plan.inner
        ].round().tolist()
