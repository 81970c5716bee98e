"""Lower bounds on the makespan of a `Dag`: what no order of its nodes can beat, memory aside.

Each stream runs one thing at a time. A node has a head, before which it cannot begin, and a tail, for which work
remains after it has ended; what a stream has to run is then a problem of one machine with heads and tails, whose
preemptive relaxation is solved by always running what has the longest tail (J. R. Jackson; see J. Carlier, "The
one-machine sequencing problem", European Journal of Operational Research 11, 1982). Heads and tails are longest paths,
but compute that has to run before a collective, after it, or between two of them passes through the one compute stream,
and counts with all of its milliseconds, not those of the longest path alone.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np
from numpy.typing import NDArray

from spanwise.overlap.ir.dag import Dag, Kind

_START = int(Kind.START)
_BLOCK = 64  # collectives whose bits make a word
_BACK = 2  # blocks of earlier collectives that are looked at together with those of a block


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Milliseconds that any order takes at least.

    Attributes:
        compute: all work of the compute stream.
        path: the longest path through collectives, with all compute that lies between two of them.
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
    around = _compute_around(dag)
    heads, (rest, tails) = _heads(dag, around), _rest(dag, around)
    path = float((heads + rest).max(initial=0.0))
    streams = {"compute": _one_machine(dag.ms, heads, tails, np.flatnonzero(dag.kinds == Kind.COMPUTE))}
    for group in dag.groups:
        of_group = np.array([i for i in dag.starts if dag.nodes[i].group == group])
        streams[group] = _one_machine(dag.ms, heads, tails, of_group)
    return Bounds(dag.compute_ms, path, streams)


def heads_and_rest(dag: Dag) -> tuple[list[float], list[float]]:
    """The longest paths to where each node is issued, and from there to the end of all; milliseconds by node."""
    return _heads(dag).tolist(), _rest(dag)[0].tolist()


@dataclasses.dataclass(frozen=True)
class _Around:
    """Compute around the collectives, by their numbers among `Dag.starts`.

    Attributes:
        before, after: all compute on which a start depends, and all that depends on its wait; float64 ``[starts]``.
        earlier: of each start, collectives whose wait it depends on, ascending; some of them.
        between: the compute that depends on those waits and on which the start depends; beside `earlier`.
    """

    before: NDArray[np.float64]
    after: NDArray[np.float64]
    earlier: list[NDArray[np.int64]]
    between: list[NDArray[np.float64]]


def _heads(dag: Dag, around: _Around | None = None) -> NDArray[np.float64]:
    """Until when no node can be issued, by dependencies alone or with what is known `around`; float64 ``[n]``."""
    found, kinds, ms = [0.0] * len(dag), dag.kinds.tolist(), dag.ms.tolist()
    ended, number = np.zeros(len(dag.starts)), 0
    for i, node in enumerate(dag.nodes):
        if around is not None and kinds[i] == _START:
            earlier, between = around.earlier[number], around.between[number]
            found[i] = max(around.before[number], float((ended[earlier] + between).max(initial=0.0)))
        for dep in node.deps:
            # Whoever depends on a start may go on when it is issued; its wait alone, when the collective has ended.
            runs = kinds[dep] != _START or dep == node.start
            found[i] = max(found[i], found[dep] + (ms[dep] if runs else 0.0))
        if kinds[i] == _START:
            ended[number] = found[i] + ms[i]
            number += 1
    return np.array(found)


def _rest(dag: Dag, around: _Around | None = None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How long it takes at least to the end of all, from when a node is issued, and from when it has ended.

    Returns:
        rest, tails: float64 ``[n]`` each.
    """
    rest, tails, kinds, ms = [0.0] * len(dag), [0.0] * len(dag), dag.kinds.tolist(), dag.ms.tolist()
    after = np.zeros(len(dag.starts)) if around is None else around.after.copy()
    number = len(dag.starts)
    for i in range(len(dag) - 1, -1, -1):
        if kinds[i] == _START:
            number -= 1
            tails[i] = max(tails[i], float(after[number]))
        rest[i] = max(rest[i], ms[i] + tails[i])
        if around is not None and kinds[i] == _START:
            earlier = around.earlier[number]
            after[earlier] = np.maximum(after[earlier], around.between[number] + rest[i])
        node = dag.nodes[i]
        for dep in node.deps:
            of = tails if kinds[dep] != _START or dep == node.start else rest
            of[dep] = max(of[dep], rest[i])
    return np.array(rest), np.array(tails)


def _compute_around(dag: Dag) -> _Around:
    """By sets of bits, one for each collective: linear in dependencies for each block of 64."""
    starts = np.array(dag.starts, np.int64)
    work = np.where(dag.kinds == Kind.COMPUTE, dag.ms, 0.0)
    waits = {node.start: i for i, node in enumerate(dag.nodes) if node.kind == Kind.WAIT}
    words = -(-len(starts) // _BLOCK)
    reached_by, leads_to = np.zeros((2, len(dag), words), np.uint64)
    for number, start in enumerate(dag.starts):
        bit = np.uint64(1) << np.uint64(number % _BLOCK)
        leads_to[start, number // _BLOCK] |= bit
        if start in waits:
            reached_by[waits[start], number // _BLOCK] |= bit
    for i, node in enumerate(dag.nodes):  # what a wait reaches
        for dep in node.deps:
            reached_by[i] |= reached_by[dep]
    for i in range(len(dag) - 1, -1, -1):  # what leads to a start
        for dep in dag.nodes[i].deps:
            leads_to[dep] |= leads_to[i]
    busy = np.flatnonzero(work)

    def bits(sets: NDArray[np.uint64], rows: NDArray[np.int64], word: int) -> NDArray[np.float64]:
        column = np.ascontiguousarray(sets[rows, word], "<u8").view(np.uint8).reshape(-1, 8)
        count = min(_BLOCK, len(starts) - word * _BLOCK)
        return np.unpackbits(column, axis=1, bitorder="little")[:, :count].astype(np.float64)

    before, after = (
        np.concatenate(
            [_product(work[busy, None], bits(sets, busy, word))[0] for word in range(words)] or [np.zeros(0)]
        )
        for sets in (leads_to, reached_by)
    )
    earlier: list[list[NDArray[np.int64]]] = [[] for _ in starts]
    between: list[list[NDArray[np.float64]]] = [[] for _ in starts]
    for word in range(words):
        first = word * _BLOCK
        of_word = starts[first : first + _BLOCK]
        for back in range(max(0, word - _BACK), word + 1):
            # What lies between a wait and a later start has its number between theirs.
            rows = busy[(busy > starts[back * _BLOCK]) & (busy < of_word[-1])]
            after_wait = bits(reached_by, rows, back)
            gaps = _product(after_wait * work[rows, None], bits(leads_to, rows, word))
            reached = bits(reached_by, of_word, back)
            for column in range(len(of_word)):
                numbers = np.flatnonzero(reached[column])
                earlier[first + column].append(back * _BLOCK + numbers)
                between[first + column].append(gaps[numbers, column])
    none = np.zeros(0, np.int64)
    return _Around(
        before,
        after,
        [np.concatenate(parts or [none]) for parts in earlier],
        [np.concatenate(parts or [np.zeros(0)]) for parts in between],
    )


def _product(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """``left.T @ right``, in pieces so small that no BLAS spreads them over threads: starting these takes longer."""
    found = np.zeros((left.shape[1], right.shape[1]))
    for first in range(0, len(left), _BLOCK):
        found += left[first : first + _BLOCK].T @ right[first : first + _BLOCK]
    return found


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
