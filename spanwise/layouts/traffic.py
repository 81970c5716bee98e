"""Exact work and needs of the ranks under a layout. Pure arrays.

The ranks of the layouts here are *groups*. A group is a single rank, or the ranks that trade heads among themselves
(Ulysses) and so read K/V as one.
"""

# G groups

from __future__ import annotations

import functools

import numpy as np

from spanwise.layouts.layout import Layout
from spanwise.layouts.runs import subtract_runs
from spanwise.masks import even_runs
from spanwise.masks.arrays import Bool, Int64
from spanwise.masks.span_mask import SpanMask

Needs = list[list[Int64]]  # for each batch row and group: runs of keys, [n, 2]


def num_rows(mask: SpanMask, layout: Layout) -> int:
    """Batch rows that differ in mask or layout; a single row serves all."""
    return max(mask.batch_size, layout.batch_size)


class Readings:
    """What one mask makes the groups compute and read; each figure is found when first asked for.

    Args:
        layout, kv_layout: the queries and the keys that each group holds.
        batch_size: a multiple of the batch rows that differ in mask or layout.
    """

    def __init__(self, mask: SpanMask, layout: Layout, kv_layout: Layout, batch_size: int) -> None:
        self.mask, self.layout, self.kv_layout = mask, layout, kv_layout
        self.rows = num_rows(mask, layout)
        self.repeats = batch_size // self.rows  # batch rows that each of these serves

    @functools.cached_property
    def area(self) -> Int64:
        """(query, key) pairs of each group, summed over batch rows; int64 ``[G]``."""
        total = np.zeros(self.layout.num_ranks, np.int64)
        for row in range(self.rows):
            group, of = _cut(self.mask, self.layout, row)
            np.add.at(total, group, of.pairs)
        return _frozen(total * self.repeats)

    @functools.cached_property
    def local_area(self) -> Int64:
        """(query, key) pairs of `area` whose keys the group holds; int64 ``[G]``."""
        if self.layout.num_ranks == 1:
            return self.area  # quicker
        total = np.zeros(self.layout.num_ranks, np.int64)
        for row in range(self.rows):
            keys = self.kv_layout.pieces(row)
            total += _pairs_inside(*_cut(self.mask, self.layout, row), keys, self.layout.num_ranks)
        return _frozen(total * self.repeats)

    @functools.cached_property
    def needs(self) -> Needs:
        """K/V runs that each group reads and does not hold, ascending, for each batch row that differs."""
        return needs(self.mask, self.layout, self.kv_layout)

    @functools.cached_property
    def pairs(self) -> Int64:
        """Tokens of `needs` by pair of groups; int64 ``[G receivers, G senders]``."""
        total = np.zeros((self.kv_layout.num_ranks, self.kv_layout.num_ranks), np.int64)
        for row, runs_of in enumerate(self.needs):
            reader = np.repeat(np.arange(len(runs_of)), [len(runs) for runs in runs_of])
            run, owner, both = self.kv_layout.owners_of(np.concatenate(runs_of), row)
            add_pairs(total, reader[run], owner, both[:, 1] - both[:, 0])
        return total


def _frozen(array: Int64) -> Int64:
    array.setflags(write=False)
    return array


def add_pairs(table: Int64, receiver: Int64, sender: Int64, tokens: Int64) -> None:
    """Adds the tokens of moves to a table ``[receivers, senders]``."""
    np.add.at(table.reshape(-1), receiver * len(table) + sender, tokens)


def pairs_over(mask: SpanMask, layout: Layout, keys: list[Int64], batch_size: int) -> Int64:
    """(query, key) pairs of each group over keys that came to it, int64 ``[G]``.

    Args:
        keys: for each batch row, or for all, int64 ``[m, 3]``: group, start, stop; the runs of a group are disjoint.
    """
    total, end = np.zeros(layout.num_ranks, np.int64), [[0, mask.kv_len, mask.kv_len]]
    for row in range(batch_size):
        here = np.concatenate([keys[row if len(keys) > 1 else 0], end])
        total += _pairs_inside(*_cut(mask, layout, row), here[np.lexsort(here.T[::-1])], layout.num_ranks)
    return total


def needs(mask: SpanMask, layout: Layout, kv_layout: Layout) -> Needs:
    """K/V runs that each group reads and does not hold, ascending, for each batch row; see `num_rows`."""
    rows = range(num_rows(mask, layout))
    if layout.num_ranks == 1:
        return [[np.empty((0, 2), np.int64)] for _ in rows]
    found, stride = [], kv_layout.seq_len + 1  # all groups on one line: one merge and one difference serve them
    for row in rows:
        pieces, keys = layout.pieces(row), kv_layout.pieces(row)
        read = even_runs.keys_read(mask.even_runs(row), pieces[:, 1:], pieces[:, 0], stride)
        missing = subtract_runs(read, keys[:, 1:] + keys[:, :1] * stride)
        found.append(even_runs.by_owner(missing, layout.num_ranks, stride))
    return found


def _cut(mask: SpanMask, layout: Layout, row: int) -> tuple[Int64, even_runs.EvenRuns]:
    """The group and the rows of each even run of a batch row, cut where groups change."""
    pieces = layout.pieces(row)
    run, of = even_runs.cut(mask.even_runs(row), pieces[:, 1:])
    return pieces[run, 0], of


def _pairs_inside(group: Int64, of: even_runs.EvenRuns, keys: Int64, num_groups: int) -> Int64:
    """(query, key) pairs of each group over the keys that it holds, int64 ``[G]``.

    A row of group r reads ``F_r(end) - F_r(start)`` keys that r holds, where ``F_r(x)`` is the number of r's tokens
    before ``x``. Over an even run, whose ends stay or grow by one a row, the sum of F has a closed form, because
    F is piecewise linear. So the time grows with the number of documents and runs, not of rows.

    Args:
        group: of the rows of each even run, int64 ``[n]``.
        of: even runs whose rows lie on one group each.
        keys: int64 ``[m, 3]``: group, first key and end of each run of keys, sorted by group, then key.
    """
    count = _TokensBefore(keys, num_groups, int(keys[:, 2].max(initial=0)))
    rows = of.stop - of.first
    area = np.zeros(num_groups, dtype=np.int64)
    np.add.at(area, group, count.summed(group, of.end, of.end_step, rows))
    np.subtract.at(area, group, count.summed(group, of.start, of.start_step, rows))
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
