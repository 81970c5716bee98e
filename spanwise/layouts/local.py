"""The local balancer: balanced work and equal tokens with the least K/V traffic.

A rank receives the K/V that its queries read and that it does not own. `Local` searches for the owner of each block
that minimises this traffic, summed over ranks (or of the busiest rank), while the work of the busiest rank stays within
a bound. The search starts from the contiguous layout, which has next to no traffic, and swaps groups of equally many
blocks between two ranks; early swaps may cost traffic. Every swap is priced exactly at the granularity of blocks, from
the number of q blocks of each rank that read each kv block.

For many ranks a search takes too long; `by_document` then builds a layout. For few ranks the better one
is taken.

This module builds the search from masks; `local_search` is the compiled loop.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from spanwise.layouts import by_document
from spanwise.layouts.balancers import LPT, Contiguous, HeadTail
from spanwise.layouts.block_reads import block_reads, documents_of_blocks
from spanwise.layouts.layout import Layout
from spanwise.layouts.problem import LayoutProblem
from spanwise.masks.arrays import Float64, Int64

# Found by trial on packed documents: lower traffic on the mean of many seeds.
# Thresholds: blocks by which a swap may be worse at the start, at the start after a coarse search, and at the end.
_THRESHOLD, _THRESHOLD_AFTER_COARSE, _FINAL_THRESHOLD = 4.0, 1.0, 0.02
_PENALTY, _FINE_PENALTY = 0.5, 1.0
_COARSE_SHARE, _COARSE_SLACK = 0.5, 1.005  # share of the budget; bound of the coarse search over the bound
_HOST_SHARE = 0.3  # share of the budget
_BOUND, _BLOCKS_FOR_BOUND, _FEW_BLOCKS_BOUND = 1.02, 32, 1.03
# Ranks. Lognormal documents of median 16k, 32k tokens a rank, priced K/V tokens a rank by search and by `by_document`:
# links alike, 32 ranks 55k and 61k, 64 ranks 96k and 88k; hosts of 8 at a price of 0.11, 32 ranks 29.9k and 8.3k.
_SEARCHED_ALONE, MOST_SEARCHED = 32, 64
_UNBALANCED = 1.05  # work of the busiest rank over the mean at which a search is worth its time
_AS_BALANCED = 1.005  # work of the busiest rank over that of another layout which counts as equal
_LARGEST = 2.45  # as in `local_search`
_QUALITIES = {"best": 1.0, "fast": 0.25}
_OBJECTIVES = ("mean", "busiest")


@dataclass(frozen=True)
class Local:
    """Least K/V traffic under a bound on the imbalance; ranks hold equally many blocks, or one more.

    With several masks the weighted sum of their work is bounded, and so is each mask alone, because ranks wait for one
    another in every layer. If the search finds no layout within all bounds, only the bound of the sum holds. Traffic is
    the sum of the masks' tokens, each times its weight.

    Args:
        max_imbalance: allowed ratio of busiest to mean work (mask area), at least 1. None: 1.02, or 1.03 if a rank
            holds fewer than 32 blocks. If longest-first assignment (`LPT`) does not reach it, its busiest rank is the
            bound instead.
        quality: "best", or "fast" for a quarter of the search.
        objective: "mean" minimises the tokens that all ranks receive together, or the tokens of the busiest receiver
            where those exceed 2.45 times the mean; "busiest" always minimises the latter, and the mean among equals.
        host_size: ranks of a host, where rank r is on host ``r // host_size``; None if all links are alike.
        host_price: price of a token from a rank of the same host, between 0 and 1; one from another host costs 1. The
            default is about the ratio of a 400 Gbit/s adapter's 50 GB/s to NVLink's 450 GB/s.
        most_runs: most runs of tokens on a rank, each then about as long; layers that carry a state exchange a map for
            each run. The sequence is cut into that many stretches a rank instead of blocks. None: no bound.

    Raises:
        ValueError: a bound below 1, an unknown quality or objective, no ranks on a host, a price outside 0 … 1.
    """

    max_imbalance: float | None = None
    quality: str = "best"
    objective: str = "mean"
    host_size: int | None = None
    host_price: float = 0.1
    most_runs: int | None = None

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
        if self.most_runs is not None and self.most_runs < 1:
            raise ValueError(f"most_runs must be at least 1, or None for no bound, got {self.most_runs}")
        if not 0 <= self.host_price <= 1:
            raise ValueError(f"host_price must be between 0 and 1, the price from another host, got {self.host_price}")

    def assign(self, problem: LayoutProblem, num_ranks: int) -> Int64 | Layout:
        """The layout, or the owner of each block, int64 ``[batch, num_blocks]``; the same on every host.

        A search over blocks up to 32 ranks whose links are all alike. The better of it and `by_document`, which cuts
        documents at any token, with hosts, up to 64 ranks, and for the objective "busiest". Otherwise `by_document`,
        unless it is not balanced. With `most_runs` a search over stretches, which are longer than blocks where blocks
        are short enough to need it.
        """
        if self.most_runs is not None:
            stretch = max(-(-problem.seq_len // (num_ranks * self.most_runs)), problem.block_size)
            problem = dataclasses.replace(problem, block_size=stretch)
            return Layout.from_owners(self._owners(problem, num_ranks), num_ranks, problem.seq_len, stretch)
        if num_ranks > MOST_SEARCHED and self.objective == "mean":
            most = max(self.max_imbalance or _BOUND, _UNBALANCED) * by_document.mean_work(problem, num_ranks)
            for host_size in dict.fromkeys((self.host_size, None)):  # long roots of trees may not fit hosts evenly
                layout = self._spread(problem, num_ranks, host_size)
                if (by_document.busiest(layout, problem) <= most)[:, 0].all():
                    return layout
        owner = self._owners(problem, num_ranks)
        if (num_ranks <= _SEARCHED_ALONE and not self._has_hosts(num_ranks)) or problem.num_blocks < num_ranks:
            return owner
        found = Layout.from_owners(owner, num_ranks, problem.seq_len, problem.block_size)
        most = by_document.busiest(found, problem) * _AS_BALANCED
        others = _balanced(self._by_document(problem, num_ranks, self.host_size), problem, most)
        best = self._best([found, *others], problem)
        return owner if best is found else best

    def _has_hosts(self, num_ranks: int) -> bool:
        return 1 < (self.host_size or 1) < num_ranks  # otherwise all links are alike

    def _owners(self, problem: LayoutProblem, num_ranks: int) -> Int64:
        """Owner of each block by search, int64 ``[batch, num_blocks]``."""
        owner = np.empty((problem.batch_size, problem.num_blocks), dtype=np.int64)
        alone = [LayoutProblem({name: problem.masks[name]}, block_size=problem.block_size) for name in problem.masks]
        balanced = [LPT().assign(each, num_ranks) for each in (problem, *(alone if len(alone) > 1 else ()))]
        ranks = _Ranks(problem, num_ranks, self.host_size)
        for row in range(problem.batch_size):
            owner[row] = ranks.renumbered(self._search(problem, row, ranks, balanced))
        return owner

    def _spread(self, problem: LayoutProblem, num_ranks: int, host_size: int | None) -> Layout:
        """The best layout of `by_document`, or a regular one with less traffic, if it is as balanced."""
        ways = self._by_document(problem, num_ranks, host_size)
        bound = (self.max_imbalance or _BOUND) * by_document.mean_work(problem, num_ranks)
        most = np.maximum(bound, by_document.busiest(ways[0], problem)) * _AS_BALANCED
        regular = [balancer.assign(problem, num_ranks) for balancer in (Contiguous(), HeadTail())]
        return self._best(_balanced([*ways, *regular], problem, most), problem)

    def _by_document(self, problem: LayoutProblem, num_ranks: int, host_size: int | None) -> list[Layout]:
        ways = by_document.ways(num_ranks, host_size)
        return [by_document.assign(problem, num_ranks, host_size, self.max_imbalance or _BOUND, way) for way in ways]

    def _best(self, layouts: list[Layout], problem: LayoutProblem) -> Layout:
        """The layout in which ranks receive least, as the search rates it; the first among equals.

        With hosts, and beyond the ranks that are searched, what the busiest rank sends counts as much.
        """
        num_ranks = layouts[0].num_ranks
        sends_count = num_ranks > MOST_SEARCHED or self._has_hosts(num_ranks)

        def rating(layout: Layout) -> float:
            recv, sent = by_document.priced_tokens(layout, problem, self.host_size, self.host_price)
            largest = num_ranks * float(max(recv.max(), sent.max() if sends_count else 0.0))
            return largest if self.objective == "busiest" else max(float(recv.sum()), largest / _LARGEST)

        return min(layouts, key=rating) if len(layouts) > 1 else layouts[0]

    def _search(self, problem: LayoutProblem, row: int, ranks: _Ranks, by_lpt: list[Int64]) -> Int64:
        """Owner of each block of one batch row; ``by_lpt`` holds the answers of `LPT` to each bound."""
        num_blocks, num_ranks = problem.num_blocks, ranks.num_ranks
        contiguous = _contiguous(num_blocks, num_ranks)
        work = _bounded_work(problem, row)
        balanced = [num_ranks - 1 - each[row if len(each) > 1 else 0] for each in by_lpt]
        reached = np.array([_busiest(each, work, num_ranks)[k] for k, each in enumerate(balanced)])[work.any(axis=1)]
        work = work[work.any(axis=1)]
        if num_ranks == 1 or num_blocks <= 1 or len(work) == 0:
            return contiguous
        bound = self.max_imbalance
        if bound is None:
            bound = _BOUND if num_blocks >= _BLOCKS_FOR_BOUND * num_ranks else _FEW_BLOCKS_BOUND
        limit = np.maximum(bound * work.sum(axis=1) / num_ranks, reached) * (1 + 1e-12)
        budget = _budget(num_blocks, num_ranks) * _QUALITIES[self.quality]
        coarse = _coarse(num_blocks, num_ranks)
        starts, threshold = [_contiguous(-(-num_blocks // coarse), num_ranks)], _THRESHOLD
        if ranks.host_size > 1 and num_ranks % ranks.host_size == 0:
            starts.append(self._spread_over_hosts(problem, row, ranks, work, limit, _HOST_SHARE * budget))
        start = starts[-1]
        if coarse > 1:
            search = _Search(self, problem, row, ranks, work, limit * _COARSE_SLACK, coarse)
            for begin in starts:
                search.run(begin, 2.0 * coarse, _PENALTY, _COARSE_SHARE * budget / len(starts))
            start, threshold = np.repeat(search.best, coarse)[:num_blocks], _THRESHOLD_AFTER_COARSE
            budget *= 1 - _COARSE_SHARE
        start = ranks.equalised(start)
        search = _Search(self, problem, row, ranks, work, limit)
        search.run(start, threshold, _FINE_PENALTY, budget)
        # Balanced regular layouts may be hard to beat: windows, plain causal masks.
        for structured in (contiguous, ranks.equalised(_zig_zag(num_blocks, num_ranks))):
            if (_busiest(structured, work, num_ranks) <= limit).all():
                search.run(structured, 0.0, _FINE_PENALTY, 0)
        for penalty in (8 * _FINE_PENALTY, 64 * _FINE_PENALTY):
            if math.isinf(search.least[0]):
                search.run(search.last, 0.0, penalty, 0.25 * budget)
        if math.isinf(search.least[0]):  # give up the bounds of single masks, keep that of their sum
            limit = np.maximum(limit, _busiest(balanced[0], work, num_ranks) * (1 + 1e-12))
            search = _Search(self, problem, row, ranks, work, limit)
            search.run(balanced[0], 0.0, 64 * _FINE_PENALTY, 0.25 * budget)
        return search.best

    def _spread_over_hosts(
        self,
        problem: LayoutProblem,
        row: int,
        ranks: _Ranks,
        work: Float64,
        limit: Float64,
        budget: float,
    ) -> Int64:
        """A coarse layout with little traffic between hosts: a search with hosts as ranks, then an even split."""
        size = ranks.host_size
        hosts = _Ranks(problem, ranks.num_ranks // size, None)
        rough = _coarse(problem.num_blocks, hosts.num_ranks)
        search = _Search(self, problem, row, hosts, work, size * limit * _COARSE_SLACK, rough)
        search.run(_contiguous(-(-problem.num_blocks // rough), hosts.num_ranks), 2.0 * rough, _PENALTY, budget)
        coarse = _coarse(problem.num_blocks, ranks.num_ranks)
        host = np.repeat(search.best, rough // coarse)[: -(-problem.num_blocks // coarse)]
        start = np.empty_like(host)
        for each in range(hosts.num_ranks):
            units = np.flatnonzero(host == each)
            start[units] = each * size + np.arange(len(units)) * size // max(len(units), 1)
        return ranks.equalised(start)


def _balanced(layouts: list[Layout], problem: LayoutProblem, most: Float64) -> list[Layout]:
    """Those whose busiest rank has at most that work, by every bound."""
    return [layout for layout in layouts if (by_document.busiest(layout, problem) <= most).all()]


class _Ranks:
    """Ranks in the order of the search, which is reversed: the last ranks hold one block more, and a short last block.

    Attributes:
        host_size: ranks of a host; 1 if all links are alike.
        host_start, host_stop: the ranks that share a host with each rank; only the rank if all links are alike.
        kind: ranks of equal kind are interchangeable, together with the other ranks of their hosts; ``[num_ranks]``.
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

    def equalised(self, owner: Int64) -> Int64:
        """Moves blocks (or units of blocks) from ranks with too many to ranks with too few.

        A short last block ends at a rank that may hold it.
        """
        counts, wanted = np.bincount(owner, minlength=self.num_ranks), _counts(len(owner), self.num_ranks)
        owner = owner.copy()
        surplus = [
            np.flatnonzero(owner == rank)[: max(counts[rank] - wanted[rank], 0)] for rank in range(self.num_ranks)
        ]
        owner[np.concatenate(surplus)] = np.repeat(np.arange(self.num_ranks), np.maximum(wanted - counts, 0))
        if self.has_short and self.kind[owner[-1]] != self.kind[-1]:
            owner[np.flatnonzero(owner == self.num_ranks - 1)[-1]] = owner[-1]
            owner[-1] = self.num_ranks - 1
        return owner

    def renumbered(self, owner: Int64) -> Int64:
        """Owners in the caller's numbering of ranks; ranks of one host stay together.

        Hosts and ranks with more blocks come first, then those with the short last block, then by first block.
        """
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
    """The search on one batch row at one granularity: units of ``coarse`` blocks.

    Attributes:
        best: the balanced layout with least traffic so far, or the last one tried if no layout was balanced.
        least: its rating and its traffic, in tokens times weight; infinite if it is not balanced.
        last: layout at which the last run stopped.
    """

    def __init__(
        self,
        settings: Local,
        problem: LayoutProblem,
        row: int,
        ranks: _Ranks,
        work: Float64,
        limit: Float64,
        coarse: int = 1,
    ) -> None:
        from spanwise.layouts.local_search import Task, anneal  # loads numba, a compiler

        weights = problem.weights or {}
        names = sorted(problem.masks)
        masks = [problem.masks[name] for name in names]
        masks = [mask.row(row if mask.batch_size > 1 else 0) for mask in masks]
        weight = np.array([float(weights[name]) for name in names])
        unit = problem.block_size * coarse
        num_units = -(-problem.seq_len // unit)
        offsets, low, high = block_reads(masks, unit)
        left, right = documents_of_blocks(offsets, low, num_units)
        tokens = np.full(num_units, unit, dtype=np.float64)
        tokens[-1] = problem.seq_len - (num_units - 1) * unit
        before = np.concatenate([np.zeros((len(work), 1)), np.cumsum(work, axis=1)], axis=1)
        self.scale = problem.block_size * weight.sum()
        self.penalty = problem.num_blocks * ranks.num_ranks**2 * self.scale / before[:, -1]
        self.ranks, self.anneal = ranks, anneal
        self.task = Task(
            offsets=offsets, low=low, high=high, price=weight[:, None] * tokens,
            total=np.concatenate([before[:, :-1:coarse], before[:, -1:]], axis=1), limit=limit, penalty=self.penalty,
            left=left, right=right, host_start=ranks.host_start, host_stop=ranks.host_stop,
            host_price=float(settings.host_price), kind=ranks.kind, fixed=num_units - 1 if ranks.has_short else -1,
            busiest=settings.objective == "busiest",
        )  # fmt: skip
        self.least = (math.inf, math.inf)

    def run(self, start: Int64, threshold: float, penalty: float, budget: float) -> None:
        """Search from ``start``; at first a swap may be worse by `threshold` blocks. `budget` is in operations.

        `penalty` is the price, in sequences a rank, of work over the limit by the mean work of a rank.
        """
        self.last = start.copy()
        found = start.copy()
        task = self.task._replace(penalty=penalty * self.penalty)
        scale = self.scale
        thresholds = threshold * scale, _FINAL_THRESHOLD * scale
        rated = self.anneal(task, self.last, self.ranks.num_ranks, *thresholds, int(budget), found)
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
    """Blocks of each rank; the last ranks have one more."""
    return num_blocks // num_ranks + (np.arange(num_ranks) >= num_ranks - num_blocks % num_ranks)


def _contiguous(num_blocks: int, num_ranks: int) -> Int64:
    """Equal chunks of whole blocks."""
    return np.repeat(np.arange(num_ranks), _counts(num_blocks, num_ranks))


def _zig_zag(num_blocks: int, num_ranks: int) -> Int64:
    """Head-tail chunks of whole blocks."""
    chunk = np.arange(num_blocks) * 2 * num_ranks // num_blocks
    return np.maximum(chunk, 2 * num_ranks - 1 - chunk) - num_ranks


def _coarse(num_blocks: int, num_ranks: int) -> int:
    """Blocks of a unit in the coarse search.

    Large units go first: few swaps place them, and they leave local minima that single blocks cannot. Each rank keeps
    enough units to be balanced.
    """
    coarse = 1
    while 4 * coarse * coarse * num_ranks <= num_blocks:
        coarse *= 2
    return coarse
