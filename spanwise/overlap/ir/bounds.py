"""Lower bounds on the makespan of a `Dag`: no order of its nodes is shorter. Memory is ignored.

Each stream runs one job at a time. With heads and tails (`critical_path`), its jobs are a problem of one machine. The
preemptive relaxation is solved by always running the job with the longest tail (J. R. Jackson; see J. Carlier, "The
one-machine sequencing problem", European Journal of Operational Research 11, 1982).
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np
from numpy.typing import NDArray

from spanwise.overlap.ir.critical_path import compute_around, heads, tails
from spanwise.overlap.ir.dag import Dag, Kind


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Milliseconds that every order takes at least.

    Attributes:
        compute: all work of the compute stream.
        path: the longest path through collectives, with all compute that lies between two of them.
        streams: of each stream ("compute", and each group), its work with the work that must come before and after.

    >>> Bounds(compute=5.0, path=3.0, streams={"compute": 5.0, "dp": 6.5}).makespan
    6.5
    """

    compute: float
    path: float
    streams: dict[str, float]

    @property
    def makespan(self) -> float:
        """The largest bound."""
        return max(self.compute, self.path, *self.streams.values())


def lower_bounds(dag: Dag) -> Bounds:
    """Bounds for every order of `dag` without contention.

    >>> from spanwise.overlap.ir.dag import Node
    >>> start, wait = Node("gather", Kind.START, 4.0, group="dp"), Node("wait", Kind.WAIT, deps=(0,), start=0)
    >>> lower_bounds(Dag((start, wait, Node("reader", Kind.COMPUTE, 2.0, (1,))))).makespan
    6.0
    """
    around = compute_around(dag)
    first, (rest, last) = heads(dag, around), tails(dag, around)
    path = float((first + rest).max(initial=0.0))
    streams = {"compute": _one_machine(dag.ms, first, last, np.flatnonzero(dag.kinds == Kind.COMPUTE))}
    for group in dag.groups:
        jobs = np.array([i for i in dag.starts if dag.nodes[i].group == group])
        streams[group] = _one_machine(dag.ms, first, last, jobs)
    return Bounds(dag.compute_ms, path, streams)


def _one_machine(
    ms: NDArray[np.float64], heads: NDArray[np.float64], tails: NDArray[np.float64], jobs: NDArray[np.int64]
) -> float:
    """Makespan of Jackson's preemptive schedule of `jobs`: a lower bound on one machine with heads and tails."""
    jobs = jobs[np.argsort(heads[jobs], kind="stable")]
    # By the order of their heads; looked up one by one, lists are quicker than arrays.
    order, begins = jobs.tolist(), heads[jobs].tolist()
    left = list(zip((-tails[jobs]).tolist(), order, ms[jobs].tolist(), strict=True))
    ready: list[tuple[float, int, float]] = []  # (-tail, job, milliseconds left)
    now = best = 0.0
    at = 0
    while at < len(order) or ready:
        if not ready:
            now = max(now, begins[at])
        while at < len(order) and begins[at] <= now:
            heapq.heappush(ready, left[at])
            at += 1
        tail, job, remains = heapq.heappop(ready)
        until = begins[at] if at < len(order) else np.inf
        if now + remains <= until:
            now += remains
            best = max(best, now - tail)
        else:
            heapq.heappush(ready, (tail, job, remains - (until - now)))
            now = until
    return best
