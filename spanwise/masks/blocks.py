"""Block tables of span masks: which tiles are empty, partial or full, and the block lists that kernels walk.

Works on even runs, one batch row at a time, never single rows or cells. All tiles lie on one line,
``num_kv_blocks + 1`` positions for each query block, so that one union of intervals serves all query blocks.
"""

from __future__ import annotations

import numpy as np

from spanwise.masks.arrays import Int8, Int32, Int64
from spanwise.masks.even_runs import EvenRuns, cut, merge_runs
from spanwise.masks.span_arrays import SpanArrays

PARTIAL, FULL = 1, 2


def num_blocks(length: int, block_size: int) -> int:
    """Blocks of a sequence, the last one possibly short."""
    return -(-length // block_size)


def _cut_at_blocks(mask: SpanArrays, row: int, block_size: int) -> tuple[Int64, EvenRuns]:
    """A batch row's even runs, cut at the edges of query blocks, each with its query block."""
    edges = np.minimum(np.arange(num_blocks(mask.q_len, block_size) + 1) * block_size, mask.q_len)
    return cut(mask.even_runs(row), np.column_stack([edges[:-1], edges[1:]]))


def block_counts(mask: SpanArrays, block_size: int) -> Int64:
    """Non-empty key blocks of each query block, int64 ``[batch, num_q_blocks]``."""
    stride = num_blocks(mask.kv_len, block_size) + 1
    counts = np.zeros((mask.batch_size, num_blocks(mask.q_len, block_size)), np.int64)
    for row, found in enumerate(counts):
        q_block, of = _cut_at_blocks(mask, row, block_size)
        line = q_block * stride
        runs = merge_runs(line + of.start // block_size, line - (-of.last_end // block_size))
        np.add.at(found, runs[:, 0] // stride, runs[:, 1] - runs[:, 0])
    return counts


def block_table(mask: SpanArrays, block_size: int) -> Int8:
    """0 empty, 1 partial, 2 full for each tile, int8 ``[batch, num_q_blocks, num_kv_blocks]``."""
    q_blocks, kv_blocks = num_blocks(mask.q_len, block_size), num_blocks(mask.kv_len, block_size)
    table = np.empty((mask.batch_size, q_blocks, kv_blocks), np.int8)
    height = np.minimum(mask.q_len - np.arange(q_blocks) * block_size, block_size)[:, None]
    for b in range(mask.batch_size):
        q_block, of = _cut_at_blocks(mask, b, block_size)
        rows = of.stop - of.first
        touched = _rows_of_tiles(q_block, of.start // block_size, -(-of.last_end // block_size), rows, table[b].shape)
        # Whole blocks that all rows of a run read. In each row at most one span reads a tile, so that their rows add
        # up to the tile's where it is full. The short last block is whole where its existing keys are read.
        low = -(-(of.start + of.start_step * (rows - 1)) // block_size)
        high = of.end // block_size + ((of.end == mask.kv_len) & (mask.kv_len % block_size > 0))
        whole = _rows_of_tiles(q_block, low, np.maximum(high, low), rows, table[b].shape)
        np.add(touched > 0, whole == height, out=table[b], dtype=np.int8)
    return table


def _rows_of_tiles(q_block: Int64, low: Int64, high: Int64, rows: Int64, shape: tuple[int, ...]) -> Int32:
    """For each tile the sum of the rows of runs whose key blocks ``[low, high)`` hold it."""
    line, stride = np.zeros(shape[0] * (shape[1] + 1) + 1, np.int32), shape[1] + 1
    np.add.at(line, q_block * stride + low, rows)
    np.subtract.at(line, q_block * stride + high, rows)
    return np.cumsum(line, dtype=np.int32, out=line)[:-1].reshape(shape[0], stride)[:, :-1]


def block_tables(mask: SpanArrays, block_size: int) -> dict[str, Int32]:
    """The lists of FlexAttention's ``BlockMask`` by name; batch ``B``, one head.

    ``kv_*``: for each query block the partial (``full_kv_*``: the full) key blocks, ascending; ``q_*``: the transpose.
    ``*_num_blocks`` are ``[B, 1, rows]``, ``*_indices`` ``[B, 1, rows, columns]``, zero beyond the number. A short last
    block is never full, as in torch's ``create_block_mask``: kernels skip ``mask_mod`` in full blocks, and only
    ``mask_mod`` keeps them from reading keys beyond the end.
    """
    table, found = block_table(mask, block_size), dict[str, Int32]()
    for short, edge in ((mask.q_len % block_size, table[:, -1:, :]), (mask.kv_len % block_size, table[:, :, -1:])):
        if short:
            np.minimum(edge, np.int8(PARTIAL), out=edge)
    for side, each in (("kv", table), ("q", np.ascontiguousarray(table.swapaxes(1, 2)))):
        columns = np.arange(each.shape[2], dtype=np.int32)
        for name, kind in ((side, PARTIAL), (f"full_{side}", FULL)):
            tiles = each == kind
            counts = np.count_nonzero(tiles, axis=2).astype(np.int32)
            indices = np.zeros(each.shape, np.int32)  # the system allocates only pages that are written
            # Both index arrays have equally many entries in each row, in row order: each row's move to its front.
            indices[columns < counts[..., None]] = np.broadcast_to(columns, each.shape)[tiles]
            found |= {f"{name}_num_blocks": counts[:, None], f"{name}_indices": indices[:, None]}
    return found
