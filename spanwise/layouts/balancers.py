"""Balancers by closed rule or by list scheduling: each decides from the mask which rank holds which tokens.

See `problem` for the interface and `local` for the one that follows documents. Planning calls one on the host in each
step.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanwise.layouts.layout import Layout
from spanwise.layouts.problem import LayoutProblem
from spanwise.masks.arrays import Int64


def contiguous(length: int, num_ranks: int) -> Layout:
    """Rank r holds the r-th of ``num_ranks`` equal chunks; chunks differ by at most one token."""
    sizes = length // num_ranks + (np.arange(num_ranks) < length % num_ranks)
    bounds = np.append(0, np.cumsum(sizes))
    return Layout([np.column_stack([np.arange(num_ranks), bounds[:-1], bounds[1:]])], num_ranks, length)


def head_tail_pieces(offsets: Int64, num_ranks: int) -> Int64:
    """Cuts each document into ``2 * num_ranks`` chunks and assigns chunks r and ``2 * num_ranks - 1 - r`` to rank r.

    The remainder of the division is assigned token by token: to the heads of ranks 0, 1, …, then to their tails. The
    next document continues with the rank after the last one. So rank r holds ``seq_len // num_ranks`` tokens, one more
    if ``r < seq_len % num_ranks``, for any documents; and a rank that took the early token of one short document takes
    the late token of another.

    Returns:
        int64 ``[num_docs * 2 * num_ranks, 3]`` of (rank, start, stop).
    """
    offsets = np.unique(offsets)  # drops empty documents
    num_chunks = 2 * num_ranks
    length, remainder = np.divmod(np.diff(offsets), num_chunks)
    chunk = np.arange(num_chunks)
    rank = np.minimum(chunk, num_chunks - 1 - chunk)
    turn = np.where(chunk < num_ranks, rank, num_ranks + rank)  # order in which chunks take one more token
    assigned = np.cumsum(remainder) - remainder
    size = length[:, None] + ((turn - assigned[:, None]) % num_chunks < remainder[:, None])
    stop = offsets[:-1, None] + np.cumsum(size, axis=1)
    return np.column_stack([np.tile(rank, len(length)), (stop - size).ravel(), stop.ravel()])


def head_tail(problem: LayoutProblem, num_ranks: int) -> Layout:
    """Rank r holds chunks r and ``2 * num_ranks - 1 - r`` of ``2 * num_ranks``: balances a causal mask.

    Chunks differ by at most one token, and so do ranks. Equals PyTorch's `_HeadTailLoadBalancer` for the lengths that
    it accepts (``seq_len % (2 * num_ranks) == 0``).
    """
    offsets = np.array([0, problem.seq_len])
    return Layout([head_tail_pieces(offsets, num_ranks)], num_ranks, problem.seq_len)


def per_document_head_tail(problem: LayoutProblem, num_ranks: int) -> Layout:
    """Head and tail of *every document* on every rank: balances causal documents at the price of much traffic.

    The layout that PyTorch documents for `_PerDocumentHeadTailLoadBalancer` (rank-major; release 2.13 computes
    document-major indices instead), for documents of any length: ranks differ by at most one token in total. Needs
    ``problem.cu_seqlens``.
    """
    if problem.cu_seqlens_rows is None:
        raise ValueError(
            "balancer 'per_document_head_tail' needs cu_seqlens, because spans do not tell where documents start: "
            "give cu_seqlens, or choose a balancer that reads the mask alone, such as 'lpt' or 'ptrr'"
        )
    pieces = [head_tail_pieces(offsets, num_ranks) for offsets in problem.cu_seqlens_rows]
    return Layout(pieces, num_ranks, problem.seq_len)


def ptrr(problem: LayoutProblem, num_ranks: int) -> Int64:
    """Processing-time based round-robin: assigns blocks in zig-zag, by falling number of non-empty kv blocks.

    Equals PyTorch's `_PTRRLoadBalancer` (pytorch/pytorch #163617) for the masks that it accepts. Here the number of
    blocks need not be a multiple of the ranks, and several masks are summed with their weights.
    """
    num_blocks = problem.num_blocks
    has_short = problem.seq_len % problem.block_size != 0
    lap, step = np.divmod(np.arange(num_blocks), num_ranks)
    rank_by_position = np.where(lap % 2 == 0, step, num_ranks - 1 - step)
    owner = np.empty((problem.batch_size, num_blocks), dtype=np.int64)
    for row, counts in enumerate(problem.block_counts):
        order = np.argsort(-counts, kind="stable")
        if has_short:
            # At the end: its rank is the same in every batch row.
            order = np.append(order[order != num_blocks - 1], num_blocks - 1)
        owner[row, order] = rank_by_position
    return owner


def lpt(problem: LayoutProblem, num_ranks: int, *, longest_first: bool = True) -> Int64:
    """Longest (or shortest) processing time first: each block to the rank with the least work so far.

    Work is the exact mask area of a block. List scheduling on identical machines (R. L. Graham, "Bounds on
    multiprocessing timing anomalies", 1969).

    Args:
        longest_first: heaviest blocks first; False is the shortest-first sibling, name ``"spt"``.
    """
    has_short = problem.seq_len % problem.block_size != 0
    owner = np.empty((problem.batch_size, problem.num_blocks), dtype=np.int64)
    for row, work in enumerate(problem.block_area):
        order = np.argsort(-work if longest_first else work, kind="stable")
        owner[row] = _least_loaded(work, order, num_ranks, has_short)
    return owner


def _least_loaded(work: NDArray[Any], order: Int64, num_ranks: int, has_short: bool) -> Int64:
    """Assigns blocks in ``order``, each to the rank with the least ``work`` that may hold another block.

    Ties go to the rank with fewest blocks, then to the lowest. A rank may hold ``num_blocks // num_ranks`` blocks, and
    the first ranks to reach that limit take one of the remaining blocks each. Ranks are then renumbered: those with
    more blocks come first. A short last block goes to rank 0 before all others. So token counts depend on the sequence
    length alone, never on the mask.
    """
    num_blocks = len(work)
    limit, remainder = divmod(num_blocks, num_ranks)
    limits = [limit] * num_ranks
    heap: list[tuple[float, int, int]] = [(0, 0, rank) for rank in range(num_ranks)]
    cost = work.tolist()
    owner = [0] * num_blocks
    if has_short:
        order = order[order != num_blocks - 1]
        heap[0] = (cost[-1], 1, 0)
        heapq.heapify(heap)
        if remainder:
            limits[0], remainder = limit + 1, remainder - 1
    for block in order.tolist():
        load, count, rank = heap[0]
        while count >= limits[rank]:
            if remainder and count == limit:
                limits[rank], remainder = limit + 1, remainder - 1
            else:
                heapq.heappop(heap)
                load, count, rank = heap[0]
        owner[block] = rank
        heapq.heapreplace(heap, (load + cost[block], count + 1, rank))
    answer = np.array(owner, dtype=np.int64)
    label = np.empty(num_ranks, dtype=np.int64)
    label[np.argsort(-np.bincount(answer, minlength=num_ranks), kind="stable")] = np.arange(num_ranks)
    return label[answer]
