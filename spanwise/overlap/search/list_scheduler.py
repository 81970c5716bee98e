"""List schedules of a `Dag` within limits, by due dates; what `schedule` tries.

A list scheduler (R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM Journal on Applied Mathematics 17,
1969) on the model of `simulate`: whenever a stream is free, the ready node that is due first (`due`) takes it. Costs
are guesses, so collectives are handed over before their stream stands still, and waited for no sooner than their turn
comes. Pure and deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from spanwise.overlap.ir.memory import AllOf
from spanwise.overlap.search.priorities import Listed, Problem

# How many ready nodes are looked at when the first ones do not fit the limits.
_LOOK = 8
# By how much less what takes memory may run ahead when memory gets scarce.
_CROWDED = 8.0


def forward(
    problem: Problem,
    due: list[float],
    ahead: float,
    patience: float = 0.0,
    *,
    queue: float = 0.0,
    budget: int | None = None,
) -> Listed:
    """A schedule from the beginning on: of what may run, what is due first does, within all limits.

    A collective is started when the stream of its group has less than `queue` milliseconds left to do; a wait is taken
    when its collective has ended and its turn has come, or when nothing else is ready. What takes memory and is due
    more than `ahead` milliseconds later than anything that is left is put off, for it only fills memory. Where the node
    that is due first does not fit the limits, one of the next few may; where nothing fits, the known order goes on,
    which always does.

    Args:
        patience: the share of a node's milliseconds for which compute rather stands still, where the wait that ends
            then is due before the node.
        queue: collectives that are handed over before their stream needs them leave no gap where others take less time,
            and compute more, than was thought.
        budget: bytes of memory, instead of what the guards say.
    """
    ms, machine, users, start_of, free_of_charge = (
        problem.ms, problem.machine, problem.users, problem.start_of, problem.free
    )  # fmt: skip
    count, streams = len(ms), range(1, problem.streams)
    memory = problem.guards[0].copy(budget)
    guards = [memory, *(guard.copy() for guard in problem.guards[1:])]
    takes, scarce = memory.takes, problem.scarce
    by_due = sorted(problem.order, key=due.__getitem__)
    rank = [0] * count  # by which the heaps go
    for at, i in enumerate(by_due):
        rank[i] = at
    missing = [len(deps) for deps in problem.deps]
    has_run = bytearray(count)
    order: list[int] = []
    begin, end = [0.0] * count, [0.0] * count
    free = [0.0] * problem.streams
    ready: list[list[int]] = [[] for _ in range(problem.streams)]
    early: list[int] = []  # ready, and put off
    waits: list[tuple[float, int]] = []  # by the end of the collective
    ended: list[int] = []  # waits of collectives that have
    now, front, reach = 0.0, 0, -math.inf

    safe, ran = memory.is_safe, memory.run
    if len(guards) > 1:
        all_guards = AllOf(guards)
        safe, ran = all_guards.is_safe, all_guards.run

    def issue(i: int) -> None:
        """Issue a node, and what is ready by it and free of charge."""
        nonlocal now
        stack = [i]
        while stack:
            i = stack.pop()
            ran(i)
            has_run[i] = True
            order.append(i)
            stream = machine[i]
            if stream == 0:
                begin[i] = now
                now += ms[i]
            elif stream > 0:
                begin[i] = free[stream] if free[stream] > now else now
                end[i] = free[stream] = begin[i] + ms[i]
            else:
                begin[i] = now
                now = max(now, end[start_of[i]])
            for user in users[i]:
                missing[user] -= 1
                if not missing[user]:
                    if free_of_charge[user]:
                        stack.append(user)
                    else:
                        is_ready(user)

    def is_ready(i: int) -> None:
        if machine[i] < 0:
            heappush(waits, (end[start_of[i]], i))
        elif takes[i] and due[i] > reach:
            heappush(early, rank[i])
        else:
            heappush(ready[machine[i]], rank[i])

    def take(heap: list[int]) -> int:
        """Remove and return the first node of a heap that fits the limits; -1 for none."""
        kept: list[int] = []
        found = -1
        while heap and len(kept) < _LOOK:
            at = heappop(heap)
            i = by_due[at]
            if has_run[i]:
                continue
            if safe(i):
                found = i
                break
            kept.append(at)
        for at in kept:
            heappush(heap, at)
        return found

    def unlocked(i: int) -> float:
        """Milliseconds of compute that may run when a node has."""
        found = 0.0
        lacks: dict[int, int] = {}
        stack = [i]
        while stack:
            for user in users[stack.pop()]:
                lacks[user] = lacks.get(user, missing[user]) - 1
                if not lacks[user]:
                    if free_of_charge[user]:
                        stack.append(user)
                    else:
                        found += ms[user]
        return found

    def what_to_wait_for() -> int:
        """The wait for which compute stands still; -1 for none.

        Of the next collectives to end, that whose work is due first; or one that ends before it, and whose work fills
        a good part of the time until then. Others are left alone: they may end later than was thought.
        """
        next_ended = [heappop(ended) for _ in range(min(_LOOK, len(ended)))]
        next_waits = [heappop(waits) for _ in range(min(_LOOK, len(waits)))]
        for at in next_ended:
            heappush(ended, at)
        for entry in next_waits:
            heappush(waits, entry)
        looked = [*(by_due[at] for at in next_ended), *(i for _, i in next_waits)]
        gains = [(end[start_of[i]], rank[i], i, unlocked(i)) for i in looked if not has_run[i]]
        if not gains:
            return -1
        target = min([gain for gain in gains if gain[3] > 0.0] or gains, key=lambda gain: gain[1])
        for until, _, i, work in sorted(gains):
            if i == target[2] or work >= (target[0] - max(until, now)) / 4 > 0.0:
                return i
        return target[2]

    def wait_for_all() -> bool:
        """Wait for what has ended, which gives back what it took; whether there was any."""
        found = False
        while ended:
            i = by_due[ended[0]]
            if not has_run[i]:
                if not safe(i):
                    break
                issue(i)
                found = True
            heappop(ended)
        return found

    for i in problem.order:
        if not missing[i] and not has_run[i]:
            issue(i) if free_of_charge[i] else is_ready(i)
    compute = ready[0]
    while len(order) < count:
        while waits and (waits[0][0] <= now or has_run[waits[0][1]]):
            wait = heappop(waits)[1]
            if not has_run[wait]:
                heappush(ended, rank[wait])
        # Of collectives that have ended, those whose turn it is are waited for: others may end later than was thought.
        while compute and has_run[by_due[compute[0]]]:
            heappop(compute)
        while ended and compute and ended[0] < compute[0]:
            wait = by_due[ended[0]]
            if not has_run[wait]:
                if not safe(wait):
                    break
                issue(wait)
            heappop(ended)
        while ended and has_run[by_due[ended[0]]]:
            heappop(ended)
        if len(order) == count:
            break
        crowded = memory.alive > scarce
        if crowded and ended and wait_for_all():
            continue
        while has_run[by_due[front]]:
            front += 1
        reach = max(reach, due[by_due[front]] + (ahead / _CROWDED if crowded else ahead))
        while early and due[by_due[early[0]]] <= reach:
            at = heappop(early)
            heappush(ready[machine[by_due[at]]], at)
        chosen = take(compute)
        if chosen >= 0 and patience and waits:
            until, wait = waits[0]
            if until - now < patience * ms[chosen] and due[wait] < due[chosen]:
                heappush(compute, rank[chosen])
                chosen = -1
        until = now + ms[chosen] if chosen >= 0 else now
        started = False
        for stream in streams:
            heap = ready[stream]
            while heap and free[stream] <= until + queue:
                start = take(heap)
                if start < 0:
                    started = (heap and wait_for_all()) or started
                    break
                issue(start)
                started = True
                if chosen < 0:
                    break
        if chosen >= 0:
            # What was started may have taken the room that there was, or let the known order run it.
            if safe(chosen):
                issue(chosen)
                continue
            heappush(compute, rank[chosen])
        if not started:
            wait = what_to_wait_for()
            issue(wait if wait >= 0 and safe(wait) else memory.next_in_order)
    return Listed(order, begin, max([now, *free]), memory.peak)


def sunk(problem: Problem, order: Sequence[int], late: Sequence[bool]) -> list[int]:
    """The same order, but what is `late`, by node, comes right before whoever needs it first."""
    deps = problem.deps
    has_run = bytearray(len(order))
    found: list[int] = []

    def run(i: int) -> None:
        has_run[i] = True
        found.append(i)

    for i in order:
        if not late[i]:
            _with_deps(i, deps, has_run, run)
    for i in order:
        _with_deps(i, deps, has_run, run)
    return found


def _with_deps(i: int, deps: Sequence[Sequence[int]], has_run: bytearray, run: Callable[[int], None]) -> None:
    """Run a node after all that it still needs; `run` marks what `has_run`."""
    stack = [i]
    while stack:
        i = stack[-1]
        before = [dep for dep in deps[i] if not has_run[dep]]
        if before:
            stack += before
            continue
        stack.pop()
        if not has_run[i]:
            run(i)


def loosened(problem: Problem) -> list[int]:
    """The known order, but all is started as soon, and waited for as late, as dependencies and limits let it be.

    Compute keeps its order, and so does every stream. A start that comes earlier among compute and a wait that comes
    later delay nothing, whatever the costs: at no cost does the new order take longer than the old one, and where a
    collective or compute before it takes longer than was thought, there is more time until somebody needs it.
    """
    order, machine, deps, users = problem.order, problem.machine, problem.deps, problem.users
    limits = AllOf([guard.copy() for guard in problem.guards])
    streams: list[list[int]] = [[] for _ in range(problem.streams)]  # starts, the next one last
    for i in reversed(order):
        if machine[i] > 0:
            streams[machine[i]].append(i)
    missing = [len(before) for before in deps]
    has_run = bytearray(len(order))
    found: list[int] = []
    late: dict[int, None] = {}  # passed by; in the order of their turn

    def run(i: int) -> None:
        limits.run(i)
        has_run[i] = True
        late.pop(i, None)
        found.append(i)
        for user in users[i]:
            missing[user] -= 1

    def issue(i: int) -> None:
        _with_deps(i, deps, has_run, run)

    def start_all() -> None:
        for starts in streams:
            while starts and (has_run[starts[-1]] or (not missing[starts[-1]] and limits.is_safe(starts[-1]))):
                issue(starts.pop())

    for i in order:
        if has_run[i]:
            continue
        is_late = machine[i] < 0 or (problem.free[i] and any(dep in late for dep in deps[i]))
        if is_late and users[i]:
            late[i] = None
            continue
        for dep in deps[i]:
            issue(dep)
        if not limits.is_safe(i):  # nobody has passed by: the way out goes on
            for wait in list(late):
                issue(wait)
        issue(i)
        start_all()
    for i in list(late):
        issue(i)
    return found
