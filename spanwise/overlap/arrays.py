"""A dag as arrays, and what limits its orders: the input of the compiled `machine`, and its result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanwise.overlap.dag import Dag, Kind, Order, positions

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: How memory is kept: not at all, with a way to the end, or as far as it has space now.
FREELY, SAFELY, GREEDILY = range(3)


class Graph(NamedTuple):
    """A dag as arrays; lists of lists are flat, with the index at which each begins.

    Attributes:
        stream: 0 for compute, a number for each of `Dag.streams`, -1 for a wait.
        partner: of a wait, the node on the stream that it waits for; -1 for others.
        allocated: bytes by node. used: storages that a node makes or uses.
        users_left, freed: of each storage, the nodes that touch it, and the bytes that the last of them frees.
        tail: milliseconds from a node's issue to the end at least.
        flight: units of the two limits in flight that a start takes; `[n, 2]`.
    """

    stream: Ints
    ms: Floats
    tail: Floats
    partner: Ints
    deps_at: Ints
    deps: Ints
    users_at: Ints
    users: Ints
    allocated: Ints
    used_at: Ints
    used: Ints
    users_left: Ints
    freed: Ints
    flight: Ints
    streams: int


class Limits(NamedTuple):
    """What no order may exceed, and a known order that does not.

    Attributes:
        touched_at, touched: of each storage, the positions of the nodes that touch it, ascending.
        alive: bytes alive at each position of the known order.
    """

    budget: float
    in_flight: Floats
    order: Ints
    position: Ints
    touched_at: Ints
    touched: Ints
    alive: Ints


class Rule(NamedTuple):
    """How a list schedule picks; milliseconds.

    Attributes:
        queue: work below which a stream gets its next collective while compute runs; if minus infinite, only idle
            streams get one. A long queue leaves no gap where costs are wrong; a short one takes memory late.
        ahead: how far a node that takes memory may be ahead of the smallest priority left; early results fill memory.
        memory: `FREELY`, `SAFELY` or `GREEDILY`.
        wait_by_priority: whether idle compute waits for the collective of the smallest priority, not the first to end.
    """

    queue: float = 0.0
    ahead: float = math.inf
    memory: int = SAFELY
    wait_by_priority: bool = False


class Run(NamedTuple):
    """One pass over the graph: milliseconds (infinite if it broke a limit), bytes, nodes as issued, times by node."""

    makespan: float
    peak: int
    order: Ints
    begin: Floats
    end: Floats
    issued: Floats


def _flat(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Where each list begins, and all items."""
    return np.cumsum([0, *map(len, lists)], dtype=np.int64), np.array([i for one in lists for i in one], np.int64)


def graph_of(dag: Dag) -> Graph:
    """`dag` as arrays."""
    numbers = {stream: number for number, stream in enumerate(dag.streams, 1)}
    stream = [numbers[n.stream] if n.kind == Kind.START else -int(n.kind == Kind.WAIT) for n in dag.nodes]
    nodes, begins = dag.touched
    storages = np.repeat(np.arange(len(dag.storages)), np.diff(begins))
    by_node = np.argsort(nodes, kind="stable")
    return Graph(
        np.array(stream, np.int64),
        dag.ms,
        np.zeros(len(dag)),
        np.array([node.start for node in dag.nodes], np.int64),
        *_flat(dag.unique_deps),
        *_flat(dag.users),
        dag.allocated,
        np.searchsorted(nodes[by_node], np.arange(len(dag) + 1)).astype(np.int64),
        storages[by_node],
        np.diff(begins),
        np.array([0 if storage.kept else storage.num_bytes for storage in dag.storages], np.int64),
        dag.flight_sizes,
        1 + len(numbers),
    )


def reversed_graph(graph: Graph) -> Graph:
    """The graph from its end to its begin: a wait takes the stream, and its start is the wait. It takes no memory."""
    waits = np.flatnonzero(graph.stream < 0)
    starts = graph.partner[waits]
    stream, ms, partner = graph.stream.copy(), graph.ms.copy(), np.full(len(graph.ms), -1)
    stream[waits], ms[waits] = graph.stream[starts], graph.ms[starts]
    stream[starts], ms[starts], partner[starts] = -1, 0.0, waits
    nothing = np.zeros(len(ms), np.int64)
    return graph._replace(
        stream=stream,
        ms=ms,
        tail=np.zeros(len(ms)),
        partner=partner,
        deps_at=graph.users_at,
        deps=graph.users,
        users_at=graph.deps_at,
        users=graph.deps,
        allocated=nothing,
        used_at=np.zeros(len(ms) + 1, np.int64),
        flight=np.zeros_like(graph.flight),
    )


def limits_of(dag: Dag, order: Order, budget: float, in_flight: Floats | None = None) -> Limits:
    """Limits that `order` keeps: bytes; of each stream collectives and bytes in flight, float64 ``[streams, 2]``."""
    position, (nodes, begins) = positions(order), dag.touched
    storages = np.repeat(np.arange(len(dag.storages)), np.diff(begins))
    at = position[nodes]
    if in_flight is None:
        in_flight = np.full((1 + len(dag.streams), 2), np.inf)
    ascending = at[np.lexsort((at, storages))]
    known = np.asarray(order, np.int64)
    return Limits(float(budget), in_flight, known, position, begins, ascending, dag.alive_bytes(order))
