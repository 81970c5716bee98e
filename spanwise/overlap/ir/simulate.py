"""Timeline of a `Dag` in a given order: when each node runs, and how long compute waits for each collective.

A discrete-event simulation of the model in `dag`, linear in nodes and dependencies.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence

import numpy as np

from spanwise.overlap.ir.dag import Dag, Kind
from spanwise.overlap.ir.timeline import Intervals


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline(Intervals):
    """When the nodes of a `Dag` run in a given order; `Intervals` lists its attributes.

    >>> from spanwise.overlap.ir.dag import Node
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

    >>> from spanwise.overlap.ir.dag import Node
    >>> start, wait = Node("gather", Kind.START, 4.0, group="dp"), Node("wait", Kind.WAIT, deps=(0,), start=0)
    >>> timeline = simulate(Dag((start, Node("other", Kind.COMPUTE, 3.0), wait)))
    >>> timeline.makespan, timeline.exposed
    (4.0, {0: 1.0})
    """
    if not (math.isfinite(contention) and contention >= 1):
        raise ValueError(f"contention must be at least 1, got {contention}")
    if order is not None:
        dag.check_order(order)
    nodes = list(range(len(dag)) if order is None else map(int, order))
    begin, end, issued = ([0.0] * len(dag) for _ in range(3))
    now = 0.0
    free = dict.fromkeys(dag.groups, 0.0)
    for i in nodes:
        node = dag.nodes[i]
        issued[i] = begin[i] = now
        if node.kind == Kind.START:
            begin[i] = max(now, free[node.group])
            end[i] = free[node.group] = begin[i] + node.ms
            continue
        if node.kind == Kind.WAIT:
            now = max(now, end[node.start])
        elif contention == 1.0:
            now += node.ms
        else:
            now += _stretched(node.ms, max(free.values(), default=0.0) - now, contention)
        end[i] = now
    return Timeline(dag, np.array(nodes, np.int64), *map(np.array, (begin, end, issued)))


def _stretched(ms: float, busy: float, contention: float) -> float:
    """Milliseconds that `ms` of compute take if streams are busy for the first `busy` of them."""
    if busy <= 0:
        return ms
    return ms * contention if ms * contention <= busy else busy + ms - busy / contention
