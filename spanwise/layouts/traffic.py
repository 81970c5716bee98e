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
    per_row = mask.area()
    work = np.zeros(layout.num_ranks, dtype=np.int64)
    for row in range(batch_size):
        runs = layout.pieces(row_of(layout, row))
        owner, start, _ = runs[np.argsort(runs[:, 1])].T  # they tile the sequence
        np.add.at(work, owner, np.add.reduceat(per_row[row_of(mask, row)], start))
    return _frozen(work)


def local_area(mask: SpanMask, layout: Layout, kv_layout: Layout, batch_size: int) -> Int64:
    """(query, key) pairs of :func:`area` whose keys the group holds; int64 ``[G]``."""
    if layout.num_ranks == 1:
        return area(mask, layout, batch_size)  # quicker
    total = np.zeros(layout.num_ranks, dtype=np.int64)
    for row in range(batch_size):
        at = row_of(mask, row)
        rows, keys = layout.pieces(row_of(layout, row)), kv_layout.pieces(row_of(kv_layout, row))
        total += _local_area.local_area(mask.start[at], mask.end[at], rows, keys, layout.num_ranks)
    return _frozen(total)


def needs(mask: SpanMask, layout: Layout, kv_layout: Layout, batch_size: int) -> Needs:
    """K/V runs that each group reads and does not hold, ascending, for each batch row."""
    if layout.num_ranks == 1:
        return [[np.empty((0, 2), np.int64)] for _ in range(batch_size)]
    found = []
    for row in range(batch_size):
        groups = range(layout.num_ranks)
        runs = [layout.runs(group, row_of(layout, row)) for group in groups]
        reads = mask.row(row_of(mask, row)).keys_read_many(runs)
        own = [kv_layout.runs(group, row_of(kv_layout, row)) for group in groups]
        found.append([subtract_runs(read, held) for read, held in zip(reads, own, strict=True)])
    return found


def needed_traffic(rows: Needs, kv_layout: Layout) -> Int64:
    """Tokens of each other group that a group reads; int64 ``[G receivers, G senders]``, summed over batch rows."""
    groups = kv_layout.num_ranks
    traffic = np.zeros((groups, groups), dtype=np.int64)
    for row, read in enumerate(rows):
        receiver = np.repeat(np.arange(groups), [len(runs) for runs in read])
        run, sender, tokens = kv_layout.owners_of(np.concatenate(read), row_of(kv_layout, row))
        np.add.at(traffic, (receiver[run], sender), tokens)
    return _frozen(traffic)


def _frozen(array: Int64) -> Int64:
    array.setflags(write=False)
    return array
