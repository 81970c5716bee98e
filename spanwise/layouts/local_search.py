"""The compiled half of the local balancer: swaps of block stretches between ranks, each priced exactly.

`spanwise.layouts.local` sets a `Task` up from masks and calls `anneal`; nothing else comes here. Threshold accepting,
a deterministic sibling of simulated annealing (G. Dueck and T. Scheuer, J. Comput. Phys. 90, 1990). The same layout on
every host: integers, IEEE sums in one order, a random generator of its own, a budget of operations instead of time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit  # type: ignore[import-untyped, unused-ignore]

from spanwise.masks.arrays import Float64, Int32, Int64

_PRIME = 2**31 - 1  # the generator is x <- 48271 x mod this (S. K. Park, K. W. Miller, P. K. Stockmeyer, CACM 36, 1993)
_FACTOR = 48271
# A swap is priced as if what a rank receives above the cap counted so many times more. Found by trial.
_LOPSIDED, _LOPSIDED_WEIGHT = 2.0, 4.0  # cap in means
_TOP, _TOP_WEIGHT = 0.9, 16.0  # cap in busiest ranks, where the busiest is what counts
_LARGEST = 2.45  # the largest receiver counts instead of the mean where it is so many times as much
_MANY_RANKS = 16  # with more, two ranks drawn at random rarely hold parts of one document


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _compiled(function: _Function) -> _Function:
    try:
        compiled = njit(cache=True)(function)
    except RuntimeError:  # nowhere to keep what was compiled: a read-only installation without a home
        compiled = njit(function)
    return cast(_Function, compiled)


class Task(NamedTuple):
    """What stays the same through a search over ``num_blocks`` blocks and ``num_ranks`` ranks.

    Attributes:
        offsets, low, high: q block ``q`` of mask ``m`` reads the kv blocks ``low[i] … high[i] - 1`` for ``i`` in
            ``offsets[m, q] … offsets[m, q + 1] - 1``.
        price: weighted tokens of each kv block, ``[num_masks, num_blocks]``.
        total: work before each block, ``[num_bounds, num_blocks + 1]``: one row for each sum of masks that is bounded.
        limit: the most of it that a rank may have, ``[num_bounds]``.
        penalty: tokens that a unit of work over the limit counts, ``[num_bounds]``.
        left, right: the stretch ``[left, right)`` around each block that is one document, ``[num_blocks]``.
        host_start, host_stop: the ranks that share a host with each rank, ``[num_ranks]``.
        host_price: what a token costs that comes from a rank of the same host; from elsewhere it costs 1.
        kind: ranks of equal kind may swap the fixed block, ``[num_ranks]``.
        fixed: the short block; -1 if there is none.
        busiest: whether the rank that receives most is what counts, instead of all together.
    """

    offsets: Int64
    low: Int64
    high: Int64
    price: Float64
    total: Float64
    limit: Float64
    penalty: Float64
    left: Int64
    right: Int64
    host_start: Int64
    host_stop: Int64
    host_price: float
    kind: Int64
    fixed: int
    busiest: bool


@_compiled
def _hand_over(
    begin: int,
    stop: int,
    giver: int,
    taker: int,
    owner: Int64,
    offsets: Int64,
    low: Int64,
    high: Int64,
    readers: Int32,
    price: Float64,
    host_start: Int64,
    host_stop: Int64,
    near: float,
    recv: Float64,
    delta: Int64,
) -> int:
    """Gives the blocks ``[begin, stop)`` to another rank and updates ``owner``, ``readers`` and ``recv``.

    Arrays one by one, because handing a tuple of them on takes longer than the work. ``delta`` is scratch, zeros before
    and after. Returns the operations that this took.
    """
    giver_start, giver_stop = host_start[giver], host_stop[giver]
    taker_start, taker_stop = host_start[taker], host_stop[taker]
    one_host = giver_start == taker_start
    apart = near if one_host else 1.0
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
        for kv in range(max(first, 0), last):
            count += delta[kv]
            delta[kv] = 0
            if count > 0:
                left = gone[kv] - count
                gone[kv] = left
                before = come[kv]
                come[kv] = before + count
                if left == 0 or before == 0:
                    home, tokens = owner[kv], price[m, kv]
                    if left == 0 and home != giver:
                        change_giver -= near * tokens if giver_start <= home < giver_stop else tokens
                    if before == 0 and home != taker:
                        change_taker += near * tokens if taker_start <= home < taker_stop else tokens
        delta[last] = 0
        for kv in range(begin, stop):
            if gone[kv] > 0:
                change_giver += price[m, kv] * apart
            if come[kv] > 0:
                change_taker -= price[m, kv] * apart
        recv[giver] += change_giver
        recv[taker] += change_taker
        operations += max(last - first, 0) + offsets[m, stop] - offsets[m, begin]
        if not one_host:
            # What the neighbours read of these blocks comes from farther away, or from nearer.
            for rank in range(giver_start, giver_stop):
                if rank != giver:
                    for kv in range(begin, stop):
                        if readers[m, rank, kv] > 0:
                            recv[rank] += (1.0 - near) * price[m, kv]
            for rank in range(taker_start, taker_stop):
                if rank != taker:
                    for kv in range(begin, stop):
                        if readers[m, rank, kv] > 0:
                            recv[rank] -= (1.0 - near) * price[m, kv]
            operations += (stop - begin) * (giver_stop - giver_start - 1)
    for kv in range(begin, stop):
        owner[kv] = taker
    return operations


@_compiled
def _felt(recv: Float64, start: int, stop: int, cap: float, weight: float) -> float:
    """What the ranks of a host receive; what one of them receives above the cap counts ``weight`` times more."""
    felt = 0.0
    for rank in range(start, stop):
        felt += recv[rank] + weight * max(0.0, recv[rank] - cap)
    return felt


@_compiled
def _begun(task: Task, owner: Int64, num_ranks: int) -> tuple[Int32, Float64, Float64]:
    """How many q blocks of each rank read each kv block, ``[num_masks, num_ranks, num_blocks]``; the priced tokens that
    each rank receives; the work of each rank, ``[num_bounds, num_ranks]``."""
    offsets, num_blocks = task.offsets, owner.shape[0]
    readers = np.zeros((offsets.shape[0], num_ranks, num_blocks), np.int32)
    recv = np.zeros(num_ranks)
    work = np.zeros((task.total.shape[0], num_ranks))
    for q in range(num_blocks):
        rank = owner[q]
        for k in range(task.total.shape[0]):
            work[k, rank] += task.total[k, q + 1] - task.total[k, q]
        for m in range(offsets.shape[0]):
            for i in range(offsets[m, q], offsets[m, q + 1]):
                for kv in range(task.low[i], task.high[i]):
                    readers[m, rank, kv] += 1
    for m in range(offsets.shape[0]):
        for rank in range(num_ranks):
            for kv in range(num_blocks):
                if readers[m, rank, kv] > 0 and owner[kv] != rank:
                    recv[rank] += task.price[m, kv] * (
                        task.host_price if task.host_start[rank] <= owner[kv] < task.host_stop[rank] else 1.0
                    )
    return readers, recv, work


@_compiled
def _rating(busiest: bool, recv: Float64) -> float:
    """What the best layout has least of: priced tokens of all ranks, or of the busiest rank times the ranks.

    In the mean a layout counts as much as the largest receiver lets it: one that receives more than ``_LARGEST`` means
    is what has to fall then, and nothing is won by more traffic elsewhere.
    """
    largest = len(recv) * recv.max()
    return largest if busiest else max(recv.sum(), largest / _LARGEST)


@_compiled
def anneal(
    task: Task, owner: Int64, num_ranks: int, heat: float, cold: float, budget: int, best: Int64
) -> tuple[float, float]:
    """Swaps stretches of blocks until the budget is spent; ``best`` becomes the best balanced layout that was met.

    Args:
        owner: where to start; afterwards where the search stopped.
        heat, cold: tokens by which a swap may be worse, at the beginning and at the end.
        budget: operations, about 3 ns each.

    Returns:
        The rating of ``best`` (see `_rating`) and its priced tokens summed over ranks; infinite if no balanced layout
        was met.
    """
    num_blocks = owner.shape[0]
    num_bounds = task.total.shape[0]
    left, right, kind, fixed = task.left, task.right, task.kind, task.fixed
    busiest = task.busiest
    total, limit, penalty, host_start, host_stop = task.total, task.limit, task.penalty, task.host_start, task.host_stop
    offsets, low, high, price, near = task.offsets, task.low, task.high, task.price, task.host_price
    readers, recv, work = _begun(task, owner, num_ranks)
    delta = np.zeros(num_blocks + 1, np.int64)
    kept = recv.copy()
    members = np.zeros((num_ranks, num_blocks // num_ranks + 1), np.int64)
    held = np.zeros(num_ranks, np.int64)
    seat = np.zeros(num_blocks, np.int64)
    for q in range(num_blocks):
        rank = owner[q]
        seat[q] = held[rank]
        members[rank, held[rank]] = q
        held[rank] += 1
    cost, over = recv.sum(), 0.0
    for k in range(num_bounds):
        for rank in range(num_ranks):
            over += max(0.0, work[k, rank] / limit[k] - 1.0)
    slack = 1e-9
    least, least_cost = np.inf, np.inf
    if over <= slack:
        least, least_cost = _rating(busiest, recv), cost
        best[:] = owner
    largest, top = recv.max(), recv.argmax()
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
        if busiest and bits & 3072 == 0 and held[top] > 0:  # what the busiest rank holds, more often than the rest
            a = top
            x = members[a, x % held[a]]
        y = -1
        if num_ranks > _MANY_RANKS and bits & 768 == 0:
            # A rank that holds part of a document takes more of it, and gives whatever else it has.
            draw = draw * _FACTOR % _PRIME
            y = left[x] + draw % (right[x] - left[x])
            if owner[y] == a:
                continue
            draw = draw * _FACTOR % _PRIME
            x = members[a, draw % held[a]]
        lowest, highest = (left[x], right[x]) if bits & 1 else (0, num_blocks)
        a_start, a_stop = x, x + 1
        while a_start > lowest and owner[a_start - 1] == a:
            a_start -= 1
        while a_stop < highest and owner[a_stop] == a:
            a_stop += 1
        b = a
        if y >= 0:
            b = owner[y]
        elif bits & 4:
            # The partner holds the neighbouring blocks, or any.
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
        if y < 0:
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
        if moves_fixed and kind[a] != kind[b]:
            continue
        draw = draw * _FACTOR % _PRIME
        allowed = (heat * rest * rest + cold) * (draw / _PRIME)
        more = 0.0
        for k in range(num_bounds):
            moved = (total[k, a_start + size] - total[k, a_start]) - (total[k, b_start + size] - total[k, b_start])
            late = max(0.0, work[k, a] - moved - limit[k]) + max(0.0, work[k, b] + moved - limit[k])
            late -= max(0.0, work[k, a] - limit[k]) + max(0.0, work[k, b] - limit[k])
            more += late / limit[k]
            allowed -= penalty[k] * late
        if busiest or largest > _LARGEST * cost / num_ranks:
            cap, weight = _TOP * largest, _TOP_WEIGHT
        else:
            cap, weight = _LOPSIDED * cost / num_ranks, _LOPSIDED_WEIGHT
        before = _felt(recv, host_start[a], host_stop[a], cap, weight)
        if host_start[a] != host_start[b]:
            before += _felt(recv, host_start[b], host_stop[b], cap, weight)
        if allowed < -before:
            continue
        for rank in range(host_start[a], host_stop[a]):
            kept[rank] = recv[rank]
        for rank in range(host_start[b], host_stop[b]):
            kept[rank] = recv[rank]
        operations += _hand_over(
            a_start, a_start + size, a, b, owner, offsets, low, high, readers, price,
            host_start, host_stop, near, recv, delta,
        ) + _hand_over(
            b_start, b_start + size, b, a, owner, offsets, low, high, readers, price,
            host_start, host_stop, near, recv, delta,
        )  # fmt: skip
        after = _felt(recv, host_start[a], host_stop[a], cap, weight)
        if host_start[a] != host_start[b]:
            after += _felt(recv, host_start[b], host_stop[b], cap, weight)
        if after - before > allowed:
            operations += _hand_over(
                a_start, a_start + size, b, a, owner, offsets, low, high, readers, price,
                host_start, host_stop, near, recv, delta,
            ) + _hand_over(
                b_start, b_start + size, a, b, owner, offsets, low, high, readers, price,
                host_start, host_stop, near, recv, delta,
            )  # fmt: skip
            for rank in range(host_start[a], host_stop[a]):
                recv[rank] = kept[rank]
            for rank in range(host_start[b], host_stop[b]):
                recv[rank] = kept[rank]
            continue
        for k in range(num_bounds):
            moved = (total[k, a_start + size] - total[k, a_start]) - (total[k, b_start + size] - total[k, b_start])
            work[k, a] -= moved
            work[k, b] += moved
        over += more
        cost, largest, top = recv.sum(), recv.max(), recv.argmax()
        for i in range(size):
            p, q = a_start + i, b_start + i
            seat_p, seat_q = seat[p], seat[q]
            members[a, seat_p], seat[q] = q, seat_p
            members[b, seat_q], seat[p] = p, seat_q
        if over <= slack:
            rating = _rating(busiest, recv)
            if rating < least - 1e-6 or (rating < least + 1e-6 and cost < least_cost - 1e-6):
                least, least_cost = rating, cost
                best[:] = owner
    return least, least_cost
