"""Timelines: what users see of an order, made by `scheduler`."""

from __future__ import annotations

import os

from spanwise.overlap.dag import Dag, Order
from spanwise.overlap.scheduler import Engine, Intervals


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


def simulate(dag: Dag, order: Order | None = None) -> Timeline:
    """Run `dag` in the given order, or in its own.

    Args:
        order: every node once, each after its dependencies; see `Dag.check_order`.

    Raises:
        GraphError: a node of `order` comes before one of its dependencies.
        ValueError: `order` misses a node or repeats one.

    >>> from spanwise.overlap.dag import Kind, Node
    >>> start, wait = Node("gather", Kind.START, 4.0, group="dp"), Node("wait", Kind.WAIT, deps=(0,), start=0)
    >>> timeline = simulate(Dag((start, Node("other", Kind.COMPUTE, 3.0), wait)))
    >>> timeline.makespan, timeline.exposed
    (4.0, {0: 1.0})
    """
    if order is not None:
        dag.check_order(order)
    found = Engine(dag, order)
    run = found.replay(found.known.order)
    return Timeline(dag, run.order, run.begin, run.end, run.issued)
