"""What blocks read, for the search of the local balancer: intervals of kv blocks, and the documents they form."""

from __future__ import annotations

import numpy as np

from spanwise.masks import spans as _spans
from spanwise.masks.arrays import Int64
from spanwise.masks.span_mask import SpanMask


def block_reads(masks: list[SpanMask], block_size: int) -> tuple[Int64, Int64, Int64]:
    """The kv blocks that each q block reads, as intervals that may overlap.

    Returns:
        ``offsets`` [num_masks, num_blocks + 1], ``low`` and ``high`` [num_intervals]: q block ``q`` of mask ``m`` reads
        the kv blocks ``low[i] … high[i] - 1`` for ``i`` in ``offsets[m, q] … offsets[m, q + 1] - 1``.
    """
    num_blocks = -(-masks[0].q_len // block_size)
    tables, offsets, before = [], [], 0
    for mask in masks:
        found = [np.empty((0, 3), np.int64)]
        for start, end in zip(mask.start[0], mask.end[0], strict=True):
            filled = start < end
            rows = np.arange(len(start))
            if not filled.all():
                rows, start, end = rows[filled], start[filled], end[filled]
            opens = _spans.chain_breaks(start, end)
            opens[np.searchsorted(rows, np.arange(0, rows[-1] + 1 if len(rows) else 0, block_size))] = True
            first = np.flatnonzero(opens)
            last = np.append(first[1:], len(rows))[: len(first)] - 1
            low, high = start[first] // block_size, -(-end[last] // block_size)
            found.append(np.stack([rows[first] // block_size, low, high], axis=1))
        table = np.concatenate(found)
        table = table[np.lexsort(table.T[::-1])]
        new = np.ones(len(table), dtype=bool)
        new[1:] = (table[1:] != table[:-1]).any(axis=1)
        table = table[new]
        offsets.append(before + np.searchsorted(table[:, 0], np.arange(num_blocks + 1)))
        tables.append(table)
        before += len(table)
    joined = np.concatenate(tables)
    return np.stack(offsets).astype(np.int64), joined[:, 1].copy(), joined[:, 2].copy()


def documents_of_blocks(offsets: Int64, low: Int64, num_blocks: int) -> tuple[Int64, Int64]:
    """The document ``[left, right)`` of each block: adjacent blocks with the same first key read in every mask."""
    opens = np.zeros(num_blocks, dtype=bool)
    opens[0] = True
    for table in offsets:
        first = np.full(num_blocks, num_blocks)
        reads = np.diff(table)
        first[reads > 0] = low[table[:-1][reads > 0]]  # tables are sorted: a block's first interval is its lowest
        opens[1:] |= first[1:] != first[:-1]
    if opens.sum() > num_blocks // 3:  # a window: the first key read changes with every block
        opens[1:] = False
    edges = np.append(np.flatnonzero(opens), num_blocks)
    document = np.cumsum(opens) - 1
    return edges[document], edges[document + 1]
