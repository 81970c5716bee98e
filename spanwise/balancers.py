"""Balancers: which rank gets which part of the sequence, from the mask.

A balancer is any object with ``assign(problem, num_ranks)``. It reads a `LayoutProblem` (masks, their exact areas and
block counts, documents) and returns an owner for each block, or a `Layout` where its parts are not whole blocks.
`assign_layout` runs one and checks what it returned. Planning calls this once a step on the host; numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spanwise.layout import Layout
from spanwise.mask import SpanMask

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LayoutProblem:
    """What a balancer may look at.

    Args:
        masks: name -> mask; all self-attention masks of one model over the same ``seq_len`` tokens. A mask of batch 1
            serves every batch row.
        weights: name -> positive number, usually the layers that use the mask; missing names count 1. Every figure
            below is the sum over masks times their weight.
        block_size: tokens of a block.
        cu_seqlens: int ``[num_docs + 1]`` document offsets, one such array for each batch row, or None if unknown.

    Raises:
        ValueError: masks of different lengths or batches, unknown or non-positive weights, bad offsets.
    """

    masks: Mapping[str, SpanMask]
    weights: Mapping[str, float] = field(default_factory=dict)
    block_size: int = 128
    cu_seqlens: Any = None  # any of the forms above; `document_offsets` is the checked one

    def __post_init__(self) -> None:
        if not self.masks:
            raise ValueError("a layout problem needs at least one mask, got none")
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        object.__setattr__(self, "masks", dict(self.masks))
        object.__setattr__(self, "weights", {name: (self.weights or {}).get(name, 1) for name in self.masks})

    @property
    def seq_len(self) -> int:
        """Tokens of the sequence."""
        return next(iter(self.masks.values())).q_len

    @property
    def batch_size(self) -> int:
        """Batch rows with masks of their own."""
        return max(mask.batch_size for mask in self.masks.values())

    @property
    def num_blocks(self) -> int:
        """Blocks of the sequence, the last one possibly short."""
        return -(-self.seq_len // self.block_size)


@runtime_checkable
class LoadBalancer(Protocol):
    """Deals a sequence out to ranks."""

    def assign(self, problem: LayoutProblem, num_ranks: int) -> ArrayLike | Layout:
        """Owner of each block, int ``[num_blocks]`` or ``[batch, num_blocks]``, or a `Layout`."""


@dataclass(frozen=True)
class Contiguous:
    """Rank r holds the r-th of ``num_ranks`` equal chunks; chunks differ by at most one token."""

    def assign(self, problem: LayoutProblem, num_ranks: int) -> Layout:
        bounds = _bounds(_even_split(problem.seq_len, num_ranks))
        return Layout([np.column_stack([np.arange(num_ranks), bounds[:-1], bounds[1:]])], num_ranks, problem.seq_len)


@dataclass(frozen=True)
class HeadTail:
    """Rank r holds chunks r and ``2 * num_ranks - 1 - r`` of ``2 * num_ranks``: balances a causal mask.

    Chunks differ by at most one token, and so do ranks. The same as PyTorch's `_HeadTailLoadBalancer` where that
    accepts the length (``seq_len % (2 * num_ranks) == 0``).
    """

    def assign(self, problem: LayoutProblem, num_ranks: int) -> Layout:
        offsets = np.array([0, problem.seq_len])
        return Layout([_head_tail_pieces(offsets, num_ranks)], num_ranks, problem.seq_len)


def _even_split(total: int, parts: int) -> Int64Array:
    """Sizes of ``parts`` parts of ``total`` that differ by at most one, larger ones first."""
    return total // parts + (np.arange(parts) < total % parts)


def _bounds(sizes: Int64Array) -> Int64Array:
    return np.append(0, np.cumsum(sizes))


def _head_tail_pieces(offsets: Int64Array, num_ranks: int) -> Int64Array:
    """Cuts each document into ``2 * num_ranks`` chunks and deals rank r its chunks r and ``2 * num_ranks - 1 - r``.

    Tokens left over by the division are dealt out one by one, to the heads of ranks 0, 1, …, then to their tails,
    and the next document goes on where the last one stopped. So rank r ends with ``seq_len // num_ranks`` tokens,
    one more if ``r < seq_len % num_ranks``, whatever the documents; and a rank that got the early token of one short
    document gets the late one of another.

    Returns:
        int64 ``[num_docs * 2 * num_ranks, 3]`` of (rank, start, stop).
    """
    num_chunks = 2 * num_ranks
    length, left_over = np.divmod(np.diff(offsets), num_chunks)
    chunk = np.arange(num_chunks)
    rank = np.minimum(chunk, num_chunks - 1 - chunk)
    turn = np.where(chunk < num_ranks, rank, num_ranks + rank)  # when a chunk's turn comes in the deal
    dealt = np.cumsum(left_over) - left_over
    size = length[:, None] + ((turn - dealt[:, None]) % num_chunks < left_over[:, None])
    stop = offsets[:-1, None] + np.cumsum(size, axis=1)
    return np.column_stack([np.tile(rank, len(length)), (stop - size).ravel(), stop.ravel()])
