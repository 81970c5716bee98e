"""Balancers: which rank gets which part of the sequence, from the mask.

A balancer is any object with ``assign(problem, num_ranks)``. It reads a `LayoutProblem` (masks, their exact areas and
block counts, documents) and returns an owner for each block, or a `Layout` where its parts are not whole blocks.
`assign_layout` runs one and checks what it returned. Planning calls this once a step on the host; numpy only.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spanwise.layouts.layout import Layout
from spanwise.masks.patterns import check_offset_rows
from spanwise.masks.span_mask import SpanMask

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LayoutProblem:
    """What a balancer may look at.

    Args:
        masks: name -> mask; all self-attention masks of one model over the same tokens. A mask of batch 1 serves every
            batch row.
        weights: name -> positive number, usually how many layers use the mask; a mask without one counts 1. The
            figures below are sums over the masks, each times its weight.
        block_size: tokens of a block.
        cu_seqlens: document offsets, int ``[num_docs + 1]`` from 0 to ``seq_len``; or one such array for each batch
            row, as a list or an int array ``[batch, num_docs + 1]``; or None if unknown. Documents may be empty.
        square: whether the masks must be those of self-attention.

    Raises:
        ValueError: masks that are not square or differ in length or batch, weights for unknown masks or not positive,
            offsets that do not ascend from 0 to ``seq_len``.
    """

    masks: Mapping[str, SpanMask]
    weights: Mapping[str, float] | None = None
    block_size: int = 128
    cu_seqlens: ArrayLike | Sequence[ArrayLike] | None = None
    square: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "masks", dict(self.masks))
        weights = dict(self.weights or {})
        if not self.masks:
            raise ValueError("a layout problem needs at least one mask, got none")
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if self.seq_len < 1:
            raise ValueError("a layout needs at least one token, the masks have none")
        for name, mask in self.masks.items():
            if self.square and mask.q_len != mask.kv_len:
                raise ValueError(
                    f"a layout is for self-attention, q_len == kv_len, but mask {name!r} has q_len {mask.q_len} "
                    f"and kv_len {mask.kv_len}"
                )
            if mask.q_len != self.seq_len:
                raise ValueError(
                    f"all masks must have one length, but {next(iter(self.masks))!r} has {self.seq_len} tokens "
                    f"and {name!r} has {mask.q_len}"
                )
            if mask.kv_len != (kv_len := next(iter(self.masks.values())).kv_len):
                raise ValueError(f"all masks must have as many keys, got {kv_len} and, of {name!r}, {mask.kv_len}")
            if mask.batch_size not in (1, self.batch_size):
                raise ValueError(f"mask {name!r} has batch {mask.batch_size}, must be 1 or {self.batch_size}")
        for name, weight in weights.items():
            if name not in self.masks:
                raise ValueError(f"there is a weight for mask {name!r}, but the masks are {sorted(self.masks)}")
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"the weight of mask {name!r} must be positive and finite, got {weight}")
        object.__setattr__(self, "weights", {name: weights.get(name, 1) for name in self.masks})
        _ = self.cu_seqlens_rows  # bad offsets are an error here, where they are given

    @cached_property
    def seq_len(self) -> int:
        """Tokens of the sequence."""
        return next(iter(self.masks.values())).q_len

    @cached_property
    def batch_size(self) -> int:
        """Batch rows with masks of their own."""
        return max(mask.batch_size for mask in self.masks.values())

    @property
    def num_blocks(self) -> int:
        """Blocks of the sequence, the last one possibly short."""
        return -(-self.seq_len // self.block_size)

    @cached_property
    def area(self) -> NDArray[Any]:
        """Keys that each row reads: ``[batch, seq_len]``, int64 if the weights are ints, else float64."""
        return self._weighted({name: mask.area() for name, mask in self.masks.items()})

    @cached_property
    def block_area(self) -> NDArray[Any]:
        """`area` of each block: ``[batch, num_blocks]``, same dtype."""
        return np.add.reduceat(self.area, np.arange(0, self.seq_len, self.block_size), axis=1)

    @cached_property
    def block_counts(self) -> NDArray[Any]:
        """Non-empty kv blocks of each q block: ``[batch, num_blocks]``, int64 if the weights are ints, else float64."""
        return self._weighted({name: mask.block_counts(self.block_size) for name, mask in self.masks.items()})

    @cached_property
    def cu_seqlens_rows(self) -> tuple[Int64Array, ...] | None:
        """`cu_seqlens` as int64 arrays, a single one that serves every batch row or one for each; None if unknown."""
        given: Any = self.cu_seqlens
        if given is None:
            return None
        rows = check_offset_rows(given, self.seq_len)
        if len(rows) not in (1, self.batch_size):
            raise ValueError(f"cu_seqlens has {len(rows)} rows, must have 1 or {self.batch_size}, as many as the masks")
        return rows

    def _weighted(self, figures: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        weights = cast(Mapping[str, float], self.weights)
        # By name, not in the caller's order: float sums must come out the same on every rank.
        first, *others = sorted(figures)
        total = np.asarray(weights[first] * figures[first])
        for name in others:
            total = total + weights[name] * figures[name]
        return total


@runtime_checkable
class LoadBalancer(Protocol):
    """Deals a sequence out to ranks. The same problem must give the same answer on every host."""

    def assign(self, problem: LayoutProblem, num_ranks: int) -> ArrayLike | Layout:
        """Owner of each block, int ``[num_blocks]`` or ``[batch, num_blocks]``, or a `Layout`."""


@dataclass(frozen=True)
class Contiguous:
    """Rank r holds the r-th of ``num_ranks`` equal chunks; chunks differ by at most one token."""

    def assign(self, problem: LayoutProblem, num_ranks: int) -> Layout:
        return contiguous(problem.seq_len, num_ranks)


def contiguous(length: int, num_ranks: int) -> Layout:
    """``num_ranks`` equal chunks of ``length`` tokens, as `Contiguous` deals them."""
    bounds = _bounds(_even_split(length, num_ranks))
    return Layout([np.column_stack([np.arange(num_ranks), bounds[:-1], bounds[1:]])], num_ranks, length)


@dataclass(frozen=True)
class HeadTail:
    """Rank r holds chunks r and ``2 * num_ranks - 1 - r`` of ``2 * num_ranks``: balances a causal mask.

    Chunks differ by at most one token, and so do ranks. The same as PyTorch's `_HeadTailLoadBalancer` where that
    accepts the length (``seq_len % (2 * num_ranks) == 0``).
    """

    def assign(self, problem: LayoutProblem, num_ranks: int) -> Layout:
        offsets = np.array([0, problem.seq_len])
        return Layout([_head_tail_pieces(offsets, num_ranks)], num_ranks, problem.seq_len)


@dataclass(frozen=True)
class PerDocumentHeadTail:
    """Head and tail of *every document* on every rank: balances documents with a causal mask, for much traffic.

    What PyTorch documents for `_PerDocumentHeadTailLoadBalancer` (rank-major; its release 2.13 computes document-major
    indices instead), for documents of any length: left-over tokens are dealt out so that ranks differ by at most one
    token in all. Needs ``problem.cu_seqlens``.
    """

    def assign(self, problem: LayoutProblem, num_ranks: int) -> Layout:
        if problem.cu_seqlens_rows is None:
            raise ValueError(
                "balancer 'per_document_head_tail' needs cu_seqlens, because spans do not tell where documents start: "
                "give cu_seqlens, or choose a balancer that reads the mask alone, such as 'lpt' or 'ptrr'"
            )
        pieces = [_head_tail_pieces(offsets, num_ranks) for offsets in problem.cu_seqlens_rows]
        return Layout(pieces, num_ranks, problem.seq_len)


@dataclass(frozen=True)
class PTRR:
    """Processing-time based round-robin: blocks by falling number of non-empty kv blocks, dealt out in zig-zag.

    The same as PyTorch's `_PTRRLoadBalancer` (pytorch/pytorch #163617) where that accepts the mask. Here the block
    count need not divide by the ranks, and several masks count with their weights.
    """

    def assign(self, problem: LayoutProblem, num_ranks: int) -> Int64Array:
        num_blocks = problem.num_blocks
        has_short = problem.seq_len % problem.block_size != 0
        turn = np.arange(num_blocks)
        lap, seat = np.divmod(turn, num_ranks)
        rank_of_turn = np.where(lap % 2 == 0, seat, num_ranks - 1 - seat)
        owner = np.empty((problem.batch_size, num_blocks), dtype=np.int64)
        for row, counts in enumerate(problem.block_counts):
            order = np.argsort(-counts, kind="stable")
            if has_short:
                # Last in the deal, so that it lands with a rank that holds most blocks, in every batch row the same.
                order = np.append(order[order != num_blocks - 1], num_blocks - 1)
            owner[row, order] = rank_of_turn
        return owner


@dataclass(frozen=True)
class LPT:
    """Longest (or shortest) processing time first: each block to the rank with the least work so far.

    Work is the exact mask area of a block. List scheduling on identical machines (R. L. Graham, "Bounds on
    multiprocessing timing anomalies", 1969).

    Args:
        longest_first: heaviest blocks first; False is the shortest-first sibling, name ``"spt"``.
        equal_tokens: ranks hold equal numbers of blocks, give or take one. False balances work alone: shards then
            differ in length by any amount, which batched masks do not allow.
    """

    longest_first: bool = True
    equal_tokens: bool = True

    def assign(self, problem: LayoutProblem, num_ranks: int) -> Int64Array:
        if not self.equal_tokens and problem.batch_size > 1:
            raise ValueError(
                f"LPT(equal_tokens=False) gives ranks different token counts in different batch rows, got batch "
                f"{problem.batch_size}: use equal_tokens=True, or batch 1"
            )
        has_short = problem.seq_len % problem.block_size != 0
        owner = np.empty((problem.batch_size, problem.num_blocks), dtype=np.int64)
        for row, work in enumerate(problem.block_area):
            order = np.argsort(-work if self.longest_first else work, kind="stable")
            owner[row] = _least_loaded(work, order, num_ranks, self.equal_tokens, has_short)
        return owner


_BY_NAME: Mapping[str, LoadBalancer] = {
    "contiguous": Contiguous(),
    "head_tail": HeadTail(),
    "per_document_head_tail": PerDocumentHeadTail(),
    "ptrr": PTRR(),
    "lpt": LPT(),
    "spt": LPT(longest_first=False),
}


def resolve(balancer: str | LoadBalancer) -> LoadBalancer:
    """Turns a name into its balancer; passes an object with an ``assign`` method through.

    Raises:
        ValueError: an unknown name, or an object that is no balancer.
    """
    known = ", ".join(repr(name) for name in (*_BY_NAME, "local"))
    if isinstance(balancer, str):
        if balancer == "local":
            from spanwise.layouts.local import Local  # stands above this room, and loads a compiler

            return Local()
        if balancer not in _BY_NAME:
            raise ValueError(f"unknown balancer {balancer!r}; use {known} or an object with assign(problem, num_ranks)")
        return _BY_NAME[balancer]
    if isinstance(balancer, type):
        raise ValueError(f"a balancer is an object, got the class {balancer.__name__}: pass {balancer.__name__}()")
    if not callable(getattr(balancer, "assign", None)):
        raise ValueError(f"a balancer needs a method assign(problem, num_ranks), {balancer!r} has none; or use {known}")
    return balancer


def assign_layout(balancer: str | LoadBalancer, problem: LayoutProblem, num_ranks: int) -> Layout:
    """Runs a balancer and checks its answer.

    Raises:
        ValueError: see `resolve`; or the answer is no layout of this problem (the message names the balancer).
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    balancer = resolve(balancer)
    answer = balancer.assign(problem, num_ranks)
    name = type(balancer).__name__
    if not isinstance(answer, Layout):
        try:
            answer = Layout.from_owners(answer, num_ranks, problem.seq_len, problem.block_size)
        except (TypeError, ValueError) as error:
            raise ValueError(f"balancer {name}: {error}") from error
    got, wanted = (answer.seq_len, answer.num_ranks), (problem.seq_len, num_ranks)
    if got != wanted:
        raise ValueError(f"balancer {name} returned a layout of (seq_len, num_ranks) {got}, wanted {wanted}")
    if answer.batch_size not in (1, problem.batch_size):
        raise ValueError(
            f"balancer {name} returned a layout of batch {answer.batch_size}, wanted 1 or {problem.batch_size}"
        )
    return answer


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
    offsets = np.unique(offsets)  # documents of length 0 have nothing to deal
    num_chunks = 2 * num_ranks
    length, left_over = np.divmod(np.diff(offsets), num_chunks)
    chunk = np.arange(num_chunks)
    rank = np.minimum(chunk, num_chunks - 1 - chunk)
    turn = np.where(chunk < num_ranks, rank, num_ranks + rank)  # when a chunk's turn comes in the deal
    dealt = np.cumsum(left_over) - left_over
    size = length[:, None] + ((turn - dealt[:, None]) % num_chunks < left_over[:, None])
    stop = offsets[:-1, None] + np.cumsum(size, axis=1)
    return np.column_stack([np.tile(rank, len(length)), (stop - size).ravel(), stop.ravel()])


def _least_loaded(work: NDArray[Any], order: Int64Array, num_ranks: int, equal: bool, has_short: bool) -> Int64Array:
    """Deals blocks in ``order``, each to the rank with the least ``work`` (then fewest blocks, then lowest) and room.

    With ``equal``, a rank has room for ``num_blocks // num_ranks`` blocks and the first ones to fill up take one of the
    left-over blocks each; ranks are then renumbered so that those with more blocks come first, and a short last block
    is rank 0's, dealt before all others. Token counts so depend on the sequence length alone, never on the mask.
    """
    num_blocks = len(work)
    room, left_over = divmod(num_blocks, num_ranks) if equal else (num_blocks, 0)
    rooms = [room] * num_ranks
    heap: list[tuple[float, int, int]] = [(0, 0, rank) for rank in range(num_ranks)]
    cost = work.tolist()
    owner = [0] * num_blocks
    if equal and has_short:
        order = order[order != num_blocks - 1]
        heap[0] = (cost[-1], 1, 0)
        heapq.heapify(heap)
        if left_over:
            rooms[0], left_over = room + 1, left_over - 1
    for block in order.tolist():
        load, count, rank = heap[0]
        while count >= rooms[rank]:
            if left_over and count == room:
                rooms[rank], left_over = room + 1, left_over - 1
            else:
                heapq.heappop(heap)
                load, count, rank = heap[0]
        owner[block] = rank
        heapq.heapreplace(heap, (load + cost[block], count + 1, rank))
    answer = np.array(owner, dtype=np.int64)
    if equal:
        label = np.empty(num_ranks, dtype=np.int64)
        label[np.argsort(-np.bincount(answer, minlength=num_ranks), kind="stable")] = np.arange(num_ranks)
        answer = label[answer]
    return answer
