"""Reasons of exposed collectives: the change that each names hides what it says, on graphs by hand and on any."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, strategies as st

from spanwise.overlap.bounds import Reach, compute_of
from spanwise.overlap.dag import Dag, Kind, Node, Storage
from spanwise.overlap.engine import Timeline, simulate
from spanwise.overlap.explain.reasons import Move, Why, reasons
from tests.overlap.test_simulate import dags, orders

C, S, W = Kind.COMPUTE, Kind.START, Kind.WAIT


class Build:
    """Nodes by name, as they are added."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.storages: list[Storage] = []
        self.number: dict[str, int] = {}

    def add(self, name: str, kind: Kind, ms: float, deps: tuple[str, ...], group: str = "", start: str = "") -> None:
        self.number[name] = len(self.nodes)
        numbers = tuple(self.number[dep] for dep in deps)
        self.nodes.append(Node(name, kind, ms, numbers, group, self.number[start] if start else -1))

    def compute(self, name: str, ms: float, *deps: str) -> None:
        self.add(name, C, ms, deps)

    def start(self, name: str, ms: float, *deps: str, group: str = "g") -> None:
        self.add(name, S, ms, deps, group)

    def wait(self, start: str) -> None:
        self.add(f"w{start}", W, 0.0, (start,), start=start)

    def memory(self, num_bytes: int, maker: str, *users: str) -> None:
        self.storages.append(Storage(num_bytes, self.number[maker], tuple(self.number[user] for user in users)))

    def dag(self) -> Dag:
        return Dag(tuple(self.nodes), tuple(self.storages))


def moves(timeline: Timeline, budget: int | None = None) -> dict[str, dict[Why, Move]]:
    found = reasons(timeline, budget=budget)
    return {timeline.dag.nodes[start].name: reason.moves for start, reason in found.items()}


def test_too_little_independent_compute() -> None:
    """Three products lead to the scatter and one follows it; half a millisecond is independent."""
    b = Build()
    for name in "qkv":
        b.compute(name, 2.0)
    b.start("s", 3.0, "q", "k", "v")
    b.compute("beside", 0.5)
    b.wait("s")
    b.compute("later", 5.0, "ws")
    timeline = simulate(b.dag())
    assert moves(timeline) == {"s": {Why.NO_COMPUTE: Move(2.5)}}


def late() -> Build:
    """A gather is issued after compute that could have hidden it."""
    b = Build()
    b.compute("x", 2.0)
    b.compute("y", 2.0)
    b.compute("cast", 0.0)
    b.start("s", 3.0, "cast")
    b.wait("s")
    b.compute("z", 1.0, "ws", "y")
    b.memory(100, "s", "ws", "z")
    b.memory(50, "x", "y")
    return b


def test_an_order_and_the_memory_that_it_takes() -> None:
    dag = late().dag()
    assert moves(simulate(dag)) == moves(simulate(dag), 150) == {"s": {Why.ORDER: Move(3.0, longer=-3.0)}}
    assert moves(simulate(dag), 149) == {"s": {Why.MEMORY: Move(3.0, longer=-3.0, more_bytes=1)}}


def beside_no_compute(timeline: Timeline, start: int) -> float:
    """Milliseconds of a collective while which no compute runs; another collective may."""
    compute = timeline.dag.kinds == C
    begin, end = (
        times[compute].clip(timeline.begin[start], timeline.end[start]) for times in (timeline.begin, timeline.end)
    )
    return float(timeline.dag.nodes[start].ms - (end - begin).sum())


@given(dags(), st.data())
def test_each_change_hides_what_it_says(dag: Dag, data: st.DataObject) -> None:
    """Each is made here in another way and simulated; that an order exists, by trying all."""
    users = [tuple(user for user, node in enumerate(dag.nodes) if i in node.deps) for i in range(len(dag))]
    dag = Dag(dag.nodes, tuple(Storage(data.draw(st.integers(0, 3)), i, of) for i, of in enumerate(users)))
    some = list(itertools.islice(orders(dag), 40))
    timeline = simulate(dag, data.draw(st.sampled_from(some)))
    budget = data.draw(st.sampled_from([None, timeline.peak_bytes]))
    found, independent = reasons(timeline, budget=budget), Reach(dag).independent(compute_of(dag))
    assert {start: reason.exposed for start, reason in found.items()} == {
        start: ms for start, ms in timeline.exposed.items() if ms > 0
    }
    for start, reason in found.items():
        assert sum(reason.parts.values()) == pytest.approx(reason.exposed) and min(reason.parts.values()) > 0

        def changed(
            why: Why, order: list[int], at: int = start, exposed: float = reason.exposed, **facts: object
        ) -> None:
            nodes = list(dag.nodes)
            nodes[at] = dataclasses.replace(nodes[at], **facts)  # type: ignore[arg-type]
            other = simulate(Dag(tuple(nodes)), order)
            assert other.exposed[at] <= exposed - found[at].moves[why].hides + 1e-9
            assert other.makespan == pytest.approx(timeline.makespan + found[at].moves[why].longer)

        given_order = timeline.order.tolist()
        for why, move in reason.moves.items():
            if why is Why.NO_COMPUTE:  # in no order, nor on a stream of its own, does compute run beside it
                nodes = (dataclasses.replace(n, group="own") if i == start else n for i, n in enumerate(dag.nodes))
                alone = Dag(tuple(nodes))
                assert move.hides == pytest.approx(min(reason.exposed, dag.nodes[start].ms - independent[start]))
                assert min(beside_no_compute(simulate(alone, order), start) for order in some) >= move.hides - 1e-9
            elif why is Why.STREAM:
                changed(why, given_order, group="own")
            elif why is Why.DEPENDENCY:
                assert move.needs in {dag.nodes[dep].name for dep in dag.nodes[start].deps}
                changed(why, [start, *(i for i in given_order if i != start)], deps=())
            elif why in (Why.ORDER, Why.MEMORY):
                assert bool(move.more_bytes) == (why is Why.MEMORY)
                limit = 10**9 if budget is None else budget + move.more_bytes
                assert any(
                    order.exposed[start] <= reason.exposed - move.hides + 1e-9
                    and order.makespan <= timeline.makespan + move.longer + 1e-9
                    and order.peak_bytes <= limit
                    for order in (simulate(dag, order) for order in orders(dag))
                )


@given(dags())
def test_independent_compute_by_hand(dag: Dag) -> None:
    below: list[set[int]] = []  # what each node depends on
    for node in dag.nodes:
        below.append(set(node.deps).union(*(below[dep] for dep in node.deps)))
    waits = {node.start: i for i, node in enumerate(dag.nodes) if node.kind == W}
    for start, ms in Reach(dag).independent(compute_of(dag)).items():
        wait = waits.get(start)
        free = [
            node.ms
            for i, node in enumerate(dag.nodes)
            if node.kind == C and i not in below[start] and (wait is None or wait not in below[i])
        ]
        assert ms == pytest.approx(sum(free))
