"""Exact work, needs and traffic of the ranks under a layout. Pure arrays.

The ranks of the layouts here are *groups*. A group is a single rank, or the ranks that trade heads among themselves
(Ulysses) and so read K/V as one.
"""

# G groups

from __future__ import annotations

import numpy as np

from spanwise.layouts import local_area as _local_area
from spanwise.layouts.layout import Layout
from spanwise.layouts.runs import subtract_runs
from spanwise.masks import even_runs
from spanwise.masks.arrays import Int64
from spanwise.masks.span_mask import SpanMask

Needs = list[list[Int64]]  # for each batch row and group: runs of keys, [n, 2]


def row_of(x: SpanMask | Layout, row: int) -> int:
    """The row of a mask or layout that serves batch row ``row``; a single row serves all."""
    return row if x.batch_size > 1 else 0


def num_rows(mask: SpanMask, layout: Layout) -> int:
    """Batch rows that differ in mask or layout; a single row serves all."""
    return max(mask.batch_size, layout.batch_size)


def area(mask: SpanMask, layout: Layout, batch_size: int) -> Int64:
    """(query, key) pairs of each group, summed over batch rows; int64 ``[G]``."""
    return _frozen(sum((row_area(mask, layout, row) for row in range(batch_size)), _zeros(layout)))


def row_area(mask: SpanMask, layout: Layout, row: int) -> Int64:
    """(query, key) pairs of each group in one batch row; int64 ``[G]``."""
    work, (group, of) = _zeros(layout), _cut(mask, layout, row)
    np.add.at(work, group, of.pairs)
    return work


def local_area(mask: SpanMask, layout: Layout, kv_layout: Layout, batch_size: int) -> Int64:
    """(query, key) pairs of :func:`area` whose keys the group holds; int64 ``[G]``."""
    if layout.num_ranks == 1:
        return area(mask, layout, batch_size)  # quicker
    total = _zeros(layout)
    for row in range(batch_size):
        keys = kv_layout.pieces(row_of(kv_layout, row))
        total += _local_area.local_area(*_cut(mask, layout, row), keys, layout.num_ranks)
    return _frozen(total)


def pairs_over(mask: SpanMask, layout: Layout, keys: list[Int64], batch_size: int) -> Int64:
    """(query, key) pairs of each group over keys that came to it, int64 ``[G]``.

    Args:
        keys: for each batch row, or for all, int64 ``[m, 3]``: group, start, stop; the runs of a group are disjoint.
    """
    total, end = _zeros(layout), [[0, mask.kv_len, mask.kv_len]]
    for row in range(batch_size):
        here = np.concatenate([keys[row if len(keys) > 1 else 0], end])
        total += _local_area.local_area(*_cut(mask, layout, row), here[np.lexsort(here.T[::-1])], layout.num_ranks)
    return total


def needs(mask: SpanMask, layout: Layout, kv_layout: Layout, batch_size: int) -> Needs:
    """K/V runs that each group reads and does not hold, ascending, for each batch row."""
    if layout.num_ranks == 1:
        return [[np.empty((0, 2), np.int64)] for _ in range(batch_size)]
    found, stride = [], kv_layout.seq_len + 1  # all groups on one line: one merge and one difference serve them
    for row in range(batch_size):
        pieces, keys = layout.pieces(row_of(layout, row)), kv_layout.pieces(row_of(kv_layout, row))
        read = even_runs.keys_read(mask.even_runs(row_of(mask, row)), pieces[:, 1:], pieces[:, 0], stride)
        missing = subtract_runs(read, keys[:, 1:] + keys[:, :1] * stride)
        found.append(even_runs.by_owner(missing, layout.num_ranks, stride))
    return found


def needed_traffic(rows: Needs, kv_layout: Layout) -> Int64:
    """Tokens of each other group that a group reads; int64 ``[G receivers, G senders]``, summed over batch rows."""
    groups = kv_layout.num_ranks
    traffic = np.zeros((groups, groups), dtype=np.int64)
    receiver, sender, tokens = needed_pairs(rows, kv_layout)
    np.add.at(traffic, (receiver, sender), tokens)
    return _frozen(traffic)


def needed_pairs(rows: Needs, kv_layout: Layout) -> tuple[Int64, Int64, Int64]:
    """Receiver, sender and tokens of everything that groups read of others, int64 ``[n]``; pairs may come again."""
    found = []
    for row, read in enumerate(rows):
        receiver = np.repeat(np.arange(kv_layout.num_ranks), [len(runs) for runs in read])
        run, sender, tokens = kv_layout.owners_of(np.concatenate(read), row_of(kv_layout, row))
        found.append((receiver[run], sender, tokens))
    receiver, sender, tokens = (np.concatenate(each) for each in zip(*found, strict=True))
    return receiver, sender, tokens


def _cut(mask: SpanMask, layout: Layout, row: int) -> tuple[Int64, even_runs.EvenRuns]:
    """The group and the rows of each even run of a batch row, cut where groups change."""
    pieces = layout.pieces(row_of(layout, row))
    run, of = even_runs.cut(mask.even_runs(row_of(mask, row)), pieces[:, 1:])
    return pieces[run, 0], of


def _zeros(layout: Layout) -> Int64:
    return np.zeros(layout.num_ranks, dtype=np.int64)


def _frozen(array: Int64) -> Int64:
    array.setflags(write=False)
    return array
