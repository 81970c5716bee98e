"""The local balancer: balanced work and equal tokens with the least K/V traffic.

A rank receives the K/V that its queries read and that it does not own. `Local` searches for the owner of each block
that minimises this traffic, summed over ranks, while the work of the busiest rank stays within a bound. The search
starts from the contiguous layout, which has next to no traffic, and swaps groups of equally many blocks between two
ranks; early swaps may cost traffic. Every swap is priced exactly at the granularity of blocks, from the number of q
blocks of each rank that read each kv block.

For many ranks a search takes too long; `by_document` then builds the layout.

This module builds the search from masks; `local_search` is the compiled loop.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from spanwise.layouts.balancers import LPT
from spanwise.layouts.by_document import ByDocument
from spanwise.layouts.layout import Layout
from spanwise.layouts.problem import LayoutProblem
from spanwise.masks import spans
from spanwise.masks.arrays import Float64, Int64
from spanwise.masks.span_mask import SpanMask

# Found by trial on packed documents: lower traffic on the mean of many seeds.
# Thresholds: blocks by which a swap may be worse at the start, at the start after a coarse search, and at the end.
_THRESHOLD, _THRESHOLD_AFTER_COARSE, _FINAL_THRESHOLD = 4.0, 1.0, 0.02
_PENALTY, _FINE_PENALTY = 0.5, 1.0
_COARSE_SHARE, _COARSE_SLACK = 0.5, 1.005  # share of the budget; bound of the coarse search over the bound
_BOUND, _BLOCKS_FOR_BOUND, _FEW_BLOCKS_BOUND = 1.02, 32, 1.03
# Ranks. Predicted step of the search over that of `by_document`, ten families of masks:
# 64 ranks 1.0 to 1.6, 128 ranks 1.0 to 2.4.
MOST_SEARCHED = 32
_QUALITIES = {"best": 1.0, "fast": 0.25}


@dataclass(frozen=True)
class Local:
    """Least K/V traffic under a bound on the imbalance; ranks hold equally many blocks, or one more.

    With several masks the weighted sum of their work is bounded, and so is each mask alone, because ranks wait for one
    another in every layer. If the search finds no layout within all bounds, only the bound of the sum holds. Traffic is
    the sum of the masks' tokens, each times its weight: of all ranks, or of the busiest receiver where that has more
    than 2.45 times the mean. Beyond 32 ranks the layout is that of `ByDocument`.

    Args:
        max_imbalance: allowed ratio of busiest to mean work (mask area), at least 1. None: 1.02, or 1.03 if a rank
            holds fewer than 32 blocks. If longest-first assignment (`LPT`) does not reach it, its busiest rank is the
            bound instead.
        quality: "best", or "fast" for a quarter of the search.
        most_runs: most runs of tokens on a rank, each then about as long; layers that carry a state exchange a map for
            each run. The sequence is cut into that many runs a rank instead of blocks, for any number of ranks.
            None: no bound.

    Raises:
        ValueError: a bound below 1, or an unknown quality.
    """

    max_imbalance: float | None = None
    quality: str = "best"
    most_runs: int | None = None

    def __post_init__(self) -> None:
        bound = self.max_imbalance
        if bound is not None and not (math.isfinite(bound) and bound >= 1):
            raise ValueError(f"max_imbalance must be at least 1 and finite, got {bound}")
        if self.quality not in _QUALITIES:
            raise ValueError(f"quality must be one of {sorted(_QUALITIES)}, got {self.quality!r}")
        if self.most_runs is not None and self.most_runs < 1:
            raise ValueError(f"most_runs must be at least 1, or None for no bound, got {self.most_runs}")

    def assign(self, problem: LayoutProblem, num_ranks: int) -> Layout:
        """The layout; the same on every host."""
        if self.most_runs is not None:
            run = max(-(-problem.seq_len // (num_ranks * self.most_runs)), problem.block_size)
            problem = dataclasses.replace(problem, block_size=run)
        elif num_ranks > MOST_SEARCHED:
            return ByDocument(self.max_imbalance or _BOUND).assign(problem, num_ranks)
        alone = [LayoutProblem({name: problem.masks[name]}, block_size=problem.block_size) for name in problem.masks]
        balanced = [LPT().assign(each, num_ranks) for each in (problem, *(alone if len(alone) > 1 else ()))]
        owner = [self._search(problem, row, num_ranks, balanced) for row in range(problem.batch_size)]
        return Layout.from_owners(np.stack(owner), num_ranks, problem.seq_len, problem.block_size)

    def _search(self, problem: LayoutProblem, row: int, num_ranks: int, by_lpt: list[Int64]) -> Int64:
        """Owner of each block of one batch row; ``by_lpt`` holds the answers of `LPT` to each bound."""
        num_blocks, has_short = problem.num_blocks, problem.seq_len % problem.block_size != 0
        contiguous = np.repeat(np.arange(num_ranks), _counts(num_blocks, num_ranks))
        work = _bounded_work(problem, row)
        balanced = [num_ranks - 1 - each[row if len(each) > 1 else 0] for each in by_lpt]
        reached = np.array([_busiest(each, work, num_ranks)[k] for k, each in enumerate(balanced)])[work.any(axis=1)]
        work = work[work.any(axis=1)]
        if num_ranks == 1 or num_blocks <= 1 or len(work) == 0:
            return _renumbered(contiguous, num_ranks, has_short)
        bound = self.max_imbalance
        if bound is None:
            bound = _BOUND if num_blocks >= _BLOCKS_FOR_BOUND * num_ranks else _FEW_BLOCKS_BOUND
        limit = np.maximum(bound * work.sum(axis=1) / num_ranks, reached) * (1 + 1e-12)
        budget = _budget(num_blocks, num_ranks) * _QUALITIES[self.quality]
        start, threshold, coarse = contiguous, _THRESHOLD, 1
        # Blocks of a unit in the coarse search. Large units go first: few swaps place them, and they leave local minima
        # that single blocks cannot. Each rank keeps enough units to be balanced.
        while 4 * coarse * coarse * num_ranks <= num_blocks:
            coarse *= 2
        if coarse > 1:
            search = _Search(problem, row, num_ranks, work, limit * _COARSE_SLACK, coarse)
            num_units = -(-num_blocks // coarse)
            begin = np.repeat(np.arange(num_ranks), _counts(num_units, num_ranks))
            search.run(begin, 2.0 * coarse, _PENALTY, _COARSE_SHARE * budget)
            start, threshold = np.repeat(search.best, coarse)[:num_blocks], _THRESHOLD_AFTER_COARSE
            start, budget = _equalised(start, num_ranks, has_short), budget * (1 - _COARSE_SHARE)
        search = _Search(problem, row, num_ranks, work, limit)
        search.run(start, threshold, _FINE_PENALTY, budget)
        # Balanced regular layouts may be hard to beat: windows, plain causal masks.
        chunk = np.arange(num_blocks) * 2 * num_ranks // num_blocks
        head_tail = np.maximum(chunk, 2 * num_ranks - 1 - chunk) - num_ranks
        for regular in (contiguous, _equalised(head_tail, num_ranks, has_short)):
            if (_busiest(regular, work, num_ranks) <= limit).all():
                search.run(regular, 0.0, _FINE_PENALTY, 0)
        for penalty in (8 * _FINE_PENALTY, 64 * _FINE_PENALTY):
            if math.isinf(search.least[0]):
                search.run(search.last, 0.0, penalty, 0.25 * budget)
        if math.isinf(search.least[0]):  # give up the bounds of single masks, keep that of their sum
            limit = np.maximum(limit, _busiest(balanced[0], work, num_ranks) * (1 + 1e-12))
            search = _Search(problem, row, num_ranks, work, limit)
            search.run(balanced[0], 0.0, 64 * _FINE_PENALTY, 0.25 * budget)
        return _renumbered(search.best, num_ranks, has_short)


class _Search:
    """The search on one batch row at one granularity: units of ``coarse`` blocks.

    Attributes:
        best: the balanced layout with least traffic so far, or the last one tried if no layout was balanced.
        least: its rating and its traffic, in tokens times weight; infinite if it is not balanced.
        last: layout at which the last run stopped.
    """

    def __init__(
        self, problem: LayoutProblem, row: int, num_ranks: int, work: Float64, limit: Float64, coarse: int = 1
    ) -> None:
        from spanwise.layouts.local_search import Task  # loads numba, a compiler

        weights = problem.weights or {}
        names = sorted(problem.masks)
        masks = [problem.masks[name] for name in names]
        masks = [mask.row(row if mask.batch_size > 1 else 0) for mask in masks]
        weight = np.array([float(weights[name]) for name in names])
        unit = problem.block_size * coarse
        num_units = -(-problem.seq_len // unit)
        offsets, low, high = block_reads(masks, unit)
        left, right = _documents_of_blocks(offsets, low, num_units)
        tokens = np.full(num_units, unit, dtype=np.float64)
        tokens[-1] = problem.seq_len - (num_units - 1) * unit
        before = np.concatenate([np.zeros((len(work), 1)), np.cumsum(work, axis=1)], axis=1)
        self.scale = problem.block_size * weight.sum()
        self.penalty = problem.num_blocks * num_ranks**2 * self.scale / before[:, -1]
        self.num_ranks = num_ranks
        self.task = Task(
            offsets=offsets, low=low, high=high, price=weight[:, None] * tokens,
            total=np.concatenate([before[:, :-1:coarse], before[:, -1:]], axis=1), limit=limit, penalty=self.penalty,
            left=left, right=right, fixed=num_units - 1 if problem.seq_len % problem.block_size else -1,
        )  # fmt: skip
        self.least = (math.inf, math.inf)

    def run(self, start: Int64, threshold: float, penalty: float, budget: float) -> None:
        """Search from ``start``; at first a swap may be worse by `threshold` blocks. `budget` is in operations.

        `penalty` is the price, in sequences a rank, of work over the limit by the mean work of a rank.
        """
        from spanwise.layouts.compiling import noticed
        from spanwise.layouts.local_search import anneal, state_of

        found, task = start.copy(), self.task._replace(penalty=penalty * self.penalty)
        thresholds = threshold * self.scale, _FINAL_THRESHOLD * self.scale
        state = state_of(task, start.copy(), self.num_ranks)
        with noticed():
            rated = anneal(task, state, *thresholds, int(budget), found)
        self.last = state.owner
        if math.isinf(rated[0]):
            found = self.last
        if math.isinf(self.least[0]) or rated < self.least:
            self.best, self.least = found, rated


def _bounded_work(problem: LayoutProblem, row: int) -> Float64:
    """Area of each block for each bound, ``[num_bounds, num_blocks]``: the weighted sum, then each mask alone."""
    bounded = [problem.block_area]
    if len(problem.masks) > 1:
        starts = np.arange(0, problem.seq_len, problem.block_size)
        bounded += [np.add.reduceat(mask.area(), starts, axis=1) for mask in problem.masks.values()]
    return np.stack([area[row if len(area) > 1 else 0].astype(np.float64) for area in bounded])


def _busiest(owner: Int64, work: Float64, num_ranks: int) -> Float64:
    return np.array([np.bincount(owner, area, num_ranks).max() for area in work])


def _budget(num_blocks: int, num_ranks: int) -> float:
    """Operations of a full search, about 3 ns each."""
    size = min(num_blocks, 1024) * (max(num_blocks, 1024) / 1024) ** 0.4
    return 1000 * size * min(num_ranks, 8) * (max(num_ranks, 8) / 8) ** 0.7


def _counts(num_blocks: int, num_ranks: int) -> Int64:
    """Blocks of each rank in the order of the search, in which the last ranks have one more."""
    return num_blocks // num_ranks + (np.arange(num_ranks) >= num_ranks - num_blocks % num_ranks)


def _equalised(owner: Int64, num_ranks: int, has_short: bool) -> Int64:
    """Moves blocks from ranks with too many to ranks with too few; a short last one to a rank that may hold it."""
    counts, wanted = np.bincount(owner, minlength=num_ranks), _counts(len(owner), num_ranks)
    owner = owner.copy()
    surplus = [np.flatnonzero(owner == rank)[: max(counts[rank] - wanted[rank], 0)] for rank in range(num_ranks)]
    owner[np.concatenate(surplus)] = np.repeat(np.arange(num_ranks), np.maximum(wanted - counts, 0))
    if has_short and wanted[owner[-1]] != wanted[-1]:
        owner[np.flatnonzero(owner == num_ranks - 1)[-1]] = owner[-1]
        owner[-1] = num_ranks - 1
    return owner


def _renumbered(owner: Int64, num_ranks: int, has_short: bool) -> Int64:
    """Owners in the caller's numbering: first ranks with more blocks, with the short last block, with early blocks."""
    first = np.full(num_ranks, len(owner))
    np.minimum.at(first, owner, np.arange(len(owner)))
    if has_short:
        first[owner[-1]] = -1
    label = np.empty(num_ranks, dtype=np.int64)
    label[np.lexsort((first, -np.bincount(owner, minlength=num_ranks)))] = np.arange(num_ranks)
    return label[owner]


def block_reads(masks: list[SpanMask], block_size: int) -> tuple[Int64, Int64, Int64]:
    """The kv blocks that each q block reads, as intervals that may overlap.

    Returns:
        ``offsets`` [num_masks, num_blocks + 1], ``low`` and ``high`` [num_intervals]: q block ``q`` of mask ``m`` reads
        the kv blocks ``low[i] … high[i] - 1`` for ``i`` in ``offsets[m, q] … offsets[m, q + 1] - 1``.
    """
    num_blocks = -(-masks[0].q_len // block_size)
    tables, offsets, before = [], [], 0
    for mask in masks:
        found = [np.empty((0, 3), np.int64)]
        for start, end in zip(mask.start[0], mask.end[0], strict=True):
            filled = start < end
            rows = np.arange(len(start))
            if not filled.all():
                rows, start, end = rows[filled], start[filled], end[filled]
            opens = spans.chain_breaks(start, end)
            opens[np.searchsorted(rows, np.arange(0, rows[-1] + 1 if len(rows) else 0, block_size))] = True
            first = np.flatnonzero(opens)
            last = np.append(first[1:], len(rows))[: len(first)] - 1
            low, high = start[first] // block_size, -(-end[last] // block_size)
            found.append(np.stack([rows[first] // block_size, low, high], axis=1))
        table = np.concatenate(found)
        table = table[np.lexsort(table.T[::-1])]
        new = np.ones(len(table), dtype=bool)
        new[1:] = (table[1:] != table[:-1]).any(axis=1)
        table = table[new]
        offsets.append(before + np.searchsorted(table[:, 0], np.arange(num_blocks + 1)))
        tables.append(table)
        before += len(table)
    joined = np.concatenate(tables)
    return np.stack(offsets).astype(np.int64), joined[:, 1].copy(), joined[:, 2].copy()


def _documents_of_blocks(offsets: Int64, low: Int64, num_blocks: int) -> tuple[Int64, Int64]:
    """The document ``[left, right)`` of each block: adjacent blocks with the same first key read in every mask."""
    opens = np.zeros(num_blocks, dtype=bool)
    opens[0] = True
    for table in offsets:
        first = np.full(num_blocks, num_blocks)
        reads = np.diff(table)
        first[reads > 0] = low[table[:-1][reads > 0]]  # tables are sorted: a block's first interval is its lowest
        opens[1:] |= first[1:] != first[:-1]
    if opens.sum() > num_blocks // 3:  # a window: the first key read changes with every block
        opens[1:] = False
    edges = np.append(np.flatnonzero(opens), num_blocks)
    document = np.cumsum(opens) - 1
    return edges[document], edges[document + 1]
