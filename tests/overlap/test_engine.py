"""Timelines, bounds, list schedules and quotients of dags: by hand, and against every order of small random ones."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, strategies as st

from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.dag import Dag, GraphError, Kind, Node, Storage
from spanwise.overlap.engine import simulate
from spanwise.overlap.quotient import contract
from spanwise.overlap.scheduler import ListScheduler, Rule
from tests.overlap.dags import Build, C, S, W, dags, orders, some_order


def gather() -> Dag:
    """An all-gather of 4 ms, 2 ms of compute that need it, 3 ms that do not."""
    made = Build()
    made.compute(2.0, made.collective(4.0, "dp")[1])
    made.compute(3.0)
    return made.dag()


def test_hidden_and_exposed_time() -> None:
    shown, hidden = simulate(gather()), simulate(gather(), [0, 3, 1, 2])
    assert shown.makespan == 9 and shown.exposed_ms == 4 and shown.counts() == {"hidden": 0, "partly": 0, "exposed": 1}
    assert hidden.makespan == 6 and hidden.exposed == {0: 1.0} and hidden.counts()["partly"] == 1
    assert lower_bounds(gather()).makespan == 6


def test_memory_of_an_order() -> None:
    nodes = (Node("a", C), Node("b", C), Node("read a", C, deps=(0,)), Node("read b", C, deps=(1,)))
    dag = Dag(nodes, (Storage(10, 0, (2,)), Storage(20, 1, (3,)), Storage(1, 2, kept=True), Storage(5, 3)))
    assert dag.peak_bytes() == 31  # a and b, and the result of the first reader
    assert dag.peak_bytes([0, 2, 1, 3]) == 26  # b, the kept byte and the result of its reader
    assert simulate(dag, [1, 3, 0, 2]).peak_bytes == 25


BAD = [
    (Node("x", C, float("nan")),), (Node("x", C, -1.0),), (Node("x", C, deps=(1,)), Node("y", C)),
    (Node("x", C, deps=(0,)),), (Node("x", S),), (Node("y", C), Node("x", W, deps=(0,), start=0)),
    (Node("y", S, group="g"), Node("x", W, start=0)),
    (Node("y", S, group="g"), Node("v", W, deps=(0,), start=0), Node("x", W, deps=(0,), start=0)),
]  # fmt: skip


def test_bad_graphs_and_orders_are_refused() -> None:
    for nodes in BAD:
        with pytest.raises(GraphError) as error:
            Dag(nodes)
        assert error.value.node == "x"
    with pytest.raises(GraphError, match="node 'node 1': .* 'node 0', on which it depends"):
        simulate(gather(), [1, 0, 2, 3])
    for order in ([0, 1, 2], [0, 1, 2, 2]):
        with pytest.raises(ValueError, match="each of them once"):
            simulate(gather(), order)


def by_hand(dag: Dag, order: tuple[int, ...]) -> float:
    """The makespan by definition: a node waits for its collective and its stream."""
    end: dict[int, float] = {}
    for at, i in enumerate(order):
        node, before = dag.nodes[i], order[:at]
        here = max([0.0, *(end[j] for j in before if dag.nodes[j].kind != S)])  # when the compute stream gets here
        if node.kind == S:
            end[i] = node.ms + max([here, *(end[j] for j in before if dag.nodes[j].group == node.group)])
        else:
            end[i] = max(here, end[node.start]) if node.kind == W else here + node.ms
    return max(end.values())


@given(dags())
def test_no_order_beats_the_bounds(dag: Dag) -> None:
    spans = []
    for order in itertools.islice(orders(dag), 400):
        timeline = simulate(dag, order)
        assert timeline.makespan == by_hand(dag, order) >= timeline.exposed_ms
        spans.append(timeline.makespan)
    bounds = lower_bounds(dag)
    assert min(spans) + 1e-9 >= bounds.makespan >= max(bounds.compute, bounds.path) >= dag.compute_ms
    assert all(bounds.streams[g] >= sum(dag.ms[i] for i in dag.starts if dag.nodes[i].group == g) for g in dag.groups)


def test_the_bound_counts_all_compute_around_and_between_collectives() -> None:
    """Layers of gather, three projections side by side, scatter: nothing of a layer can hide its collectives."""
    made, last = Build(), tuple[int, ...]()
    for _ in range(100):
        gathered = made.collective(1.0, "tp", *last)[1]
        last = (made.collective(1.0, "tp", *[made.compute(2.0, gathered) for _ in "qkv"])[1],)
    bounds = lower_bounds(made.dag())
    assert bounds.path == 100 * 8 == simulate(made.dag()).makespan and bounds.compute == 600
    made = Build()  # side by side in the graph, but not on the one stream
    wait = made.collective(2.0, "tp", made.compute(3.0), made.compute(4.0))[1]
    made.compute(5.0, wait)
    made.compute(6.0, wait)
    bounds = lower_bounds(made.dag())
    assert bounds.compute == 18 and bounds.streams["tp"] == bounds.path == bounds.makespan == 20


@given(dags(), st.integers(0, 20), st.booleans(), st.data())
def test_list_schedules_are_legal_and_keep_the_budget(dag: Dag, room: int, safely: bool, data: st.DataObject) -> None:
    """Whatever the priorities and the rule; the figures are those of `simulate`."""
    budget = dag.peak_bytes() + room
    priorities = np.array([float(data.draw(st.integers(0, 9))) for _ in range(len(dag))])
    ahead = data.draw(st.sampled_from([0.0, math.inf])) if safely else math.inf
    rule = Rule(data.draw(st.sampled_from([0.0, 2.0])), ahead, safely)
    found = ListScheduler(dag, budget=budget).forward(priorities, rule)
    if found.makespan == math.inf:
        assert not safely  # nothing that was ready fitted
        return
    timeline = simulate(dag, found.order.tolist())
    assert (found.makespan, found.peak) == (timeline.makespan, max(0, timeline.peak_bytes))
    assert timeline.peak_bytes <= budget


@given(dags(), st.integers(0, 6), st.randoms(use_true_random=False))
def test_early_starts_and_late_waits_are_no_slower_at_any_costs(dag: Dag, room: int, draw: random.Random) -> None:
    """Of any order, at costs other than estimated, and with no more memory."""
    order = some_order(dag, draw)
    peak = dag.peak_bytes(order) + room
    found = ListScheduler(dag, order, peak).settled().order.tolist()
    dag.check_order(found)
    assert dag.peak_bytes(found) <= peak
    for kind in (C, *dag.groups):
        same = [[i for i in ran if dag.nodes[i].kind != W and dag.nodes[i].ms] for ran in (order, found)]
        assert len({tuple(i for i in of if kind in (dag.nodes[i].kind, dag.nodes[i].group)) for of in same}) == 1
    for _ in range(5):
        other = Dag(tuple(dataclasses.replace(n, ms=n.ms * draw.choice((0, 0.3, 1, 4))) for n in dag.nodes))
        assert simulate(other, found).makespan <= simulate(other, order).makespan + 1e-9


@st.composite
def with_views(draw: st.DrawFn) -> Dag:
    """Half of the compute takes no time; some memory is given to the dag."""
    dag = draw(dags())
    nodes = tuple(dataclasses.replace(n, ms=draw(st.sampled_from([0.0, n.ms]))) for n in dag.nodes)
    users = draw(st.lists(st.sets(st.integers(0, len(dag) - 1), min_size=1), max_size=2))
    given_bytes = tuple(Storage(draw(st.integers(0, 9)), -1, tuple(sorted(of))) for of in users)
    return Dag(nodes, (*dag.storages, *given_bytes))


@given(with_views(), st.integers(0, 10), st.randoms(use_true_random=False))
def test_without_views_orders_take_the_same_time_and_memory_and_none_is_lost(
    dag: Dag, room: int, draw: random.Random
) -> None:
    contracted, budget = contract(dag), dag.peak_bytes() + room
    assert sorted(i for unit in contracted.members for i in unit) == list(range(len(dag)))
    joined = [i for _, *views in contracted.members for i in views]
    assert all(dag.nodes[i].kind == C and not dag.nodes[i].ms and not dag.allocated[i] for i in joined)
    for order in (some_order(contracted.dag, draw) for _ in range(4)):
        expanded = contracted.expand(order)
        dag.check_order(expanded)
        ours, full = simulate(contracted.dag, order), simulate(dag, expanded)
        assert (ours.makespan, ours.exposed_ms, ours.peak_bytes) == (full.makespan, full.exposed_ms, full.peak_bytes)
    assert lower_bounds(contracted.dag).makespan == lower_bounds(dag).makespan

    def best(of: Dag) -> float:
        return min(simulate(of, order).makespan for order in orders(of) if of.peak_bytes(order) <= budget)

    assert best(contracted.dag) == best(dag)


def test_second_waits_and_views_that_free_memory() -> None:
    """A second wait of coalesced collectives joins the first; a view that alone frees given memory stays."""
    start, item = Node("gathers", Kind.START, 4.0, group="dp"), Node("item", C, deps=(0,))
    first, second = Node("wait", W, deps=(0, 1), start=0), Node("wait 1", C, deps=(1, 2))
    contracted = contract(Dag((start, item, first, second, Node("mm", C, 1.0, (3,)))))
    assert contracted.members == ((0, 1), (2, 3), (4,))
    assert [node.deps for node in contracted.dag.nodes] == [(), (0,), (1,)]
    reader, view = Node("sin", C, 1.0), Node("view", C)
    assert contract(Dag((reader, view), (Storage(8, -1, (1,)),))).members == ((0,), (1,))
    assert contract(Dag((reader, view), (Storage(8, -1, (0, 1)),))).members == ((1,), (0,))
