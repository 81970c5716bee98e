"""The compiled loop of the local balancer: swaps of block groups between ranks, each priced exactly.

`local` builds a `Task` from masks and calls `anneal`. The method is threshold accepting, a deterministic sibling of
simulated annealing (G. Dueck and T. Scheuer, J. Comput. Phys. 90, 1990). Every host finds the same layout: integers,
IEEE sums in a fixed order, a random generator in this file, and a budget of operations instead of time.

`anneal` draws a swap, prices its change of work, executes it, prices its change of traffic, and reverts it if it is
worse than the threshold allows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spanwise.layouts.compiling import compiled
from spanwise.masks.arrays import Float64, Int32, Int64

_PRIME = 2**31 - 1  # the generator is x <- 48271 x mod this (S. K. Park, K. W. Miller, P. K. Stockmeyer, CACM 36, 1993)
_FACTOR = 48271
# A swap is priced as if the tokens that a rank receives above the cap cost this many times more. Found by trial.
_LOPSIDED, _LOPSIDED_WEIGHT = 2.0, 4.0  # cap in means
_TOP, _TOP_WEIGHT = 0.9, 16.0  # cap in maxima, where the busiest receiver is minimised
_LARGEST = 2.45  # beyond this many means the largest receiver is minimised instead of the mean
_MANY_RANKS = 16  # with more, two ranks drawn at random rarely hold blocks of one document
_SLACK = 1e-9  # work over the limit that rounding may leave


class Task(NamedTuple):
    """The constants of a search over ``num_blocks`` blocks.

    Attributes:
        offsets, low, high: q block ``q`` of mask ``m`` reads the kv blocks ``low[i] … high[i] - 1`` for ``i`` in
            ``offsets[m, q] … offsets[m, q + 1] - 1``.
        price: weighted tokens of each kv block, ``[num_masks, num_blocks]``.
        total: work before each block, ``[num_bounds, num_blocks + 1]``: one row for each bound.
        limit: work that a rank may have, ``[num_bounds]``.
        penalty: tokens that a unit of work over the limit costs, ``[num_bounds]``.
        left, right: the document ``[left, right)`` of each block, ``[num_blocks]``.
        fixed: the short block, which only ranks with equally many blocks may swap; -1 if all blocks are whole.
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
    fixed: int


class State(NamedTuple):
    """A layout and what follows from it; the search changes all of them.

    Attributes:
        owner: rank of each block.
        readers: q blocks of each rank that read each kv block, int32 ``[num_masks, num_ranks, num_blocks]``.
        recv: tokens that each rank receives, by weight, ``[num_ranks]``.
        work: of each rank, ``[num_bounds, num_ranks]``.
        members: the blocks of each rank, ``[num_ranks, most]``; `held`: how many it holds, ``[num_ranks]``.
        seat: the index of each block in its row of `members`, ``[num_blocks]``.
    """

    owner: Int64
    readers: Int32
    recv: Float64
    work: Float64
    members: Int64
    held: Int64
    seat: Int64


def state_of(task: Task, owner: Int64, num_ranks: int) -> State:
    """The state of a layout."""
    num_masks, num_blocks = task.price.shape
    mask, q = np.divmod(np.repeat(np.arange(num_masks * num_blocks), np.diff(task.offsets).ravel()), num_blocks)
    readers = np.zeros((num_masks, num_ranks, num_blocks + 1), np.int32)
    np.add.at(readers, (mask, owner[q], task.low), 1)
    np.add.at(readers, (mask, owner[q], task.high), -1)
    readers = np.ascontiguousarray(np.cumsum(readers, axis=2, dtype=np.int32)[:, :, :-1])
    mask, rank, kv = np.nonzero((readers > 0) & (owner != np.arange(num_ranks)[:, None]))
    order, held = np.argsort(owner, kind="stable"), np.bincount(owner, minlength=num_ranks)
    seat, members = np.empty_like(owner), np.zeros((num_ranks, num_blocks // num_ranks + 1), np.int64)
    seat[order] = np.arange(num_blocks) - np.repeat(np.cumsum(held) - held, held)
    members[owner, seat] = np.arange(num_blocks)
    recv = np.bincount(rank, task.price[mask, kv], num_ranks)  # one by one: the same sum on every host
    work = np.stack([np.bincount(owner, np.diff(each), num_ranks) for each in task.total]).astype(np.float64)
    return State(owner, readers, recv.astype(np.float64), work, members, held, seat)


@compiled
def anneal(
    task: Task, state: State, threshold: float, final_threshold: float, budget: int, best: Int64
) -> tuple[float, float]:
    """Swaps groups of blocks until the budget is spent; ``best`` becomes the best balanced layout found.

    Args:
        state: the layout at the start; afterwards the one at which the search stopped.
        threshold, final_threshold: tokens by which a swap may be worse, at the start and at the end.
        budget: operations, about 3 ns each.
        best: the layout at the start.

    Returns:
        The rating of ``best`` (see `_rated`) and the tokens that all ranks receive; infinite if no layout was
        balanced.

    The loop is longer than 60 lines because helpers for its hot steps made planning 1.1 to 1.9 times slower, called or
    inlined: numba counts references to every array that it passes.
    """
    left, right, fixed, offsets, low, high = task.left, task.right, task.fixed, task.offsets, task.low, task.high
    price, total, limit, penalty = task.price, task.total, task.limit, task.penalty
    owner, readers, recv, work = state.owner, state.readers, state.recv, state.work
    members, held, seat = state.members, state.held, state.seat
    num_blocks, num_ranks = len(owner), len(recv)
    delta = np.zeros(num_blocks + 1, np.int64)
    over = 0.0
    for k in range(len(limit)):
        for rank in range(num_ranks):
            over += max(0.0, work[k, rank] / limit[k] - 1.0)
    rating, cost, largest = _rated(recv)
    least, least_cost = (rating, cost) if over <= _SLACK else (np.inf, np.inf)
    draw, operations = 1, 0
    while operations < budget:
        rest = 1.0 - operations / budget
        operations += 60
        draw = draw * _FACTOR % _PRIME
        x = draw % num_blocks
        a = owner[x]
        draw = draw * _FACTOR % _PRIME
        bits = draw >> 4
        y = -1
        if num_ranks > _MANY_RANKS and bits & 768 == 0:
            # A rank that holds blocks of a document takes another one of it, for any of its other blocks.
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
        elif bits & 4:  # the owner of an adjacent block; otherwise any rank
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
        size = min(a_stop - a_start, b_stop - b_start)
        if bits & 96:
            draw = draw * _FACTOR % _PRIME
            size = min(size, 1 + int(size * (draw / _PRIME) * (draw / _PRIME)))
        if bits & 2:
            a_start = a_stop - size
        if bits & 128:
            b_start = b_stop - size
        moves_fixed = a_start <= fixed < a_start + size or b_start <= fixed < b_start + size
        if moves_fixed and held[a] != held[b]:
            continue
        draw = draw * _FACTOR % _PRIME
        allowed = (threshold * rest * rest + final_threshold) * (draw / _PRIME)
        more = 0.0
        for k in range(total.shape[0]):
            moved = (total[k, a_start + size] - total[k, a_start]) - (total[k, b_start + size] - total[k, b_start])
            late = max(0.0, work[k, a] - moved - limit[k]) + max(0.0, work[k, b] + moved - limit[k])
            late -= max(0.0, work[k, a] - limit[k]) + max(0.0, work[k, b] - limit[k])
            more += late / limit[k]
            allowed -= penalty[k] * late
        if largest > _LARGEST * cost / num_ranks:
            cap, weight = _TOP * largest, _TOP_WEIGHT
        else:
            cap, weight = _LOPSIDED * cost / num_ranks, _LOPSIDED_WEIGHT
        recv_a, recv_b = recv[a], recv[b]
        before = recv_a + recv_b + weight * (max(0.0, recv_a - cap) + max(0.0, recv_b - cap))
        if allowed < -before:
            continue
        operations += _move_blocks(
            a_start, a_start + size, a, b, owner, offsets, low, high, readers, price, recv, delta
        )
        operations += _move_blocks(
            b_start, b_start + size, b, a, owner, offsets, low, high, readers, price, recv, delta
        )
        after = recv[a] + recv[b] + weight * (max(0.0, recv[a] - cap) + max(0.0, recv[b] - cap))
        if after - before > allowed:
            operations += _move_blocks(
                a_start, a_start + size, b, a, owner, offsets, low, high, readers, price, recv, delta
            )
            operations += _move_blocks(
                b_start, b_start + size, a, b, owner, offsets, low, high, readers, price, recv, delta
            )
            recv[a], recv[b] = recv_a, recv_b  # exactly, without rounding
            continue
        for k in range(total.shape[0]):
            moved = (total[k, a_start + size] - total[k, a_start]) - (total[k, b_start + size] - total[k, b_start])
            work[k, a] -= moved
            work[k, b] += moved
        for i in range(size):
            p, q = a_start + i, b_start + i
            seat_p, seat_q = seat[p], seat[q]
            members[a, seat_p], seat[q] = q, seat_p
            members[b, seat_q], seat[p] = p, seat_q
        over += more
        rating, cost, largest = _rated(recv)
        better = rating < least - 1e-6 or (rating < least + 1e-6 and cost < least_cost - 1e-6)
        if better and over <= _SLACK:
            least, least_cost = rating, cost
            for i in range(num_blocks):  # `best[:] = owner` takes numba two seconds to compile
                best[i] = owner[i]
    return least, least_cost


@compiled
def _move_blocks(
    begin: int, stop: int, giver: int, taker: int, owner: Int64, offsets: Int64, low: Int64, high: Int64,
    readers: Int32, price: Float64, recv: Float64, delta: Int64,
) -> int:  # fmt: skip
    """Gives the blocks ``[begin, stop)`` to another rank and updates ``owner``, ``readers`` and ``recv``.

    Takes single arrays, because passing them as a tuple takes longer than the work. ``delta`` is scratch, zeros before
    and after. Returns the operations that this took.
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
        for kv in range(max(first, 0), last):
            count += delta[kv]
            delta[kv] = 0
            if count > 0:
                left = gone[kv] - count
                gone[kv] = left
                before = come[kv]
                come[kv] = before + count
                if left == 0 and owner[kv] != giver:
                    change_giver -= price[m, kv]
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


@compiled
def _rated(recv: Float64) -> tuple[float, float, float]:
    """What the search minimises: tokens of all ranks, or of the busiest receiver where it has ``_LARGEST`` means.

    And both figures. Plain loops, because numba takes a second to compile a sum or a maximum.
    """
    cost, largest = 0.0, 0.0
    for tokens in recv:
        cost += tokens
        largest = max(largest, tokens)
    return max(cost, len(recv) * largest / _LARGEST), cost, largest
