"""Lower bounds on the makespan of a `Dag`: what no order of its nodes can beat, memory aside.

Each stream runs one thing at a time. A node has a head, before which it cannot begin, and a tail, for which work
remains after it has ended; what a stream has to run is then a problem of one machine with heads and tails, whose
preemptive relaxation is solved by always running what has the longest tail (J. R. Jackson; see J. Carlier, "The
one-machine sequencing problem", European Journal of Operational Research 11, 1982). Heads and tails are longest paths,
made longer where all compute on whose results a collective depends has to pass through the one compute stream, too.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np
from numpy.typing import NDArray

from spanwise.overlap.dag import Dag, Kind

_START = int(Kind.START)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Milliseconds that any order takes at least.

    Attributes:
        compute: all work of the compute stream.
        path: the longest path of dependencies, collectives included.
        streams: by stream ("compute", and each group), its work with what must come before and after it.
    """

    compute: float
    path: float
    streams: dict[str, float]

    @property
    def makespan(self) -> float:
        """The largest of them."""
        return max(self.compute, self.path, *self.streams.values())


def lower_bounds(dag: Dag) -> Bounds:
    """Bounds for every order of `dag` without contention."""
    heads, (rest, _) = _heads(dag), _rest(dag)
    path = float((heads + rest).max(initial=0.0))
    before, after = _compute_around(dag)
    heads, (_, tails) = _heads(dag, before), _rest(dag, after)
    streams = {"compute": _one_machine(dag.ms, heads, tails, np.flatnonzero(dag.kinds == Kind.COMPUTE))}
    for group in dag.groups:
        of_group = np.array([i for i in dag.starts if dag.nodes[i].group == group])
        streams[group] = _one_machine(dag.ms, heads, tails, of_group)
    return Bounds(dag.compute_ms, path, streams)


def remaining(dag: Dag) -> list[float]:
    """The longest path from when each node is issued to the end of all, milliseconds; a priority for schedules."""
    return _rest(dag)[0].tolist()


def needed_at(dag: Dag) -> list[float]:
    """When each node has to be issued so that what depends on it can be as early as it can, milliseconds.

    With streams that run everything at once. What is ready long before anybody needs it, as a cast of a weight is, is
    needed late; what nobody needs, at once.
    """
    heads, ms = _heads(dag).tolist(), dag.ms.tolist()
    found = [0.0] * len(dag)
    for i in range(len(dag) - 1, -1, -1):
        users = dag.users[i]
        found[i] = max(heads[i], min(found[u] for u in users) - ms[i]) if users else heads[i]
    return found


def _heads(dag: Dag, least: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Until when no node can be issued, of starts `least` milliseconds; float64 ``[n]``."""
    heads = np.zeros(len(dag))
    if least is not None:
        heads[list(dag.starts)] = least
    found, kinds, ms = heads.tolist(), dag.kinds.tolist(), dag.ms.tolist()
    for i, node in enumerate(dag.nodes):
        for dep in node.deps:
            # Whoever depends on a start may go on when it is issued; its wait alone, when the collective has ended.
            runs = kinds[dep] != _START or dep == node.start
            found[i] = max(found[i], found[dep] + (ms[dep] if runs else 0.0))
    return np.array(found)


def _rest(dag: Dag, least: NDArray[np.float64] | None = None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How long it takes at least to the end of all, from when a node is issued, and from when it has ended.

    Args:
        least: of each start, from the end of its collective.

    Returns:
        rest, tails: float64 ``[n]`` each.
    """
    given = np.zeros(len(dag))
    if least is not None:
        given[list(dag.starts)] = least
    rest, tails, kinds, ms = [0.0] * len(dag), given.tolist(), dag.kinds.tolist(), dag.ms.tolist()
    for i in range(len(dag) - 1, -1, -1):
        rest[i] = max(rest[i], ms[i] + tails[i])
        node = dag.nodes[i]
        for dep in node.deps:
            of = tails if kinds[dep] != _START or dep == node.start else rest
            of[dep] = max(of[dep], rest[i])
    return np.array(rest), np.array(tails)


def _compute_around(dag: Dag) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """All compute that must run before each start, and after its wait; float64 ``[starts]`` each.

    By sets of bits, a block of starts at a time: linear in dependencies for each block of 64.
    """
    before, after = np.zeros((2, len(dag.starts)))
    work = np.where(dag.kinds == Kind.COMPUTE, dag.ms, 0.0)
    waits = {node.start: i for i, node in enumerate(dag.nodes) if node.kind == Kind.WAIT}
    words = -(-len(dag.starts) // 64)
    reached_by, leads_to = np.zeros((2, len(dag), words), np.uint64)
    for number, start in enumerate(dag.starts):
        bit = np.uint64(1) << np.uint64(number % 64)
        leads_to[start, number // 64] |= bit
        if start in waits:
            reached_by[waits[start], number // 64] |= bit
    for i, node in enumerate(dag.nodes):  # what a wait reaches
        for dep in node.deps:
            reached_by[i] |= reached_by[dep]
    for i in range(len(dag) - 1, -1, -1):  # what leads to a start
        for dep in dag.nodes[i].deps:
            leads_to[dep] |= leads_to[i]
    busy = np.flatnonzero(work)
    for sets, total in ((leads_to, before), (reached_by, after)):
        for word in range(words):
            column = np.ascontiguousarray(sets[busy, word], "<u8").view(np.uint8).reshape(-1, 8)
            bits = np.unpackbits(column, axis=1, bitorder="little")
            total[word * 64 : word * 64 + 64] = (work[busy] @ bits)[: len(total) - word * 64]
    return before, after


def _one_machine(
    ms: NDArray[np.float64], heads: NDArray[np.float64], tails: NDArray[np.float64], jobs: NDArray[np.int64]
) -> float:
    """Jackson's preemptive schedule of `jobs`: the least makespan of one machine with heads and tails."""
    order = jobs[np.argsort(heads[jobs], kind="stable")].tolist()
    ready: list[tuple[float, int, float]] = []  # (-tail, job, what remains of it)
    now = best = 0.0
    at = 0
    while at < len(order) or ready:
        if not ready:
            now = max(now, float(heads[order[at]]))
        while at < len(order) and heads[order[at]] <= now:
            heapq.heappush(ready, (-float(tails[order[at]]), order[at], float(ms[order[at]])))
            at += 1
        tail, job, remains = heapq.heappop(ready)
        until = float(heads[order[at]]) if at < len(order) else np.inf
        if now + remains <= until:
            now += remains
            best = max(best, now - tail)
        else:
            heapq.heappush(ready, (tail, job, remains - (until - now)))
            now = until
    return best
