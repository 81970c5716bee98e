"""What blocks read, for the search of the local balancer: intervals of kv blocks, and the documents they form."""

from __future__ import annotations

import numpy as np

from spanwise.masks.arrays import Int64
from spanwise.masks.blocks import block_runs, num_blocks
from spanwise.masks.span_mask import SpanMask


def block_reads(masks: list[SpanMask], block_size: int) -> tuple[Int64, Int64, Int64]:
    """The kv blocks that each q block reads, as ascending intervals that neither overlap nor touch.

    Returns:
        ``offsets`` [num_masks, num_blocks + 1], ``low`` and ``high`` [num_intervals]: q block ``q`` of mask ``m`` reads
        the kv blocks ``low[i] … high[i] - 1`` for ``i`` in ``offsets[m, q] … offsets[m, q + 1] - 1``.
    """
    edges = np.arange(num_blocks(masks[0].q_len, block_size) + 1)
    tables = [block_runs(mask, 0, block_size) for mask in masks]
    before = np.cumsum([0, *map(len, tables)])
    offsets = [n + np.searchsorted(table[:, 0], edges) for n, table in zip(before, tables, strict=False)]
    _, low, high = np.concatenate(tables).T
    return np.stack(offsets), low.copy(), high.copy()


def documents_of_blocks(offsets: Int64, low: Int64, count: int) -> tuple[Int64, Int64]:
    """The document ``[left, right)`` of each block: adjacent blocks with the same first key read in every mask."""
    opens = np.zeros(count, dtype=bool)
    opens[0] = True
    for table in offsets:
        first = np.full(count, count)
        reads = np.diff(table)
        first[reads > 0] = low[table[:-1][reads > 0]]  # tables are sorted: a block's first interval is its lowest
        opens[1:] |= first[1:] != first[:-1]
    if opens.sum() > count // 3:  # a window: the first key read changes with every block
        opens[1:] = False
    edges = np.append(np.flatnonzero(opens), count)
    document = np.cumsum(opens) - 1
    return edges[document], edges[document + 1]
