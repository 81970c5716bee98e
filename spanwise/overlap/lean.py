"""An order of a `Dag` that takes less memory than the graph's own: for budgets that the own order exceeds.

    dag, budget ─► lean ─► a known order, as which `schedule` goes on

Orders with ever lower peaks, each the way out for those that are made next. To find the least is NP-hard (R. Sethi,
"Complete register allocation problems", SIAM Journal on Computing 4, 1975), and not claimed. Pure and deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from spanwise.overlap.dag import Dag
from spanwise.overlap.due import Problem, paced
from spanwise.overlap.listed import forward, sunk
from spanwise.overlap.memory import Guard

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
        if dag.peak_bytes(best) >= peak:
            raise ValueError(
                f"no order was found that takes {budget:,} bytes at its peak: the graph's own takes "
                f"{dag.peak_bytes():,}, the least that was found {peak:,}; allow as many"
            )
        order, peak = best, dag.peak_bytes(best)
    return order


def _tried(dag: Dag, order: Sequence[int], peak: int) -> Iterator[list[int]]:
    """Orders whose peaks are no higher, or that come of those by doing everything as late as it is needed."""
    problem = Problem(dag, order, [Guard(dag, peak, order=order)])
    yield sunk(problem, order, math.inf)
    for lead in _LEADS:
        for ahead in (0.0, 1 / 64):
            found = forward(problem, paced(problem, lead * problem.longest), ahead * problem.longest).order
            yield found
            yield sunk(problem, found, math.inf)
