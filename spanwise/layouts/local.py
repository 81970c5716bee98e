"""The local balancer: equal tokens and balanced work from the layout that makes K/V travel least.

A rank receives the K/V that its queries read and that it does not own. `Local` searches for the owner of each block
that makes the sum over ranks (or the busiest rank's share) smallest while the busiest rank's work stays within a bound:
it starts from the contiguous layout, in which next to nothing travels, and swaps stretches of equally many blocks
between two ranks, at first also where that costs traffic for a while. Every swap is priced exactly, at the granularity
of blocks, from counters of how many q blocks of each rank read each kv block.

This module sets the search up from masks; `spanwise.layouts.local_search` is its compiled loop. Stands on
`spanwise.layouts.balancers`, which imports it when it is asked for by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from spanwise.layouts.balancers import LPT, LayoutProblem
from spanwise.layouts.local_search import Float64Array, Int64Array, Task, anneal
from spanwise.masks import spans as _spans
from spanwise.masks.span_mask import SpanMask

# Found by trial on packed documents: lower traffic on the mean of many seeds.
_HEAT, _REHEAT, _COLD = 4.0, 1.0, 0.02  # blocks by which a swap may be worse: at first, after a coarse search, at last
_PENALTY, _FINE_PENALTY = 0.5, 1.0
_COARSE_SHARE, _COARSE_SLACK = 0.5, 1.005  # of the budget; the coarse bound over the bound
_HOST_SHARE = 0.3  # of the budget
_QUALITIES = {"best": 1.0, "fast": 0.25}
_OBJECTIVES = ("mean", "busiest")


@dataclass(frozen=True)
class Local:
    """Least K/V traffic under a bound on the imbalance; every rank holds equally many blocks, give or take one.

    Of several masks the weighted sum is bounded, and so is each by itself, because ranks wait for one another in every
    layer; where the search finds no layout within all bounds, only the sum's holds. The traffic that counts is the sum
    of the masks' tokens, each times its weight.

    Args:
        max_imbalance: busiest over mean work (mask area) that is allowed, at least 1. None: 1.02, or 1.03 if a rank
            holds fewer than 32 blocks. What longest-first dealing (`LPT`) cannot reach is not asked for: its busiest
            rank is allowed too.
        quality: "best", or "fast" for a quarter of the search.
        objective: "mean" for the tokens that all ranks receive together, or, where one receives more than 2.45 times
            the mean, for what that one receives; "busiest" for the rank that receives most, and among equals the mean.
        host_size: ranks of a host, where rank r is on host ``r // host_size``; None if all links are alike.
        host_price: what a token from a rank of the same host costs, between 0 and 1; one from another host costs 1.
            The default is about NVLink's 450 GB/s against the 50 GB/s of a 400 Gbit/s adapter.

    Raises:
        ValueError: a bound below 1, an unknown quality or objective, no ranks on a host, a price outside 0 … 1.
    """

    max_imbalance: float | None = None
    quality: str = "best"
    objective: str = "mean"
    host_size: int | None = None
    host_price: float = 0.1

    def __post_init__(self) -> None:
        bound = self.max_imbalance
        if bound is not None and not (math.isfinite(bound) and bound >= 1):
            raise ValueError(f"max_imbalance must be at least 1 and finite, got {bound}")
        if self.quality not in _QUALITIES:
            raise ValueError(f"quality must be one of {sorted(_QUALITIES)}, got {self.quality!r}")
        if self.objective not in _OBJECTIVES:
            raise ValueError(f"objective must be one of {list(_OBJECTIVES)}, got {self.objective!r}")
        if self.host_size is not None and self.host_size < 1:
            raise ValueError(
                f"host_size must be at least 1, or None for links that are all alike, got {self.host_size}"
            )
        if not 0 <= self.host_price <= 1:
            raise ValueError(f"host_price must be between 0 and 1, the price from another host, got {self.host_price}")

    def assign(self, problem: LayoutProblem, num_ranks: int) -> Int64Array:
        """Owner of each block, int64 ``[batch, num_blocks]``; the same for the same problem on every host."""
        owner = np.empty((problem.batch_size, problem.num_blocks), dtype=np.int64)
        alone = [LayoutProblem({name: problem.masks[name]}, block_size=problem.block_size) for name in problem.masks]
        dealt = [LPT().assign(each, num_ranks) for each in (problem, *(alone if len(alone) > 1 else ()))]
        ranks = _Ranks(problem, num_ranks, self.host_size)
        for row in range(problem.batch_size):
            owner[row] = ranks.named(self._search(problem, row, ranks, dealt))
        return owner

    def _search(self, problem: LayoutProblem, row: int, ranks: _Ranks, deals: list[Int64Array]) -> Int64Array:
        num_blocks, num_ranks = problem.num_blocks, ranks.num_ranks
        contiguous = _contiguous(num_blocks, num_ranks)
        work = _bounded_work(problem, row)
        dealt = [num_ranks - 1 - each[row if len(each) > 1 else 0] for each in deals]
        reached = np.array([_busiest(each, work, num_ranks)[k] for k, each in enumerate(dealt)])[work.any(axis=1)]
        work = work[work.any(axis=1)]
        if num_ranks == 1 or num_blocks <= 1 or len(work) == 0:
            return contiguous
        bound = self.max_imbalance
        if bound is None:
            bound = 1.02 if num_blocks >= 32 * num_ranks else 1.03
        limit = np.maximum(bound * work.sum(axis=1) / num_ranks, reached) * (1 + 1e-12)
        budget = _budget(num_blocks, num_ranks) * _QUALITIES[self.quality]
        coarse = _coarse(num_blocks, num_ranks)
        starts, heat = [_contiguous(-(-num_blocks // coarse), num_ranks)], _HEAT
        if ranks.host_size > 1 and num_ranks % ranks.host_size == 0:
            starts.append(self._spread_over_hosts(problem, row, ranks, work, limit, _HOST_SHARE * budget))
        start = starts[-1]
        if coarse > 1:
            search = _Search(self, problem, row, ranks, work, limit * _COARSE_SLACK, coarse)
            for begin in starts:
                search.run(begin, 2.0 * coarse, _PENALTY, _COARSE_SHARE * budget / len(starts))
            start, heat = np.repeat(search.best, coarse)[:num_blocks], _REHEAT
            budget *= 1 - _COARSE_SHARE
        start = ranks.evened(start)
        search = _Search(self, problem, row, ranks, work, limit)
        search.run(start, heat, _FINE_PENALTY, budget)
        # Where the structured layouts are balanced they may be hard to beat: windows, plain causal masks.
        for structured in (contiguous, ranks.evened(_zig_zag(num_blocks, num_ranks))):
            if (_busiest(structured, work, num_ranks) <= limit).all():
                search.run(structured, 0.0, _FINE_PENALTY, 0)
        for penalty in (8 * _FINE_PENALTY, 64 * _FINE_PENALTY):
            if math.isinf(search.least[0]):
                search.run(search.last, 0.0, penalty, 0.25 * budget)
        if math.isinf(search.least[0]):  # no mask by itself is sure of its bound, only their sum
            limit = np.maximum(limit, _busiest(dealt[0], work, num_ranks) * (1 + 1e-12))
            search = _Search(self, problem, row, ranks, work, limit)
            search.run(dealt[0], 0.0, 64 * _FINE_PENALTY, 0.25 * budget)
        return search.best

    def _spread_over_hosts(
        self,
        problem: LayoutProblem,
        row: int,
        ranks: _Ranks,
        work: Float64Array,
        limit: Float64Array,
        budget: float,
    ) -> Int64Array:
        """A coarse layout in which little travels between hosts: a flat search with hosts for ranks, cut evenly."""
        size = ranks.host_size
        hosts = _Ranks(problem, ranks.num_ranks // size, None)
        rough = _coarse(problem.num_blocks, hosts.num_ranks)
        search = _Search(self, problem, row, hosts, work, size * limit * _COARSE_SLACK, rough)
        search.run(_contiguous(-(-problem.num_blocks // rough), hosts.num_ranks), 2.0 * rough, _PENALTY, budget)
        coarse = _coarse(problem.num_blocks, ranks.num_ranks)
        host = np.repeat(search.best, rough // coarse)[: -(-problem.num_blocks // coarse)]
        start = np.empty_like(host)
        for each in range(hosts.num_ranks):
            held = np.flatnonzero(host == each)
            start[held] = each * size + np.arange(len(held)) * size // max(len(held), 1)
        return ranks.evened(start)


class _Ranks:
    """Ranks as the search counts them, backwards: the last ones hold the left-over blocks, and a short last block.

    Attributes:
        host_size: ranks of a host; 1 if all links are alike.
        host_start, host_stop: the ranks that share a host with each rank; a rank alone if all links are alike.
        kind: ranks of equal kind may change places with all their host, ``[num_ranks]``.
        has_short: whether the last block is short.
    """

    def __init__(self, problem: LayoutProblem, num_ranks: int, host_size: int | None) -> None:
        self.num_ranks = num_ranks
        self.has_short = problem.seq_len % problem.block_size != 0
        size = self.host_size = host_size if host_size is not None and host_size < num_ranks else 1
        self.host = (num_ranks - 1 - np.arange(num_ranks)) // size
        self.host_start = np.maximum(num_ranks - (self.host + 1) * size, 0)
        self.host_stop = num_ranks - self.host * size
        counts = _counts(problem.num_blocks, num_ranks)
        blocks = np.bincount(self.host, counts)[self.host].astype(np.int64)
        kinds = np.stack([self.host_stop - self.host_start, blocks, counts], axis=1)
        self.kind = np.unique(kinds, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)

    def evened(self, owner: Int64Array) -> Int64Array:
        """Moves blocks, or units of them, from ranks with too many to ranks with too few, the last one to a rank that
        may hold it."""
        counts, wanted = np.bincount(owner, minlength=self.num_ranks), _counts(len(owner), self.num_ranks)
        owner = owner.copy()
        spare = [np.flatnonzero(owner == rank)[: max(counts[rank] - wanted[rank], 0)] for rank in range(self.num_ranks)]
        owner[np.concatenate(spare)] = np.repeat(np.arange(self.num_ranks), np.maximum(wanted - counts, 0))
        if self.has_short and self.kind[owner[-1]] != self.kind[-1]:
            owner[np.flatnonzero(owner == self.num_ranks - 1)[-1]] = owner[-1]
            owner[-1] = self.num_ranks - 1
        return owner

    def named(self, owner: Int64Array) -> Int64Array:
        """Ranks as the caller counts them: hosts and their ranks with more blocks first, then those with the short last
        block, then by first block. Ranks of one host stay together."""
        counts = np.bincount(owner, minlength=self.num_ranks)
        first = np.full(self.num_ranks, len(owner))
        np.minimum.at(first, owner, np.arange(len(owner)))
        if self.has_short:
            first[owner[-1]] = -1
        blocks = np.bincount(self.host, counts)[self.host]
        host_first = np.full(self.num_ranks, len(owner))
        np.minimum.at(host_first, self.host, first)
        size = self.host_stop - self.host_start
        label = np.empty(self.num_ranks, dtype=np.int64)
        label[np.lexsort((first, -counts, host_first[self.host], -blocks, -size))] = np.arange(self.num_ranks)
        return label[owner]


class _Search:
    """One granularity of a row's problem: units of ``coarse`` blocks.

    Attributes:
        best: the balanced layout with least traffic that was met, or the last one tried if none is balanced.
        least: what it was rated, in tokens times weight, summed over ranks; infinite if it is not balanced.
        last: where the last run stopped.
    """

    def __init__(
        self,
        settings: Local,
        problem: LayoutProblem,
        row: int,
        ranks: _Ranks,
        work: Float64Array,
        limit: Float64Array,
        coarse: int = 1,
    ) -> None:
        weights = problem.weights or {}
        names = sorted(problem.masks)
        masks = [problem.masks[name] for name in names]
        masks = [mask.row(row if mask.batch_size > 1 else 0) for mask in masks]
        weight = np.array([float(weights[name]) for name in names])
        unit = problem.block_size * coarse
        num_units = -(-problem.seq_len // unit)
        offsets, low, high = _block_reads(masks, unit)
        left, right = _stretches(offsets, low, num_units)
        tokens = np.full(num_units, unit, dtype=np.float64)
        tokens[-1] = problem.seq_len - (num_units - 1) * unit
        before = np.concatenate([np.zeros((len(work), 1)), np.cumsum(work, axis=1)], axis=1)
        self.scale = problem.block_size * weight.sum()
        self.penalty = problem.num_blocks * ranks.num_ranks**2 * self.scale / before[:, -1]
        self.ranks = ranks
        self.task = Task(
            offsets=offsets, low=low, high=high, price=weight[:, None] * tokens,
            total=np.concatenate([before[:, :-1:coarse], before[:, -1:]], axis=1), limit=limit, penalty=self.penalty,
            left=left, right=right, host_start=ranks.host_start, host_stop=ranks.host_stop,
            host_price=float(settings.host_price), kind=ranks.kind, fixed=num_units - 1 if ranks.has_short else -1,
            busiest=settings.objective == "busiest",
        )  # fmt: skip
        self.least = (math.inf, math.inf)

    def run(self, start: Int64Array, heat: float, penalty: float, budget: float) -> None:
        """Searches from ``start``; heat in blocks, penalty in sequences for each mean work over the limit, a rank."""
        self.last = start.copy()
        found = start.copy()
        task = self.task._replace(penalty=penalty * self.penalty)
        scale = self.scale
        rated = anneal(task, self.last, self.ranks.num_ranks, heat * scale, _COLD * scale, int(budget), found)
        if math.isinf(rated[0]):
            found = self.last
        if math.isinf(self.least[0]) or rated < self.least:
            self.best, self.least = found, rated


def _bounded_work(problem: LayoutProblem, row: int) -> Float64Array:
    """Area of each block for all that is bounded, ``[num_bounds, num_blocks]``: the weighted sum, then each mask."""
    bounded = [problem.block_area]
    if len(problem.masks) > 1:
        starts = np.arange(0, problem.seq_len, problem.block_size)
        bounded += [np.add.reduceat(mask.area(), starts, axis=1) for mask in problem.masks.values()]
    return np.stack([area[row if len(area) > 1 else 0].astype(np.float64) for area in bounded])


def _busiest(owner: Int64Array, work: Float64Array, num_ranks: int) -> Float64Array:
    return np.array([np.bincount(owner, area, num_ranks).max() for area in work])


def _budget(num_blocks: int, num_ranks: int) -> float:
    """Operations that the search may take: about 3 ns each."""
    size = min(num_blocks, 1024) * (max(num_blocks, 1024) / 1024) ** 0.4
    return 1000 * size * min(num_ranks, 8) * (max(num_ranks, 8) / 8) ** 0.7


def _counts(num_blocks: int, num_ranks: int) -> Int64Array:
    """Blocks of each rank, the last ranks one more."""
    return num_blocks // num_ranks + (np.arange(num_ranks) >= num_ranks - num_blocks % num_ranks)


def _contiguous(num_blocks: int, num_ranks: int) -> Int64Array:
    """Equal chunks of whole blocks."""
    return np.repeat(np.arange(num_ranks), _counts(num_blocks, num_ranks))


def _zig_zag(num_blocks: int, num_ranks: int) -> Int64Array:
    """Head-tail chunks of whole blocks."""
    chunk = np.arange(num_blocks) * 2 * num_ranks // num_blocks
    return np.maximum(chunk, 2 * num_ranks - 1 - chunk) - num_ranks


def _coarse(num_blocks: int, num_ranks: int) -> int:
    """Blocks of a unit in the coarse search: big pieces find their place first, which costs little and crosses hills
    that single blocks do not. A rank keeps units enough to be balanced."""
    coarse = 1
    while 4 * coarse * coarse * num_ranks <= num_blocks:
        coarse *= 2
    return coarse


def _block_reads(masks: list[SpanMask], block_size: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The kv blocks that each q block reads, as intervals that together cover them (they may overlap).

    Returns:
        ``offsets`` [num_masks, num_blocks + 1], ``low`` and ``high`` [num_intervals]: q block ``q`` of mask ``m`` reads
        the kv blocks ``low[i] … high[i] - 1`` for ``i`` in ``offsets[m, q] … offsets[m, q + 1] - 1``.
    """
    num_blocks = -(-masks[0].q_len // block_size)
    tables, offsets, before = [], [], 0
    for mask in masks:
        parts = [np.empty((0, 3), np.int64)]
        for start, end in zip(mask.start[0], mask.end[0], strict=True):
            filled = start < end
            rows = np.arange(len(start))
            if not filled.all():
                rows, start, end = rows[filled], start[filled], end[filled]
            opens = _spans.chain_breaks(start, end)
            opens[np.searchsorted(rows, np.arange(0, rows[-1] + 1 if len(rows) else 0, block_size))] = True
            first = np.flatnonzero(opens)
            last = np.append(first[1:], len(rows))[: len(first)] - 1
            low, high = start[first] // block_size, -(-end[last] // block_size)
            parts.append(np.stack([rows[first] // block_size, low, high], axis=1))
        table = np.concatenate(parts)
        table = table[np.lexsort(table.T[::-1])]
        new = np.ones(len(table), dtype=bool)
        new[1:] = (table[1:] != table[:-1]).any(axis=1)
        table = table[new]
        offsets.append(before + np.searchsorted(table[:, 0], np.arange(num_blocks + 1)))
        tables.append(table)
        before += len(table)
    joined = np.concatenate(tables)
    return np.stack(offsets).astype(np.int64), joined[:, 1].copy(), joined[:, 2].copy()


def _stretches(offsets: Int64Array, low: Int64Array, num_blocks: int) -> tuple[Int64Array, Int64Array]:
    """The stretch ``[left, right)`` around each block whose first key read is the same in every mask: a document."""
    opens = np.zeros(num_blocks, dtype=bool)
    opens[0] = True
    for table in offsets:
        first = np.full(num_blocks, num_blocks)
        reads = np.diff(table)
        first[reads > 0] = low[table[:-1][reads > 0]]  # tables are sorted: a block's first interval is its lowest
        opens[1:] |= first[1:] != first[:-1]
    if opens.sum() > num_blocks // 3:  # a window: every block reads from another key on
        opens[1:] = False
    edges = np.append(np.flatnonzero(opens), num_blocks)
    stretch = np.cumsum(opens) - 1
    return edges[stretch], edges[stretch + 1]
