"""The engine: every order of a dag is made and timed here.

    dag ─► Engine ─► forward   a list schedule by priorities, within memory and limits in flight
                 ├─► backward  the same on the reversed graph: times that leave space for what follows
                 └─► settled   a fixed order with its starts earlier and its waits later
    dag, order ─► simulate

`machine` is the compiled code below it.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence

import numpy as np

from spanwise.overlap.arrays import FREELY, Floats, Graph, Ints, Limits, Rule, Run, graph_of, limits_of, reversed_graph
from spanwise.overlap.bounds import tails
from spanwise.overlap.dag import Dag, positions
from spanwise.overlap.timeline import Intervals

_ROUNDING = 1e-9


def in_units(graph: Graph, order: Ints, unit: Ints, *, late_starts: bool = False, late_waits: bool = False) -> Ints:
    """An order in which the members of each unit are side by side: where the first of them was, or the last.

    Units whose dependencies come later there wait for these. The order is shorter than `order` if units wait for one
    another.

    Args:
        unit: of each node, the smallest member of its unit.
    """
    from spanwise.overlap import compiled  # loads numba, a compiler

    position, nodes = positions(order), np.arange(len(order))
    first, last = position.copy(), position.copy()
    np.minimum.at(first, unit, position)
    np.maximum.at(last, unit, position)
    late = ((graph.stream > 0) & late_starts) | ((graph.stream < 0) & late_waits)
    members = np.argsort(unit, kind="stable")
    begins = np.searchsorted(unit[members], np.arange(len(order) + 1))
    heap, found = np.empty((2, len(order)), np.int64)
    size, missing = np.zeros(1, np.int64), np.zeros_like(nodes)
    key = np.where(late, last, first)
    with compiled.noticed():
        count = compiled.order_units(
            graph, unit, key, order, members, begins, missing, heap.reshape(1, -1), size, found
        )
    return found[:count]


def replay(graph: Graph, limits: Limits, order: Ints, contention: float = 1.0) -> Run:
    """A fixed order, run; its makespan is infinite if it breaks a limit."""
    from spanwise.overlap import machine  # loads numba, a compiler

    return machine.replay(graph, limits, order, contention)


class Engine:
    """Makes schedules of `dag` within `limits`."""

    def __init__(self, dag: Dag, limits: Limits) -> None:
        from spanwise.overlap import machine  # loads numba, a compiler

        self._machine = machine
        self.graph, self.limits = graph_of(dag)._replace(tail=tails(dag)[0]), limits
        self._back = reversed_graph(self.graph)

    def with_limits(self, limits: Limits) -> Engine:
        """The same graph within other limits."""
        other = copy.copy(self)
        other.limits = limits
        return other

    def forward(self, priorities: Floats, rule: Rule, longest: float = math.inf) -> Run:
        """A list schedule; of equal priorities, the first in the known order goes first.

        Args:
            longest: milliseconds above which the caller has no use for it; it is left early.
        """
        longest *= 1 + _ROUNDING
        known = self.limits.order
        by_priority = known[np.argsort(priorities[known], kind="stable")]
        rank = positions(by_priority)
        return self._machine.list_schedule(self.graph, self.limits, priorities, by_priority, rank, rule, longest)

    def backward(self, last: Floats) -> Floats:
        """Priorities: begin times of a schedule made from the end backward, nodes with the largest `last` first.

        "Justification": K. Y. Li and R. J. Willis, "An iterative scheduling technique for resource-constrained project
        scheduling", European Journal of Operational Research 56, 1992. Each stream runs one node at a time there, so
        one that is the bottleneck gets times that leave space for all its work.
        """
        known = self.limits.order[::-1]
        by_priority = known[np.argsort(-last[known], kind="stable")]
        rank, rule = positions(by_priority), Rule(memory=FREELY)
        found = self._machine.list_schedule(self._back, self.limits, -last, by_priority, rank, rule, math.inf)
        return found.makespan - found.end

    def settled(self) -> Run:
        """The known order, with every start as early and every wait as late as dependencies and limits allow.

        Compute keeps its order, and so does every stream. The new order takes no longer than the old one at any costs:
        if a collective takes longer than estimated, or compute before it, more time is left until its first reader.
        """
        return self._machine.replay(self.graph, self.limits, self._machine.settle(self.graph, self.limits), 1.0)


class Timeline(Intervals):
    """When the nodes of a `Dag` run in a given order; `Intervals` lists its attributes.

    >>> from spanwise.overlap.dag import Kind, Node
    >>> start, wait = Node("gather", Kind.START, 4.0, group="dp"), Node("wait", Kind.WAIT, deps=(0,), start=0)
    >>> timeline = simulate(Dag((start, Node("other", Kind.COMPUTE, 3.0), wait)))
    >>> timeline.makespan, timeline.exposed_ms, timeline.counts()
    (4.0, 1.0, {'hidden': 0, 'partly': 1, 'exposed': 0})
    """

    def save_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write Chrome trace events for Perfetto (ui.perfetto.dev); see `explain.trace`."""
        from spanwise.overlap.explain.trace import save_chrome_trace

        save_chrome_trace(path, {"step": self})


def simulate(dag: Dag, order: Sequence[int] | None = None, *, contention: float = 1.0) -> Timeline:
    """Run `dag` in the given order, or in its own.

    Args:
        order: every node once, each after its dependencies; see `Dag.check_order`.
        contention: factor by which compute takes longer while a collective runs, at least 1. It applies for as long as
            any group's stream is known to be busy when the node is issued.

    Raises:
        GraphError: a node of `order` comes before one of its dependencies.
        ValueError: `order` misses a node or repeats one, or `contention` is below 1.

    >>> from spanwise.overlap.dag import Kind, Node
    >>> start, wait = Node("gather", Kind.START, 4.0, group="dp"), Node("wait", Kind.WAIT, deps=(0,), start=0)
    >>> timeline = simulate(Dag((start, Node("other", Kind.COMPUTE, 3.0), wait)))
    >>> timeline.makespan, timeline.exposed
    (4.0, {0: 1.0})
    """
    if not (math.isfinite(contention) and contention >= 1):
        raise ValueError(f"contention must be at least 1, got {contention}")
    if order is not None:
        dag.check_order(order)
    known = np.arange(len(dag)) if order is None else np.array(order, np.int64)
    found = replay(graph_of(dag), limits_of(dag, known, math.inf), known, float(contention))
    return Timeline(dag, found.order, found.begin, found.end, found.issued)
