"""Longest paths through a `Dag`: heads, tails, which collectives a node depends on, and compute between collectives.

A node's head is the earliest time at which it can be issued. Its tail is the time that the graph needs at least after
the node has ended. Both are longest paths (the critical path method, J. E. Kelley and M. R. Walker, 1959). Compute that
must run before a collective, after it, or between two of them passes through one compute stream, so that
`ComputeAround` counts all of its milliseconds, not those of the longest path alone.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from spanwise.overlap.ir.dag import Dag, Kind

_START = int(Kind.START)
# Collectives in a block of columns; also rows in a product of matrices. Compute between collectives of two blocks is
# left out. Counting it changes no `Bounds.makespan` of the zoo, nor of six other graphs with up to 437 collectives.
_BLOCK = 64


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


def waits_before(dag: Dag) -> list[int]:
    """Of each node, the collectives whose wait it is or depends on, as bits by their numbers in `Dag.starts`."""
    bit = {dag.wait_of[start]: 1 << number for number, start in enumerate(dag.starts) if start in dag.wait_of}
    found: list[int] = []
    for i, deps in enumerate(dag.unique_deps):
        bits = bit.get(i, 0)
        for dep in deps:
            bits |= found[dep]
        found.append(bits)
    return found


def starts_after(dag: Dag) -> list[int]:
    """Of each node, the collectives whose start it is or leads to, as bits by their numbers in `Dag.starts`."""
    found = [0] * len(dag)
    for number, start in enumerate(dag.starts):
        found[start] = 1 << number
    for i in range(len(dag) - 1, -1, -1):
        for dep in dag.unique_deps[i]:
            found[dep] |= found[i]
    return found


def compute_around(dag: Dag) -> ComputeAround:
    """Milliseconds of compute around all collectives, by blocks of collectives."""
    starts = np.array(dag.starts, np.int64)
    work = np.where(dag.kinds == Kind.COMPUTE, dag.ms, 0.0)
    busy = np.flatnonzero(work)
    reached_by, leads_to = (_matrix(sets, len(starts)) for sets in (waits_before(dag), starts_after(dag)))

    def bits(sets: NDArray[np.uint8], rows: NDArray[np.int64], block: int) -> NDArray[np.float64]:
        column = sets[rows, block * _BLOCK // 8 : (block + 1) * _BLOCK // 8]
        count = min(_BLOCK, len(starts) - block * _BLOCK)
        return np.unpackbits(column, axis=1, bitorder="little")[:, :count].astype(np.float64)

    blocks = range(-(-len(starts) // _BLOCK))
    before, after = (
        np.concatenate([_product(work[busy, None], bits(sets, busy, block))[0] for block in blocks] or [np.zeros(0)])
        for sets in (leads_to, reached_by)
    )
    earlier: list[NDArray[np.int64]] = []
    between: list[NDArray[np.float64]] = []
    for block in blocks:
        of_block = starts[block * _BLOCK : (block + 1) * _BLOCK]
        # A node between a wait and a later start has its number between theirs.
        rows = busy[(busy > of_block[0]) & (busy < of_block[-1])]
        gap = _product(bits(reached_by, rows, block) * work[rows, None], bits(leads_to, rows, block))
        for column, waits in enumerate(map(np.flatnonzero, bits(reached_by, of_block, block))):
            earlier.append(block * _BLOCK + waits)
            between.append(gap[waits, column])
    return ComputeAround(before, after, earlier, between)


def _matrix(sets: list[int], count: int) -> NDArray[np.uint8]:
    """Sets of up to `count` bits as rows of bytes, whole blocks of them."""
    size = -(-count // _BLOCK) * _BLOCK // 8
    packed = b"".join(bits.to_bytes(size, "little") for bits in sets)
    return np.frombuffer(packed, np.uint8).reshape(len(sets), size)


def _product(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """``left.T @ right`` in pieces so small that no BLAS starts threads for them: starting takes longer."""
    found = np.zeros((left.shape[1], right.shape[1]))
    for first in range(0, len(left), _BLOCK):
        found += left[first : first + _BLOCK].T @ right[first : first + _BLOCK]
    return found
