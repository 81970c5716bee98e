"""Reasons of exposed collectives: graphs for which each is known, and what holds for any."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwise.overlap.bounds import independent_compute
from spanwise.overlap.dag import Dag, Kind, Node, Storage
from spanwise.overlap.engine import Timeline, simulate
from spanwise.overlap.explain.reasons import Why, _Analysis, hidden_counts, hideable, reasons
from spanwise.overlap.search import schedule
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


def why(timeline: Timeline, budget: int | None = None) -> dict[str, dict[Why, float]]:
    found = reasons(timeline, budget=budget)
    return {timeline.dag.nodes[start].name: reason.parts for start, reason in found.items()}


def test_a_chain_has_no_independent_compute() -> None:
    b = Build()
    b.compute("a", 1.0)
    b.start("s", 3.0, "a")
    b.wait("s")
    b.compute("c", 2.0, "ws")
    dag = b.dag()
    assert why(simulate(dag)) == {"s": {Why.NO_COMPUTE: 3.0}}
    assert independent_compute(dag) == {1: 0.0} and hideable(dag) == set()


def test_too_little_independent_compute() -> None:
    b = Build()
    b.compute("a", 1.0)
    b.start("s", 3.0, "a")
    b.compute("beside", 0.5)
    b.wait("s")
    dag = b.dag()
    assert why(simulate(dag)) == {"s": {Why.NO_COMPUTE: 2.5}}
    assert hideable(dag) == {1} and hidden_counts(simulate(dag)) == {"hidden": 0, "partly": 1, "exposed": 0}


def test_parallel_compute_that_leads_to_a_start_is_not_independent() -> None:
    """Three products side by side all lead to the scatter: none of them could have hidden it."""
    b = Build()
    for name in "qkv":
        b.compute(name, 2.0)
    b.start("s", 1.0, "q", "k", "v")
    b.wait("s")
    b.compute("later", 5.0, "ws")
    assert why(simulate(b.dag())) == {"s": {Why.NO_COMPUTE: 1.0}}


def line(group: str) -> Dag:
    b = Build()
    b.start("first", 4.0, group=group)
    b.start("second", 3.0)
    b.compute("a", 4.0)
    b.wait("second")
    b.compute("c", 9.0)
    b.wait("first")
    return b.dag()


def test_a_collective_stands_in_line() -> None:
    assert why(simulate(line("g"))) == {"second": {Why.STREAM: 3.0}}
    assert why(simulate(line("another"))) == {}  # which is what the reason says


def test_a_stream_that_was_idle_before_it_was_full() -> None:
    """The first collective could have started with the graph; the second waits for it on their stream."""
    b = Build()
    b.compute("early", 2.0)
    b.start("first", 4.0)
    b.start("second", 3.0, "early")
    b.wait("second")
    b.compute("c", 9.0, "wsecond")
    b.wait("first")
    assert why(simulate(b.dag())) == {"second": {Why.IDLE: 2.0, Why.STREAM: 2.0, Why.NO_COMPUTE: 3.0}}


def test_a_stream_that_nothing_could_have_used_is_saturated() -> None:
    """Three products lead to both collectives, on one compute stream: neither could have started before all three."""
    b = Build()
    for name in "qkv":
        b.compute(name, 2.0)
    b.start("first", 4.0, "q", "k", "v")
    b.start("second", 3.0, "q", "k", "v")
    b.wait("second")
    b.wait("first")
    assert why(simulate(b.dag())) == {"second": {Why.STREAM: 4.0, Why.NO_COMPUTE: 3.0}}


def test_compute_that_runs_when_the_stream_falls_idle_ends_first() -> None:
    """The stream is idle from 5 on; a product that began at 2 ends at 6, and only then can anything be issued."""
    b = Build()
    b.start("before", 5.0)
    b.compute("x", 2.0)
    b.compute("y", 4.0, "before", "x")
    b.compute("z", 2.0, "y")
    b.wait("before")
    b.start("first", 3.0, "wbefore")
    b.start("s", 4.0, "z")
    b.wait("s")
    assert why(simulate(b.dag())) == {"s": {Why.IDLE: 2.0, Why.STREAM: 1.0, Why.NO_COMPUTE: 4.0}}


def test_a_collective_that_could_have_gone_first_on_an_idle_stream() -> None:
    """It has no dependencies, and the stream is idle for 6 ms: it fits there, and nothing else would be later."""
    b = Build()
    b.compute("x", 6.0)
    b.start("first", 4.0, "x")
    b.start("s", 3.0)
    b.wait("s")
    b.compute("c", 9.0)
    b.wait("first")
    dag = b.dag()
    assert why(simulate(dag)) == {"s": {Why.IDLE: 4.0, Why.ORDER: 3.0}}
    assert simulate(dag, [2, 0, 1, 3, 4, 5]).exposed_ms == 0


def test_a_stream_that_is_idle_most_of_the_time_is_not_saturated() -> None:
    """Its stream is busy for 1 ms of the 8 in which it could have been issued."""
    b = Build()
    b.compute("x", 5.0)
    b.start("other", 1.0, "x")
    b.compute("y", 3.0)
    b.start("s", 8.0)
    b.wait("s")
    b.wait("other")
    assert why(simulate(b.dag())) == {"s": {Why.ORDER: 7.0, Why.STREAM: 1.0}}
    b = Build()
    b.compute("x", 6.0)
    b.start("other", 1.0, "x")
    b.wait("other")
    b.start("s", 3.0)
    b.wait("s")
    dag = b.dag()
    assert why(simulate(dag))["s"] == {Why.ORDER: 3.0}
    assert simulate(dag, [3, 0, 1, 2, 4]).exposed_ms == 1  # as before, for the other


@st.composite
def queues(draw: st.DrawFn) -> tuple[Dag, list[tuple[int, ...]]]:
    """Compute and collectives of one stream that depend on it or on each other, then all waits; and all orders."""
    computes, starts = draw(st.integers(1, 3)), draw(st.integers(2, 3))
    kinds = [C] * computes + [S] * starts
    nodes = [
        Node(
            f"n{i}",
            kind,
            float(draw(st.integers(1, 6))),
            tuple(draw(st.sets(st.integers(0, i - 1)))) if kind == S else (),
            group="g" if kind == S else "",
        )
        for i, kind in enumerate(kinds)
    ]
    waits = [Node(f"w{i}", W, deps=(i,), start=i) for i in range(computes, len(kinds))]
    dag = Dag(tuple(nodes))
    whole = Dag((*nodes, *waits))
    return whole, [(*order, *range(len(dag), len(whole))) for order in orders(dag)]


@given(queues(), st.data())
def test_an_idle_stream_could_have_been_used(of: tuple[Dag, list[tuple[int, ...]]], data: st.DataObject) -> None:
    """Some order ends the collective that much earlier, net of what those before it on the stream lose."""
    dag, some = of
    timeline = simulate(dag, data.draw(st.sampled_from(some)))
    others = [simulate(dag, order) for order in some]
    for start, reason in reasons(timeline).items():
        gains = []
        for other in others:
            later = other.end - timeline.end
            lost = max((float(later[i]) for i in dag.starts if timeline.end[i] < timeline.end[start]), default=0.0)
            gains.append(-float(later[start]) - max(0.0, lost))
        assert max(gains) >= reason.parts.get(Why.IDLE, 0.0)


@given(dags(), st.data())
def test_a_saturated_stream_is_busy(dag: Dag, data: st.DataObject) -> None:
    """Its stream is busy at least that long before the collective begins."""
    timeline = simulate(dag, data.draw(st.sampled_from(list(itertools.islice(orders(dag), 40)))))
    for start, reason in reasons(timeline).items():
        ahead = [i for i in dag.starts if dag.nodes[i].group == dag.nodes[start].group]
        begin = float(timeline.begin[start])
        could = begin - sum(reason.parts.get(why, 0.0) for why in (Why.IDLE, Why.STREAM, Why.ORDER, Why.MEMORY))
        busy = sum(max(0.0, float(min(timeline.end[i], begin) - max(timeline.begin[i], could))) for i in ahead)
        assert busy >= reason.parts.get(Why.STREAM, 0.0)


def late() -> Build:
    """A gather is issued after compute that could have hidden it."""
    b = Build()
    b.compute("cast", 0.0)
    b.compute("x", 2.0)
    b.compute("y", 2.0)
    b.start("s", 3.0, "cast")
    b.wait("s")
    b.compute("z", 1.0, "ws", "y")
    return b


def test_a_start_that_could_have_been_earlier() -> None:
    b = late()
    dag = b.dag()
    assert why(simulate(dag)) == {"s": {Why.ORDER: 3.0}}
    moved = [b.number[name] for name in ("cast", "s", "x", "y", "ws", "z")]
    assert reasons(simulate(dag, moved)) == {}


def test_a_start_that_the_budget_keeps_late() -> None:
    b = late()
    b.memory(100, "s", "ws", "z")
    b.memory(50, "x", "y")
    dag = b.dag()
    peaks = dag.peak_bytes(), dag.peak_bytes([0, 3, 1, 2, 4, 5])
    assert peaks == (100, 150)
    assert why(simulate(dag), budget=149) == {"s": {Why.MEMORY: 3.0}}
    assert why(simulate(dag), budget=150) == {"s": {Why.ORDER: 3.0}} == why(simulate(dag))
    # The schedule itself comes to the same end, but puts x behind z, so that y hides a part.
    tight, loose = (schedule(dag, budget=budget) for budget in (149, 150))
    assert (tight.timeline.exposed_ms, loose.timeline.exposed_ms) == (1.0, 0.0)
    assert tight.timeline.peak_bytes == 100


def test_what_a_start_depends_on_moves_with_it_when_memory_is_tried() -> None:
    """Not the gather, but the cast that it needs first would hold too much."""
    b = Build()
    b.compute("x", 2.0)
    b.compute("y", 2.0)
    b.compute("cast", 0.0)
    b.start("s", 3.0, "cast")
    b.wait("s")
    b.memory(100, "cast", "ws")
    b.memory(50, "x", "y")
    dag = b.dag()
    assert dag.peak_bytes() == 100 and dag.peak_bytes([2, 3, 0, 1, 4]) == 150
    assert why(simulate(dag), budget=149) == {"s": {Why.MEMORY: 3.0}}
    assert why(simulate(dag), budget=150) == {"s": {Why.ORDER: 3.0}}


def test_its_stream_is_taken_where_it_could_have_been_issued() -> None:
    """Issued a millisecond earlier it would have begun then; the stream was taken before that."""
    b = Build()
    b.start("first", 3.0)
    b.compute("x", 4.0)
    b.start("s", 5.0)
    b.compute("a", 1.0)
    b.wait("s")
    b.wait("first")
    assert why(simulate(b.dag())) == {"s": {Why.ORDER: 1.0, Why.STREAM: 3.0}}


def test_independent_compute_behind_the_wait() -> None:
    b = Build()
    b.start("s", 3.0)
    b.compute("kept", 0.0)
    b.wait("s")
    b.compute("z", 1.0, "ws")
    b.compute("free", 2.0, "kept")
    b.compute("more", 2.0)
    b.memory(100, "free", "more")
    b.memory(80, "s", "z")
    dag = b.dag()
    assert why(simulate(dag)) == {"s": {Why.ORDER: 3.0}}
    assert why(simulate(dag), budget=179) == {"s": {Why.MEMORY: 3.0}}
    assert why(simulate(dag), budget=180) == {"s": {Why.ORDER: 3.0}}


def two_in_a_row() -> Build:
    """One collective needs the other, and there is compute to hide one of them."""
    b = Build()
    b.start("s", 2.0)
    b.compute("beside", 2.0)
    b.wait("s")
    b.start("t", 2.0, "ws")
    b.wait("t")
    return b


def test_independent_compute_that_another_has_used() -> None:
    """The second cannot be earlier: what it depends on ends just then, and what is independent has run."""
    dag = two_in_a_row().dag()
    assert why(simulate(dag)) == {"t": {Why.DEPENDENCY: 2.0}}
    assert hideable(dag) == {0, 3}
    assert hidden_counts(simulate(dag)) == {"hidden": 1, "partly": 0, "exposed": 1}
    assert hidden_counts(simulate(dag), among=[3]) == {"hidden": 0, "partly": 0, "exposed": 1}
    # Were these what nodes of another graph have become, three collectives of it the first, these would count.
    members = ((0, 1, 2), (3,), (4, 5, 6), (7, 8), (9, 10))
    assert hidden_counts(simulate(dag), [0, 2, 8], members) == {"hidden": 2, "partly": 0, "exposed": 1}


def test_only_some_compute_counts() -> None:
    """A cast that nothing needs makes no collective of a chain hideable where casts do not count."""
    b = Build()
    b.compute("cast", 0.1)
    b.compute("product", 1.0)
    b.start("s", 3.0, "product")
    b.wait("s")
    dag = b.dag()
    assert hideable(dag) == hideable(dag, [0]) == {2}
    assert hideable(dag, [1]) == hideable(dag, []) == set()


def test_compute_that_could_hide_either_counts_once() -> None:
    b = Build()
    for name in "st":
        b.start(name, 2.0)
        b.wait(name)
        b.compute(f"after {name}", 5.0, f"w{name}")
    b.compute("free", 3.0)
    found = why(simulate(b.dag()))
    # Compute after the first could hide the second but already does; free compute hides either.
    assert found == {"s": {Why.ORDER: 2.0}, "t": {Why.ORDER: 2.0}}
    b = Build()
    b.compute("begin", 1.0)
    b.start("s", 2.0, "begin")
    b.wait("s")
    b.start("t", 2.0, "ws")
    b.wait("t")
    b.compute("free", 3.0, "begin")
    assert why(simulate(b.dag())) == {"s": {Why.ORDER: 2.0}, "t": {Why.ORDER: 1.0, Why.DEPENDENCY: 1.0}}


def test_a_wait_that_came_late_leaves_room() -> None:
    """Half of what hid the first ran after it had ended; the second could have been issued then."""
    b = Build()
    b.start("s", 2.0)
    b.compute("beside", 2.0)
    b.compute("too long", 1.0)
    b.wait("s")
    b.start("t", 2.0, "ws")
    b.wait("t")
    assert why(simulate(b.dag())) == {"t": {Why.ORDER: 1.0, Why.DEPENDENCY: 1.0}}


def test_what_waits_for_another_collective_cannot_run_yet() -> None:
    """Behind the wait stands compute that does not need it, but another collective that has not ended."""
    b = Build()
    b.start("s", 2.0)
    b.start("other", 5.0, group="h")
    b.wait("s")
    b.wait("other")
    b.compute("z", 4.0, "wother")
    assert why(simulate(b.dag())) == {"s": {Why.DEPENDENCY: 2.0}, "other": {Why.NO_COMPUTE: 3.0}}


def test_several_reasons_are_told_with_their_milliseconds() -> None:
    b = Build()
    b.start("first", 3.0)
    b.compute("x", 4.0)
    b.start("s", 5.0)
    b.compute("a", 1.0)
    b.wait("s")
    b.wait("first")
    (reason,) = reasons(simulate(b.dag())).values()
    assert reason.exposed == 4.0 and reason.main is Why.STREAM
    assert str(reason) == "stream is saturated (3 ms), order of compute (1 ms)"
    (alone,) = reasons(simulate(two_in_a_row().dag())).values()
    assert str(alone) == "dependency"


@given(dags(), st.data())
def test_parts_add_up_and_only_the_hideable_can_be_hidden(dag: Dag, data: st.DataObject) -> None:
    some = list(itertools.islice(orders(dag), 40))
    timeline = simulate(dag, data.draw(st.sampled_from(some)))
    found = reasons(timeline, budget=data.draw(st.sampled_from([None, timeline.peak_bytes])))
    assert {start: reason.exposed for start, reason in found.items()} == {
        start: ms for start, ms in timeline.exposed.items() if ms > 0
    }
    independent = independent_compute(dag)
    for start, reason in found.items():
        assert sum(reason.parts.values()) == pytest.approx(reason.exposed) and min(reason.parts.values()) > 0
        if not independent[start]:
            assert set(reason.parts) <= {Why.STREAM, Why.IDLE, Why.NO_COMPUTE}
        if independent[start] >= dag.nodes[start].ms:
            assert Why.NO_COMPUTE not in reason.parts
    assert hideable(dag) == {start for start, ms in independent.items() if ms > 0}
    for start in set(dag.starts) - hideable(dag):  # nothing is computed meanwhile, whatever the order
        if any(node.start == start for node in dag.nodes):
            for of_order in (simulate(dag, order) for order in some):
                low, high = of_order.begin[start], of_order.end[start]
                busy = [(of_order.begin[i], of_order.end[i]) for i, node in enumerate(dag.nodes) if node.kind == C]
                assert not any(min(high, stop) - max(low, first) > 0 for first, stop in busy)


@given(dags(), st.data())
def test_what_is_said_to_be_possible_is(dag: Dag, data: st.DataObject) -> None:
    """The moves behind `ORDER` and `MEMORY` are legal orders with the claimed gain."""
    some = list(itertools.islice(orders(dag), 40))
    timeline = simulate(dag, data.draw(st.sampled_from(some)))
    analysis = _Analysis(timeline, None)
    assert all(analysis.ready[i] <= timeline.issued[i] for i in range(len(dag)) if dag.nodes[i].kind != W)
    for start, exposed in timeline.exposed.items():
        if not exposed:
            continue
        gained, moved, first = analysis.earlier(start, exposed)
        assert 0 <= gained <= exposed
        if gained:
            again = simulate(dag, analysis.with_moved(np.array(moved), first).tolist())
            assert again.issued[start] <= timeline.issued[start] - gained
        wait = dag.wait_of[start]
        gained, moved = analysis.behind(wait, exposed)
        if gained:
            again = simulate(dag, analysis.with_moved(np.array(moved), int(analysis.place[wait])).tolist())
            assert again.exposed[start] == exposed - gained


@given(dags())
def test_independent_compute_by_hand(dag: Dag) -> None:
    below: list[set[int]] = []  # what each node depends on
    for node in dag.nodes:
        below.append(set(node.deps).union(*(below[dep] for dep in node.deps)))
    waits = {node.start: i for i, node in enumerate(dag.nodes) if node.kind == W}
    for start, ms in independent_compute(dag).items():
        wait = waits.get(start)
        free = [
            node.ms
            for i, node in enumerate(dag.nodes)
            if node.kind == C and i not in below[start] and (wait is None or wait not in below[i])
        ]
        assert ms == pytest.approx(sum(free))


def test_forty_five_thousand_nodes() -> None:
    """As in a step of 126 layers; the set of hideable collectives is known by how the graph is made."""
    b = Build()
    b.compute("begin", 1.0)
    last = "begin"
    for layer in range(2250):
        gather, scatter = f"gather{layer}", f"scatter{layer}"
        b.start(gather, 1.0, group="dp")
        b.wait(gather)
        for k in range(14):
            b.compute(f"{layer}.{k}", 0.1, last, *((f"w{gather}",) if k == 7 else ()))
            last = f"{layer}.{k}"
        b.start(scatter, 1.0, last, group="tp")
        b.wait(scatter)
        last = f"w{scatter}"
    dag = b.dag()
    assert len(dag) > 40_000
    began = time.process_time()
    found = hideable(dag)
    assert time.process_time() - began < 5  # about half a second on its own
    assert found == {i for i in dag.starts if dag.nodes[i].name.startswith("gather")}
