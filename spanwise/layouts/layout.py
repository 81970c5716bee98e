"""Layout: the token runs that each rank holds, and the permutation that they define.

Balancers decide who owns which token; a `Layout` records it as ascending token runs for each rank and batch row. The
plan, `shard` and `unshard`, and the exchanges all read the runs from here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from spanwise.layouts.runs import overlaps, ragged_arange
from spanwise.masks.arrays import Int64
from spanwise.masks.checks import check_below, check_positive, check_row, check_shape, int_array


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Layout:
    """Token runs of every rank; the runs of all ranks together tile ``[0, seq_len)`` in every batch row.

    Every batch row gives a rank the same number of tokens, so that shards are rectangular. A layout with one row
    serves every row of a batch. A *piece* is a run and the rank that holds it: (rank, start, stop).

    Args:
        pieces: for each batch row an int array ``[num_pieces, 3]`` of (rank, start, stop), in any order; pieces may be
            empty. The layout sorts them by rank, then start, and merges adjacent pieces of a rank.
        num_ranks: number of ranks; a rank may hold nothing.
        seq_len: tokens of the sequence.

    Attributes:
        seq_len, num_ranks: as given.

    Raises:
        ValueError: a token has no owner or two, a rank is out of range, or rows give a rank different token counts.

    >>> from spanwise import Layout
    >>> layout = Layout([[(0, 0, 2), (1, 2, 6), (0, 6, 8)]], num_ranks=2, seq_len=8)
    >>> layout
    Layout(seq_len=8, num_ranks=2, batch_size=1, runs=3)
    >>> layout.rearrange_indices()
    tensor([[0, 1, 6, 7, 2, 3, 4, 5]])
    """

    seq_len: int
    num_ranks: int
    _rows: tuple[Int64, ...]  # per batch row: [num_runs, 2], rank 0's runs, then rank 1's, ...
    _offsets: Int64  # [batch, num_ranks + 1]: rank r's runs are _rows[b][_offsets[b, r] : _offsets[b, r + 1]]

    def __init__(self, pieces: Sequence[ArrayLike], num_ranks: int, seq_len: int) -> None:
        num_ranks, seq_len = check_positive(num_ranks, "num_ranks"), check_positive(seq_len, "seq_len")
        if len(pieces) == 0:
            raise ValueError("a layout needs at least one batch row, got none")
        tables = [_canonical(each, num_ranks, seq_len) for each in pieces]
        rows = tuple(_frozen(table[:, 1:]) for table in tables)
        offsets = np.stack([np.searchsorted(table[:, 0], np.arange(num_ranks + 1)) for table in tables])
        object.__setattr__(self, "seq_len", seq_len)
        object.__setattr__(self, "num_ranks", num_ranks)
        object.__setattr__(self, "_rows", rows)
        object.__setattr__(self, "_offsets", _frozen(offsets))
        for row in range(1, len(rows)):
            tokens = self._count_tokens(row)
            for rank in np.flatnonzero(tokens != self.tokens_per_rank)[:1]:
                raise ValueError(
                    f"every batch row must give a rank the same number of tokens, but rank {rank} gets "
                    f"{self.tokens_per_rank[rank]} in row 0 and {tokens[rank]} in row {row}"
                )

    @classmethod
    def from_owners(cls, owner: ArrayLike, num_ranks: int, seq_len: int, block_size: int) -> Layout:
        """Builds a layout from the owner of each block of ``block_size`` tokens; the last block may be short.

        Args:
            owner: int ``[num_blocks]`` or ``[batch, num_blocks]``, ranks in ``[0, num_ranks)``.

        Raises:
            ValueError: wrong dtype or shape, a rank out of range, or rows that give a rank different token counts.

        >>> Layout.from_owners([0, 1, 1, 0], num_ranks=2, seq_len=7, block_size=2).pieces()
        array([[0, 0, 2],
               [0, 6, 7],
               [1, 2, 6]])
        """
        num_blocks = -(-check_positive(seq_len, "seq_len") // check_positive(block_size, "block_size"))
        table = int_array(owner, "block owners")
        if table.ndim not in (1, 2) or table.shape[-1] != num_blocks:
            raise ValueError(
                f"block owners must have shape [{num_blocks}] or [batch, {num_blocks}] "
                f"(seq_len {seq_len}, block_size {block_size}), got {list(table.shape)}"
            )
        pieces = []
        for row in np.atleast_2d(table).astype(np.int64):
            # One piece for adjacent blocks of one owner: everything below works on runs, not on blocks.
            first = np.flatnonzero(np.diff(row, prepend=row[0] - 1))
            start = first * block_size
            pieces.append(np.column_stack([row[first], start, np.append(start[1:], seq_len)]))
        return cls(pieces, num_ranks, seq_len)

    @property
    def batch_size(self) -> int:
        """Number of batch rows whose runs are stored; 1 if one layout serves all rows."""
        return len(self._rows)

    @cached_property
    def tokens_per_rank(self) -> Int64:
        """Tokens that each rank holds, the same in every row: int64 ``[num_ranks]``."""
        return _frozen(self._count_tokens(0))

    def num_tokens(self, rank: int) -> int:
        """Tokens that ``rank`` holds in each batch row."""
        return int(self.tokens_per_rank[check_below(rank, self.num_ranks, "rank")])

    def runs(self, rank: int, row: int = 0) -> Int64:
        """Runs of ``rank`` in batch row ``row``: int64 ``[num_runs, 2]``, ascending, disjoint, merged; read-only.

        >>> Layout.from_owners([0, 1, 1, 0], num_ranks=2, seq_len=7, block_size=2).runs(0)
        array([[0, 2],
               [6, 7]])
        """
        row = check_row(row, self.batch_size)
        lo, hi = self._offsets[row, check_below(rank, self.num_ranks, "rank") : rank + 2]
        return self._rows[row][lo:hi]

    def indices(self, rank: int, row: int = 0) -> Int64:
        """Global positions of the rank's tokens, in shard order (ascending): int64 ``[num_tokens(rank)]``.

        >>> Layout.from_owners([0, 1, 1, 0], num_ranks=2, seq_len=7, block_size=2).indices(0)
        array([0, 1, 6])
        """
        return ragged_arange(self.runs(rank, row))

    def grouped(self, size: int) -> Layout:
        """The layout of groups of ``size`` consecutive ranks; a group holds the tokens of its ranks.

        >>> Layout.from_owners([0, 1, 2, 3], num_ranks=4, seq_len=4, block_size=1).grouped(2).runs(1)
        array([[2, 4]])
        """
        if size < 1 or self.num_ranks % size:
            raise ValueError(f"{self.num_ranks} ranks cannot be grouped by {size}")
        if size == 1:
            return self
        tables = [self.pieces(row) // np.array([size, 1, 1]) for row in range(self.batch_size)]
        return Layout(tables, self.num_ranks // size, self.seq_len)

    def split(self, parts: int) -> Layout:
        """Splits each rank's tokens among ``parts`` ranks: consecutive, sizes differ by at most one; undoes `grouped`.

        >>> Layout.from_owners([0, 1], num_ranks=2, seq_len=8, block_size=4).split(2).tokens_per_rank
        array([2, 2, 2, 2])
        """
        if parts == 1:
            return self
        tables = []
        for row in range(self.batch_size):
            pieces = self.pieces(row)
            length = pieces[:, 2] - pieces[:, 1]
            tokens = self.tokens_per_rank
            # Cut positions within each rank's shard, as positions in the concatenated shards of all ranks.
            size = tokens[:, None] // parts + (np.arange(parts) < tokens[:, None] % parts)
            cuts = np.cumsum(size.ravel())
            first = np.cumsum(length) - length
            edges = np.unique(np.concatenate([first, first + length, cuts, [0]]))
            left, right = edges[:-1], edges[1:]
            piece = np.searchsorted(first, left, side="right") - 1
            start = pieces[piece, 1] + left - first[piece]
            owner = np.searchsorted(cuts, left, side="right")
            tables.append(np.column_stack([owner, start, start + right - left]))
        return Layout(tables, self.num_ranks * parts, self.seq_len)

    def pieces(self, row: int = 0) -> Int64:
        """All runs of a batch row with their owner, rank-major: int64 ``[num_runs, 3]`` of (rank, start, stop).

        >>> layout = Layout.from_owners([1, 0], num_ranks=2, seq_len=8, block_size=4)
        >>> layout.pieces()
        array([[0, 4, 8],
               [1, 0, 4]])
        >>> Layout([layout.pieces()], layout.num_ranks, layout.seq_len) == layout
        True
        """
        row = row if len(self._rows) > 1 else 0
        ranks = np.repeat(np.arange(self.num_ranks), np.diff(self._offsets[row]))
        return np.column_stack([ranks, self._rows[row]])

    def owners_of(self, runs: Int64, row: int = 0) -> tuple[Int64, Int64, Int64]:
        """Owners of the tokens of some runs, int64 ``[n, 2]``, in any order; none of them empty.

        Returns:
            One entry for each run and piece that overlap: index of the run and rank of the piece, int64 ``[m]``, and
            the tokens in both, ``[m, 2]``; by run, ascending.

        >>> layout = Layout.from_owners([1, 0], num_ranks=2, seq_len=8, block_size=4)
        >>> layout.owners_of(np.array([[3, 6]]))
        (array([0, 0]), array([1, 0]), array([[3, 4],
               [4, 6]]))
        """
        pieces = self.pieces(row)
        pieces = pieces[np.argsort(pieces[:, 1], kind="stable")]
        run, piece, both = overlaps(runs, pieces[:, 1:])
        return run, pieces[piece, 0], both

    def rearrange_indices(self) -> torch.Tensor:
        """Positions of rank 0's tokens, then rank 1's, …: int64 ``[batch_size, seq_len]`` on the CPU.

        ``x[rearrange_indices()[b]]`` is row ``b`` in shard order.

        >>> Layout.from_owners([1, 0], num_ranks=2, seq_len=4, block_size=2).rearrange_indices()
        tensor([[2, 3, 0, 1]])
        """
        return torch.from_numpy(np.stack([ragged_arange(runs) for runs in self._rows]))

    def restore_indices(self) -> torch.Tensor:
        """The inverse permutation of `rearrange_indices`: int64 ``[batch_size, seq_len]`` on the CPU.

        >>> layout = Layout.from_owners([1, 0, 0], num_ranks=2, seq_len=3, block_size=1)
        >>> layout.rearrange_indices(), layout.restore_indices()
        (tensor([[1, 2, 0]]), tensor([[2, 0, 1]]))
        """
        out = np.empty((self.batch_size, self.seq_len), dtype=np.int64)
        for row, runs in enumerate(self._rows):
            length = runs[:, 1] - runs[:, 0]
            shard_start = np.cumsum(length) - length
            by_start = np.argsort(runs[:, 0])
            start = shard_start[by_start]
            out[row] = ragged_arange(np.column_stack([start, start + length[by_start]]))
        return torch.from_numpy(out)

    def slots(self) -> Int64:
        """Index of each token in the concatenation of all ranks' shards, each padded to the longest.

        Returns:
            int64 ``[batch_size, seq_len]``, indices into ``[rank, batch row, token]``, flattened.

        >>> Layout.from_owners([0, 0, 1], num_ranks=2, seq_len=3, block_size=1).slots()
        array([[0, 1, 2]])
        """
        length, shift = self.shifts()
        tokens = np.arange(self.batch_size * self.seq_len)
        return (tokens + np.repeat(shift, length)).reshape(self.batch_size, self.seq_len)

    def shifts(self) -> Int64:
        """`slots` in runs: their tokens, and the differences of slots to positions, counted through all batch rows.

        Returns:
            int64 ``[2, num_runs]``, the runs of a batch row behind those of the one before, each row's ascending.
        """
        found, padded = [], int(self.tokens_per_rank.max())
        shards = np.append(0, np.cumsum(self.tokens_per_rank))
        for row, runs in enumerate(self._rows):
            rank = np.repeat(np.arange(self.num_ranks), np.diff(self._offsets[row]))
            length = runs[:, 1] - runs[:, 0]
            before = np.cumsum(length) - length  # tokens of all earlier runs, whatever their rank
            slot = (rank * self.batch_size + row) * padded + before - shards[rank]
            by_start = np.argsort(runs[:, 0])
            found.append(np.stack([length, slot - runs[:, 0] - row * self.seq_len])[:, by_start])
        return np.concatenate(found, axis=1)

    def digest(self) -> bytes:
        """SHA-256 of everything that two equal layouts share; the same on every platform."""
        sha = hashlib.sha256(np.array([self.seq_len, self.num_ranks, self.batch_size], dtype="<i8").tobytes())
        for array in (self._offsets, *self._rows):
            sha.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return sha.digest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return (
            (self.seq_len, self.num_ranks, self.batch_size) == (other.seq_len, other.num_ranks, other.batch_size)
            and np.array_equal(self._offsets, other._offsets)
            and all(map(np.array_equal, self._rows, other._rows))
        )

    def __hash__(self) -> int:
        return hash(self.digest())

    def __repr__(self) -> str:
        runs = sum(len(row) for row in self._rows)
        return f"Layout(seq_len={self.seq_len}, num_ranks={self.num_ranks}, batch_size={self.batch_size}, runs={runs})"

    def _count_tokens(self, row: int) -> Int64:
        total = np.append(0, np.cumsum(self._rows[row][:, 1] - self._rows[row][:, 0]))
        return np.diff(total[self._offsets[row]])


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


def _canonical(given: ArrayLike, num_ranks: int, seq_len: int) -> Int64:
    """Checks that the pieces tile the sequence; returns them sorted by (rank, start), adjacent ones merged."""
    pieces = int_array(given, "pieces").astype(np.int64, copy=False)
    pieces = pieces if pieces.size else pieces.reshape(0, 3)
    check_shape(pieces, "pieces", "n", 3)
    pieces = pieces[pieces[:, 1] != pieces[:, 2]]
    pieces = pieces[np.argsort(pieces[:, 1], kind="stable")]
    rank, start, stop = pieces.T
    for each in pieces[(rank < 0) | (rank >= num_ranks) | (start < 0) | (start > stop) | (stop > seq_len)][:1].tolist():
        raise ValueError(
            f"pieces must be (rank, start, stop), a rank in [0, {num_ranks}) and a run in [0, {seq_len}), got {each}"
        )
    covered = np.append(0, stop)
    following = np.append(start, seq_len)
    for i in np.flatnonzero(covered != following)[:1]:
        if covered[i] < following[i]:
            raise ValueError(f"tokens [{covered[i]}, {following[i]}) belong to no rank; runs must tile [0, {seq_len})")
        raise ValueError(f"token {following[i]} belongs to rank {rank[i - 1]} and to rank {rank[i]}")
    pieces = pieces[np.argsort(rank, kind="stable")]
    rank, start, stop = pieces.T
    opens = np.ones(len(pieces), dtype=bool)
    opens[1:] = (rank[1:] != rank[:-1]) | (start[1:] != stop[:-1])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(pieces)) - 1
    return np.column_stack([rank[first], start[first], stop[last]])


def _frozen(array: NDArray[Any]) -> Int64:
    array = np.ascontiguousarray(array, dtype=np.int64)
    array.setflags(write=False)
    return array
