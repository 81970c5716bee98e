"""An order of a `Dag` that takes less memory than the graph's own: for budgets that the own order exceeds.

    dag, budget ─► lean ─► a known order, as which `schedule` goes on

Orders with ever lower peaks, each the way out for those that are made next. To find the least is NP-hard (R. Sethi,
"Complete register allocation problems", SIAM Journal on Computing 4, 1975), and not claimed. Pure and deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from spanwise.overlap.ir.dag import Dag, Kind
from spanwise.overlap.ir.memory import Guard
from spanwise.overlap.search.list_scheduler import forward, sunk
from spanwise.overlap.search.priorities import Problem, paced

_LEADS = (0.0, 1 / 64, 1 / 16, math.inf)  # of due dates that keep to the known order, shares of the longest path


def within(dag: Dag, budget: int) -> list[int]:
    """An order whose peak is `budget` bytes at most: the graph's own, or one that is found.

    Raises:
        ValueError: none was found; names the least peak that was.
    """
    order = list(range(len(dag)))
    peak = dag.peak_bytes()
    while peak > budget:
        best = min(_tried(dag, order, peak), key=dag.peak_bytes)
        lower = dag.peak_bytes(best)
        if lower >= peak:
            raise ValueError(
                f"no order was found that takes {budget:,} bytes at its peak: the graph's own takes "
                f"{dag.peak_bytes():,}, the least that was found {peak:,}; allow as many"
            )
        order, peak = best, lower
    return order


def _tried(dag: Dag, order: Sequence[int], peak: int) -> Iterator[list[int]]:
    """Orders whose peaks are no higher, or that come of those by doing everything as late as it is needed."""
    problem = Problem(dag, order, [Guard(dag, peak, order=order)])
    found = [list(order)]
    for lead in _LEADS:
        for ahead in (0.0, 1 / 64):
            found.append(forward(problem, paced(problem, lead * problem.longest), ahead * problem.longest).order)
    for one in found:
        yield one
        for late in _late(dag, one):
            yield sunk(problem, one, late)


def _late(dag: Dag, order: Sequence[int]) -> Iterator[list[bool]]:
    """Of each node, whether it is compute that takes memory; and whether it takes more than is free after it."""
    place = [0] * len(dag)
    for at, i in enumerate(order):
        place[i] = at
    taken, freed = [0] * len(dag), [0] * len(dag)
    for storage in dag.storages:
        taken[storage.maker] += storage.num_bytes
        if not storage.kept:
            freed[max((storage.maker, *storage.users), key=place.__getitem__)] += storage.num_bytes
    compute = [node.kind == Kind.COMPUTE for node in dag.nodes]
    yield [is_compute and new > 0 for is_compute, new in zip(compute, taken, strict=True)]
    yield [is_compute and new > old for is_compute, new, old in zip(compute, taken, freed, strict=True)]
