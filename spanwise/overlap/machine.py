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


class Priorities(NamedTuple):
    """By what a list schedule picks, and what it picks from.

    Attributes:
        nodes, rank: nodes by priority, and the place of each among them.
        lists: ranks of ready nodes, a heap for each stream; then ready waits, new nodes, and nodes that do not fit.
        sizes: of the heaps.
    """

    priorities: Floats
    nodes: Ints
    rank: Ints
    lists: Ints
    sizes: Ints


@compiled
def _is_instant(graph, node):  # type: ignore[no-untyped-def]
    """Whether it takes no time and no memory, so that it runs before all others: these may follow."""
    return graph.stream[node] == 0 and graph.ms[node] == 0.0 and graph.allocated[node] == 0


@compiled
def _take(graph, limits, state, by, memory, stream, horizon):  # type: ignore[no-untyped-def]
    """Remove and return the first ready node of a stream that fits; -1 if none of the first ones does."""
    count, found, too_large = 0, -1, by.lists[graph.streams + 2]
    while by.sizes[stream] > 0 and count < _LOOKAHEAD and found < 0:
        rank = pop(by.lists, by.sizes, stream)  # instant nodes have negative ranks
        node = by.nodes[rank]
        if state.done[node]:
            continue
        if graph.allocated[node] > 0 and by.priorities[node] > horizon:
            push(by.lists, by.sizes, stream, rank)
            break
        if _fits(graph, limits, state, memory, node):
            found = node
        else:
            too_large[count] = rank
            count += 1
    for at in range(count):
        push(by.lists, by.sizes, stream, too_large[at])
    return found


@compiled
def _next(graph, limits, state, by, rule, horizon):  # type: ignore[no-untyped-def]
    """The next compute, or before it a collective whose stream is free by its end; -1 if neither is ready and fits."""
    clock = state.clock
    compute = _take(graph, limits, state, by, rule.memory, 0, horizon)
    if compute >= 0 and _is_instant(graph, compute):
        return compute
    until = max(clock[0], clock[0] + rule.queue + (graph.ms[compute] if compute >= 0 else 0.0))
    for stream in range(1, graph.streams):
        if by.sizes[stream] and clock[stream] <= until:
            start = _take(graph, limits, state, by, rule.memory, stream, horizon)
            if start >= 0:
                if compute >= 0:
                    push(by.lists, by.sizes, 0, by.rank[compute])
                return start
    return compute


@compiled
def _first_wait(graph, state, waits, count, rank, by_priority):  # type: ignore[no-untyped-def]
    """The index of the wait whose collective ends first, or whose priority is the smallest."""
    best = 0
    for at in range(1, count):
        one, other = waits[at], waits[best]
        if by_priority:
            best = at if rank[one] < rank[other] else best
        else:
            best = at if state.end[graph.partner[one]] < state.end[graph.partner[other]] else best
    return best


def list_schedule(
    graph: Graph, limits: Limits, priorities: Floats, by_priority: Ints, rank: Ints, rule: Rule, longest: float
) -> Run:
    """A schedule by priorities, the smallest first; left, with an infinite makespan, where it exceeds `longest`."""
    state = _new_state(graph, limits, rule.memory)
    lists, sizes = np.empty((graph.streams + 3, len(graph.ms)), np.int64), np.zeros(graph.streams, np.int64)
    lists[graph.streams + 1] = limits.order
    by = Priorities(priorities, by_priority, rank, lists, sizes)
    work = float(graph.ms[graph.stream == 0].sum())
    with noticed():
        kept = _list_schedule(graph, limits, state, by, rule, longest, work)
    return _run_of(state, kept)


@compiled
def _list_schedule(graph, limits, state, by, rule, longest, work):  # type: ignore[no-untyped-def]
    """`work` is the compute that is left."""
    count, clock = len(graph.ms), state.clock
    waits, new = by.lists[graph.streams], by.lists[graph.streams + 1]
    num_waits, num_new, lowest = 0, count, 0
    soonest = math.inf  # when the first of the waits ends
    while True:
        for at in range(num_new):
            node = new[at]
            stream = graph.stream[node]
            if state.missing[node] or state.done[node]:
                continue
            if stream < 0:
                waits[num_waits] = node
                num_waits += 1
                soonest = min(soonest, state.end[graph.partner[node]])
            else:
                push(by.lists, by.sizes, stream, by.rank[node] - (count if _is_instant(graph, node) else 0))
        if state.numbers[_COUNT] == count:
            return True
        chosen, horizon = -1, math.inf
        if soonest <= clock[0]:
            chosen = waits[_first_wait(graph, state, waits, num_waits, by.rank, False)]
        elif rule.ahead < math.inf:
            while state.done[by.nodes[lowest]]:
                lowest += 1
            horizon = by.priorities[by.nodes[lowest]] + rule.ahead
        if chosen < 0:
            chosen = _next(graph, limits, state, by, rule, horizon)
        if chosen < 0 and num_waits:
            chosen = waits[_first_wait(graph, state, waits, num_waits, by.rank, rule.wait_by_priority)]
        for stream in range(1, graph.streams):  # all that is left waits for its stream
            if chosen < 0 and by.sizes[stream]:
                chosen = _take(graph, limits, state, by, rule.memory, stream, math.inf)
        if chosen < 0 and rule.memory == SAFELY:
            chosen = limits.order[state.numbers[_FIRST]]
        if chosen < 0 or clock[0] + max(work, graph.tail[chosen]) > longest:
            return False
        if graph.stream[chosen] == 0:
            work -= graph.ms[chosen]
        if not _issue(graph, limits, state, rule.memory, 1.0, chosen):
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
    stack = np.empty(len(graph.deps) + 1, np.int64)
    in_order = limits.order[np.argsort(graph.stream[limits.order], kind="stable")]  # by stream
    next_start = np.searchsorted(graph.stream[in_order], np.arange(graph.streams + 1))
    with noticed():
        _settle(graph, limits, state, in_order, next_start, next_start.copy(), stack)
    return state.order


@compiled
def _settle(graph, limits, state, in_order, next_start, first_start, stack):  # type: ignore[no-untyped-def]
    for i in limits.order:
        if state.done[i] or (graph.stream[i] < 0 and graph.users_at[i + 1] > graph.users_at[i]):
            continue  # a wait is issued when something needs it
        for at in range(graph.deps_at[i], graph.deps_at[i + 1]):
            if not state.done[graph.deps[at]]:
                _issue_after_deps(graph, limits, state, graph.deps[at], stack)
        while not (
            state.done[i] or _fits(graph, limits, state, SAFELY, i)
        ):  # back to the known order, which always fits
            _issue_after_deps(graph, limits, state, limits.order[state.numbers[_FIRST]], stack)
        _issue_after_deps(graph, limits, state, i, stack)
        for stream in range(1, graph.streams):
            while next_start[stream] < first_start[stream + 1]:
                start = in_order[next_start[stream]]
                if not state.done[start]:
                    if state.missing[start] or not _fits(graph, limits, state, SAFELY, start):
                        break
                    _issue_after_deps(graph, limits, state, start, stack)
                next_start[stream] += 1
    for i in limits.order:
        _issue_after_deps(graph, limits, state, i, stack)
