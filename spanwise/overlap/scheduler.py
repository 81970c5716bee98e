"""The scheduler: every order of a dag is made and timed here.

    dag ─► ListScheduler ─► forward   a list schedule by priorities, within memory
                 ├─► backward  the same on the reversed graph: times that leave space for what follows
                 ├─► settled   a fixed order with its starts earlier and its waits later
                 └─► replay    a fixed order ─► engine.simulate ─► Timeline

A list scheduler (R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM Journal on Applied Mathematics 17,
1969) gives each free stream the ready node of the smallest priority that fits. `loops` is the compiled code below it.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanwise.overlap.dag import Dag, Kind, Order, positions

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Graph(NamedTuple):
    """A dag as arrays; lists of lists are flat, with the index at which each begins.

    Attributes:
        stream: 0 for compute, a number for each of `Dag.streams`, -1 for a wait.
        partner: of a wait, the node on the stream that it waits for; -1 for others.
        allocated: bytes by node. used: storages that a node makes or uses.
        users_left, freed: of each storage, the nodes that touch it, and the bytes that the last of them frees.
        tail: milliseconds from a node's issue to the end at least, where these are known.
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
    streams: int


class Known(NamedTuple):
    """A budget in bytes, and an order within it, which says what is safe.

    Attributes:
        touched_at, touched: of each storage, the positions of the nodes that touch it, ascending.
        alive: bytes alive at each position.
    """

    budget: float
    order: Ints
    position: Ints
    touched_at: Ints
    touched: Ints
    alive: Ints


class State(NamedTuple):
    """A partly issued graph.

    Attributes:
        clock: when each stream is free; compute, stream 0, is where the next node is issued.
        numbers: nodes issued, first position left of the known order, bytes alive now and at most, and bytes needed.
        last: of each storage, the index into `Known.touched` of the last position that is left.
        alive: bytes at the positions of the known order that are left.
    """

    done: NDArray[np.bool_]
    missing: Ints
    order: Ints
    begin: Floats
    end: Floats
    issued: Floats
    clock: Floats
    numbers: Ints
    users_left: Ints
    last: Ints
    alive: Ints


class Ready(NamedTuple):
    """By what a list schedule picks, and what it picks from.

    Attributes:
        is_first: what takes no time and no memory, and goes before all else: others may follow it.
        nodes, rank: nodes by priority, and the place of each among them.
        lists: ranks of ready nodes, a heap for each stream; then ready waits, new nodes, and nodes that do not fit.
        sizes: of the heaps.
    """

    priorities: Floats
    is_first: NDArray[np.bool_]
    nodes: Ints
    rank: Ints
    lists: Ints
    sizes: Ints


class Rule(NamedTuple):
    """How a list schedule picks; milliseconds.

    Attributes:
        queue: work below which a stream gets its next collective while compute runs; if minus infinite, only idle
            streams get one. A long queue leaves no gap where costs are wrong; a short one takes memory late.
        ahead: how far a node that takes memory may be ahead of the smallest priority left; early results fill memory.
        safely: whether memory is taken only where the known order can follow. Otherwise a schedule may get stuck.
    """

    queue: float = 0.0
    ahead: float = math.inf
    safely: bool = True


class Run(NamedTuple):
    """One pass over the graph: milliseconds (infinite if it got stuck), bytes, nodes as issued, times by node.

    It is the same in any budget of at least `needed` bytes."""

    makespan: float
    peak: int
    needed: int
    order: Ints
    begin: Floats
    end: Floats
    issued: Floats


def _flat(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Where each list begins, and all items."""
    return np.cumsum([0, *map(len, lists)], dtype=np.int64), np.array([i for one in lists for i in one], np.int64)


def _graph_of(dag: Dag) -> Graph:
    numbers = {stream: number for number, stream in enumerate(dag.streams, 1)}
    stream = [numbers[n.stream] if n.kind == Kind.START else -int(n.kind == Kind.WAIT) for n in dag.nodes]
    nodes, begins = dag.touched
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
        np.repeat(np.arange(len(dag.storages)), np.diff(begins))[by_node],
        np.diff(begins),
        np.array([0 if storage.kept else storage.num_bytes for storage in dag.storages], np.int64),
        1 + len(numbers),
    )


def _reversed(graph: Graph) -> Graph:
    """The graph from its end to its begin: a wait takes the stream, and its start is the wait. It takes no memory."""
    waits = np.flatnonzero(graph.stream < 0)
    starts = graph.partner[waits]
    stream, ms, partner = graph.stream.copy(), graph.ms.copy(), np.full(len(graph.ms), -1)
    stream[waits], ms[waits] = graph.stream[starts], graph.ms[starts]
    stream[starts], ms[starts], partner[starts] = -1, 0.0, waits
    nothing = np.zeros(len(ms) + 1, np.int64)
    return graph._replace(
        stream=stream,
        ms=ms,
        tail=np.zeros(len(ms)),
        partner=partner,
        deps_at=graph.users_at,
        deps=graph.users,
        users_at=graph.deps_at,
        users=graph.deps,
        allocated=nothing[1:],
        used_at=nothing,
    )


class ListScheduler:
    """Makes and times orders of `dag`.

    Args:
        order: a known order, which says what is safe; default: the dag's own.
        budget: bytes; at least the peak of that order.
    """

    def __init__(self, dag: Dag, order: Order | None = None, budget: float = math.inf) -> None:
        from spanwise.overlap import loops  # loads numba, a compiler

        self._loops, self.dag = loops, dag
        self.graph = _graph_of(dag)
        self.known = self._known(np.arange(len(dag)) if order is None else order, budget)

    def _known(self, order: Order, budget: float) -> Known:
        position, (nodes, begins) = positions(order), self.dag.touched
        storages = np.repeat(np.arange(len(self.dag.storages)), np.diff(begins))
        touched = position[nodes]
        ascending = touched[np.lexsort((touched, storages))]
        known = np.asarray(order, np.int64)
        return Known(float(budget), known, position, begins, ascending, self.dag.alive_bytes(order))

    def within(self, budget: float, order: Order) -> ListScheduler:
        """The same graph within another budget, which `order` keeps."""
        other = copy.copy(self)
        other.known = self._known(order, budget)
        return other

    @functools.cached_property
    def _back(self) -> Graph:
        return _reversed(self.graph)

    def _state(self, graph: Graph, known: Known) -> State:
        count, numbers = len(graph.ms), np.zeros(5, np.int64)
        done, order = np.zeros(count, np.bool_), np.zeros(count, np.int64)
        begin, end, issued = np.zeros((3, count))
        missing, left, last = np.diff(graph.deps_at), graph.users_left.copy(), known.touched_at[1:] - 1
        clock, alive = np.zeros(graph.streams), known.alive.copy()
        return State(done, missing, order, begin, end, issued, clock, numbers, left, last, alive)

    def _list_schedule(
        self, graph: Graph, known: Known, priorities: Floats, rule: Rule, longest: float = math.inf
    ) -> Run:
        """A schedule by priorities; of equal ones, the first in the known order goes first."""
        is_first = (graph.stream == 0) & (graph.ms == 0.0) & (graph.allocated == 0)
        by_priority = known.order[np.lexsort((priorities[known.order], ~is_first[known.order]))]
        lists = np.empty((graph.streams + 3, len(graph.ms)), np.int64)
        lists[-2], sizes = known.order, np.zeros(graph.streams, np.int64)
        rule = rule._replace(safely=rule.safely and known.budget < math.inf)  # without a limit, all is safe
        ready = Ready(priorities, is_first, by_priority, positions(by_priority), lists, sizes)
        state, work = self._state(graph, known), float(graph.ms[graph.stream == 0].sum())
        with self._loops.noticed():
            complete = self._loops.list_schedule(graph, known, state, ready, rule, longest, work)
        return _run_of(state, complete)

    def forward(self, priorities: Floats, rule: Rule, longest: float = math.inf) -> Run:
        """A list schedule, the smallest priority first; given up, with an infinite makespan, beyond `longest`."""
        return self._list_schedule(self.graph, self.known, priorities, rule, longest)

    def backward(self, last: Floats) -> Floats:
        """Priorities: begin times of a schedule made from the end backward, nodes with the largest `last` first.

        "Justification": K. Y. Li and R. J. Willis, "An iterative scheduling technique for resource-constrained project
        scheduling", European Journal of Operational Research 56, 1992. A stream that is the bottleneck gets times that
        leave space for all its work.
        """
        known = self.known._replace(order=self.known.order[::-1].copy())
        found = self._list_schedule(self._back, known, -last, Rule(safely=False))
        return found.makespan - found.end

    def settled(self) -> Run:
        """The known order, with every start as early and every wait as late as dependencies and the budget allow.

        Compute keeps its order, and so does every stream. The new order takes no longer than the old one at any costs:
        if a collective takes longer than estimated, or compute before it, more time is left until its first reader.
        """
        graph, known, state = self.graph, self.known, self._state(self.graph, self.known)
        starts = known.order[np.argsort(graph.stream[known.order], kind="stable")]  # by stream
        starts_at = np.searchsorted(graph.stream[starts], np.arange(graph.streams + 1))
        stack = np.empty(len(graph.deps) + 1, np.int64)
        with self._loops.noticed():
            self._loops.settle(graph, known, state, starts, starts_at, starts_at.copy(), stack)
        return self.replay(state.order)

    def replay(self, order: Ints, **changes: Any) -> Run:
        """A fixed order, run on the graph with these changes."""
        graph = self.graph._replace(**changes)
        state = self._state(graph, self.known)
        with self._loops.noticed():
            self._loops.replay(graph, self.known, state, order)
        return _run_of(state, True)

    def in_units(self, order: Ints, unit: Ints, *, late_starts: bool = False, late_waits: bool = False) -> Ints:
        """An order in which the members of each unit are side by side: where the first of them was, or the last.

        Units whose dependencies are later there wait for these. The result is shorter if units wait for one another.
        `unit` has the smallest member of each node's unit.
        """
        position, count = positions(order), len(order)
        first, last = position.copy(), position.copy()
        np.minimum.at(first, unit, position)
        np.maximum.at(last, unit, position)
        late = ((self.graph.stream > 0) & late_starts) | ((self.graph.stream < 0) & late_waits)
        members = np.argsort(unit, kind="stable")
        begins = np.searchsorted(unit[members], np.arange(count + 1))
        key, heap, size = np.where(late, last, first), np.empty((1, count), np.int64), np.zeros(1, np.int64)
        missing, found = np.zeros((2, count), np.int64)
        lists = members, begins, missing, heap, size, found
        with self._loops.noticed():
            return found[: self._loops.order_units(self.graph, unit, key, order, *lists)]


def _run_of(state: State, complete: bool) -> Run:
    makespan = float(state.clock.max()) if complete else math.inf
    *_, peak, needed = state.numbers.tolist()
    return Run(makespan, peak, needed, state.order, state.begin, state.end, state.issued)
