"""Balancers by closed rule or by list scheduling, the names of all, and the layouts that they make.

    mask -> LayoutProblem -> balancer -> Layout -> Plan

See `problem` for the interface and `local` for the balancer that follows documents. Planning calls one on the host in
each step.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from spanwise.layouts.layout import Layout, contiguous, head_tail_pieces
from spanwise.layouts.local import Local
from spanwise.layouts.packing import Packing
from spanwise.layouts.problem import LayoutProblem, LoadBalancer
from spanwise.masks.arrays import Int64
from spanwise.masks.checks import check_positive
from spanwise.masks.span_arrays import common
from spanwise.masks.span_mask import SpanMask

# Where blocks must be cut finer. Worst imbalance of 29 short packings on 4 to 16 ranks with 2, 4, 8, 16 blocks a rank:
# "lpt" 1.49, 1.07, 1.01, 1.00; "ptrr" 2.08, 1.47, 1.19, 1.09. "local" receives least with 2 to 16 alike (4.7 to 5.7 S).
_BLOCKS_PER_GROUP = 8


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
    counts = np.array(problem.block_counts)
    if problem.seq_len % problem.block_size:
        counts[:, -1] = -1  # a short block comes last: its rank is the same in every batch row
    blocks = ptrr_schedule(torch.from_numpy(counts), num_ranks).numpy()
    owner = np.empty((len(counts), problem.num_blocks + 1), dtype=np.int64)
    owner[np.arange(len(counts))[:, None, None], blocks] = np.arange(num_ranks)[:, None]  # -1, no block, is the last
    return owner[:, :-1]


def ptrr_schedule(process_time: Tensor, num_ranks: int) -> Tensor:
    """Assigns blocks to ranks in zig-zag order of falling processing time (PTRR, pytorch/pytorch #163617).

    For models that compute block counts on the accelerator, for instance from a mask that depends on data. Uses torch
    ops whose shapes follow from the argument's shape alone: no host sync, and compilable with
    ``fullgraph=True``. Equal times keep the order of their blocks. With ``P = num_ranks``, rank r takes the sorted
    blocks r, 2P-1-r, 2P+r, ….

    Args:
        process_time: ``[num_blocks]`` or ``[batch, num_blocks]``, any real dtype and device; `SpanMask.block_counts`
            or `BlockMask.kv_num_blocks` plus `full_kv_num_blocks`, for instance.
        num_ranks: number of ranks; need not divide ``num_blocks``.

    Returns:
        int64 ``[num_ranks, ceil(num_blocks / num_ranks)]``, or ``[batch, …]`` of that: each rank's blocks, ascending.
        The row of a rank that holds one block less than others ends with -1.

    Raises:
        ValueError: ``num_ranks`` below 1, or ``process_time`` without exactly one or two dims.

    >>> import torch
    >>> from spanwise import ptrr_schedule
    >>> ptrr_schedule(torch.tensor([9, 1, 7, 3, 5]), num_ranks=2)
    tensor([[ 0,  1,  3],
            [ 2,  4, -1]])
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    if process_time.ndim not in (1, 2):
        raise ValueError(
            f"process_time must have shape [num_blocks] or [batch, num_blocks], got {list(process_time.shape)}"
        )
    num_blocks = process_time.shape[-1]
    laps = -(-num_blocks // num_ranks)
    order = torch.sort(process_time, dim=-1, descending=True, stable=True).indices
    # Fill the last lap with block num_blocks: it sorts behind all others and becomes -1.
    order = torch.nn.functional.pad(order, (0, laps * num_ranks - num_blocks), value=num_blocks)
    order = order.unflatten(-1, (laps, num_ranks))
    is_forward = (torch.arange(laps, device=order.device) % 2 == 0).unsqueeze(-1)
    assigned = torch.where(is_forward, order, order.flip(-1)).transpose(-1, -2).sort(dim=-1).values
    return assigned.masked_fill(assigned == num_blocks, -1)


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


BY_NAME: Mapping[str, Callable[[LayoutProblem, int], ArrayLike | Layout]] = {
    "contiguous": lambda problem, num_ranks: contiguous(problem.seq_len, num_ranks),
    "head_tail": head_tail,
    "per_document_head_tail": per_document_head_tail,
    "ptrr": ptrr,
    "lpt": lpt,
    "spt": functools.partial(lpt, longest_first=False),
    "local": Local().assign,
}


def assign_layout(balancer: str | LoadBalancer, problem: LayoutProblem, num_ranks: int) -> Layout:
    """Run a balancer; ``ValueError`` for what is none, and if the answer is not a layout of this problem."""
    check_positive(num_ranks, "num_ranks")
    assign = BY_NAME.get(balancer) if isinstance(balancer, str) else getattr(balancer, "assign", None)
    if not callable(assign) or isinstance(balancer, type):
        raise ValueError(
            f"unknown balancer {balancer!r}; use one of {list(BY_NAME)}, an object (no class) with assign(problem, "
            f"num_ranks), or with make_plan 'auto' or 'dual_chunk'"
        )
    answer, name = assign(problem, num_ranks), balancer if isinstance(balancer, str) else type(balancer).__name__
    if not isinstance(answer, Layout):
        try:
            answer = Layout.from_owners(answer, num_ranks, problem.seq_len, problem.block_size)
        except (TypeError, ValueError) as error:
            raise ValueError(f"balancer {name}: {error}") from error
    got = (answer.seq_len, answer.num_ranks, answer.batch_size)
    if got[:2] != (problem.seq_len, num_ranks) or got[2] not in (1, problem.batch_size):
        wanted = (problem.seq_len, num_ranks, problem.batch_size)
        raise ValueError(f"balancer {name} returned a layout of (seq_len, num_ranks, batch) {got}, wanted {wanted}")
    return answer


def problem_of(
    masks: dict[str, SpanMask], weights: Mapping[str, float] | None, block_size: int, cu_seqlens: Any,
    packing: Packing | None,
) -> LayoutProblem:  # fmt: skip
    """The layout problem of a plan's masks; of masks that are not square, that of the queries."""
    first = next(iter(masks.values()))
    square = first.q_len == first.kv_len and (packing is None or packing.square)
    if packing is not None and square:
        cu_seqlens = np.unique([0, *packing.q_offsets, packing.q_len])
    elif square and cu_seqlens is None:
        cu_seqlens = common([mask.cu_seqlens for mask in masks.values()])
    if not square and cu_seqlens is not None:
        raise ValueError("cu_seqlens is for self-attention; where keys differ from queries, give a packing")
    return LayoutProblem(masks, weights, block_size, cu_seqlens, square=square)


def layouts(
    problem: LayoutProblem, packing: Packing | None, balancer: str | LoadBalancer, outer: int, inner: int
) -> tuple[Layout, Layout, int]:
    """Layouts of queries and of keys for ``outer * inner`` ranks, and the block size that was used.

    Balancers assign square masks; all others have two fixed orders, "contiguous" and "dual_chunk" of a packing. The
    balancer assigns tokens to groups of `inner` ranks, and each group splits its tokens among its ranks. With one group
    (Ulysses alone) the balancer assigns to the ranks of the group. Blocks are cut finer where a rank would otherwise
    hold no token although there are enough.
    """
    num_ranks, q_len, kv_len = outer * inner, problem.seq_len, next(iter(problem.masks.values())).kv_len
    if balancer == "dual_chunk":
        if packing is None:
            raise ValueError("balancer 'dual_chunk' is the order of a packing: give packing=spanwise.Packing(…)")
        layout, kv_layout = packing.dual_chunk_layout(num_ranks, "q"), packing.dual_chunk_layout(num_ranks, "kv")
        return layout, layout if kv_layout == layout else kv_layout, problem.block_size
    if not problem.square:
        if balancer != "contiguous":
            raise ValueError(
                f"queries and keys lie differently ({q_len} and {kv_len} tokens): use balancer='contiguous' or, with a "
                f"packing, 'dual_chunk'; got {balancer!r}"
            )
        return contiguous(q_len, num_ranks), contiguous(kv_len, num_ranks), problem.block_size
    groups, parts = (num_ranks, 1) if outer == 1 else (outer, inner)
    whole = assign_layout(balancer, problem, groups).split(parts)
    for block_size in (problem.block_size, max(q_len // (_BLOCKS_PER_GROUP * groups), 1), 1):
        layout = whole
        if block_size < problem.block_size:
            layout = assign_layout(balancer, dataclasses.replace(problem, block_size=block_size), groups).split(parts)
        if np.count_nonzero(layout.tokens_per_rank) == min(num_ranks, q_len):
            return layout, layout, min(block_size, problem.block_size)
    return whole, whole, problem.block_size  # a balancer of the caller that wants it so
