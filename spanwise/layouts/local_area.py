"""Mask area that each rank computes on its own keys.

A row of rank r reads ``F_r(end) - F_r(start)`` keys that r holds, where ``F_r(x)`` is the number of r's tokens before
``x``. From row to row the ends of spans mostly stay the same or grow by one. Over such a segment the sum of F has a
closed form, because F is piecewise linear. So the time grows with the number of documents and runs, not of rows.
"""

from __future__ import annotations

import numpy as np

from spanwise.masks.arrays import Bool, Int32, Int64


def local_area(start: Int32, end: Int32, rows: Int64, keys: Int64, num_ranks: int) -> Int64:
    """Number of (query, key) pairs of each rank whose key the rank holds.

    Args:
        start, end: spans ``[num_spans, q_len]``.
        rows: int64 ``[n, 3]``: rank, first row and end of each run of query rows, sorted by rank, then row; they tile
            ``[0, q_len)``.
        keys: the same for keys; ``rows`` itself in self-attention.

    Returns:
        int64 ``[num_ranks]``.
    """
    count = _TokensBefore(keys, num_ranks, int(keys[:, 2].max(initial=0)))
    in_order = rows[np.argsort(rows[:, 1], kind="stable")]
    area = np.zeros(num_ranks, dtype=np.int64)
    for low, high in zip(start, end, strict=True):
        if not (low < high).any():
            continue
        for edge, sign in ((high, 1), (low, -1)):  # the two edges of an empty span cancel
            area += sign * count.summed(edge, in_order)
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

    def summed(self, edge: Int32, in_order: Int64) -> Int64:
        """For each rank the sum of F at ``edge[row]`` over its rows, int64 ``[num_ranks]``."""
        step = np.diff(edge)
        opens = np.ones(len(edge), dtype=bool)
        # A segment goes on while the step stays the same, 0 or 1, and the rank stays the same.
        opens[1:] = (step < 0) | (step > 1)
        opens[2:] |= step[1:] != step[:-1]
        opens[in_order[:, 1][in_order[:, 1] < in_order[:, 2]]] = True
        begin = np.flatnonzero(opens)
        stop = np.append(begin[1:], len(edge))
        owner = in_order[np.searchsorted(in_order[:, 1], begin, side="right") - 1, 0]
        low, high = edge[begin].astype(np.int64), edge[stop - 1].astype(np.int64)
        grows = high > low
        value = np.where(
            grows, self._sum_below(owner, high + 1) - self._sum_below(owner, low), (stop - begin) * self._at(owner, low)
        )
        total = np.zeros(self.num_ranks, dtype=np.int64)
        np.add.at(total, owner, value)
        return total

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
