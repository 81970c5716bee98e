"""Mask area that each rank computes on its own keys.

A row of rank r reads ``F_r(end) - F_r(start)`` keys that r holds, where ``F_r(x)`` is the number of r's tokens before
``x``. Over an even run, whose ends stay the same or grow by one a row, the sum of F has a closed form, because F is
piecewise linear. So the time grows with the number of documents and runs, not of rows.
"""

from __future__ import annotations

import numpy as np

from spanwise.masks.arrays import Bool, Int64
from spanwise.masks.even_runs import EvenRuns


def local_area(rank: Int64, of: EvenRuns, keys: Int64, num_ranks: int) -> Int64:
    """Number of (query, key) pairs of each rank whose key the rank holds.

    Args:
        rank: of the rows of each even run, int64 ``[n]``.
        of: even runs whose rows lie on one rank each.
        keys: int64 ``[m, 3]``: rank, first key and end of each run of keys, sorted by rank, then key.

    Returns:
        int64 ``[num_ranks]``.
    """
    count = _TokensBefore(keys, num_ranks, int(keys[:, 2].max(initial=0)))
    rows = of.stop - of.first
    area = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(area, rank, count.summed(rank, of.end, of.end_step, rows))
    np.subtract.at(area, rank, count.summed(rank, of.start, of.start_step, rows))
    return area


class _TokensBefore:
    """``F_r(x)``, and its sum over ``x`` of an interval, for all ranks."""

    def __init__(self, keys: Int64, num_ranks: int, kv_len: int) -> None:
        # An empty run at 0 for every rank, so that each position has a run at or before it.
        runs = np.concatenate([np.stack([np.arange(num_ranks), *np.zeros((2, num_ranks), np.int64)], axis=1), keys])
        runs = runs[np.lexsort((runs[:, 2], runs[:, 1], runs[:, 0]))]
        self.rank, self.first, stop = runs.T
        self.length = stop - self.first
        self.num_ranks, self.stride = num_ranks, kv_len + 2
        self.key = self.rank * self.stride + self.first
        opens = np.concatenate([[True], self.rank[1:] != self.rank[:-1]])
        self.before = _restarted_cumsum(self.length, opens)
        # The sum of F over the positions from this run's first to the next run's.
        gap = np.where(np.append(opens[1:], True), 0, np.append(self.first[1:], 0) - self.first)
        self.total = _restarted_cumsum(self.before * gap + _triangle(gap, self.length), opens)

    def summed(self, rank: Int64, edge: Int64, step: Int64, rows: Int64) -> Int64:
        """The sum of F over `rows` positions from `edge` on, which are equal or ascend by one; int64 ``[n]``."""
        grown = self._sum_below(rank, edge + step * rows) - self._sum_below(rank, edge)
        return np.where(step > 0, grown, rows * self._at(rank, edge))

    def _at(self, rank: Int64, x: Int64) -> Int64:
        run = np.searchsorted(self.key, rank * self.stride + x, side="right") - 1
        return self.before[run] + np.minimum(x - self.first[run], self.length[run])

    def _sum_below(self, rank: Int64, x: Int64) -> Int64:
        """The sum of F over ``[0, x)``."""
        run = np.searchsorted(self.key, rank * self.stride + x, side="right") - 1
        steps = x - self.first[run]
        return self.total[run] + self.before[run] * steps + _triangle(steps, self.length[run])


def _triangle(steps: Int64, length: Int64) -> Int64:
    """The sum of ``min(u, length)`` over ``u`` in ``[0, steps)``."""
    inside = np.minimum(steps, length)
    return inside * (inside - 1) // 2 + (steps - inside) * length


def _restarted_cumsum(values: Int64, opens: Bool) -> Int64:
    """Sum of the values before each one, restarted where ``opens`` is true."""
    before = np.cumsum(values) - values
    return before - np.repeat(before[opens], np.diff(np.append(np.flatnonzero(opens), len(values))))
