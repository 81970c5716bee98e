"""Buckets of collectives on an overlap `Dag`: which are merged, that the graph stays legal, that nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.buckets import bucket
from spanwise.overlap.dag import Dag, GraphError, Kind, Node, Storage
from spanwise.overlap.engine import simulate
from spanwise.overlap.quotient import Quotient, joined, split_units, units_of
from spanwise.overlap.scheduler import ListScheduler
from spanwise.overlap.search import schedule
from tests.overlap.test_simulate import dags

C, S, W = Kind.COMPUTE, Kind.START, Kind.WAIT


def merge(
    dag: Dag,
    buckets: Sequence[Sequence[int]],
    ms: Sequence[float],
    order: Sequence[int] | None = None,
    *,
    late: bool = False,
) -> Quotient:
    """`dag` with these buckets, each where its first member is in `order`, or its last; ``GraphError`` for a cycle."""
    unit = units_of(dag, buckets)
    known = np.arange(len(dag)) if order is None else np.array(order)
    found = ListScheduler(dag).in_units(known, unit, late_starts=late, late_waits=late)
    if len(found) < len(dag):
        raise GraphError(dag.nodes[buckets[0][0]].name, "they wait for one another")
    return joined(dag, split_units(found, unit), {min(of): cost for of, cost in zip(buckets, ms, strict=True)})


def two_gathers(*deps: int) -> Dag:
    """Two all-gathers with readers; the second one's start depends on `deps`."""
    nodes = (
        Node("gather a", S, 2.0, group="dp"),
        Node("wait a", W, deps=(0,), start=0),
        Node("read a", C, 1.0, (1,)),
        Node("cast b", C, 1.0),
        Node("gather b", S, 3.0, (3, *deps), "dp"),
        Node("wait b", W, deps=(4,), start=4),
        Node("read b", C, 1.0, (2, 5)),
    )
    return Dag(nodes, (Storage(8, 0, (1, 2)), Storage(4, 3, (4, 5)), Storage(9, 4, (5, 6)), Storage(1, 6, kept=True)))


def test_members_start_where_the_first_one_did() -> None:
    merged = merge(two_gathers(), [[4, 0]], [4.5])
    assert merged.members == ((3,), (0, 4), (1, 5), (2,), (6,))
    start, wait = merged.dag.nodes[1:3]
    assert start == Node("gather a and 1 more", S, 4.5, (0,), "dp")
    assert wait == Node("wait a and 1 more", W, 0.0, (1,), start=1)
    assert merged.dag.storages[0] == Storage(8, 1, (2, 3)) and merged.dag.storages[2] == Storage(9, 1, (2, 4))
    assert merged.dag.peak_bytes() == 8 + 4 + 9 and simulate(merged.dag).makespan == 1 + 4.5 + 2
    assert len(merged.dag.starts) == 1


def test_buckets_that_wait_for_one_another_are_refused() -> None:
    for dag in (two_gathers(2), two_gathers(0)):
        with pytest.raises(GraphError, match="they wait for one another"):
            merge(dag, [[0, 4]], [4.5])
    # Each bucket alone is legal, both together are not.
    nodes = (
        Node("x 0", S, 1.0, group="x"), Node("y 0", S, 1.0, group="y"),
        Node("wait x 0", W, deps=(0,), start=0), Node("wait y 0", W, deps=(1,), start=1),
        Node("y 1", S, 1.0, (2,), "y"), Node("x 1", S, 1.0, (3,), "x"),
    )  # fmt: skip
    dag = Dag(nodes)
    assert len(merge(dag, [[0, 5]], [1.0]).dag.starts) == len(merge(dag, [[1, 4]], [1.0]).dag.starts) == 3
    with pytest.raises(GraphError, match="they wait for one another"):
        merge(dag, [[0, 5], [1, 4]], [1.0, 1.0])


def check(dag: Dag, merged: Quotient) -> None:
    """Every node is there once, and what a node depended on comes before it."""
    assert sorted(i for members in merged.members for i in members) == list(range(len(dag)))
    unit = {i: u for u, members in enumerate(merged.members) for i in members}
    for i, node in enumerate(dag.nodes):
        of_merged = merged.dag.nodes[unit[i]]
        assert of_merged.kind == node.kind and of_merged.group == node.group
        assert {unit[dep] for dep in node.deps} <= set(of_merged.deps)
        if node.kind == W:
            assert unit[node.start] == of_merged.start
    for old, new in zip(dag.storages, merged.dag.storages, strict=True):
        assert new.maker == unit[old.maker] and new.num_bytes == old.num_bytes
        assert set(new.users) == {unit[user] for user in old.users} and new.kept == old.kept


@st.composite
def graphs(draw: st.DrawFn) -> Dag:
    dag = draw(dags(most=14))
    storages = []
    for maker in range(len(dag)):
        users = [i for i in dag.users[maker] if draw(st.booleans())]
        # As a result is read where its collective is waited for, and by those who read that.
        users += [i for user in users if dag.kinds[user] == W for i in dag.users[user] if draw(st.booleans())]
        if dag.kinds[maker] != W and draw(st.booleans()):
            storages.append(Storage(draw(st.integers(1, 9)), maker, tuple(sorted(set(users))), draw(st.booleans())))
    return Dag(dag.nodes, tuple(storages))


@given(graphs(), st.randoms(use_true_random=False), st.booleans())
def test_a_merge_is_legal_or_refused(dag: Dag, draw: random.Random, late: bool) -> None:
    buckets = [[i for i in dag.starts if dag.nodes[i].group == group and draw.random() < 0.8] for group in dag.groups]
    buckets = [bucket for bucket in buckets if bucket]
    try:
        check(dag, merge(dag, buckets, [1.0] * len(buckets), late=late))
    except GraphError as error:
        assert "wait for one another" in str(error)


def layers(count: int, *, compute: float, room: int = 1000) -> tuple[Dag, int]:
    """Backward of layers with sharded parameters: for each, four gathers of weights, a product, four scatters.

    Returns:
        The dag, and a budget `room` bytes above its own order; weights of a layer take 4 bytes, gradients as many.
    """
    nodes: list[Node] = []
    storages: list[Storage] = []

    def add(name: str, kind: Kind, ms: float, *deps: int, group: str = "", start: int = -1) -> int:
        nodes.append(Node(name, kind, ms, deps, group, start))
        return len(nodes) - 1

    gradient = add("loss", C, 1.0)
    for layer in range(count):
        weights = [add(f"gather {layer}.{k}", S, 0.3, group="dp") for k in range(4)]
        waits = [add(f"wait {nodes[i].name}", W, 0.0, i, start=i) for i in weights]
        gradient = add(f"dgrad {layer}", C, compute / 2, gradient, *waits)
        wgrad = add(f"wgrad {layer}", C, compute / 2, gradient)
        storages += [Storage(1, i, (wait, gradient)) for i, wait in zip(weights, waits, strict=True)]
        for k in range(4):
            start = add(f"scatter {layer}.{k}", S, 0.3, wgrad, group="dp")
            storages.append(Storage(1, wgrad, (add(f"wait scatter {layer}.{k}", W, 0.0, start, start=start),)))
    dag = Dag(tuple(nodes), tuple(storages))
    return dag, dag.peak_bytes() + room


def saves(dag: Dag, latency: float) -> Callable[[list[int]], float]:
    return lambda starts: sum(dag.nodes[i].ms for i in starts) - latency * (len(starts) - 1)


def kind_of(dag: Dag) -> list[Hashable | None]:
    return [node.name.split(" ")[0] if node.kind == S else None for node in dag.nodes]


@pytest.mark.parametrize(("room", "gain"), [(0, 0.1), (8, 0.01), (1000, 0.05)])
def test_a_stream_that_is_the_bottleneck_gains(room: int, gain: float) -> None:
    dag, budget = layers(32, compute=2.0, room=room)
    before = schedule(dag, budget=budget)
    merged, after = bucket(dag, before, kind_of(dag), saves(dag, 0.1))
    assert before.timeline.makespan >= 0.999 * 32 * 8 * 0.3  # of collectives
    assert after.timeline.makespan <= (1 - gain) * before.timeline.makespan
    assert after.timeline.peak_bytes <= budget and after.timeline.exposed_ms <= before.timeline.exposed_ms
    assert len(merged.dag.starts) <= len(dag.starts) / 2


def test_launches_are_saved_where_compute_is_the_bottleneck() -> None:
    dag, budget = layers(32, compute=4.0)
    before = schedule(dag, budget=budget)
    asked = []

    def sums(starts: list[int]) -> float:
        asked.append(starts)
        return saves(dag, 0.0)(starts)

    merged, after = bucket(dag, before, kind_of(dag), sums)
    assert after.timeline.makespan <= before.timeline.makespan * (1 + 1e-9)
    assert after.timeline.makespan <= 1.03 * lower_bounds(merged.dag).makespan
    assert len(merged.dag.starts) <= len(dag.starts) / 3 and after.timeline.peak_bytes <= budget
    assert len(asked) <= 2 * len(dag.starts)  # a price of fx nodes takes time


def test_a_bucket_that_costs_more_than_its_members_is_refused() -> None:
    dag, budget = layers(4, compute=4.0)
    before = schedule(dag, budget=budget)
    merged, after = bucket(dag, before, kind_of(dag), lambda starts: 0.31 * len(starts))
    assert merged.dag is dag and after is before


def test_gathers_around_a_scatter_that_is_hidden() -> None:
    """Gathers before and after it become one where the first of them was."""
    nodes = (
        Node("gather a", S, 2.0, (), "g"), Node("mm 1", C, 2.0), Node("wait a", W, 0.0, (0,), start=0),
        Node("use a", C, 1.0, (2,)), Node("scatter", S, 2.0, (3,), "g"), Node("mm 2", C, 2.0, (1,)),
        Node("wait scatter", W, 0.0, (4,), start=4), Node("gather b", S, 2.0, (), "g"), Node("mm 3", C, 2.0, (5,)),
        Node("wait b", W, 0.0, (7,), start=7), Node("sum", C, 1.0, (6, 8, 9)),
    )  # fmt: skip
    dag = Dag(nodes)
    before = schedule(dag)
    merged, after = bucket(dag, before, kind_of(dag), lambda starts: 2.0)
    assert (0, 7) in [tuple(sorted(members)) for members in merged.members]
    assert after.timeline.makespan == before.timeline.makespan


def test_a_pair_at_fault_does_not_keep_others_apart() -> None:
    """The gather that is needed at once would wait for a long one; two of another group have time."""
    nodes = [Node(name, S, ms, group=name[0]) for name, ms in (("g", 1.0), ("g 1", 1.0), ("h", 1.0), ("h 1", 3.0))]
    nodes += [Node("mm", C, 1.0), Node("wait h", W, 0.0, (2,), start=2), Node("mm of h", C, 3.0, (4, 5))]
    nodes += [Node(f"wait {i}", W, 0.0, (i,), start=i) for i in (3, 0, 1)]
    dag = Dag((*nodes, Node("sum", C, 1.0, (6, 7, 8, 9))))
    merged, _ = bucket(dag, schedule(dag), [node.group or None for node in dag.nodes], saves(dag, 0.5))
    assert [members for members in merged.members if len(members) > 1] in ([(0, 1), (8, 9)], [(1, 0), (9, 8)])


def test_bad_prices_and_keys_raise() -> None:
    dag, budget = layers(2, compute=4.0)
    before = schedule(dag, budget=budget)
    for bad in (float("nan"), -1.0, float("inf")):
        prices = dict.fromkeys(range(10), bad)
        with pytest.raises(GraphError, match=r"node '(gather|scatter) \d.\d': merged .* would cost"):
            bucket(dag, before, kind_of(dag), lambda starts, prices=prices: prices[len(starts)])  # type: ignore[misc]


@given(graphs(), st.integers(0, 10), st.sampled_from([0.0, 0.5, 1.0]), st.randoms(use_true_random=False))
def test_never_longer_never_over_the_budget_nothing_twice(
    dag: Dag, room: int, saved: float, draw: random.Random
) -> None:
    budget = dag.peak_bytes() + room
    before = schedule(dag, budget=budget, effort=2)
    keys = [(node.group, draw.random() < 0.8) if node.kind == S and draw.random() < 0.9 else None for node in dag.nodes]

    def merged_ms(starts: list[int]) -> float:
        return max(0.0, sum(dag.nodes[i].ms for i in starts) - saved * (len(starts) - 1))

    merged, after = bucket(dag, before, keys, merged_ms, effort=2)
    check(dag, merged)
    merged.dag.check_order(after.order)
    assert after.timeline.makespan <= before.timeline.makespan
    assert after.timeline.peak_bytes <= budget and len(merged.dag.starts) <= len(dag.starts)
    for node, members in zip(merged.dag.nodes, merged.members, strict=True):
        if len(members) > 1:
            assert node.name == f"{dag.nodes[members[0]].name} and {len(members) - 1} more"
        if node.kind == S and len(members) > 1:
            assert len({keys[i] for i in members}) == 1 and keys[members[0]] is not None
            assert node.ms == merged_ms(list(members))
