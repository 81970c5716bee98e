"""The compiled loops that give documents to hosts so that few rows enter a host; `by_host` splits hosts among ranks.

A document with parts on several hosts costs one row for each row before the last one of each part, less the rows that
the host holds itself. So documents stay whole where they can, and a *wide* one, longer than a host may have, is cut
from its end on: the rows before the cut are then as few as possible. Steps:

1. `cut_wide`: ends of wide documents fill a host each, as far as the lightest other documents and light rows of the
   same document can fill up its tokens. The rest of a wide document is an item like a whole document.
2. `place`: the lightest items fill up those hosts; the others go where work and tokens leave most room.
3. `exchange`: swaps of items between two hosts until work and tokens are even.
4. `even_out`: rows at the start of documents make tokens exact.
"""

# H hosts, n items

from __future__ import annotations

import numpy as np

from spanwise.layouts.compiling import compiled
from spanwise.masks.arrays import Bool, Float64, Int64

# Work over the goal counts this much more than tokens: tokens are made exact for one row each, work is not.
_WORK_PRICE = 30.0
# Units of heads over those of tails to try.
_HEADS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
_WHOLE = 0.97  # share of a host's work that what is left of a wide document may have


@compiled
def cut_wide(
    start: Int64, stop: Int64, before: Float64, sizes: Int64, goal: Float64, light: Float64, most_sent: float
) -> tuple[Int64, Int64]:
    """Fills hosts with the ends of wide documents, longest first.

    Args:
        start, stop: wide documents ``[start, stop)``, by falling work.
        before: work before each unit, ``[num_units + 1]``.
        sizes: units of each host; goal: work of each host.
        light: units and work of the lightest other documents, sums ``[2, m + 1]`` from 0.
        most_sent: units that a host may send. A document that exceeds this gives its hosts larger heads.

    Returns:
        int64 ``[num_pieces, 3]``: host, first unit and end; and what is left of each document, ``[len(start), 2]``.
        No pieces if the hosts are too few.
    """
    found = np.empty((2 * len(sizes), 3), np.int64)
    rest = np.empty((len(start), 2), np.int64)
    count, host, used = 0, 0, 0.0
    for i in range(len(start)):
        for heads in _HEADS:
            end, more = _cut_one(found, count, start[i], stop[i], before, sizes, goal, light, host, used, heads)
            if more < 0:
                return found[:0], rest
            if _most_sent(found[count:more], end) <= most_sent:
                break
        for piece in found[count:more]:
            used -= piece[2] - piece[1]
        rest[i] = end
        last = found[more - 1, 0] + 1
        for h in range(host, last):
            used += sizes[h]
        host, count = last, more
    return found[:count], rest


@compiled
def _cut_one(
    found: Int64, count: int, begin: int, end: int, before: Float64, sizes: Int64, goal: Float64,
    light: Float64, host: int, used: float, heads: float,
) -> tuple[tuple[int, int], int]:  # fmt: skip
    """Writes the pieces of one document to `found` from `count` on; returns what is left, and the new count or -1."""
    while True:
        if host == len(sizes):
            return (begin, end), -1
        if before[end] - before[begin] <= _WHOLE * goal[host] and end - begin <= sizes[host]:
            return (begin, end), count
        head, tail = _end_of(before, begin, end, sizes[host], goal[host], light, used, heads)
        if head + tail == 0:
            return (begin, end), -1
        used += sizes[host] - head - tail
        if head > 0:
            found[count] = host, begin, begin + head
            count += 1
        found[count] = host, end - tail, end
        begin, end, host, count = begin + head, end - tail, host + 1, count + 1


@compiled
def _most_sent(pieces: Int64, rest: tuple[int, int]) -> float:
    """Units that the busiest host of a document sends: a unit to each host with a later part."""
    hosts = pieces[-1, 0] - pieces[0, 0] + 1
    most, sent = float((rest[1] - rest[0]) * hosts), 0.0
    others = hosts - 1 if rest[0] == rest[1] else hosts
    for i in range(len(pieces)):
        h, is_head = pieces[i, 0], pieces[i, 2] <= rest[0]
        sent = 0.0 if i == 0 or h != pieces[i - 1, 0] else sent
        sent += (pieces[i, 2] - pieces[i, 1]) * (others if is_head else h - pieces[0, 0])
        most = max(most, sent)
    return most


@compiled
def _end_of(
    before: Float64, begin: int, end: int, size: int, goal: float, light: Float64, used: float, heads: float
) -> tuple[int, int]:
    """Units of the head and of the tail of ``[begin, end)`` with which a host, filled with light items, has its goal.

    The head has the rows that are lighter than the light items, or `heads` of the tail's.
    """
    at = int(np.searchsorted(light[0], used, side="right"))
    at = min(max(at, 1), light.shape[1] - 1)
    limit = np.inf
    if light.shape[1] > 1:
        limit = (light[1, at] - light[1, at - 1]) / max(light[0, at] - light[0, at - 1], 1.0)
    low, high = begin, begin + (end - begin) // 2
    while low < high:  # rows are taken to be the heavier the later
        middle = (low + high) // 2
        if before[middle + 1] - before[middle] <= limit:
            low = middle + 1
        else:
            high = middle
    free = low - begin
    low, high = 0, min(end - begin, size)
    taken = np.interp(used, light[0], light[1])
    while high > low:
        units = (low + high + 1) // 2
        head = min(max(free, int(units * heads / (1 + heads))), units // 2)
        work = before[end] - before[end - units + head] + before[begin + head] - before[begin]
        if work + np.interp(used + size - units, light[0], light[1]) - taken <= goal:
            low = units
        else:
            high = units - 1
    head = min(max(free, int(low * heads / (1 + heads))), low // 2)
    return head, low - head


@compiled
def place(units: Int64, work: Float64, sizes: Int64, goal: Float64, given: Int64, had: Float64, full: int) -> Int64:
    """Host of each item; adds to `given` and `had`, units and work of each host.

    The lightest items fill the first `full` hosts; of the others, each goes where it leaves most room.
    """
    host = np.full(len(units), -1, np.int64)
    h = 0
    for i in np.argsort(work / units, kind="mergesort"):
        while h < full and given[h] + units[i] / 2 > sizes[h]:
            h += 1
        if h == full:
            break
        host[i] = h
        given[h] += units[i]
        had[h] += work[i]
    for i in np.argsort(-work, kind="mergesort"):
        if host[i] >= 0:
            continue
        best, most = 0, -np.inf
        for h in range(full if full < len(sizes) else 0, len(sizes)):
            room, free = (sizes[h] - given[h]) / sizes[h], (goal[h] - had[h]) / goal[h]
            t, w = units[i] / sizes[h], work[i] / goal[h]
            value = w * free + t * room if t <= room and w <= free else min(room - t, free - w) - 10
            if value > most:
                best, most = h, value
        host[i] = best
        given[best] += units[i]
        had[best] += work[i]
    return host


@compiled
def exchange(
    begun: Int64, units: Int64, work: Float64, sizes: Int64, goal: Float64, all_units: Int64, all_work: Float64,
    steps: int, threshold: float,
) -> Int64:  # fmt: skip
    """Moves items, or swaps two, where that makes hosts more even; returns the host of each item.

    Proposals are random, from a fixed seed; they may be worse by `threshold` at first. `begun` has the hosts of the
    items before, `all_units` and `all_work` what each host has in all.
    """
    host, given, had = begun.copy(), all_units.copy(), all_work.copy()
    if len(host) == 0:
        return host
    num_hosts = len(sizes)
    items, at = np.empty((num_hosts, len(host)), np.int64), np.empty_like(host)
    count = np.zeros(num_hosts, np.int64)
    for item in range(len(host)):
        items[host[item], count[host[item]]], at[item] = item, count[host[item]]
        count[host[item]] += 1
    uneven = np.empty(num_hosts)
    for h in range(num_hosts):
        uneven[h] = _uneven(given[h], had[h], sizes[h], goal[h])
    state = np.uint64(1)
    for step in range(steps):
        allowed = max(0.0, threshold * (1 - 1.25 * step / steps)) ** 3
        state, i = _random(state, len(host))
        state, to = _random(state, num_hosts)
        h = host[i]
        if to == h:
            continue
        state, other = _random(state, count[to] + 1)
        j, more_units, more_work = np.int64(-1), units[i], work[i]
        if other < count[to]:
            j = np.int64(items[to, other])
            more_units, more_work = more_units - units[j], more_work - work[j]
        here = _uneven(given[h] - more_units, had[h] - more_work, sizes[h], goal[h])
        there = _uneven(given[to] + more_units, had[to] + more_work, sizes[to], goal[to])
        if here + there > uneven[h] + uneven[to] + allowed:
            continue
        uneven[h], uneven[to] = here, there
        given[h] -= more_units
        had[h] -= more_work
        given[to] += more_units
        had[to] += more_work
        _move(items, count, at, host, i, to)
        if j >= 0:
            _move(items, count, at, host, j, h)
    return host


@compiled
def _random(state: np.uint64, below: int) -> tuple[np.uint64, np.int64]:
    """The next state, and a number in ``[0, below)``."""
    state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    return state, np.int64((state >> np.uint64(33)) % np.uint64(below))


@compiled
def _move(items: Int64, count: Int64, at: Int64, host: Int64, item: np.int64, to: np.int64) -> None:
    """Moves an item to a host."""
    h = host[item]
    count[h] -= 1
    last = items[h, count[h]]
    items[h, at[item]], at[last] = last, at[item]
    items[to, count[to]], at[item], host[item] = item, count[to], to
    count[to] += 1


@compiled
def _uneven(units: int, work: float, size: int, goal: float) -> float:
    beyond = max(0.0, work / goal - 1)
    return (units / size - 1) ** 2 + _WORK_PRICE * beyond * beyond


@compiled
def even_out(pieces: Int64, sizes: Int64, is_whole: Bool) -> Int64:
    """The pieces, with rows moved from their starts so that each host has its units.

    Args:
        pieces: host, first unit and end, ``[m, 3]``; those of whole documents, `is_whole`, are preferred.
    """
    given = np.zeros(len(sizes), np.int64)
    for i in range(len(pieces)):
        given[pieces[i, 0]] += pieces[i, 2] - pieces[i, 1]
    found = np.empty((2 * len(pieces) + 2 * len(sizes), 3), np.int64)
    found[: len(pieces)] = pieces
    count, into = len(pieces), 0
    order = np.argsort(np.where(is_whole, 0, 2**40) - (pieces[:, 2] - pieces[:, 1]), kind="mergesort")
    for i in order:
        h = pieces[i, 0]
        while given[h] > sizes[h] and found[i, 1] < found[i, 2]:
            while given[into] >= sizes[into]:
                into += 1
            move = min(given[h] - sizes[h], sizes[into] - given[into], found[i, 2] - found[i, 1])
            found[count] = into, found[i, 1], found[i, 1] + move
            found[i, 1] += move
            given[h] -= move
            given[into] += move
            count += 1
    found = found[:count]
    return found[found[:, 1] < found[:, 2]]
