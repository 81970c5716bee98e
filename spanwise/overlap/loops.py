"""The compiled loops of `scheduler`: one step that issues a node; the list scheduler, replay and settling around it.

Streams and memory are resources that a node takes when it is issued (`_issue`). Memory must leave a way to the end: the
banker's algorithm (E. W. Dijkstra, EWD 623), with a known order as the safe sequence. A node is safe if all nodes left,
run in the known order after it, stay within the budget. The next node of the known order always is. Sums are made in a
fixed order, so that all ranks find the same. `scheduler` describes the arguments.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from numba import njit  # type: ignore[import-untyped, unused-ignore]
from numba.core import event  # type: ignore[import-untyped, unused-ignore]

_GONE = -(2**61)  # bytes at a position that no longer counts: no later sum is near zero
_LOOKAHEAD = 16  # ready nodes tried when the first ones do not fit
_COUNT, _FIRST, _ALIVE, _PEAK, _NEEDED = range(5)  # of `State.numbers`

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _compiled(function: _Function) -> _Function:
    """The function as machine code, kept on disk where that is possible.

    It counts no references to arrays and so cannot make any: callers pass all. Counting takes 1 us a node in calls, and
    functions compile twice as long with it.
    """
    options: dict[str, Any] = {"_nrt": False}
    try:
        fast = njit(cache=True, **options)(function)
    except RuntimeError:  # no writable place for the cache: a read-only installation without a home
        fast = njit(**options)(function)
    return cast(_Function, fast)


@functools.cache
def _notice() -> None:
    logging.getLogger("spanwise").warning("spanwise: compiling the scheduler, once; this takes some seconds")


class _Notice(event.Listener):  # type: ignore[misc, unused-ignore]
    def on_start(self, event: Any) -> None:
        _notice()

    def on_end(self, event: Any) -> None:
        pass


def noticed() -> AbstractContextManager[None]:
    """Log a line where the calls inside compile first."""
    return cast("AbstractContextManager[None]", event.install_listener("numba:compile", _Notice()))


@_compiled
def _push(heaps, sizes, row, item):  # type: ignore[no-untyped-def]
    """Add an item to one of the heaps, which are rows."""
    at = sizes[row]
    while at > 0 and heaps[row, (at - 1) >> 1] > item:
        heaps[row, at] = heaps[row, (at - 1) >> 1]
        at = (at - 1) >> 1
    heaps[row, at] = item
    sizes[row] += 1


@_compiled
def _pop(heaps, sizes, row):  # type: ignore[no-untyped-def]
    """Remove and return the smallest item of a heap."""
    size = sizes[row] - 1
    top, item, at = heaps[row, 0], heaps[row, size], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and heaps[row, child + 1] < heaps[row, child]:
            child += 1
        if item <= heaps[row, child]:
            break
        heaps[row, at] = heaps[row, child]
        at = child
    heaps[row, at] = item
    sizes[row] = size
    return top


@_compiled
def _fits(graph, known, state, safely, node):  # type: ignore[no-untyped-def]
    """Whether there is memory for a node whose dependencies have run, and a way to the end after it."""
    new, first = graph.allocated[node], state.numbers[_FIRST]
    if new == 0:
        return True
    needed = state.numbers[_ALIVE] + new
    if safely:
        # Storages that the node frees by running early are ignored: the test is on the safe side.
        for at in range(first, known.position[node]):
            needed = max(needed, state.alive[at] + new)
            if needed > known.budget:
                break
    state.numbers[_NEEDED] = max(state.numbers[_NEEDED], needed)
    return needed <= known.budget


@_compiled
def _issue(graph, known, state, safely, i):  # type: ignore[no-untyped-def]
    """Issue a node: it takes its stream and its memory."""
    clock, numbers, stream = state.clock, state.numbers, graph.stream[i]
    state.done[i] = True
    state.order[numbers[_COUNT]] = i
    numbers[_COUNT] += 1
    now = clock[0]
    state.issued[i] = state.begin[i] = now
    if stream == 0:
        clock[0] = now + graph.ms[i]
    elif stream > 0:
        state.begin[i] = max(now, clock[stream])
        clock[stream] = state.begin[i] + graph.ms[i]
    else:
        clock[0] = max(now, state.end[graph.partner[i]])
    state.end[i] = clock[max(stream, 0)]
    numbers[_ALIVE] += graph.allocated[i]
    numbers[_PEAK] = max(numbers[_PEAK], numbers[_ALIVE])
    for at in range(graph.used_at[i], graph.used_at[i + 1]):
        storage = graph.used[at]
        state.users_left[storage] -= 1
        if not state.users_left[storage]:
            numbers[_ALIVE] -= graph.freed[storage]
    if safely:
        _update(graph, known, state, i)


@_compiled
def _update(graph, known, state, i):  # type: ignore[no-untyped-def]
    """Bytes at the positions of the known order that are left, after node `i` has run."""
    first, position, new = state.numbers[_FIRST], known.position[i], graph.allocated[i]
    if new:
        for at in range(first, position):
            state.alive[at] += new
    state.alive[position] = _GONE
    for at in range(graph.used_at[i], graph.used_at[i + 1]):
        storage = graph.used[at]
        last = state.last[storage]
        if known.touched[last] != position:
            continue
        begin = known.touched_at[storage]
        while last >= begin and state.done[known.order[known.touched[last]]]:
            last -= 1
        state.last[storage] = max(last, begin)
        opens = max(first, known.touched[last] + 1) if last >= begin else first
        for place in range(opens, position):
            state.alive[place] -= graph.freed[storage]
    while first < len(known.order) and state.done[known.order[first]]:
        first += 1
    state.numbers[_FIRST] = first


@_compiled
def replay(graph, known, state, order):  # type: ignore[no-untyped-def]
    """Run a fixed order."""
    for i in order:
        _issue(graph, known, state, False, i)


@_compiled
def _take(graph, known, state, ready, rule, stream, horizon):  # type: ignore[no-untyped-def]
    """Remove and return the first ready node of a stream that fits; -1 if none of the first ones does."""
    count, found, too_large = 0, -1, ready.lists[graph.streams + 2]
    while ready.sizes[stream] > 0 and count < _LOOKAHEAD and found < 0:
        rank = _pop(ready.lists, ready.sizes, stream)
        node = ready.nodes[rank]
        if state.done[node]:
            continue
        if graph.allocated[node] > 0 and ready.priorities[node] > horizon:
            _push(ready.lists, ready.sizes, stream, rank)
            break
        if _fits(graph, known, state, rule.safely, node):
            found = node
        else:
            too_large[count] = rank
            count += 1
    for at in range(count):
        _push(ready.lists, ready.sizes, stream, too_large[at])
    return found


@_compiled
def _next(graph, known, state, ready, rule, horizon):  # type: ignore[no-untyped-def]
    """The next compute, or before it a collective whose stream is free by its end; -1 if neither is ready and fits."""
    clock = state.clock
    compute = _take(graph, known, state, ready, rule, 0, horizon)
    if compute >= 0 and ready.is_first[compute]:
        return compute
    until = max(clock[0], clock[0] + rule.queue + (graph.ms[compute] if compute >= 0 else 0.0))
    for stream in range(1, graph.streams):
        if ready.sizes[stream] and clock[stream] <= until:
            start = _take(graph, known, state, ready, rule, stream, horizon)
            if start >= 0:
                if compute >= 0:
                    _push(ready.lists, ready.sizes, 0, ready.rank[compute])
                return start
    return compute


@_compiled
def _first_wait(graph, state, waits, count):  # type: ignore[no-untyped-def]
    """The wait whose collective ends first."""
    best = waits[0]
    for at in range(1, count):
        best = waits[at] if state.end[graph.partner[waits[at]]] < state.end[graph.partner[best]] else best
    return best


@_compiled
def list_schedule(graph, known, state, ready, rule, longest, work):  # type: ignore[no-untyped-def]
    """Issue all nodes by priority; whether none was left. `work` is the compute that is left."""
    count, clock = len(graph.ms), state.clock
    waits, new = ready.lists[graph.streams], ready.lists[graph.streams + 1]
    num_waits, num_new, lowest = 0, count, 0
    soonest = math.inf  # when the first of the waits ends
    while True:
        for at in range(num_new):
            node = new[at]
            if state.missing[node] or state.done[node]:
                continue
            if graph.stream[node] < 0:
                waits[num_waits] = node
                num_waits += 1
                soonest = min(soonest, state.end[graph.partner[node]])
            else:
                _push(ready.lists, ready.sizes, graph.stream[node], ready.rank[node])
        if state.numbers[_COUNT] == count:
            return True
        if soonest <= clock[0]:
            chosen = _first_wait(graph, state, waits, num_waits)
        else:
            while lowest < count - 1 and (state.done[ready.nodes[lowest]] or ready.is_first[ready.nodes[lowest]]):
                lowest += 1
            chosen = _next(graph, known, state, ready, rule, ready.priorities[ready.nodes[lowest]] + rule.ahead)
        if chosen < 0 and num_waits:
            chosen = _first_wait(graph, state, waits, num_waits)
        for stream in range(1, graph.streams):  # all that is left waits for its stream
            if chosen < 0 and ready.sizes[stream]:
                chosen = _take(graph, known, state, ready, rule, stream, math.inf)
        if chosen < 0 and rule.safely:
            chosen = known.order[state.numbers[_FIRST]]
        if chosen < 0 or clock[0] + max(work, graph.tail[chosen]) > longest:
            return False
        _issue(graph, known, state, rule.safely, chosen)
        if graph.stream[chosen] == 0:
            work -= graph.ms[chosen]
        elif graph.stream[chosen] < 0:
            left, soonest = 0, math.inf
            for at in range(num_waits):
                if waits[at] != chosen:
                    waits[left] = waits[at]
                    soonest = min(soonest, state.end[graph.partner[waits[left]]])
                    left += 1
            num_waits = left
        num_new = graph.users_at[chosen + 1] - graph.users_at[chosen]
        for at in range(num_new):
            new[at] = graph.users[graph.users_at[chosen] + at]
            state.missing[new[at]] -= 1


@_compiled
def _issue_after_deps(graph, known, state, last, stack):  # type: ignore[no-untyped-def]
    """Issue a node, and before it all that it depends on and that has not run."""
    stack[0], size = last, 1
    while size:
        node, before = stack[size - 1], size
        for at in range(graph.deps_at[node], graph.deps_at[node + 1]):
            if not state.done[graph.deps[at]]:
                stack[size] = graph.deps[at]
                size += 1
        if size > before:
            continue
        size -= 1
        if not state.done[node]:
            _issue(graph, known, state, True, node)
            for at in range(graph.users_at[node], graph.users_at[node + 1]):
                state.missing[graph.users[at]] -= 1


@_compiled
def settle(graph, known, state, starts, starts_at, next_start, stack):  # type: ignore[no-untyped-def]
    """Issue the known order with its starts early and its waits late; `starts` has those of each stream in order."""
    for i in known.order:
        if state.done[i] or (graph.stream[i] < 0 and graph.users_at[i + 1] > graph.users_at[i]):
            continue  # a wait is issued when something needs it
        for at in range(graph.deps_at[i], graph.deps_at[i + 1]):
            if not state.done[graph.deps[at]]:
                _issue_after_deps(graph, known, state, graph.deps[at], stack)
        while not (state.done[i] or _fits(graph, known, state, True, i)):
            # Back to the known order, which always fits.
            _issue_after_deps(graph, known, state, known.order[state.numbers[_FIRST]], stack)
        _issue_after_deps(graph, known, state, i, stack)
        for stream in range(1, graph.streams):
            while next_start[stream] < starts_at[stream + 1]:
                start = starts[next_start[stream]]
                if not state.done[start]:
                    if state.missing[start] or not _fits(graph, known, state, True, start):
                        break
                    _issue_after_deps(graph, known, state, start, stack)
                next_start[stream] += 1
    for i in known.order:
        _issue_after_deps(graph, known, state, i, stack)


@_compiled
def order_units(graph, unit, key, by_key, members, begins, missing, heap, size, found):  # type: ignore[no-untyped-def]
    """Fill `found` with nodes, whole units at once: of those whose dependencies are there, the one of the smallest key.

    Returns:
        How many were found; fewer than all if units wait for one another.
    """
    count = len(unit)
    for i in range(count):
        missing[unit[i]] += graph.deps_at[i + 1] - graph.deps_at[i]
    for i in range(count):
        if unit[i] == i and missing[i] == 0:
            _push(heap, size, 0, key[i])
    num_found = 0
    while size[0]:
        now = unit[by_key[_pop(heap, size, 0)]]
        for at in range(begins[now], begins[now + 1]):
            member = members[at]
            found[num_found] = member
            num_found += 1
            for user in range(graph.users_at[member], graph.users_at[member + 1]):
                other = unit[graph.users[user]]
                if other != now:
                    missing[other] -= 1
                    if missing[other] == 0:
                        _push(heap, size, 0, key[other])
    return num_found
