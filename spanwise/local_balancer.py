"""The local balancer: equal tokens and balanced work from the layout that makes K/V travel least.

A rank receives the K/V that its queries read and that it does not own. `Local` searches for the owner of each block
that makes the sum over ranks smallest while the busiest rank stays within a bound: it starts from the contiguous
layout, in which next to nothing travels, and swaps stretches of equally many blocks between two ranks, at first also
where that costs traffic for a while (threshold accepting, a deterministic sibling of simulated annealing: G. Dueck
and T. Scheuer, J. Comput. Phys. 90, 1990). Every swap is priced exactly, at the granularity of blocks, from counters
of how many q blocks of each rank read each kv block.

The inner loop is plain Python over arrays, which numba compiles if it is installed. Both give the same layout:
integers, IEEE sums in one order, a random generator of its own, and a budget of operations instead of time.
Stands on `spanwise.balancers`, which imports it when it is asked for by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from spanwise import _spans
from spanwise.balancers import LPT, LayoutProblem
from spanwise.mask import SpanMask

Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]
_Function = TypeVar("_Function", bound=Callable[..., Any])

try:
    import numba  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:

    def _compiled(function: _Function) -> _Function:
        return function
else:

    def _compiled(function: _Function) -> _Function:
        return cast(_Function, numba.njit(cache=True)(function))


# Found by trial on packed documents: lower traffic on the mean of many seeds.
_HEAT, _REHEAT, _COLD = 4.0, 1.0, 0.02  # blocks by which a swap may be worse: at first, after a coarse search, at last
_PENALTY, _FINE_PENALTY = 0.5, 1.0
_COARSE_SHARE, _COARSE_SLACK = 0.5, 1.005  # of the budget; the coarse bound over the bound
_LOPSIDED = 2.0  # what a rank receives above so many times the mean counts three times
_QUALITIES = {"best": 1.0, "fast": 0.25}
_PRIME = 2**31 - 1  # the generator is x <- 48271 x mod this (S. K. Park, K. W. Miller, P. K. Stockmeyer, CACM 36, 1993)
_FACTOR = 48271


@dataclass(frozen=True)
class Local:
    """Least K/V traffic under a bound on the imbalance; every rank holds equally many blocks, give or take one.

    Args:
        max_imbalance: busiest over mean work (weighted mask area) that is allowed, at least 1. None: 1.02, or
            1.03 if a rank holds fewer than 32 blocks. What longest-first dealing (`LPT`) cannot reach is not asked for:
            its busiest rank is allowed too.
        quality: "best", or "fast" for a quarter of the search.

    Raises:
        ValueError: a bound below 1, or an unknown quality.
    """

    max_imbalance: float | None = None
    quality: str = "best"

    def __post_init__(self) -> None:
        bound = self.max_imbalance
        if bound is not None and not (math.isfinite(bound) and bound >= 1):
            raise ValueError(f"max_imbalance must be at least 1 and finite, got {bound}")
        if self.quality not in _QUALITIES:
            raise ValueError(f"quality must be one of {sorted(_QUALITIES)}, got {self.quality!r}")

    def assign(self, problem: LayoutProblem, num_ranks: int) -> Int64Array:
        """Owner of each block, int64 ``[batch, num_blocks]``; the same for the same problem on every host."""
        weights = problem.weights or {}
        names = sorted(problem.masks)
        has_short = problem.seq_len % problem.block_size != 0
        owner = np.empty((problem.batch_size, problem.num_blocks), dtype=np.int64)
        area = np.broadcast_to(problem.block_area, owner.shape)
        dealt = LPT().assign(problem, num_ranks)
        for row, work in enumerate(area):
            masks = [problem.masks[name] for name in names]
            masks = [mask.row(row if mask.batch_size > 1 else 0) for mask in masks]
            found = self._search(masks, [float(weights[n]) for n in names], work, dealt[row], problem, num_ranks)
            owner[row] = _relabelled(found, num_ranks, has_short)
        return owner

    def _search(
        self,
        masks: list[SpanMask],
        weights: list[float],
        block_work: NDArray[Any],
        dealt: Int64Array,
        problem: LayoutProblem,
        num_ranks: int,
    ) -> Int64Array:
        num_blocks = problem.num_blocks
        total = np.append(0.0, np.cumsum(block_work, dtype=np.float64))
        if num_ranks == 1 or num_blocks <= 1 or total[-1] == 0:
            return _contiguous(num_blocks, num_ranks)
        bound = self.max_imbalance
        if bound is None:
            bound = 1.02 if num_blocks >= 32 * num_ranks else 1.03
        limit = max(bound * total[-1] / num_ranks, np.bincount(dealt, block_work, num_ranks).max()) * (1 + 1e-12)
        budget = _budget(num_blocks, num_ranks) * _QUALITIES[self.quality]
        # Big pieces find their place first: a coarse search costs little and crosses hills that single blocks do not.
        coarse = 1
        while 4 * coarse * coarse * num_ranks <= num_blocks:
            coarse *= 2
        start, heat = _contiguous(num_blocks, num_ranks), _HEAT
        if coarse > 1:
            start, heat = _contiguous(-(-num_blocks // coarse), num_ranks), _REHEAT
            search = _Search(masks, weights, total, problem, num_ranks, limit * _COARSE_SLACK, coarse)
            search.run(start, 2.0 * coarse, _PENALTY, _COARSE_SHARE * budget)
            start = _evened(np.repeat(search.best, coarse)[:num_blocks], num_ranks)
            budget *= 1 - _COARSE_SHARE
        search = _Search(masks, weights, total, problem, num_ranks, limit)
        search.run(start, heat, _FINE_PENALTY, budget)
        # Where the structured layouts are balanced they may be hard to beat: windows, plain causal masks.
        for structured in (_contiguous(num_blocks, num_ranks), _zig_zag(num_blocks, num_ranks)):
            if np.bincount(structured, block_work, num_ranks).max() <= limit:
                search.run(structured, 0.0, _FINE_PENALTY, 0)
        for penalty in (8 * _FINE_PENALTY, 64 * _FINE_PENALTY):
            if math.isinf(search.least):
                search.run(search.last, 0.0, penalty, 0.25 * budget)
        if math.isinf(search.least):
            search.run(dealt, 0.0, 64 * _FINE_PENALTY, 0.25 * budget)
        return search.best


class _Search:
    """One granularity of a row's problem: units of ``coarse`` blocks.

    Attributes:
        best: the balanced layout with least traffic that was met, or the last one tried if none is balanced.
        least: its traffic, in tokens times weight, summed over ranks; infinite if it is not balanced.
        last: where the last run stopped.
    """

    def __init__(
        self,
        masks: list[SpanMask],
        weights: list[float],
        total: Float64Array,
        problem: LayoutProblem,
        num_ranks: int,
        limit: float,
        coarse: int = 1,
    ) -> None:
        unit = problem.block_size * coarse
        self.num_units = -(-problem.seq_len // unit)
        self.num_ranks = num_ranks
        self.limit = limit
        self.total = np.append(total[:-1][::coarse], total[-1])
        self.offsets, self.low, self.high = _block_reads(masks, unit)
        self.left, self.right = _stretches(self.offsets, self.low, self.num_units)
        tokens = np.full(self.num_units, unit, dtype=np.float64)
        tokens[-1] = problem.seq_len - (self.num_units - 1) * unit
        self.price = np.array(weights)[:, None] * tokens
        self.scale = problem.block_size * sum(weights)
        self.penalty = problem.num_blocks * num_ranks**2 * self.scale / total[-1]
        self.fixed = self.num_units - 1 if coarse == 1 and problem.seq_len % problem.block_size else -1
        self.least = math.inf

    def run(self, start: Int64Array, heat: float, penalty: float, budget: float) -> None:
        """Searches from ``start``; heat in blocks, penalty in sequences for each mean work over the limit, a rank."""
        self.last = start.copy()
        found = start.copy()
        cost = _anneal(
            self.last, self.num_ranks, self.total, self.offsets, self.low, self.high, self.price, self.fixed,
            self.left, self.right, self.limit, penalty * self.penalty, heat * self.scale, _COLD * self.scale,
            int(budget), found,
        )  # fmt: skip
        if math.isinf(cost):
            found = self.last
        if math.isinf(self.least) or cost < self.least:
            self.best, self.least = found, cost


def _budget(num_blocks: int, num_ranks: int) -> float:
    """Operations that the search may take: about 3 ns each."""
    size = min(num_blocks, 1024) * math.sqrt(max(num_blocks, 1024) / 1024)
    return 1000 * size * min(num_ranks, 8) * (max(num_ranks, 8) / 8) ** 0.6


def _contiguous(num_blocks: int, num_ranks: int) -> Int64Array:
    """Equal chunks of whole blocks; the last ranks hold one more, so that a short last block is with those."""
    counts = num_blocks // num_ranks + (np.arange(num_ranks) >= num_ranks - num_blocks % num_ranks)
    return np.repeat(np.arange(num_ranks), counts)


def _zig_zag(num_blocks: int, num_ranks: int) -> Int64Array:
    """Head-tail chunks of whole blocks, evened out."""
    chunk = np.arange(num_blocks) * 2 * num_ranks // num_blocks
    return _evened(np.minimum(chunk, 2 * num_ranks - 1 - chunk), num_ranks)


def _evened(owner: Int64Array, num_ranks: int) -> Int64Array:
    """Moves blocks from ranks with too many to ranks with too few; the owner of the last block gets a left-over one."""
    few, left_over = divmod(len(owner), num_ranks)
    counts = np.bincount(owner, minlength=num_ranks)
    wanted = np.full(num_ranks, few)
    wanted[np.lexsort((-counts, np.arange(num_ranks) != owner[-1]))[:left_over]] += 1
    owner = owner.copy()
    spare = [np.flatnonzero(owner == rank)[: max(counts[rank] - wanted[rank], 0)] for rank in range(num_ranks)]
    owner[np.concatenate(spare)] = np.repeat(np.arange(num_ranks), np.maximum(wanted - counts, 0))
    return owner


def _relabelled(owner: Int64Array, num_ranks: int, has_short: bool) -> Int64Array:
    """Ranks renumbered: larger shards first, the owner of a short last block before all, then by first block."""
    counts = np.bincount(owner, minlength=num_ranks)
    first = np.full(num_ranks, len(owner))
    np.minimum.at(first, owner, np.arange(len(owner)))
    if has_short:
        first[owner[-1]] = -1
    label = np.empty(num_ranks, dtype=np.int64)
    label[np.lexsort((first, -counts))] = np.arange(num_ranks)
    return label[owner]


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
            rows = np.flatnonzero(start < end)
            if len(rows) == 0:
                continue
            block = rows // block_size
            start, end = start[rows], end[rows]
            opens = _spans.chain_breaks(start, end)
            opens[1:] |= block[1:] != block[:-1]
            first = np.flatnonzero(opens)
            last = np.append(first[1:], len(rows)) - 1
            parts.append(np.stack([block[first], start[first] // block_size, -(-end[last] // block_size)], axis=1))
        table = np.unique(np.concatenate(parts), axis=0)
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


@_compiled
def _hand_over(
    begin: int,
    stop: int,
    giver: int,
    taker: int,
    owner: Int64Array,
    offsets: Int64Array,
    low: Int64Array,
    high: Int64Array,
    readers: NDArray[np.int32],
    price: Float64Array,
    recv: Float64Array,
    delta: Int64Array,
) -> int:
    """Gives the blocks ``[begin, stop)`` to another rank and updates ``owner``, ``readers`` and ``recv``.

    ``delta`` is scratch, zeros before and after. Returns the operations that this took.
    """
    operations = 0
    for m in range(offsets.shape[0]):
        first, last = owner.shape[0], 0
        for i in range(offsets[m, begin], offsets[m, stop]):
            delta[low[i]] += 1
            delta[high[i]] -= 1
            first = min(first, low[i])
            last = max(last, high[i])
        gone, come = readers[m, giver], readers[m, taker]
        change_giver, change_taker = 0.0, 0.0
        count = 0
        for kv in range(first, last):
            count += delta[kv]
            delta[kv] = 0
            if count > 0:
                left = gone[kv] - count
                gone[kv] = left
                if left == 0 and owner[kv] != giver:
                    change_giver -= price[m, kv]
                before = come[kv]
                come[kv] = before + count
                if before == 0 and owner[kv] != taker:
                    change_taker += price[m, kv]
        delta[last] = 0
        for kv in range(begin, stop):
            if gone[kv] > 0:
                change_giver += price[m, kv]
            if come[kv] > 0:
                change_taker -= price[m, kv]
        recv[giver] += change_giver
        recv[taker] += change_taker
        operations += max(last - first, 0) + offsets[m, stop] - offsets[m, begin]
    for kv in range(begin, stop):
        owner[kv] = taker
    return operations


@_compiled
def _anneal(
    owner: Int64Array,
    num_ranks: int,
    total: Float64Array,
    offsets: Int64Array,
    low: Int64Array,
    high: Int64Array,
    price: Float64Array,
    fixed: int,
    left: Int64Array,
    right: Int64Array,
    limit: float,
    penalty: float,
    heat: float,
    cold: float,
    budget: int,
    best: Int64Array,
) -> float:
    """Swaps stretches of blocks until the budget is spent; ``best`` becomes the best balanced layout that was met.

    Args:
        owner: where to start; scratch afterwards.
        total: work before each block, ``[num_blocks + 1]``.
        price: weighted tokens of each kv block, ``[num_masks, num_blocks]``.
        fixed: the short block, which only ranks with as many blocks as its owner may hold; -1 if there is none.
        left, right: see `_stretches`.
        limit: the most work that a rank may have.
        penalty: tokens that a unit of work over the limit counts.
        heat, cold: tokens by which a swap may be worse, at the beginning and at the end.

    Returns:
        The traffic of ``best``, weighted tokens summed over ranks, and more if one rank receives far more than the
        mean; infinite if no balanced layout was met.
    """
    num_blocks = owner.shape[0]
    readers = np.zeros((offsets.shape[0], num_ranks, num_blocks), np.int32)
    recv = np.zeros(num_ranks)
    work = np.zeros(num_ranks)
    delta = np.zeros(num_blocks + 1, np.int64)
    members = np.zeros((num_ranks, num_blocks // num_ranks + 1), np.int64)
    held = np.zeros(num_ranks, np.int64)
    seat = np.zeros(num_blocks, np.int64)
    for q in range(num_blocks):
        rank = owner[q]
        work[rank] += total[q + 1] - total[q]
        seat[q] = held[rank]
        members[rank, held[rank]] = q
        held[rank] += 1
        for m in range(offsets.shape[0]):
            for i in range(offsets[m, q], offsets[m, q + 1]):
                for kv in range(low[i], high[i]):
                    readers[m, rank, kv] += 1
    cost, over = 0.0, 0.0
    for rank in range(num_ranks):
        for m in range(offsets.shape[0]):
            for kv in range(num_blocks):
                if readers[m, rank, kv] > 0 and owner[kv] != rank:
                    recv[rank] += price[m, kv]
        cost += recv[rank]
        over += max(0.0, work[rank] - limit)
    slack = 1e-9 * limit
    least = np.inf
    if over <= slack:
        least = cost
        best[:] = owner
    draw = 1
    operations = 0
    while operations < budget:
        rest = 1.0 - operations / budget
        operations += 60
        draw = draw * _FACTOR % _PRIME
        x = draw % num_blocks
        a = owner[x]
        draw = draw * _FACTOR % _PRIME
        bits = draw >> 4
        lowest, highest = (left[x], right[x]) if bits & 1 else (0, num_blocks)
        a_start, a_stop = x, x + 1
        while a_start > lowest and owner[a_start - 1] == a:
            a_start -= 1
        while a_stop < highest and owner[a_stop] == a:
            a_stop += 1
        # The partner holds the neighbouring blocks, or any.
        b = a
        if bits & 4:
            if bits & 2:
                if a_stop < num_blocks:
                    b = owner[a_stop]
            elif a_start > 0:
                b = owner[a_start - 1]
        if b == a:
            draw = draw * _FACTOR % _PRIME
            b = owner[draw % num_blocks]
        if b == a:
            continue
        draw = draw * _FACTOR % _PRIME
        y = members[b, draw % held[b]]
        lowest, highest = (left[y], right[y]) if bits & 16 else (0, num_blocks)
        b_start, b_stop = y, y + 1
        while b_start > lowest and owner[b_start - 1] == b:
            b_start -= 1
        while b_stop < highest and owner[b_stop] == b:
            b_stop += 1
        most = min(a_stop - a_start, b_stop - b_start)
        size = most
        if bits & 96:
            draw = draw * _FACTOR % _PRIME
            size = min(most, 1 + int(most * (draw / _PRIME) * (draw / _PRIME)))
        if bits & 2:
            a_start = a_stop - size
        if bits & 128:
            b_start = b_stop - size
        moves_fixed = a_start <= fixed < a_start + size or b_start <= fixed < b_start + size
        if moves_fixed and held[a] != held[b]:
            continue
        moved = (total[a_start + size] - total[a_start]) - (total[b_start + size] - total[b_start])
        work_a, work_b = work[a] - moved, work[b] + moved
        more = max(0.0, work_a - limit) + max(0.0, work_b - limit)
        more -= max(0.0, work[a] - limit) + max(0.0, work[b] - limit)
        draw = draw * _FACTOR % _PRIME
        allowed = (heat * rest * rest + cold) * (draw / _PRIME) - penalty * more
        recv_a, recv_b = recv[a], recv[b]
        if allowed < -(recv_a + recv_b):
            continue
        operations += _hand_over(
            a_start, a_start + size, a, b, owner, offsets, low, high, readers, price, recv, delta
        ) + _hand_over(b_start, b_start + size, b, a, owner, offsets, low, high, readers, price, recv, delta)
        change = recv[a] + recv[b] - recv_a - recv_b
        cap = _LOPSIDED * cost / num_ranks
        excess = max(0.0, recv[a] - cap) + max(0.0, recv[b] - cap) - max(0.0, recv_a - cap) - max(0.0, recv_b - cap)
        if change + 4.0 * excess > allowed:
            operations += _hand_over(
                a_start, a_start + size, b, a, owner, offsets, low, high, readers, price, recv, delta
            ) + _hand_over(b_start, b_start + size, a, b, owner, offsets, low, high, readers, price, recv, delta)
            recv[a], recv[b] = recv_a, recv_b
            continue
        cost += change
        over += more
        work[a], work[b] = work_a, work_b
        for i in range(size):
            p, q = a_start + i, b_start + i
            seat_p, seat_q = seat[p], seat[q]
            members[a, seat_p], seat[q] = q, seat_p
            members[b, seat_q], seat[p] = p, seat_q
        if over <= slack and cost < least - 1e-6:
            lopsided = cost + num_ranks * max(0.0, recv.max() - 1.15 * _LOPSIDED * cost / num_ranks)
            if lopsided < least - 1e-6:
                least = lopsided
                best[:] = owner
    return least
