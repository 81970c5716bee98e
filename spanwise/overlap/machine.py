"""One machine in compiled code, on which every order of a graph runs; `engine` is the way to it.

    list_schedule  by priorities, within memory and limits in flight
    replay         a fixed order
    settle         a fixed order with its starts earlier and its waits later

Streams, memory and collectives in flight are resources that a node takes when it is issued (`_issue`). A list scheduler
(R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM Journal on Applied Mathematics 17, 1969) gives each
free stream the ready node of the smallest priority that fits.

Memory must leave a way to the end: the banker's algorithm (E. W. Dijkstra, EWD 623), with a known order as the safe
sequence. A node is safe if all nodes left, run in the known order after it, stay within the budget. The next node of
the known order always is.

Sums are made in a fixed order, so that all ranks find the same.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanwise.overlap.arrays import FREELY, GREEDILY, SAFELY, Floats, Graph, Ints, Limits, Rule, Run
from spanwise.overlap.compiled import GONE, add, compiled, most, new_tree, noticed, pop, push

_LOOKAHEAD = 16  # ready nodes tried when the first ones do not fit
_COUNT, _FIRST, _ALIVE, _PEAK = range(4)  # of `State.numbers`


class State(NamedTuple):
    """A partly issued graph.

    Attributes:
        clock: when each stream is free; compute, stream 0, is where the next node is issued.
        numbers: nodes issued, the first position of the known order that is left, bytes alive now and at most.
        last: of each storage, the index into `touched` of the last position that is left.
        tree, marks: most bytes over positions of the known order that are left; see `_most`.
    """

    done: NDArray[np.bool_]
    missing: Ints
    order: Ints
    begin: Floats
    end: Floats
    issued: Floats
    clock: Floats
    numbers: Ints
    users_left: Ints
    flights: Ints
    last: Ints
    tree: Ints
    marks: Ints


def _new_state(graph: Graph, limits: Limits, memory: int) -> State:
    count = len(graph.ms)
    return State(
        np.zeros(count, np.bool_),
        graph.deps_at[1:] - graph.deps_at[:-1],
        np.zeros(count, np.int64),
        np.zeros(count),
        np.zeros(count),
        np.zeros(count),
        np.zeros(graph.streams),
        np.zeros(4, np.int64),
        graph.users_left.copy(),
        np.zeros((graph.streams, 2), np.int64),
        limits.touched_at[1:] - 1,
        *new_tree(limits.alive if memory == SAFELY else limits.alive[:0]),
    )


def _run_of(state: State, kept: bool) -> Run:
    """The result; its makespan is infinite if it broke a limit."""
    makespan = float(state.clock.max()) if kept else math.inf
    return Run(makespan, int(state.numbers[_PEAK]), state.order, state.begin, state.end, state.issued)


@compiled
def _fits(graph, limits, state, memory, node):  # type: ignore[no-untyped-def]
    """Whether a node whose dependencies have run may be issued now."""
    stream = graph.stream[node]
    if stream > 0:
        for unit in range(2):
            if state.flights[stream, unit] + graph.flight[node, unit] > limits.in_flight[stream, unit]:
                return False
    new = graph.allocated[node]
    if new == 0 or memory == FREELY:
        return True
    fits_now = state.numbers[_ALIVE] + new <= limits.budget
    if memory == GREEDILY or not fits_now:
        return fits_now or (memory == SAFELY and limits.position[node] == state.numbers[_FIRST])
    first, position = state.numbers[_FIRST], limits.position[node]
    # Storages that the node frees by running early are ignored: the test is on the safe side.
    return position == first or most(state.tree, state.marks, first, position) + new <= limits.budget


@compiled
def _issue(graph, limits, state, memory, contention, i):  # type: ignore[no-untyped-def]
    """Issue a node: it takes its stream, memory and a place in flight. Whether all limits are kept."""
    clock, numbers, stream = state.clock, state.numbers, graph.stream[i]
    state.done[i] = True
    state.order[numbers[_COUNT]] = i
    numbers[_COUNT] += 1
    now = clock[0]
    state.issued[i] = state.begin[i] = now
    kept = True
    if stream == 0:
        ms = graph.ms[i]
        if contention > 1.0:
            busy = 0.0  # compute is slower for as long as a collective runs
            for at in range(len(clock)):
                busy = max(busy, clock[at] - now)
            if busy > 0.0:
                ms = ms * contention if ms * contention <= busy else busy + ms - busy / contention
        clock[0] = now + ms
    elif stream > 0:
        state.begin[i] = max(now, clock[stream])
        clock[stream] = state.begin[i] + graph.ms[i]
        for unit in range(2):
            state.flights[stream, unit] += graph.flight[i, unit]
            kept = kept and state.flights[stream, unit] <= limits.in_flight[stream, unit]
    else:
        start = graph.partner[i]
        clock[0] = max(now, state.end[start])
        for unit in range(2):
            state.flights[graph.stream[start], unit] -= graph.flight[start, unit]
    state.end[i] = clock[max(stream, 0)]
    new = graph.allocated[i]
    numbers[_ALIVE] += new
    numbers[_PEAK] = max(numbers[_PEAK], numbers[_ALIVE])
    kept = kept and (memory == FREELY or new == 0 or numbers[_ALIVE] <= limits.budget)
    for at in range(graph.used_at[i], graph.used_at[i + 1]):
        storage = graph.used[at]
        state.users_left[storage] -= 1
        if not state.users_left[storage]:
            numbers[_ALIVE] -= graph.freed[storage]
    if memory == SAFELY:
        _update(graph, limits, state, i)
    return kept


@compiled
def _update(graph, limits, state, i):  # type: ignore[no-untyped-def]
    """Bytes at the positions of the known order that are left, after node `i` has run."""
    first, position = state.numbers[_FIRST], limits.position[i]
    add(state.tree, state.marks, first, position, graph.allocated[i])
    add(state.tree, state.marks, position, position + 1, GONE)
    for at in range(graph.used_at[i], graph.used_at[i + 1]):
        storage = graph.used[at]
        last = state.last[storage]
        if limits.touched[last] != position:
            continue
        begin = limits.touched_at[storage]
        while last >= begin and state.done[limits.order[limits.touched[last]]]:
            last -= 1
        state.last[storage] = max(last, begin)
        opens = max(first, limits.touched[last] + 1) if last >= begin else first
        add(state.tree, state.marks, opens, position, -graph.freed[storage])
    while first < len(limits.order) and state.done[limits.order[first]]:
        first += 1
    state.numbers[_FIRST] = first


@compiled
def _take(graph, limits, state, memory, heaps, sizes, stream, too_large, by_priority, priorities, horizon):  # type: ignore[no-untyped-def]
    """Remove and return the first ready node of a stream that fits; -1 if none of the first ones does."""
    count, found = 0, -1
    while sizes[stream] > 0 and count < _LOOKAHEAD and found < 0:
        rank = pop(heaps, sizes, stream)
        node = by_priority[rank]
        if state.done[node]:
            continue
        if graph.allocated[node] > 0 and priorities[node] > horizon:
            push(heaps, sizes, stream, rank)
            break
        if _fits(graph, limits, state, memory, node):
            found = node
        else:
            too_large[count] = rank
            count += 1
    for at in range(count):
        push(heaps, sizes, stream, too_large[at])
    return found


def list_schedule(
    graph: Graph, limits: Limits, priorities: Floats, by_priority: Ints, rank: Ints, rule: Rule, longest: float
) -> Run:
    """A schedule by priorities, the smallest first; left, with an infinite makespan, where it exceeds `longest`."""
    state = _new_state(graph, limits, rule.memory)
    lists, sizes = np.empty((graph.streams + 3, len(graph.ms)), np.int64), np.zeros(graph.streams, np.int64)
    lists[-1] = limits.order
    too_large = np.empty(_LOOKAHEAD, np.int64)
    with noticed():
        kept = _list_schedule(
            graph, limits, state, lists, sizes, too_large, priorities, by_priority, rank, rule, longest
        )
    return _run_of(state, kept)


@compiled
def _list_schedule(graph, limits, state, lists, sizes, too_large, priorities, by_priority, rank, rule, longest):  # type: ignore[no-untyped-def]
    """`lists` has a heap for each stream, then ready waits, instant nodes, and nodes that may have become ready."""
    count, memory = len(graph.ms), rule.memory
    done, clock, heaps = state.done, state.clock, lists
    waits, instant, new = lists[graph.streams], lists[graph.streams + 1], lists[graph.streams + 2]
    num_waits = num_instant = lowest = 0
    work = 0.0  # compute that is left
    for node in range(count):
        if graph.stream[node] == 0:
            work += graph.ms[node]
    soonest = math.inf  # when the first of the waits ends
    num_new = count
    while True:
        for at in range(num_new):
            node = new[at]
            stream = graph.stream[node]
            if state.missing[node] or done[node]:
                continue
            if stream < 0:
                waits[num_waits] = node
                num_waits += 1
                soonest = min(soonest, state.end[graph.partner[node]])
            elif stream == 0 and graph.ms[node] == 0.0 and graph.allocated[node] == 0:
                instant[num_instant] = node
                num_instant += 1
            else:
                push(heaps, sizes, stream, rank[node])
        if state.numbers[_COUNT] == count:
            break
        chosen = best = -1
        while num_instant and chosen < 0:  # takes no time and no memory, and others may follow
            num_instant -= 1
            chosen = -1 if done[instant[num_instant]] else instant[num_instant]
        if chosen < 0 and soonest <= clock[0]:
            for at in range(num_waits):
                if state.end[graph.partner[waits[at]]] <= clock[0]:
                    chosen = waits[at]
                    break
        if chosen < 0:
            horizon = math.inf
            if rule.ahead < math.inf:
                while done[by_priority[lowest]]:
                    lowest += 1
                horizon = priorities[by_priority[lowest]] + rule.ahead
            compute = _take(graph, limits, state, memory, heaps, sizes, 0, too_large, by_priority, priorities, horizon)
            until = clock[0] + rule.queue + (graph.ms[compute] if compute >= 0 else 0.0)
            for stream in range(1, graph.streams):
                if sizes[stream] and clock[stream] <= until:
                    chosen = _take(
                        graph, limits, state, memory, heaps, sizes, stream, too_large, by_priority, priorities, horizon
                    )
                    if chosen >= 0:
                        break
            if chosen < 0:
                chosen = compute
            elif compute >= 0:
                push(heaps, sizes, 0, rank[compute])
        for at in range(num_waits if chosen < 0 else 0):
            wait = waits[at]
            end = state.end[graph.partner[wait]]
            if best < 0 or (rank[wait] < rank[best] if rule.wait_by_priority else end < state.end[graph.partner[best]]):
                best = wait
        if chosen < 0:
            chosen = best
        if chosen < 0:  # all that is left waits for its stream
            for stream in range(1, graph.streams):
                if chosen < 0 and sizes[stream]:
                    chosen = _take(
                        graph, limits, state, memory, heaps, sizes, stream, too_large, by_priority, priorities, math.inf
                    )
        if chosen < 0 and memory == SAFELY:
            chosen = limits.order[state.numbers[_FIRST]]
        if chosen < 0 or clock[0] + max(work, graph.tail[chosen]) > longest:
            return False
        if graph.stream[chosen] == 0:
            work -= graph.ms[chosen]
        if not _issue(graph, limits, state, memory, 1.0, chosen):
            return False
        if graph.stream[chosen] < 0:
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
    return True


def replay(graph: Graph, limits: Limits, order: Ints, contention: float) -> Run:
    """Run a fixed order; the makespan is infinite if it breaks a limit."""
    state = _new_state(graph, limits, GREEDILY)
    with noticed():
        kept = _replay(graph, limits, state, order, contention)
    return _run_of(state, kept)


@compiled
def _replay(graph, limits, state, order, contention):  # type: ignore[no-untyped-def]
    kept = True
    for i in order:
        kept = _issue(graph, limits, state, GREEDILY, contention, i) and kept
    return kept


@compiled
def _issue_after_deps(graph, limits, state, last, stack):  # type: ignore[no-untyped-def]
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
            _issue(graph, limits, state, SAFELY, 1.0, node)
            for at in range(graph.users_at[node], graph.users_at[node + 1]):
                state.missing[graph.users[at]] -= 1


def settle(graph: Graph, limits: Limits) -> Ints:
    """The known order with every start as early, and every wait as late, as dependencies and limits allow."""
    state = _new_state(graph, limits, SAFELY)
    lists = np.empty((graph.streams + 1, len(graph.ms)), np.int64)
    sizes, stack = np.zeros((2, graph.streams), np.int64), np.empty(len(graph.deps) + 1, np.int64)
    with noticed():
        _settle(graph, limits, state, lists, sizes, stack)
    return state.order


@compiled
def _settle(graph, limits, state, starts, sizes, stack):  # type: ignore[no-untyped-def]
    """`starts` of each stream, and in the last row waits whose turn is over, in that order."""
    num_starts, next_start = sizes[0], sizes[1]
    late, num_late = starts[graph.streams], 0
    for i in limits.order:
        stream = graph.stream[i]
        if stream > 0:
            starts[stream, num_starts[stream]] = i
            num_starts[stream] += 1
    for i in limits.order:
        if state.done[i]:
            continue
        if graph.stream[i] < 0 and graph.users_at[i + 1] > graph.users_at[i]:
            late[num_late] = i
            num_late += 1
            continue
        for at in range(graph.deps_at[i], graph.deps_at[i + 1]):
            if not state.done[graph.deps[at]]:
                _issue_after_deps(graph, limits, state, graph.deps[at], stack)
        if not _fits(graph, limits, state, SAFELY, i):  # back to the known order, which always fits
            for at in range(num_late):
                if not state.done[late[at]]:
                    _issue_after_deps(graph, limits, state, late[at], stack)
            num_late = 0
        _issue_after_deps(graph, limits, state, i, stack)
        for stream in range(1, graph.streams):
            while next_start[stream] < num_starts[stream]:
                start = starts[stream, next_start[stream]]
                if not state.done[start]:
                    if state.missing[start] or not _fits(graph, limits, state, SAFELY, start):
                        break
                    _issue_after_deps(graph, limits, state, start, stack)
                next_start[stream] += 1
    for at in range(num_late):
        if not state.done[late[at]]:
            _issue_after_deps(graph, limits, state, late[at], stack)
