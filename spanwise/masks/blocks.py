"""Block tables of span masks: which tiles are empty, partial or full, and the block lists that kernels walk.

Works on canonical arrays (see `spans`), one batch row at a time, and never looks at single cells. All tiles lie on one
line, ``num_kv_blocks + 1`` positions for each query block, so that one union of intervals serves all query blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanwise.masks import spans
from spanwise.masks.arrays import Int8, Int32, Int64, IntArray

PARTIAL, FULL = 1, 2


@dataclass(frozen=True, slots=True)
class BlockTables:
    """The lists of FlexAttention's ``BlockMask``, int32 numpy arrays; batch ``B``, one head.

    ``kv_*``: for each query block the partial (``full_kv_*``: the full) key blocks, ascending; ``q_*``: the transpose.
    Counts are ``[B, 1, num_q_blocks]`` and ``[B, 1, num_kv_blocks]``, indices ``[B, 1, num_q_blocks, num_kv_blocks]``
    and ``[B, 1, num_kv_blocks, num_q_blocks]``, zero beyond the count.
    """

    kv_num_blocks: Int32
    kv_indices: Int32
    full_kv_num_blocks: Int32
    full_kv_indices: Int32
    q_num_blocks: Int32
    q_indices: Int32
    full_q_num_blocks: Int32
    full_q_indices: Int32


def num_blocks(length: int, block_size: int) -> int:
    """Blocks of a sequence, the last one possibly short."""
    return -(-length // block_size)


def _union_on_line(low: list[Int32], high: list[Int32], block_size: int, stride: int) -> Int64:
    """Union of block intervals ``[low, high)`` on the line of tiles: one list entry per slot, one value per row."""
    lows: list[IntArray] = [np.zeros(0, np.int64)]
    highs: list[IntArray] = [np.zeros(0, np.int64)]
    for lo, hi in zip(low, high, strict=True):
        filled = lo < hi
        rows = None
        if not filled.all():
            rows = np.flatnonzero(filled)
            lo, hi = lo[rows], hi[rows]
        breaks = spans.chain_breaks(lo, hi)
        if rows is None:
            breaks[::block_size] = True
        else:
            q_block = rows // block_size
            breaks[1:] |= q_block[1:] != q_block[:-1]
        first = np.flatnonzero(breaks)
        last = np.append(first[1:], len(lo))[: len(first)] - 1
        offset = (first if rows is None else rows[first]) // block_size * stride
        lows.append(lo[first] + offset)
        highs.append(hi[last] + offset)
    return spans.merge_runs(np.concatenate(lows), np.concatenate(highs))


def _floor_blocks(position: Int32, block_size: int) -> Int32:
    if block_size & (block_size - 1) == 0:
        return position >> np.int32(block_size.bit_length() - 1)
    return position // np.int32(block_size)


def _touched(start: Int32, end: Int32, block_size: int, stride: int) -> Int64:
    """Non-empty tiles of ``[num_spans, q_len]`` spans as runs on the line."""
    low = [_floor_blocks(s, block_size) for s in start]
    # An empty span is (0, 0): floor(-1 / size) + 1 = 0 keeps it empty.
    high = [_floor_blocks(e - np.int32(1), block_size) + np.int32(1) for e in end]
    return _union_on_line(low, high, block_size, stride)


def _not_full(start: Int32, end: Int32, kv_len: int, block_size: int, stride: int) -> Int64:
    """Tiles that some row reads in part or not at all, as runs on the line: the gaps between whole blocks."""
    blocks = np.int32(stride - 1)
    last_end = np.int32(0) if kv_len % block_size == 0 else np.int32(kv_len)
    low, high = [], []
    reach = np.zeros(start.shape[1], np.int32)
    for s, e in zip(start, end, strict=True):
        whole_from = _floor_blocks(s + np.int32(block_size - 1), block_size)
        whole_to = _floor_blocks(e, block_size)
        if last_end:  # the short last block is whole when its existing keys are read
            whole_to = whole_to + (e == last_end)
        whole = whole_from < whole_to
        low.append(np.where(whole, reach, np.int32(0)))
        high.append(np.where(whole, whole_from, np.int32(0)))
        reach = np.where(whole, whole_to, reach).astype(np.int32)
    low.append(reach)
    high.append(np.full_like(reach, blocks))
    return _union_on_line(low, high, block_size, stride)


def block_counts(start: Int32, end: Int32, kv_len: int, block_size: int) -> Int64:
    """Non-empty key blocks of each query block, int64 ``[batch, num_q_blocks]``."""
    batch, _, q_len = start.shape
    stride = num_blocks(kv_len, block_size) + 1
    counts = np.zeros((batch, num_blocks(q_len, block_size)), np.int64)
    for b in range(batch):
        runs = _touched(start[b], end[b], block_size, stride)
        np.add.at(counts[b], runs[:, 0] // stride, runs[:, 1] - runs[:, 0])
    return counts


def block_table(start: Int32, end: Int32, kv_len: int, block_size: int) -> Int8:
    """0 empty, 1 partial, 2 full for each tile, int8 ``[batch, num_q_blocks, num_kv_blocks]``."""
    batch, _, q_len = start.shape
    q_blocks, stride = num_blocks(q_len, block_size), num_blocks(kv_len, block_size) + 1
    table = np.empty((batch, q_blocks, stride - 1), np.int8)
    for b in range(batch):
        touched = _touched(start[b], end[b], block_size, stride)
        not_full = _not_full(start[b], end[b], kv_len, block_size, stride)
        # touched + full = touched + 1 - not_full. The runs of a union never touch, so that no statement writes one
        # position twice.
        steps = np.zeros(q_blocks * stride + 1, np.int8)
        steps[0] = 1
        steps[touched[:, 0]] += 1
        steps[touched[:, 1]] -= 1
        steps[not_full[:, 0]] -= 1
        steps[not_full[:, 1]] += 1
        np.cumsum(steps, dtype=np.int8, out=steps)
        table[b] = steps[:-1].reshape(q_blocks, stride)[:, :-1]
    return table


def block_tables(start: Int32, end: Int32, kv_len: int, block_size: int) -> BlockTables:
    """The lists that FlexAttention walks.

    A short last block is never full, as in torch's ``create_block_mask``: kernels skip ``mask_mod`` in full blocks, and
    only ``mask_mod`` keeps them from reading keys beyond the end.
    """
    q_len = start.shape[2]
    table = block_table(start, end, kv_len, block_size)
    for short, edge in ((q_len % block_size, table[:, -1:, :]), (kv_len % block_size, table[:, :, -1:])):
        if short:
            np.minimum(edge, np.int8(PARTIAL), out=edge)
    transposed = np.ascontiguousarray(table.swapaxes(1, 2))
    return BlockTables(
        *_lists(table, PARTIAL), *_lists(table, FULL), *_lists(transposed, PARTIAL), *_lists(transposed, FULL)
    )


def _lists(table: Int8, kind: int) -> tuple[Int32, Int32]:
    """(counts ``[B, 1, rows]``, indices ``[B, 1, rows, columns]``) of the tiles of one kind; columns ascend."""
    columns = np.arange(table.shape[2], dtype=np.int32)
    tiles = table == kind
    counts = np.count_nonzero(tiles, axis=2).astype(np.int32)
    indices = np.zeros(table.shape, np.int32)  # the system allocates only pages that are written
    # Both index arrays have equally many entries in each row, in row order: each row's columns move to its front.
    indices[columns < counts[..., None]] = np.broadcast_to(columns, table.shape)[tiles]
    return counts[:, None], indices[:, None]
