"""Timeline of a `Dag` in a given order: when each node runs, and how long each collective keeps compute waiting.

A discrete-event simulation of what `dag` describes, linear in nodes and dependencies. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spanwise.overlap.ir.dag import Dag, Kind


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """When the nodes of `dag` run if they are issued in `order`.

    Attributes:
        order: nodes as they are issued, int64 ``[n]``.
        begin, end: milliseconds, float64 ``[n]``, by node: of compute on its stream, of a collective (its start) on the
            stream of its group; a wait begins when the compute stream reaches it and ends when it goes on.
        issued: when the compute stream reaches each node, float64 ``[n]``.
    """

    dag: Dag
    order: NDArray[np.int64]
    begin: NDArray[np.float64]
    end: NDArray[np.float64]
    issued: NDArray[np.float64]

    @functools.cached_property
    def makespan(self) -> float:
        """Milliseconds until the last node has ended, collectives that nobody waits for included."""
        return float(self.end.max(initial=0.0))

    @functools.cached_property
    def exposed(self) -> dict[int, float]:
        """Milliseconds for which the compute stream stood still at the wait of each collective, by its start."""
        found = dict.fromkeys(self.dag.starts, 0.0)
        for i, node in enumerate(self.dag.nodes):
            if node.kind == Kind.WAIT:
                found[node.start] = float(self.end[i] - self.begin[i])
        return found

    @functools.cached_property
    def exposed_ms(self) -> float:
        """All that compute waits for collectives."""
        return math.fsum(self.exposed.values())

    @functools.cached_property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return self.dag.peak_bytes(self.order.tolist())

    def save_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write it as Chrome's trace events, to look at in Perfetto; see `trace`."""
        from spanwise.overlap.explain.trace import save_chrome_trace

        save_chrome_trace(path, {"step": self})

    def counts(self) -> dict[str, int]:
        """Collectives that are "hidden" wholly, "partly", or "exposed" for all of their time.

        Those that take no time are hidden.
        """
        found = {"hidden": 0, "partly": 0, "exposed": 0}
        for start, ms in self.exposed.items():
            cost = self.dag.nodes[start].ms
            tiny = 1e-9 * max(1.0, self.makespan)
            found["hidden" if ms <= tiny else "partly" if ms < cost - tiny else "exposed"] += 1
        return found


def simulate(dag: Dag, order: Sequence[int] | None = None, *, contention: float = 1.0) -> Timeline:
    """Run `dag` in the given order, or in its own.

    Args:
        contention: how much longer compute takes while a collective is under way, at least 1. A node of compute is
            stretched over the time in which any stream of a group is busy, as it is known when the node is issued.

    Raises:
        GraphError, ValueError: `order` is no order of these nodes.
    """
    if not (math.isfinite(contention) and contention >= 1):
        raise ValueError(f"contention must be at least 1, got {contention}")
    if order is not None:
        dag.check_order(order)
    places = list(range(len(dag)) if order is None else map(int, order))
    begin, end, issued = ([0.0] * len(dag) for _ in range(3))
    now = 0.0
    free = dict.fromkeys(dag.groups, 0.0)
    for i in places:
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
    return Timeline(dag, np.array(places, np.int64), *map(np.array, (begin, end, issued)))


def _stretched(ms: float, busy: float, contention: float) -> float:
    """How long `ms` of compute take that begin while streams are busy for `busy` more milliseconds."""
    if busy <= 0:
        return ms
    return ms * contention if ms * contention <= busy else busy + ms - busy / contention
