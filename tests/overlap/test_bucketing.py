"""Buckets of collectives on a `Dag`: which are merged, that the graph stays legal, that nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.buckets import bucket
from spanwise.overlap.dag import Dag, GraphError
from spanwise.overlap.quotient import Quotient, joined, split_units, units_of
from spanwise.overlap.scheduler import ListScheduler
from spanwise.overlap.search import schedule
from tests.overlap.dags import Build, C, S, W, dags


def merge(
    dag: Dag, buckets: Sequence[Sequence[int]], ms: Sequence[float] | None = None, *, late: bool = False
) -> Quotient:
    """`dag` with these buckets, each where its first member is, or its last; ``GraphError`` for a cycle."""
    unit = units_of(dag, buckets)
    found = ListScheduler(dag).in_units(np.arange(len(dag)), unit, late_starts=late, late_waits=late)
    if len(found) < len(dag):
        raise GraphError(dag.nodes[buckets[0][0]].name, "they wait for one another")
    costs = zip(buckets, ms or [1.0] * len(buckets), strict=True)
    return joined(dag, split_units(found, unit), {min(of): cost for of, cost in costs})


def test_buckets_that_wait_for_one_another_are_refused() -> None:
    made = Build()  # each bucket alone is legal, both together are not
    x, y = made.collective(1.0, "x"), made.collective(1.0, "y")
    more = made.add(S, 1.0, (x[1],), "y"), made.add(S, 1.0, (y[1],), "x")
    buckets = [x[0], more[1]], [y[0], more[0]]
    assert all(len(merge(made.dag(), [one]).dag.starts) == 3 for one in buckets)
    for both in (buckets, [[x[0], more[0]]]):  # a member of the last one needs the other
        with pytest.raises(GraphError, match="they wait for one another"):
            merge(made.dag(), both)


def check(dag: Dag, merged: Quotient) -> None:
    """Every node is there once, and what a node depended on comes before it."""
    assert sorted(i for members in merged.members for i in members) == list(range(len(dag)))
    unit = {i: u for u, members in enumerate(merged.members) for i in members}
    for node, members in zip(merged.dag.nodes, merged.members, strict=True):
        more = sum(dag.kinds[i] == dag.kinds[members[0]] for i in members) - 1
        assert node.name == dag.nodes[members[0]].name + (f" and {more} more" if more and node.kind != C else "")
    for i, node in enumerate(dag.nodes):
        of_merged = merged.dag.nodes[unit[i]]
        assert of_merged.kind == node.kind and of_merged.group == node.group
        assert {unit[dep] for dep in node.deps} <= set(of_merged.deps)
        assert node.kind != W or unit[node.start] == of_merged.start
    for old, new in zip(dag.storages, merged.dag.storages, strict=True):
        assert new.maker == unit[old.maker] and new.num_bytes == old.num_bytes
        assert set(new.users) == {unit[user] for user in old.users} and new.kept == old.kept


@given(dags(most=14), st.randoms(use_true_random=False), st.booleans())
def test_a_merge_is_legal_or_refused(dag: Dag, draw: random.Random, late: bool) -> None:
    buckets = [[i for i in dag.starts if dag.nodes[i].group == group and draw.random() < 0.8] for group in dag.groups]
    try:
        check(dag, merge(dag, [bucket for bucket in buckets if bucket], late=late))
    except GraphError as error:
        assert "wait for one another" in str(error)


def layers(count: int, *, compute: float) -> Dag:
    """Backward of layers with sharded parameters: for each, four gathers of weights, a product, four scatters."""
    made = Build()
    gradient = made.compute(1.0)
    for _ in range(count):
        weights = [made.collective(0.3, "gather") for _ in range(4)]
        gradient = made.compute(compute / 2, gradient, *(wait for _, wait in weights))
        wgrad = made.compute(compute / 2, gradient)
        for start, wait in weights:
            made.takes(1, start, wait, gradient)
        for _ in range(4):
            made.takes(1, wgrad, made.collective(0.3, "scatter", wgrad)[1])
    dag = made.dag()
    return dag.with_links(dict.fromkeys(dag.groups, "link"))


def saves(dag: Dag, latency: float) -> Callable[[list[int]], float]:
    return lambda starts: sum(dag.nodes[i].ms for i in starts) - latency * (len(starts) - 1)


def groups_of(dag: Dag) -> list[Hashable | None]:
    return [node.group or None for node in dag.nodes]


@pytest.mark.parametrize(("room", "gain"), [(0, 0.1), (8, 0.01), (1000, 0.05)])
def test_a_stream_that_is_the_bottleneck_gains(room: int, gain: float) -> None:
    dag = layers(32, compute=2.0)
    before = schedule(dag, budget=dag.peak_bytes() + room)
    merged, after = bucket(dag, before, groups_of(dag), saves(dag, 0.1))
    assert before.timeline.makespan >= 0.999 * 32 * 8 * 0.3  # of collectives
    assert after.timeline.makespan <= (1 - gain) * before.timeline.makespan
    assert after.timeline.peak_bytes <= before.budget and after.timeline.exposed_ms <= before.timeline.exposed_ms
    assert len(merged.dag.starts) <= len(dag.starts) / 2
    assert all(len({dag.nodes[i].group for i in merged.members[start]}) == 1 for start in merged.dag.starts)


def test_launches_are_saved_where_compute_is_the_bottleneck() -> None:
    dag, asked = layers(32, compute=4.0), list[list[int]]()
    before = schedule(dag, budget=dag.peak_bytes() + 1000)

    def sums(starts: list[int]) -> float:
        asked.append(starts)
        return saves(dag, 0.0)(starts)

    merged, after = bucket(dag, before, groups_of(dag), sums)
    assert after.timeline.makespan <= before.timeline.makespan * (1 + 1e-9)
    assert after.timeline.makespan <= 1.03 * lower_bounds(merged.dag).makespan
    assert len(merged.dag.starts) <= len(dag.starts) / 3 and after.timeline.peak_bytes <= before.budget
    assert len(asked) <= 2 * len(dag.starts)  # a price of fx nodes takes time


def test_prices_that_are_too_high_or_none() -> None:
    dag = layers(4, compute=4.0)
    before = schedule(dag, budget=dag.peak_bytes() + 1000)
    merged, after = bucket(dag, before, groups_of(dag), lambda starts: 0.31 * len(starts))
    assert merged.dag is dag and after is before
    for bad in (float("nan"), -1.0, float("inf")):
        prices = dict.fromkeys(range(10), bad)
        with pytest.raises(GraphError, match=r"node 'node \d+': merged .* would cost"):
            bucket(dag, before, groups_of(dag), lambda starts, prices=prices: prices[len(starts)])  # type: ignore[misc]


def test_gathers_around_a_scatter_that_is_hidden() -> None:
    """Gathers before and after it become one where the first of them was."""
    made = Build()
    first, mm = made.add(S, 2.0, (), "g"), made.compute(2.0)
    used = made.compute(1.0, made.add(W, 0.0, (first,), start=first))
    scatter, mm = made.add(S, 2.0, (used,), "g"), made.compute(2.0, mm)
    scattered = made.add(W, 0.0, (scatter,), start=scatter)
    second, mm = made.add(S, 2.0, (), "g"), made.compute(2.0, mm)
    made.compute(1.0, scattered, mm, made.add(W, 0.0, (second,), start=second))
    before = schedule(made.dag())
    keys = ["gather" if i in (first, second) else None for i in range(len(made.nodes))]
    merged, after = bucket(made.dag(), before, keys, lambda starts: 2.0)
    assert (first, second) in [tuple(sorted(members)) for members in merged.members]
    assert after.timeline.makespan == before.timeline.makespan


def test_a_pair_at_fault_does_not_keep_others_apart() -> None:
    """The gather that is needed at once would wait for a long one; two of another group have time."""
    made = Build()
    free = made.add(S, 1.0, (), "g"), made.add(S, 1.0, (), "g")
    urgent, long = made.add(S, 1.0, (), "h"), made.add(S, 3.0, (), "h")
    used = made.compute(3.0, made.compute(1.0), made.add(W, 0.0, (urgent,), start=urgent))
    waits = [made.add(W, 0.0, (start,), start=start) for start in (long, *free)]
    made.compute(1.0, used, *waits)
    merged, _ = bucket(made.dag(), schedule(made.dag()), groups_of(made.dag()), saves(made.dag(), 0.5))
    buckets = [tuple(sorted(members)) for members in merged.members if len(members) > 1]
    assert buckets == [free, tuple(waits[1:])]


@given(dags(most=14), st.integers(0, 10), st.sampled_from([0.0, 0.5, 1.0]), st.randoms(use_true_random=False))
def test_never_longer_never_over_the_budget_nothing_twice(
    dag: Dag, room: int, saved: float, draw: random.Random
) -> None:
    budget = dag.peak_bytes() + room
    before = schedule(dag, budget=budget, effort=2)
    keys = [(node.group, draw.random() < 0.8) if node.kind == S and draw.random() < 0.9 else None for node in dag.nodes]

    def merged_ms(starts: list[int]) -> float:
        return max(0.0, saves(dag, saved)(starts))

    merged, after = bucket(dag, before, keys, merged_ms, effort=2)
    check(dag, merged)
    merged.dag.check_order(after.order)
    assert after.timeline.makespan <= before.timeline.makespan
    assert after.timeline.peak_bytes <= budget and len(merged.dag.starts) <= len(dag.starts)
    for node, members in zip(merged.dag.nodes, merged.members, strict=True):
        if node.kind == S and len(members) > 1:
            assert len({keys[i] for i in members}) == 1 and keys[members[0]] is not None
            assert node.ms == merged_ms(list(members))
