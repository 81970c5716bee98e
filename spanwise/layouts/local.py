"""The local balancer: balanced work and equal tokens with little K/V traffic.

A document lies whole on a rank where work and tokens permit. A longer one is folded over as few ranks as possible: each
gets a head and a tail of it (`filling`). So the busiest rank sends, too, little more than the mean: with ascending
parts, which need up to 6 % fewer bytes, the first ranks of a document send most of them.

With hosts the hosts are filled so, and a document that lies on several hosts is spread evenly over the ranks of each:
all of them read, relay and send as much. Each row that enters a host then enters it once (exchange "hierarchical").

For few ranks the documents are taken in several orders. Where rows read several spans (trees, video with global tokens,
block diffusion), documents say little, and units of the best layout change places (`swaps`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from spanwise.layouts import swaps, traffic
from spanwise.layouts.balancers import contiguous, head_tail_pieces
from spanwise.layouts.filling import fill
from spanwise.layouts.layout import Layout
from spanwise.layouts.problem import LayoutProblem
from spanwise.masks.arrays import Float64, Int64

# Share of the slack that the work of a host may use; the rest is for the ranks inside it.
_HOST_SLACK = 0.75
# Share of a document up to which what a fold leaves to the next host is its first tokens instead: they read nothing of
# this host. Predicted step with 0.25, 0.1, 0.05 and without, lognormal documents on 128 ranks: median 6k 28.5, 28.7,
# 28.7, 31.5 ms, median 16k 115.7, 108.0, 108.0, 108.0. Among the ranks of a host it costs up to 13 %.
_LITTLE = 0.1
# Orders of documents to try, as many as take the time of one for 128 ranks, and how far the factors that make them are
# from 1. On 8 and 16 ranks, 12 packings of other seeds than the benchmark's, 12 tries bring 0.89 and 0.97 of the tokens
# of one, 40 tries 0.86 and 0.96; with 0.3 for 0.6 0.91 and 0.97.
_TRIES, _TRIES_BY_RANKS, _SPREAD = 12, 128, 0.6
# Ranks up to which units change places afterwards, units of a rank, and of all. Tokens received on 4 ranks, block
# diffusion of 16,384 and of 65,536 tokens: without swaps 4,184 and 33,008, so 3,616 and 26,848, with twice the units
# 3,632 and 30,976. CPU seconds of a plan for 8 ranks: 0.02 without swaps, 0.1 with them.
_MOST_SWAPPED, _PER_RANK, _UNITS = 16, 16, 128
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Local:
    """Little K/V traffic under a bound on the imbalance; ranks hold equally many tokens, or one more.

    Args:
        max_imbalance: work (mask area, the weighted sum of the masks) that a rank may have over the mean, at least 1. A
            layout exceeds it where documents cannot be cut so evenly.
        host_size: ranks of a host, where few rows are to enter a host; rank r is on host ``r // host_size``. None:
            all links are alike.

    Raises:
        ValueError: a bound below 1, or no rank on a host.
    """

    max_imbalance: float = 1.02
    host_size: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_imbalance) and self.max_imbalance >= 1):
            raise ValueError(f"max_imbalance must be at least 1 and finite, got {self.max_imbalance}")
        if self.host_size is not None and self.host_size < 1:
            raise ValueError(f"host_size must be at least 1, or None where links are alike, got {self.host_size}")

    def assign(self, problem: LayoutProblem, num_ranks: int) -> Layout:
        """The layout; the same on every host."""
        rows = range(problem.batch_size)
        return Layout([self._pieces(problem, row, num_ranks) for row in rows], num_ranks, problem.seq_len)

    def _pieces(self, problem: LayoutProblem, row: int, num_ranks: int) -> Int64:
        """Of one batch row: the pieces with least traffic of those with least imbalance beyond the bound."""
        documents, before = problem.documents[row], problem.work_before[row]
        sizes = problem.seq_len // num_ranks + (np.arange(num_ranks) < problem.seq_len % num_ranks)
        mean, limit = before[-1] / num_ranks, self.max_imbalance * (1 + 1e-9)

        def rated(pieces: Int64) -> tuple[float, float]:
            work = np.bincount(pieces[:, 0], before[pieces[:, 2]] - before[pieces[:, 1]], num_ranks)
            layout = Layout([pieces], num_ranks, problem.seq_len)
            return max(float(work.max()), limit * mean), _received(problem, row, layout)

        orders = _orders(len(documents) - 1, num_ranks if self.host_size is None else _TRIES_BY_RANKS)
        found = [
            pieces_of_ranks(documents, before, sizes, self.host_size or 1, self.max_imbalance, order)
            for order in orders
        ]
        if len(found) == 1:
            return found[0]
        best = min(found, key=rated)
        several = any(mask.num_spans > 1 for mask in problem.masks.values())  # otherwise swaps shorten no step
        if several and num_ranks <= _MOST_SWAPPED and self.host_size is None:
            starts = [best, contiguous(problem.seq_len, num_ranks).pieces(0)]
            best = min([best, *_swapped(problem, row, num_ranks, starts, limit * mean)], key=rated)
        return best


def _orders(num_documents: int, num_ranks: int) -> list[Float64]:
    """Factors of the documents' work per unit in each try, the first all 1; no random numbers, so alike everywhere."""
    tries = np.arange(max(1, min(_TRIES, _TRIES_BY_RANKS // num_ranks)))[:, None]
    return list(1 + _SPREAD * (tries > 0) * (2 * (tries * np.arange(1, num_documents + 1) * _GOLDEN % 1) - 1))


def _swapped(problem: LayoutProblem, row: int, num_ranks: int, starts: list[Int64], bound: float) -> list[Int64]:
    """Pieces from each start after swaps of units, as many for each rank; none if units would be less than a block."""
    per_rank = min(_PER_RANK, _UNITS // num_ranks, problem.seq_len // (num_ranks * problem.block_size))
    if per_rank < 2:
        return []
    number = per_rank * num_ranks
    sizes = problem.seq_len // number + (np.arange(number) < problem.seq_len % number)
    edges = np.append(0, np.cumsum(sizes))
    masks = [problem.masks[name] for name in sorted(problem.masks)]
    reads = [swaps.unit_reads(mask.row(traffic.row_of(mask, row)), edges) for mask in masks]
    weights = [float((problem.weights or {})[name]) for name in sorted(problem.masks)]
    work = np.diff(problem.work_before[row][edges])
    found = []
    for pieces in starts:
        held = np.zeros((num_ranks, number), np.int64)
        for rank, start, stop in pieces:
            held[rank] += np.maximum(np.minimum(edges[1:], stop) - np.maximum(edges[:-1], start), 0)
        owner = swaps.improve(swaps.start_from(held, sizes), reads, weights, sizes, work, bound)
        found.append(np.column_stack([owner, edges[:-1], edges[1:]]))
    return found


def _received(problem: LayoutProblem, row: int, layout: Layout) -> float:
    """K/V tokens that all ranks receive, all masks by weight."""
    total = 0.0
    for name in sorted(problem.masks):
        mask = problem.masks[name]
        needs = traffic.needs(mask.row(traffic.row_of(mask, row)), layout, layout)[0]
        total += (problem.weights or {})[name] * sum(int((runs[:, 1] - runs[:, 0]).sum()) for runs in needs)
    return total


def pieces_of_ranks(
    documents: Int64, before: Float64, sizes: Int64, host_size: int, bound: float, order: Float64 | float = 1.0
) -> Int64:
    """Assigns documents to ranks.

    Args:
        documents: offsets of the documents, int64 ``[num_documents + 1]``, ascending; from 0 to the sequence's length.
        before: work before each token, ``[num_tokens + 1]``.
        sizes: tokens that each rank gets, ``[num_ranks]``.
        host_size: ranks of a host; 1 if all links are alike.
        bound: work that a rank may have, over the mean.
        order: as in `fill`.

    Returns:
        int64 ``[num_pieces, 3]``: rank, first token and end of each piece.
    """
    num_ranks, mean = len(sizes), before[-1] / len(sizes)
    items, cuts = np.column_stack([documents[:-1], documents[1:]]), np.append(0, np.cumsum(sizes))
    if len(items) == 1 and np.diff(before[cuts]).max() <= bound * mean:  # windows: one piece a rank reads least
        return np.column_stack([np.arange(num_ranks), cuts[:-1], cuts[1:]])
    if not 1 < host_size < num_ranks:
        return fill(items, before, sizes, np.ones(num_ranks), np.zeros(num_ranks), bound, order=order)
    first = np.arange(0, num_ranks, host_size)
    ranks = np.diff(np.append(first, num_ranks))
    of_hosts = fill(
        items, before, np.add.reduceat(sizes, first), ranks.astype(np.float64), np.zeros(len(first)),
        1 + _HOST_SLACK * (bound - 1), little=_LITTLE, order=order,
    )  # fmt: skip
    document = np.searchsorted(documents, of_hosts[:, 1], side="right") - 1
    whole = of_hosts[:, 2] - of_hosts[:, 1] == np.diff(documents)[document]
    found = []
    for host in range(len(first)):
        own = sizes[first[host] : first[host] + ranks[host]]
        mine = of_hosts[:, 0] == host
        shared, others = _shared(of_hosts[mine & ~whole, 1:], len(own)), of_hosts[mine & whole, 1:]
        had = np.bincount(shared[:, 0], before[shared[:, 2]] - before[shared[:, 1]], len(own)).astype(np.float64)
        work = had.sum() + (before[others[:, 1]] - before[others[:, 0]]).sum()
        allowed = max(bound * mean * len(own) / work, 1.0) if work > 0 else 1.0
        left = own - np.bincount(shared[:, 0], shared[:, 2] - shared[:, 1], len(own)).astype(np.int64)
        given = fill(others, before, left, np.ones(len(own)), had, allowed)
        both = np.concatenate([shared, given])
        both[:, 0] += first[host]
        found.append(both)
    return np.concatenate(found)


def _shared(runs: Int64, num_ranks: int) -> Int64:
    """A head and a tail of each run for every rank, as many tokens for all: rank, first unit, end; int64 ``[n, 3]``."""
    offsets = np.append(0, np.cumsum(runs[:, 1] - runs[:, 0]))
    pieces = head_tail_pieces(offsets, num_ranks)
    pieces = pieces[pieces[:, 1] < pieces[:, 2]]
    run = np.searchsorted(offsets, pieces[:, 1], side="right") - 1
    pieces[:, 1:] += (runs[run, 0] - offsets[run])[:, None]
    return pieces
