"""Dags without their views: the same bounds, and for each order the same time and memory."""

from __future__ import annotations

import dataclasses
import random

from hypothesis import given, strategies as st

from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.dag import Dag, Kind, Node, Storage
from spanwise.overlap.engine import simulate
from spanwise.overlap.quotient import Quotient, contract
from tests.overlap.test_schedule import with_memory
from tests.overlap.test_simulate import orders


@st.composite
def with_views(draw: st.DrawFn) -> Dag:
    """Half of the compute takes no time; some memory is given to the dag."""
    dag = draw(with_memory())
    nodes = tuple(dataclasses.replace(n, ms=draw(st.sampled_from([0.0, n.ms]))) for n in dag.nodes)
    given_bytes = tuple(
        Storage(draw(st.integers(0, 9)), -1, tuple(sorted(users)))
        for users in draw(st.lists(st.sets(st.integers(0, len(dag) - 1), min_size=1), max_size=2))
    )
    return Dag(nodes, (*dag.storages, *given_bytes))


def is_view(dag: Dag, i: int) -> bool:
    return dag.nodes[i].kind == Kind.COMPUTE and not dag.nodes[i].ms and not dag.allocated[i]


def some_orders(contracted: Quotient, draw: random.Random) -> list[list[int]]:
    found = []
    for _ in range(4):
        left, order = set(range(len(contracted.dag))), []
        while left:
            ready = [i for i in sorted(left) if left.isdisjoint(contracted.dag.nodes[i].deps)]
            order.append(draw.choice(ready))
            left.remove(order[-1])
        found.append(order)
    return found


@given(with_views(), st.randoms(use_true_random=False))
def test_an_order_takes_the_same_time_and_memory(dag: Dag, draw: random.Random) -> None:
    contracted = contract(dag)
    assert sorted(i for unit in contracted.members for i in unit) == list(range(len(dag)))
    assert all(is_view(dag, i) for _, *joined in contracted.members for i in joined)
    for order in some_orders(contracted, draw):
        expanded = contracted.expand(order)
        dag.check_order(expanded)
        ours, full = simulate(contracted.dag, order), simulate(dag, expanded)
        assert (ours.makespan, ours.exposed_ms) == (full.makespan, full.exposed_ms)
        assert ours.peak_bytes == full.peak_bytes
    assert lower_bounds(contracted.dag).makespan == lower_bounds(dag).makespan


@given(with_views(), st.integers(0, 10))
def test_no_order_is_lost(dag: Dag, room: int) -> None:
    """The best order within a budget is as short without the views."""
    budget = dag.peak_bytes() + room

    def best(of: Dag) -> float:
        return min(simulate(of, order).makespan for order in orders(of) if of.peak_bytes(order) <= budget)

    assert best(contract(dag).dag) == best(dag)


def test_the_second_wait_of_coalesced_collectives_joins_the_first() -> None:
    start, item = Node("gathers", Kind.START, 4.0, group="dp"), Node("item", Kind.COMPUTE, deps=(0,))
    first, second = Node("wait", Kind.WAIT, deps=(0, 1), start=0), Node("wait 1", Kind.COMPUTE, deps=(1, 2))
    contracted = contract(Dag((start, item, first, second, Node("mm", Kind.COMPUTE, 1.0, (3,)))))
    assert contracted.members == ((0, 1), (2, 3), (4,))
    assert [node.deps for node in contracted.dag.nodes] == [(), (0,), (1,)]


def test_views_that_free_given_memory_alone_stay() -> None:
    reader, view = Node("sin", Kind.COMPUTE, 1.0), Node("view", Kind.COMPUTE)
    alone, shared = Storage(8, -1, (1,)), Storage(8, -1, (0, 1))
    assert contract(Dag((reader, view), (alone,))).members == ((0,), (1,))
    assert contract(Dag((reader, view), (shared,))).members == ((1,), (0,))
