"""Timelines: when the nodes of a dag run in an order, timed by `scheduler`."""

from __future__ import annotations

import dataclasses
import functools
import math
import os

from spanwise.overlap.dag import Dag, Order, rounding
from spanwise.overlap.scheduler import Floats, Ints, ListScheduler


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """When the nodes of a `Dag` run in a given order; made by `simulate`.

    Attributes:
        order: nodes as they are issued, int64 ``[n]``.
        begin, end: milliseconds by node, float64 ``[n]``. Compute runs on its stream, a collective (its start) on the
            stream of its group. A wait begins when the compute stream reaches it, and ends when that goes on.
        issued: when the compute stream reaches each node, float64 ``[n]``.
    """

    dag: Dag
    order: Ints
    begin: Floats
    end: Floats
    issued: Floats

    @functools.cached_property
    def makespan(self) -> float:
        """Milliseconds until the last node has ended, collectives without a wait included."""
        return float(self.end.max(initial=0.0))

    @functools.cached_property
    def exposed(self) -> dict[int, float]:
        """Milliseconds that the compute stream stood still at each collective's wait, by its start."""
        found = dict.fromkeys(self.dag.starts, 0.0)
        found.update((start, float(self.end[wait] - self.begin[wait])) for start, wait in self.dag.wait_of.items())
        return found

    @functools.cached_property
    def exposed_ms(self) -> float:
        """Milliseconds that compute waits for collectives in all."""
        return math.fsum(self.exposed.values())

    @functools.cached_property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return self.dag.peak_bytes(self.order)

    def counts(self) -> dict[str, int]:
        """Numbers of collectives that are "hidden" (or take no time), "partly" hidden, or "exposed" all the time."""
        found, tiny = {"hidden": 0, "partly": 0, "exposed": 0}, rounding(self.makespan)
        for start, ms in self.exposed.items():
            found["hidden" if ms <= tiny else "partly" if ms < self.dag.nodes[start].ms - tiny else "exposed"] += 1
        return found

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
    >>> timeline.makespan, timeline.exposed, timeline.counts()
    (4.0, {0: 1.0}, {'hidden': 0, 'partly': 1, 'exposed': 0})
    """
    if order is not None:
        dag.check_order(order)
    found = ListScheduler(dag, order)
    run = found.replay(found.known.order)
    return Timeline(dag, run.order, run.begin, run.end, run.issued)
