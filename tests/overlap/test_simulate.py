"""Timelines and lower bounds of an overlap `Dag`: by hand, and against every order of small random graphs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, strategies as st

from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.dag import Dag, GraphError, Kind, Node, Storage
from spanwise.overlap.engine import simulate

C, S, W = Kind.COMPUTE, Kind.START, Kind.WAIT


def gather(*, early: bool) -> Dag:
    """An all-gather of 4 ms, 3 ms of compute that does not need it, 2 ms that does."""
    start, wait = Node("start", S, 4.0, group="dp"), Node("wait", W, deps=(0,), start=0)
    if early:
        return Dag((start, Node("other", C, 3.0), wait, Node("reader", C, 2.0, deps=(2,))))
    wait = Node("wait", W, deps=(0,), start=0)
    return Dag((start, wait, Node("reader", C, 2.0, deps=(1,)), Node("other", C, 3.0)))


def test_hidden_and_exposed_time() -> None:
    hidden = simulate(gather(early=True))
    assert hidden.makespan == 6 and hidden.exposed == {0: 1.0} and hidden.counts()["partly"] == 1
    shown = simulate(gather(early=False))
    assert shown.makespan == 9 and shown.exposed_ms == 4 and shown.counts() == {"hidden": 0, "partly": 0, "exposed": 1}
    assert simulate(gather(early=False), [0, 3, 1, 2]).makespan == 6
    assert lower_bounds(gather(early=False)).makespan == 6


def test_memory_of_an_order() -> None:
    nodes = (Node("a", C), Node("b", C), Node("read a", C, deps=(0,)), Node("read b", C, deps=(1,)))
    dag = Dag(nodes, (Storage(10, 0, (2,)), Storage(20, 1, (3,)), Storage(1, 2, kept=True), Storage(5, 3)))
    assert dag.peak_bytes() == 31  # a and b, and the result of the first reader
    assert dag.peak_bytes([0, 2, 1, 3]) == 26  # b, the kept byte and the result of its reader
    assert simulate(dag, [1, 3, 0, 2]).peak_bytes == 25


BAD = [
    (Node("x", C, float("nan")),), (Node("x", C, -1.0),), (Node("x", C, deps=(1,)), Node("y", C)),
    (Node("x", C, deps=(0,)),), (Node("s", S),), (Node("y", C), Node("x", W, deps=(0,), start=0)),
    (Node("y", S, group="g"), Node("x", W, start=0)),
    (Node("y", S, group="g"), Node("v", W, deps=(0,), start=0), Node("x", W, deps=(0,), start=0)),
]  # fmt: skip


@pytest.mark.parametrize("nodes", BAD)
def test_bad_graphs_name_the_node(nodes: tuple[Node, ...]) -> None:
    with pytest.raises(GraphError) as error:
        Dag(nodes)
    assert error.value.node == ("s" if nodes[0].name == "s" else "x")


def test_bad_orders_raise() -> None:
    dag = gather(early=True)
    with pytest.raises(GraphError, match="node 'wait': it comes before 'start', on which it depends"):
        simulate(dag, [2, 0, 1, 3])
    with pytest.raises(ValueError, match="each of them once, got 3 numbers"):
        simulate(dag, [0, 1, 2])
    with pytest.raises(ValueError, match="each of them once"):
        simulate(dag, [0, 1, 2, 2])


@st.composite
def dags(draw: st.DrawFn, most: int = 7) -> Dag:
    nodes: list[Node] = []
    open_starts: list[int] = []
    for i in range(draw(st.integers(1, most))):
        deps = set(draw(st.lists(st.integers(0, i - 1), max_size=2))) if i else set()
        kind = draw(st.sampled_from([C, C, S, W] if open_starts else [C, C, S]))
        ms = float(draw(st.integers(0, 5)))
        if kind == W:
            start = open_starts.pop(draw(st.integers(0, len(open_starts) - 1)))
            nodes.append(Node(f"n{i}", W, deps=tuple(deps | {start}), start=start))
            continue
        if kind == S:
            open_starts.append(i)
        nodes.append(Node(f"n{i}", kind, ms, tuple(deps), group=draw(st.sampled_from("ab")) if kind == S else ""))
    return Dag(tuple(nodes))


def orders(dag: Dag) -> Iterator[tuple[int, ...]]:
    for order in itertools.permutations(range(len(dag))):
        place = np.argsort(order)
        if all(place[dep] < place[i] for i, node in enumerate(dag.nodes) for dep in node.deps):
            yield order


def by_hand(dag: Dag, order: tuple[int, ...]) -> float:
    """The makespan by definition: a node waits for its collective and its stream."""
    issued: list[float] = []
    end: dict[int, float] = {}
    for at, i in enumerate(order):
        node = dag.nodes[i]
        # When the compute stream gets here: after all earlier nodes on it.
        here = max([0.0, *(end[j] for j in order[:at] if dag.nodes[j].kind != S)])
        issued.append(here)
        if node.kind == S:
            busy = [end[j] for j in order[:at] if dag.nodes[j].kind == S and dag.nodes[j].group == node.group]
            end[i] = max([here, *busy]) + node.ms
        else:
            end[i] = max(here, end[node.start]) if node.kind == W else here + node.ms
    return max(end.values())


@given(dags())
def test_no_order_beats_the_bounds(dag: Dag) -> None:
    spans = []
    for order in itertools.islice(orders(dag), 400):
        timeline = simulate(dag, order)
        assert timeline.makespan == by_hand(dag, order)
        assert timeline.makespan >= simulate(dag, order).exposed_ms
        spans.append(timeline.makespan)
    bounds = lower_bounds(dag)
    assert bounds.makespan <= min(spans) + 1e-9
    assert bounds.makespan >= max(bounds.compute, bounds.path) >= dag.compute_ms
    assert all(bounds.streams[g] >= sum(dag.ms[i] for i in dag.starts if dag.nodes[i].group == g) for g in dag.groups)


def test_the_bound_counts_all_compute_around_a_collective() -> None:
    """Two matmuls lead to a reduce-scatter, side by side in the graph but not on the one stream; two follow."""
    nodes = (
        Node("a", C, 3.0), Node("b", C, 4.0), Node("start", S, 2.0, (0, 1), "tp"), Node("wait", W, 0.0, (2,), start=2),
        Node("c", C, 5.0, (3,)), Node("d", C, 6.0, (3,)),
    )  # fmt: skip
    bounds = lower_bounds(Dag(nodes))
    assert bounds.compute == 18 and bounds.streams["tp"] == 20 == bounds.path == bounds.makespan
    assert simulate(Dag(nodes)).makespan == 20


def test_the_bound_counts_all_compute_between_collectives() -> None:
    """Layers of gather, three projections side by side, scatter: nothing of a layer can hide its collectives."""
    nodes: list[Node] = []
    for layer in range(100):
        before = (len(nodes) - 1,) if nodes else ()
        first = len(nodes)
        nodes += [
            Node(f"gather {layer}", S, 1.0, before, "tp"),
            Node(f"gathered {layer}", W, 0.0, (first,), start=first),
        ]
        nodes += [Node(f"{name} {layer}", C, 2.0, (first + 1,)) for name in "qkv"]
        nodes += [Node(f"scatter {layer}", S, 1.0, (first + 2, first + 3, first + 4), "tp")]
        nodes += [Node(f"scattered {layer}", W, 0.0, (first + 5,), start=first + 5)]
    bounds = lower_bounds(Dag(tuple(nodes)))
    assert bounds.path == 100 * 8 == simulate(Dag(tuple(nodes))).makespan and bounds.compute == 600
