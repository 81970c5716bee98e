"""The local balancer: balanced work and equal tokens with little K/V traffic.

A document lies whole on a rank where work and tokens permit. A longer one is folded over as few ranks as possible: each
gets a head and a tail of it. So the busiest rank sends, too, little more than the mean: with ascending parts, which
need up to 6 % fewer bytes, the first ranks of a document send most of them.

With hosts the hosts are filled so, and a document that lies on several hosts is spread evenly over the ranks of each:
all of them read, relay and send as much. Each row that enters a host then enters it once (exchange "hierarchical").

For few ranks or hosts the documents are taken in several orders. Where rows read several spans (trees, video with
global tokens, block diffusion), documents say little, and units of the best layout change places (`swaps`).

Bins (hosts, or the ranks of a host) are filled one after another. A bin gets a fixed number of units (tokens) and about
the same work as the others. Items are documents, or what is left of them, by falling work per unit. A bin takes whole
items from the heavy end, as long as the lightest of the others can fill it up, and then from the light end until it is
full. So the longest documents meet the shortest, every bin comes out even, and an item is cut only where it must be:

1. An item that does not fit into an empty bin is folded: the bin takes a head and a tail, so that all bins get equally
   many of its units; the next bin takes of what is left.
2. A bin that lacks work gets a prefix of the lightest item that has enough.
3. The last light item is cut where the bin is full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from spanwise.layouts import swaps
from spanwise.layouts.layout import Layout, contiguous, head_tail_pieces
from spanwise.layouts.problem import LayoutProblem
from spanwise.layouts.runs import subtract_runs
from spanwise.masks import even_runs
from spanwise.masks.arrays import Float64, Int64

# Ranks up to which units change places afterwards. CPU seconds of a plan for 8 ranks: 0.02 without swaps, 0.1 with
# them. Packed documents of block diffusion on 4 to 16 ranks take steps 1.07 to 1.2 times as long without swaps.
_MOST_SWAPPED = 16
# Found by trial on lognormal documents on 32 and 1,024 ranks. Items above _BIG of a bin's mean work may use the slack
# of the bound, because cutting them costs most. Of that slack a bin may lack _LACK, and fill _FULL with an item that no
# bin can hold. A head and a tail may be off by _FAR times what a bin may lack before inner units replace them, which
# leave two parts of the item: with 1 for 16, steps of trees on 1,024 ranks take 1.24 times as long, and without inner
# units those of a tree on 32 ranks 1.06 times.
_BIG, _LACK, _FULL, _FAR = 0.1, 0.25, 0.95, 16
_NEAR = 64  # items to look at first for the lightest
# Share of the slack that the work of a host may use; the rest is for the ranks inside it.
_HOST_SLACK = 0.75
# Orders of documents to try, as many as take the time of one for 128 ranks, and how far the factors that make them are
# from 1. On 8 and 16 ranks, 12 packings of other seeds than the benchmark's, 12 tries bring 0.89 and 0.97 of the tokens
# of one, 40 tries 0.86 and 0.96; with 0.3 for 0.6 0.91 and 0.97. On few hosts half as many: steps of 20 packings on 2,
# 4 and 8 hosts of 8 are 0.992, 0.986 and 0.992 of those with one order; on 32 hosts the worst is 1.043.
_TRIES, _TRIES_BY_BINS, _FEW_HOSTS, _SPREAD = 12, 128, 8, 0.6
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Local:
    """Little K/V traffic under a bound on the imbalance; ranks hold equally many tokens, or one more.

    Args:
        max_imbalance: work (mask area, the weighted sum of the masks) that a rank may have over the mean, at least 1. A
            layout exceeds it where documents cannot be cut so evenly.
        host_size: ranks of a host, where few rows are to enter a host; rank r is on host ``r // host_size``. None:
            all links are alike.
    """

    max_imbalance: float = 1.02
    host_size: int | None = None

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
        found = tries(documents, before, num_ranks, size, self.max_imbalance)
        ranks = np.diff(np.append(np.arange(0, num_ranks, size), num_ranks))
        best = _best(problem, row, found, ranks * limit, busiest=size > 1)
        if size > 1:
            return inside_hosts(best, documents, before, num_ranks, size, self.max_imbalance)
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


def tries(documents: Int64, before: Float64, num_ranks: int, host_size: int, bound: float) -> list[Int64]:
    """Documents on hosts, or with `host_size` 1 on ranks, in several orders; ranks get equal tokens, or one more.

    Args:
        documents: offsets, int64 ``[num_documents + 1]``, ascending; from 0 to the sequence's length.
        before: work before each token, ``[num_tokens + 1]``.
        bound: work that a rank may have, over the mean.

    Returns:
        For each try int64 ``[num_pieces, 3]``: host or rank, first token and end of each piece.
    """
    sizes, first = _sizes(int(documents[-1]), num_ranks), np.arange(0, num_ranks, host_size)
    ranks, alone = np.diff(np.append(first, num_ranks)).astype(np.float64), host_size == 1
    # No random numbers, so that the factors of the work per unit are alike everywhere; the first are all 1.
    several = _TRIES_BY_BINS // len(first) if alone else _TRIES // 2 * (len(first) <= _FEW_HOSTS)
    numbers = np.arange(max(1, min(_TRIES, several)))[:, None]
    orders = 1 + _SPREAD * (numbers > 0) * (2 * (numbers * np.arange(1, len(documents)) * _GOLDEN % 1) - 1)
    return [
        fill(
            np.column_stack([documents[:-1], documents[1:]]), before, np.add.reduceat(sizes, first), ranks,
            np.zeros(len(first)), bound if alone else 1 + _HOST_SLACK * (bound - 1), order,
        )
        for order in orders
    ]  # fmt: skip


def inside_hosts(
    of_hosts: Int64, documents: Int64, before: Float64, num_ranks: int, host_size: int, bound: float
) -> Int64:
    """What hosts hold on their ranks: rank, first token and end of each piece; arguments as in `tries`.

    A part of a document that lies on several hosts is spread evenly over the ranks.
    """
    document = np.searchsorted(documents, of_hosts[:, 1], side="right") - 1
    whole = of_hosts[:, 2] - of_hosts[:, 1] == np.diff(documents)[document]
    sizes, found = _sizes(int(documents[-1]), num_ranks), []
    for host, first in enumerate(range(0, num_ranks, host_size)):
        own, mine = sizes[first : first + host_size], of_hosts[:, 0] == host
        shared, others = _shared(of_hosts[mine & ~whole, 1:], len(own)), of_hosts[mine & whole, 1:]
        had = np.bincount(shared[:, 0], _work(before, shared[:, 1:]), len(own)).astype(np.float64)
        work = had.sum() + _work(before, others).sum()
        allowed = max(bound * before[-1] / num_ranks * len(own) / work, 1.0) if work > 0 else 1.0
        left = own - np.bincount(shared[:, 0], shared[:, 2] - shared[:, 1], len(own)).astype(np.int64)
        both = np.concatenate([shared, fill(others, before, left, np.ones(len(own)), had, allowed)])
        found.append(both + np.array([first, 0, 0]))
    return np.concatenate(found)


def _sizes(tokens: int, num_ranks: int) -> Int64:
    return tokens // num_ranks + (np.arange(num_ranks) < tokens % num_ranks)


def _shared(runs: Int64, num_ranks: int) -> Int64:
    """A head and a tail of each run for every rank, as many tokens for all: rank, first unit, end; int64 ``[n, 3]``."""
    offsets = np.append(0, np.cumsum(runs[:, 1] - runs[:, 0]))
    pieces = head_tail_pieces(offsets, num_ranks)
    pieces = pieces[pieces[:, 1] < pieces[:, 2]]
    run = np.searchsorted(offsets, pieces[:, 1], side="right") - 1
    pieces[:, 1:] += (runs[run, 0] - offsets[run])[:, None]
    return pieces


def fill(
    items: Int64, before: Float64, sizes: Int64, share: Float64, had: Float64, bound: float,
    order: Float64 | float = 1.0,
) -> Int64:  # fmt: skip
    """Assigns all units of the items to bins.

    Args:
        items: first unit and end of each, ``[n, 2]``, not empty.
        before: work before each unit, ``[num_units + 1]``.
        sizes: units of each bin; in sum those of the items.
        share: work of each bin relative to the others.
        had: work that each bin has of what was assigned before.
        bound: work that a bin may have, in its share of all work.
        order: factors of the items' work per unit where they are sorted.

    Returns:
        int64 ``[num_pieces, 3]``: bin, first unit and end of each piece.
    """
    density = _work(before, items) / (items[:, 1] - items[:, 0]) * order
    total = float(np.cumsum(np.append(had, _work(before, items)))[-1])  # one by one: the same sum on every host
    left, left_share, pieces = total, 1.0, []
    for k, fraction in enumerate((share / share.sum()).tolist()):
        by_density = np.argsort(-density, kind="stable")
        bin_ = _Bin(items[by_density], before, int(sizes[k]), float(had[k]))
        mean = total * fraction
        if sizes[k]:
            _fill_bin(bin_, mean, left * fraction / left_share, bound * mean)
        pieces += [(k, *piece) for piece in bin_.pieces]
        left -= bin_.work
        left_share -= fraction
        cut = np.array(bin_.cuts, np.int64).reshape(-1, 2)
        items = np.concatenate([bin_.items[bin_.free], cut])
        density = np.append(density[by_density][bin_.free], _work(before, cut) / (cut[:, 1] - cut[:, 0]))
    return np.array(pieces, np.int64).reshape(-1, 3)


def _work(before: Float64, items: Int64) -> Float64:
    return before[items[:, 1]] - before[items[:, 0]]


class _Bin:
    """A bin and the items that it may take.

    Attributes:
        items: by falling work per unit, ``[n, 2]``; `free`: whether each is still there.
        units, works: of each item.
        room: units that the bin still needs.
        work: work that it has.
        pieces: what it took; `cuts`: what it left of items that it cut.
    """

    def __init__(self, items: Int64, before: Float64, room: int, work: float) -> None:
        self.items, self.before, self.room, self.work = items, before, room, work
        self.units, self.works = items[:, 1] - items[:, 0], _work(before, items)
        self.free = np.ones(len(items), dtype=bool)
        self.pieces: list[tuple[int, int]] = []
        self.cuts: list[tuple[int, int]] = []

    def sum_lightest(self) -> float:
        """Sums up the lightest free items until they fill the bin; returns their work."""
        for first in (max(len(self.free) - _NEAR, 0), 0):
            light = np.flatnonzero(self.free[first:])[::-1] + first
            units = np.append(0.0, np.cumsum(self.units[light]))
            if units[-1] >= self.room:
                break
        works = np.append(0.0, np.cumsum(self.works[light]))
        end = int(np.searchsorted(units, self.room))
        least = float(np.interp(self.room, units, works))
        self._units, self._works = np.append(units[:end], self.room), np.append(works[:end], least)
        return least

    def lightest(self, units: float) -> float:
        """Work of the lightest `units` units of the free items, at most what fills the bin."""
        return float(np.interp(units, self._units, self._works))

    def most(self, density: float, goal: float) -> int:
        """Most units with this work each that leave the bin, filled up with the lightest, at no more than `goal`."""
        units = self.room - self._units
        filled = self.work + units * density + self._works  # falls, because the lightest are no heavier
        return int(np.interp(goal, filled[::-1], units[::-1])) if filled[-1] <= goal else 0

    def give(self, start: int, stop: int) -> None:
        """Gives units ``[start, stop)`` to the bin."""
        if start < stop:
            self.pieces.append((start, stop))
            self.room -= stop - start
            self.work += float(self.before[stop] - self.before[start])

    def take(self, i: int, units: int, work: float | None = None, slack: float = 0.0) -> None:
        """Takes a prefix of an item; with `work` a head and a tail whose work is close to it, the longest such head.

        Where their work is far off, in terms of `slack`, it takes inner units instead if those are closer.
        """
        start, stop = self.items[i].tolist()
        tail = stop - units
        head = units
        self.free[i] = False
        if work is not None:
            before = self.before
            found = before[start : start + units + 1] - before[start] + before[stop] - before[tail : stop + 1]
            off = np.abs(found - work)[::-1]
            head -= int(np.argmin(off))
            if off.min() > _FAR * slack:
                inner = np.abs(before[start + units : stop + 1] - before[start : tail + 1] - work)
                first = start + int(np.argmin(inner))
                if inner.min() < off.min():
                    self.give(first, first + units)
                    self.cuts += [(start, first), (first + units, stop)]
                    return
        self.give(start, start + head)
        self.give(tail + head, stop)
        if start + head < tail + head:
            self.cuts.append((start + head, tail + head))

    def take_to(self, i: int, units: int, goal: float, slack: float) -> None:
        """Takes a prefix of an item; where that fills the bin and its work is off the goal, a head and a tail."""
        start, stop = self.items[i].tolist()
        is_off = abs(goal - self.work - float(self.before[start + units] - self.before[start])) > slack
        self.take(i, units, goal - self.work if is_off and units == self.room and start + units < stop else None, slack)


def _fill_bin(b: _Bin, mean: float, target: float, limit: float) -> None:
    """Takes items until the bin is full; its work is to be `target`, and at most `limit` if possible."""
    goal, slack = min(target, limit), _LACK * (limit - mean)
    b.sum_lightest()
    allowed = limit if b.works[0] > _BIG * mean else goal
    if b.units[0] > b.room or b.work + b.works[0] + b.lightest(b.room - int(b.units[0])) > allowed:
        goal = max(goal, mean + _FULL * (limit - mean))
        # A head and a tail with the mean work per unit of the first item; nothing if no unit fits.
        first = int(b.units[0])
        density = float(b.works[0]) / first
        if units := min(first - 1, b.most(density, goal)):
            b.take(0, units, density * units, slack)
    while b.room:
        least = b.sum_lightest()
        lack = goal - b.work - least
        if lack <= slack:
            break
        extra = b.works - least / b.room * b.units  # work that an item adds, in place of the lightest
        whole = b.free & (b.units <= b.room)
        heavy = whole & (b.works * b.room >= (goal - b.work) * b.units)
        fitting = heavy & (extra <= np.where(b.works > _BIG * mean, limit - b.work - least, lack))
        enough = np.flatnonzero(b.free & (extra >= lack))
        if fitting.any():
            i = int(np.argmax(fitting))
            b.take(i, int(b.units[i]))
        elif len(enough):
            i = int(enough[-1])
            units = _longest_prefix(b, i, goal)
            if units:
                b.take_to(i, units, goal, slack)
            break
        elif (whole & (extra > 0)).any():
            i = int(np.argmax(np.where(whole, extra, 0.0)))
            b.take(i, int(b.units[i]))
        else:
            break
    for i in np.flatnonzero(b.free)[::-1].tolist():
        if not b.room:
            return
        b.take_to(i, min(int(b.units[i]), b.room), goal, slack)
    while b.room:  # all others are taken: take what its cuts have left
        start, stop = b.cuts.pop()
        end = min(stop, start + b.room)
        b.give(start, end)
        if end < stop:
            b.cuts.append((end, stop))


def _longest_prefix(b: _Bin, i: int, goal: float) -> int:
    """Units of the longest prefix of an item with which the bin, filled with light items, has no more than `goal`."""
    start, low, high = int(b.items[i, 0]), 0, min(int(b.units[i]), b.room)
    while low < high:
        middle = (low + high + 1) // 2
        if b.work + b.before[start + middle] - b.before[start] + b.lightest(b.room - middle) <= goal:
            low = middle
        else:
            high = middle - 1
    return low
