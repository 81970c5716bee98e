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

from spanwise.layouts import filling, swaps, traffic
from spanwise.layouts.balancers import contiguous
from spanwise.layouts.layout import Layout
from spanwise.layouts.problem import LayoutProblem
from spanwise.layouts.runs import subtract_runs
from spanwise.masks import even_runs
from spanwise.masks.arrays import Int64

# Ranks up to which units change places afterwards, units of a rank, and of all. Tokens received on 4 ranks, block
# diffusion of 16,384 and of 65,536 tokens: without swaps 4,184 and 33,008, so 3,616 and 26,848, with twice the units
# 3,632 and 30,976. CPU seconds of a plan for 8 ranks: 0.02 without swaps, 0.1 with them.
_MOST_SWAPPED, _PER_RANK, _UNITS = 16, 16, 128


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
        limit = self.max_imbalance * (1 + 1e-9) * before[-1] / num_ranks
        found = filling.tries(documents, before, num_ranks, self.host_size or 1, self.max_imbalance)
        best = _best(problem, row, num_ranks, found, limit)
        several = any(mask.num_spans > 1 for mask in problem.masks.values())  # otherwise swaps shorten no step
        if several and 1 < num_ranks <= _MOST_SWAPPED and self.host_size is None:
            starts = [best, contiguous(problem.seq_len, num_ranks).pieces(0)]
            found = [best, *_swapped(problem, row, num_ranks, starts, limit)]
            best = _best(problem, row, num_ranks, found, limit)
        return best


def _best(problem: LayoutProblem, row: int, num_ranks: int, tries: list[Int64], limit: float) -> Int64:
    """Of several pieces those that receive the fewest tokens, of those with least work beyond the limit.

    All tries lie on one line, so that one union and one difference serve them.
    """
    if len(tries) == 1:
        return tries[0]
    number = np.repeat(np.arange(len(tries)), [len(pieces) for pieces in tries])
    owner, start, stop = np.concatenate(tries).T
    owner = owner + number * num_ranks
    before, stride = problem.work_before[row], problem.seq_len + 1
    work = np.bincount(owner, before[stop] - before[start], len(tries) * num_ranks)
    busiest = work.reshape(-1, num_ranks).max(axis=1)
    held = np.column_stack([start, stop]) + (owner * stride)[:, None]
    held, received = held[np.argsort(held[:, 0])], np.zeros(len(tries))
    for name in sorted(problem.masks):
        slots = problem.masks[name].even_runs(traffic.row_of(problem.masks[name], row))
        read = even_runs.keys_read(slots, np.column_stack([start, stop]), owner, stride)
        missing = subtract_runs(read, held)
        of = missing[:, 0] // (stride * num_ranks)
        received += (problem.weights or {})[name] * np.bincount(of, missing[:, 1] - missing[:, 0], len(tries))
    return tries[int(np.lexsort((received, np.maximum(busiest, limit)))[0])]


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
