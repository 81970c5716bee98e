"""Lower bounds on the makespan of a `Dag`, and longest paths through it. No order is shorter; memory is ignored.

A node's head is the earliest time at which it can be issued, its tail the least time that the graph needs after it has
ended: longest paths. Compute before a collective, after it, or between two of them passes through one compute stream,
so that `ComputeAround` counts all of its milliseconds, not those of the longest path alone. With heads and tails, the
jobs of a stream are a problem of one machine, whose preemptive relaxation bounds it (J. Carlier, "The one-machine
sequencing problem", European Journal of Operational Research 11, 1982).
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np
from numpy.typing import NDArray

from spanwise.overlap.dag import Dag, Kind, rounding

_START = int(Kind.START)
_BLOCK = 64  # collectives in a block of columns; also rows in a product of matrices
# Blocks of earlier collectives that are combined with each block. With 0, the bounds of backward graphs of 32 layers,
# with 776 collectives, fall by up to 1.3 %.
_BACK = 2


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Milliseconds that every order takes at least.

    Attributes:
        compute: all work of the compute stream.
        path: the longest path through collectives, with all compute that lies between two of them.
        streams: of each stream ("compute", and `Dag.streams`), its work with the work that must come before and after.

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
    """Bounds for every order of `dag`.

    >>> from spanwise.overlap.dag import Node
    >>> start, wait = Node("gather", Kind.START, 4.0, group="dp"), Node("wait", Kind.WAIT, deps=(0,), start=0)
    >>> lower_bounds(Dag((start, wait, Node("reader", Kind.COMPUTE, 2.0, (1,))))).makespan
    6.0
    """
    around = compute_around(dag)
    first, (rest, last) = heads(dag, around), tails(dag, around)
    path = float((first + rest).max(initial=0.0))
    streams = {"compute": _one_machine(dag.ms, first, last, np.flatnonzero(dag.kinds == Kind.COMPUTE))}
    for stream in dag.streams:
        jobs = np.array([i for i in dag.starts if dag.nodes[i].stream == stream])
        streams[stream] = _one_machine(dag.ms, first, last, jobs)
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


@dataclasses.dataclass(frozen=True)
class ComputeAround:
    """Milliseconds of compute around the collectives, which are numbered as in `Dag.starts`.

    Attributes:
        before: all compute that each start depends on; float64 ``[starts]``.
        after: all compute that depends on its wait; float64 ``[starts]``.
        earlier: of each start, some of the collectives whose wait it depends on, ascending.
        between: for each of `earlier`, the compute that depends on that wait and that the start depends on.
    """

    before: NDArray[np.float64]
    after: NDArray[np.float64]
    earlier: list[NDArray[np.int64]]
    between: list[NDArray[np.float64]]


def heads(dag: Dag, around: ComputeAround | None = None) -> NDArray[np.float64]:
    """Earliest time at which each node can be issued, by dependencies and the compute `around`; float64 ``[n]``."""
    found, kinds, ms = [0.0] * len(dag), dag.kinds.tolist(), dag.ms.tolist()
    ended, number = np.zeros(len(dag.starts)), 0
    for i, node in enumerate(dag.nodes):
        if around is not None and kinds[i] == _START:
            earlier, between = around.earlier[number], around.between[number]
            found[i] = max(around.before[number], float((ended[earlier] + between).max(initial=0.0)))
        head = found[i]
        for dep in node.deps:
            # A user of a start may go on when that is issued; only its wait must let the collective end.
            runs = kinds[dep] != _START or dep == node.start
            ready = found[dep] + ms[dep] if runs else found[dep]
            if ready > head:
                head = ready
        found[i] = head
        if kinds[i] == _START:
            ended[number] = head + ms[i]
            number += 1
    return np.array(found)


def tails(dag: Dag, around: ComputeAround | None = None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Least time to the end, by dependencies and the compute `around`, from each node's issue and from its end."""
    issued, ended = [0.0] * len(dag), [0.0] * len(dag)
    kinds, ms = dag.kinds.tolist(), dag.ms.tolist()
    after = np.zeros(len(dag.starts)) if around is None else around.after.copy()
    number = len(dag.starts)
    for i in range(len(dag) - 1, -1, -1):
        if kinds[i] == _START:
            number -= 1
            ended[i] = max(ended[i], float(after[number]))
        tail = issued[i] = max(issued[i], ms[i] + ended[i])
        if around is not None and kinds[i] == _START:
            earlier = around.earlier[number]
            after[earlier] = np.maximum(after[earlier], around.between[number] + tail)
        node = dag.nodes[i]
        for dep in node.deps:
            of = ended if kinds[dep] != _START or dep == node.start else issued
            if of[dep] < tail:
                of[dep] = tail
    return np.array(issued), np.array(ended)


class Reach:
    """Of each node, the collectives that it leads to, and those whose wait it is or follows; in blocks of columns."""

    def __init__(self, dag: Dag) -> None:
        self.starts, self.count = np.array(dag.starts, np.int64), len(dag.starts)
        self.blocks = range(-(-self.count // _BLOCK))
        leads_to, follows = [0] * len(dag), [0] * len(dag)  # bits, by numbers in `Dag.starts`
        for number, start in enumerate(dag.starts):
            leads_to[start] = 1 << number
            if start in dag.wait_of:
                follows[dag.wait_of[start]] = 1 << number
        for i, deps in enumerate(dag.unique_deps):
            for dep in deps:
                follows[i] |= follows[dep]
        for i in range(len(dag) - 1, -1, -1):
            for dep in dag.unique_deps[i]:
                leads_to[dep] |= leads_to[i]
        size = len(self.blocks) * _BLOCK // 8
        self.leads_to, self.follows = (
            np.frombuffer(b"".join(bits.to_bytes(size, "little") for bits in sets), np.uint8).reshape(len(dag), size)
            for sets in (leads_to, follows)
        )

    def has(self, sets: NDArray[np.uint8], number: int) -> NDArray[np.bool_]:
        """The nodes that have this collective in their sets."""
        return sets[:, number // 8] & (1 << number % 8) > 0

    def bits(self, sets: NDArray[np.uint8], rows: NDArray[np.int64], block: int) -> NDArray[np.float64]:
        column = sets[rows, block * _BLOCK // 8 : (block + 1) * _BLOCK // 8]
        count = min(_BLOCK, self.count - block * _BLOCK)
        return np.unpackbits(column, axis=1, bitorder="little")[:, :count].astype(np.float64)

    def sums(self, sets: NDArray[np.uint8], work: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of each collective, the work of the nodes that have it in their sets."""
        busy = np.flatnonzero(work)
        parts = [_product(work[busy, None], self.bits(sets, busy, block))[0] for block in self.blocks]
        return np.concatenate(parts or [np.zeros(0)])

    def independent(self, work: NDArray[np.float64]) -> dict[int, float]:
        """Of each start, the work of the nodes that neither lead to it nor follow its wait; no node does both."""
        total = float(work.sum())
        free = total - self.sums(self.leads_to, work) - self.sums(self.follows, work)
        return dict(zip(self.starts.tolist(), np.where(free > rounding(total), free, 0.0).tolist(), strict=True))


def compute_around(dag: Dag) -> ComputeAround:
    """Milliseconds of compute around all collectives, by blocks of collectives."""
    reach, work = Reach(dag), compute_of(dag)
    starts, busy = reach.starts, np.flatnonzero(work)
    earlier: list[NDArray[np.int64]] = []
    between: list[NDArray[np.float64]] = []
    for block in reach.blocks:
        of_block = starts[block * _BLOCK : (block + 1) * _BLOCK]
        first = max(0, block - _BACK)
        follows, gaps = [], []
        for back in range(first, block + 1):
            # A node between a wait and a later start has its number between theirs.
            rows = busy[(busy > starts[back * _BLOCK]) & (busy < of_block[-1])]
            after_wait = reach.bits(reach.follows, rows, back) * work[rows, None]
            gaps.append(_product(after_wait, reach.bits(reach.leads_to, rows, block)))
            follows.append(reach.bits(reach.follows, of_block, back).T)
        gap = np.concatenate(gaps)
        for column, waits in enumerate(map(np.flatnonzero, np.concatenate(follows).T)):
            earlier.append(first * _BLOCK + waits)
            between.append(gap[waits, column])
    return ComputeAround(reach.sums(reach.leads_to, work), reach.sums(reach.follows, work), earlier, between)


def compute_of(dag: Dag) -> NDArray[np.float64]:
    """Milliseconds on the compute stream by node."""
    return np.where(dag.kinds == Kind.COMPUTE, dag.ms, 0.0)


def _product(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """``left.T @ right`` in pieces so small that no BLAS starts threads for them: starting takes longer."""
    found = np.zeros((left.shape[1], right.shape[1]))
    for first in range(0, len(left), _BLOCK):
        found += left[first : first + _BLOCK].T @ right[first : first + _BLOCK]
    return found
