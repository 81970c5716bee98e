"""The local balancer: balanced work and equal tokens with little K/V traffic.

A document lies whole on a rank where work and tokens permit. A longer one is folded over as few ranks as possible: each
gets a head and a tail of it (`filling`). So the busiest rank sends, too, little more than the mean: with ascending
parts, which need up to 6 % fewer bytes, the first ranks of a document send most of them.

With hosts the hosts are filled so, and a document that lies on several hosts is spread evenly over the ranks of each:
all of them read, relay and send as much. Each row that enters a host then enters it once (exchange "hierarchical").

For few ranks or hosts the documents are taken in several orders. Where rows read several spans (trees, video with
global tokens, block diffusion), documents say little, and units of the best layout change places (`swaps`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from spanwise.layouts import filling, swaps
from spanwise.layouts.balancers import contiguous
from spanwise.layouts.layout import Layout
from spanwise.layouts.problem import LayoutProblem
from spanwise.layouts.runs import subtract_runs
from spanwise.masks import even_runs
from spanwise.masks.arrays import Float64, Int64

# Ranks up to which units change places afterwards. CPU seconds of a plan for 8 ranks: 0.02 without swaps, 0.1 with
# them. Packed documents of block diffusion on 4 to 16 ranks take steps 1.07 to 1.2 times as long without swaps.
_MOST_SWAPPED = 16


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
        even = contiguous(problem.seq_len, num_ranks).pieces(0)
        limit = self.max_imbalance * (1 + 1e-9) * before[-1] / num_ranks
        if len(documents) == 2 and (before[even[:, 2]] - before[even[:, 1]]).max() <= limit:
            return even  # windows: one piece a rank reads least
        size = self.host_size if self.host_size is not None and self.host_size < num_ranks else 1
        found = filling.tries(documents, before, num_ranks, size, self.max_imbalance)
        ranks = np.diff(np.append(np.arange(0, num_ranks, size), num_ranks))
        best = _best(problem, row, found, ranks * limit, busiest=size > 1)
        if size > 1:
            return filling.inside_hosts(best, documents, before, num_ranks, size, self.max_imbalance)
        several = any(mask.num_spans > 1 for mask in problem.masks.values())  # otherwise swaps shorten no step
        if several and 1 < num_ranks <= _MOST_SWAPPED and self.host_size is None:
            found = [each for start in (best, even) for each in swaps.swapped(problem, row, num_ranks, start, limit)]
            best = _best(problem, row, [best, *found], np.full(num_ranks, limit))
        return best


def _best(problem: LayoutProblem, row: int, tries: list[Int64], limits: Float64, *, busiest: bool = False) -> Int64:
    """Of several pieces those that receive the fewest tokens, of those with least work beyond the limits of bins.

    All tries lie on one line, so that one union and one difference serve them.

    Args:
        busiest: weigh the bin that receives most as much as all others: hosts wait for it.
    """
    if len(tries) == 1:
        return tries[0]
    bins = len(limits)
    number = np.repeat(np.arange(len(tries)), [len(pieces) for pieces in tries])
    owner, start, stop = np.concatenate(tries).T
    owner = owner + number * bins
    before, stride = problem.work_before[row], problem.seq_len + 1
    work = np.bincount(owner, before[stop] - before[start], len(tries) * bins).reshape(-1, bins)
    beyond = np.maximum(work / np.maximum(limits, 1e-30), 1.0).max(axis=1)
    held = np.column_stack([start, stop]) + (owner * stride)[:, None]
    held, received = held[np.argsort(held[:, 0])], np.zeros(len(tries) * bins)
    for name in sorted(problem.masks):
        slots = problem.masks[name].even_runs(row)
        read = even_runs.keys_read(slots, np.column_stack([start, stop]), owner, stride)
        missing = subtract_runs(read, held)
        tokens = np.bincount(missing[:, 0] // stride, missing[:, 1] - missing[:, 0], len(received))
        received += (problem.weights or {})[name] * tokens
    by_bin = received.reshape(len(tries), bins)
    cost = by_bin.sum(axis=1) + busiest * bins * by_bin.max(axis=1)
    return tries[int(np.lexsort((cost, beyond))[0])]
