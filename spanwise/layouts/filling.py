"""The compiled loop that fills bins (hosts, or the ranks of a host) with documents, one bin after another.

Every bin gets a fixed number of units (tokens or blocks) and about the same work. Items are documents, or what is left
of them, sorted by work per unit. A bin takes whole items from the heavy end, as long as the lightest of the others can
fill it up, and then from the light end until it is full. So the longest documents meet the shortest, every bin comes
out even, and an item is cut only where it must be:

1. Of an item that does not fit into an empty bin it takes a head and a tail, so that all bins get equally many of its
   units; the next bin takes of what is left.
2. A bin that lacks work gets a prefix of the lightest item that has enough.
3. The last light item is cut where the bin is full.

`by_document` makes the items and the bins.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spanwise.layouts.compiling import compiled, noticed
from spanwise.masks.arrays import Bool, Float64, Int64

# Found by trial on lognormal documents on 32 and 1,024 ranks. Items above _BIG of a bin's mean work may use the slack
# of the bound, because cutting them costs most. A bin may lack _LACK of it, or _SPARE of the slack that is left.
_BIG, _LACK, _SPARE = 0.1, 0.005, 0.2
_FULL = 0.95  # share of the slack that an item may use which no bin can hold
_PLACES = 256  # places of a cut to compare before the exact one
_MOST_CUTS = 8  # items that one bin leaves cut


class _Bin(NamedTuple):
    """Items, scratch and result; single numbers that change are arrays of one entry.

    Attributes:
        start, stop: items, ``[room]``, by falling work per unit.
        size: how many items there are.
        taken: items that this bin has taken, ``[room]``.
        before: work before each unit, ``[num_units + 1]``.
        light_units, light_work: sums over the lightest items, ``[room + 1]``; see `_sum_lightest`.
        pieces: the result, ``[…, 3]``; `given` counts it.
        cuts: what this bin leaves of items that it cut, ``[_MOST_CUTS, 2]``; `num_cuts` counts them.
        left: units that the bin still needs.
        work: work that it has.
    """

    start: Int64
    stop: Int64
    size: Int64
    taken: Bool
    before: Float64
    light_units: Int64
    light_work: Float64
    pieces: Int64
    given: Int64
    cuts: Int64
    num_cuts: Int64
    left: Int64
    work: Float64


def fill(
    items: Int64, before: Float64, sizes: Int64, share: Float64, had: Float64, bound: float, little: float
) -> Int64:
    """Assigns all units of the items to bins.

    Args:
        items: first unit and end of each, ``[n, 2]``, not empty.
        before: work before each unit, ``[num_units + 1]``.
        sizes: units of each bin; in sum those of the items.
        share: work of each bin relative to the others.
        had: work that each bin has of what was assigned before.
        bound: work that a bin may have, in its share of all work.
        little: share of an item up to which what a fold leaves is its first units, not its middle.

    Returns:
        int64 ``[num_pieces, 3]``: bin, first unit and end of each piece.
    """
    work, units = before[items[:, 1]] - before[items[:, 0]], items[:, 1] - items[:, 0]
    order, room = np.argsort(-(work / units), kind="stable"), len(items) + _MOST_CUTS * (len(sizes) + 1)
    b = _Bin(
        np.zeros(room, np.int64), np.zeros(room, np.int64), np.array([len(items)]), np.zeros(room, np.bool_), before,
        np.zeros(room + 1, np.int64), np.zeros(room + 1), np.empty((2 * room, 3), np.int64), np.zeros(1, np.int64),
        np.empty((_MOST_CUTS, 2), np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1),
    )  # fmt: skip
    b.start[: len(items)], b.stop[: len(items)] = items[order].T
    total = float(np.cumsum(np.concatenate([had, work]))[-1])  # one by one: the same sum on every host
    with noticed():
        _fill_bins(b, sizes, share / share.sum(), had, total, bound, little)
    return b.pieces[: b.given[0]]


@compiled
def _fill_bins(b: _Bin, sizes: Int64, share: Float64, had: Float64, total: float, bound: float, little: float) -> None:
    rest, rest_share = total, 1.0
    for k in range(len(sizes)):
        if sizes[k] > 0:
            b.left[0], b.work[0], b.num_cuts[0] = sizes[k], had[k], 0
            mean, target = total * share[k], rest * share[k] / rest_share
            goal = min(target, bound * mean)
            goal = _take_heavy(b, k, mean, goal, bound * mean, little)
            _take_lacking(b, k, mean, goal, max(_LACK * mean, _SPARE * (bound * mean - target)))
            _take_light(b, k, goal, _LACK * mean)
            rest -= b.work[0]
            _remove_taken(b)
        else:
            rest -= had[k]
        rest_share -= share[k]


@compiled
def _take_heavy(b: _Bin, k: int, mean: float, goal: float, limit: float, little: float) -> float:
    """Takes whole items from the heavy end; returns the work that the bin is to have.

    Stops where the items are not heavy enough to reach the goal, and before the items that fill the bin up.
    """
    entries, is_empty = _sum_lightest(b, -1), True
    for i in range(b.size[0]):
        while entries > 0 and b.light_units[entries - 1] >= b.left[0]:
            entries -= 1
        units, work = b.stop[i] - b.start[i], b.before[b.stop[i]] - b.before[b.start[i]]
        too_light = not is_empty and work * b.left[0] < (goal - b.work[0]) * units
        if b.left[0] == 0 or i >= b.size[0] - entries or too_light:
            break
        filled = b.work[0] + work + _lightest(b, entries, b.left[0] - units, 0.0)
        if units <= b.left[0] and filled <= (limit if work > _BIG * mean else goal):
            _give(b, k, b.start[i], b.stop[i])
            b.taken[i], is_empty = True, False
        elif is_empty:
            goal = max(goal, mean + _FULL * (limit - mean))
            if not _fold(b, k, i, goal, little):
                _cut(b, k, i, goal, _LACK * mean)
            is_empty = False
            entries = _sum_lightest(b, -1)
    return goal


@compiled
def _take_lacking(b: _Bin, k: int, mean: float, goal: float, slack: float) -> None:
    """Takes prefixes of the lightest items that bring the bin to its goal; whole items where none is enough."""
    while b.left[0] > 0:
        entries = _sum_lightest(b, -1)
        light = _lightest(b, entries, b.left[0], 0.0)
        lack = goal - b.work[0] - light
        if lack <= slack:
            return
        enough, most, largest = -1, -1, 0.0
        for i in range(b.size[0] - 1, -1, -1):
            if b.taken[i]:
                continue
            units = b.stop[i] - b.start[i]
            more = b.before[b.stop[i]] - b.before[b.start[i]] - light / b.left[0] * units
            if more >= lack:
                enough = i
                break
            if more > largest and units <= b.left[0]:
                most, largest = i, more
        if enough >= 0:
            _cut(b, k, enough, goal, _LACK * mean)
            return
        if most < 0:
            return
        _give(b, k, b.start[most], b.stop[most])
        b.taken[most] = True


@compiled
def _take_light(b: _Bin, k: int, goal: float, slack: float) -> None:
    """Fills the bin from the light end, then with what its cuts have left."""
    i = b.size[0] - 1
    while b.left[0] > 0 and i >= 0:
        if not b.taken[i]:
            if b.stop[i] - b.start[i] > b.left[0]:
                _cut_to_fill(b, k, i, b.start[i] + b.left[0], goal, slack)
            else:
                _give(b, k, b.start[i], b.stop[i])
                b.taken[i] = True
        i -= 1
    while b.left[0] > 0 and b.num_cuts[0] > 0:
        last = b.num_cuts[0] - 1
        begin = b.cuts[last, 0]
        end = min(b.cuts[last, 1], begin + b.left[0])
        _give(b, k, begin, end)
        b.cuts[last, 0] = end
        if end == b.cuts[last, 1]:
            b.num_cuts[0] = last


@compiled
def _cut(b: _Bin, k: int, i: int, goal: float, slack: float) -> None:
    """Takes the longest prefix of an item with which the bin, filled with light items, has no more work than `goal`."""
    entries = _sum_lightest(b, i)
    begin, most = b.start[i], min(b.stop[i] - b.start[i], b.left[0])
    beyond = (b.before[b.stop[i]] - b.before[begin]) / (b.stop[i] - begin)
    step = max(1, most // _PLACES)
    low, high = most, most
    without = b.work[0] - b.before[begin]
    while low > 0:
        if without + b.before[begin + low] + _lightest(b, entries, b.left[0] - low, beyond) <= goal:
            break
        low, high = max(low - step, 0), low
    while high > low:
        if without + b.before[begin + high] + _lightest(b, entries, b.left[0] - high, beyond) <= goal:
            break
        high -= 1
    _cut_to_fill(b, k, i, begin + high, goal, slack)


@compiled
def _fold(b: _Bin, k: int, i: int, goal: float, little: float) -> bool:
    """Takes a head and a tail with the mean work per unit of an item; False if the bin can take nothing of it.

    Where little would be left, takes all but the first units, as few as work permits.
    """
    entries = _sum_lightest(b, i)
    begin, stop = b.start[i], b.stop[i]
    density = (b.before[stop] - b.before[begin]) / (stop - begin)
    low, high = 0, min(stop - begin - 1, b.left[0])
    while high > low:
        middle = (low + high + 1) // 2
        if b.work[0] + middle * density + _lightest(b, entries, b.left[0] - middle, density) <= goal:
            low = middle
        else:
            high = middle - 1
    if low == 0:
        return False
    head = _head(b.before, begin, stop, low, low * density)
    tail = stop - (low - head)
    if tail - begin - head <= little * (stop - begin):
        first, high = begin, begin + (stop - begin) // 2
        while first < high:
            middle = (first + high) // 2
            work = b.work[0] + b.before[stop] - b.before[middle]
            filled = work + _lightest(b, entries, b.left[0] - stop + middle, density)
            if stop - middle <= b.left[0] and filled <= goal:
                high = middle
            else:
                first = middle + 1
        head, tail = 0, first
    _give(b, k, begin, begin + head)
    _give(b, k, tail, stop)
    b.taken[i] = True
    if begin + head < tail:
        b.cuts[b.num_cuts[0], 0], b.cuts[b.num_cuts[0], 1] = begin + head, tail
        b.num_cuts[0] += 1
    return True


@compiled
def _cut_to_fill(b: _Bin, k: int, i: int, end: int, goal: float, slack: float) -> None:
    """Takes the prefix of an item up to `end`; where that fills the bin and lacks work, its head and its tail."""
    begin, stop = b.start[i], b.stop[i]
    head = end - begin
    if head == b.left[0] and head < stop - begin and b.work[0] + b.before[end] - b.before[begin] < goal - slack:
        head = _head(b.before, begin, stop, b.left[0], goal - b.work[0])
    tail = stop - (b.left[0] - head) if end - begin == b.left[0] else stop
    _give(b, k, begin, begin + head)
    _give(b, k, tail, stop)
    b.taken[i] = True
    if begin + head < tail:
        b.cuts[b.num_cuts[0], 0], b.cuts[b.num_cuts[0], 1] = begin + head, tail
        b.num_cuts[0] += 1


@compiled
def _head(before: Float64, begin: int, stop: int, units: int, work: float) -> int:
    """Units of a head that, with a tail, has `units` units in sum and a work close to `work`; the longest such head."""
    step = max(1, units // _PLACES)
    best, least = units, np.inf
    for head in range(units, -1, -step):
        gap = abs(before[begin + head] - before[begin] + before[stop] - before[stop - units + head] - work)
        if gap < least:
            best, least = head, gap
    for head in range(max(best - step, 0), min(best + step, units) + 1):
        gap = abs(before[begin + head] - before[begin] + before[stop] - before[stop - units + head] - work)
        if gap < least:
            best, least = head, gap
    return best


@compiled
def _sum_lightest(b: _Bin, without: int) -> int:
    """Sums up the lightest items that are not taken, without one, until they fill the bin; returns their number."""
    entries = 0
    b.light_units[0], b.light_work[0] = 0, 0.0
    for i in range(b.size[0] - 1, -1, -1):
        if b.light_units[entries] >= b.left[0]:
            break
        if not b.taken[i] and i != without:
            entries += 1
            b.light_units[entries] = b.light_units[entries - 1] + b.stop[i] - b.start[i]
            b.light_work[entries] = b.light_work[entries - 1] + b.before[b.stop[i]] - b.before[b.start[i]]
    return entries


@compiled
def _lightest(b: _Bin, entries: int, units: int, beyond: float) -> float:
    """Work of the lightest `units` units by the sums of `_sum_lightest`; `beyond` is the work of each further unit."""
    if units <= 0:
        return 0.0
    if units >= b.light_units[entries]:
        return b.light_work[entries] + (units - b.light_units[entries]) * beyond
    low, high = 0, entries
    while high - low > 1:
        middle = (low + high) // 2
        if b.light_units[middle] <= units:
            low = middle
        else:
            high = middle
    share = (units - b.light_units[low]) / (b.light_units[high] - b.light_units[low])
    return b.light_work[low] + share * (b.light_work[high] - b.light_work[low])


@compiled
def _give(b: _Bin, k: int, begin: int, end: int) -> None:
    """Gives ``[begin, end)`` to the bin."""
    if begin < end:
        at = b.given[0]
        b.pieces[at, 0], b.pieces[at, 1], b.pieces[at, 2] = k, begin, end
        b.given[0] += 1
        b.left[0] -= end - begin
        b.work[0] += b.before[end] - b.before[begin]


@compiled
def _remove_taken(b: _Bin) -> None:
    """Removes the items that the bin has taken, and inserts what its cuts have left."""
    count = 0
    for i in range(b.size[0]):
        if not b.taken[i]:
            b.start[count], b.stop[count] = b.start[i], b.stop[i]
            count += 1
        b.taken[i] = False
    for cut in range(b.num_cuts[0]):
        begin, end = b.cuts[cut]
        density = (b.before[end] - b.before[begin]) / (end - begin)
        i = count
        while i > 0 and b.before[b.stop[i - 1]] - b.before[b.start[i - 1]] < density * (b.stop[i - 1] - b.start[i - 1]):
            b.start[i], b.stop[i] = b.start[i - 1], b.stop[i - 1]
            i -= 1
        b.start[i], b.stop[i] = begin, end
        count += 1
    b.size[0] = count
