"""List schedules of a `Dag`, forward within limits and backward without, by due dates; what `schedule` tries.

A list scheduler (R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM Journal on Applied Mathematics 17,
1969) on the model of `simulate`: whenever a stream is free, the ready node that is due first takes it. Due dates are of
two kinds:

- `paced`: the time at which a node's turn would come in a known order, were all collectives hidden; what is not on the
  longest paths is due a little later, by `lead`. So compute that collectives need comes first, and what others are
  hidden behind is kept in store, but no more than `lead` of it, which is what keeps memory and the streams of gradients
  going. With a store of any size, the longest path runs ahead, and memory fills up.
- `latest`: when nodes begin in a schedule made from the end backward, in which whatever was last in a schedule before
  is placed first ("justification": K. Y. Li and R. J. Willis, "An iterative scheduling technique for
  resource-constrained project scheduling", European Journal of Operational Research 56, 1992; V. Valls, F. Ballestin
  and S. Quintanilla, "Justification and RCPSP: a technique that pays", ibid. 165, 2005). Streams are taken one by one
  here, so that a stream that is the bottleneck has due dates that leave room for all that it has left to run, and the
  compute that leads to its next collective is due early enough to keep it fed.

Pure and deterministic.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from heapq import heappop, heappush

from spanwise.overlap.bounds import heads_and_rest
from spanwise.overlap.dag import Dag, Kind
from spanwise.overlap.memory import AllOf, Guard

_START, _WAIT = int(Kind.START), int(Kind.WAIT)
# How many ready nodes are looked at when the first ones do not fit the limits.
_LOOK = 8
# By how much less what takes memory may run ahead when memory gets scarce.
_CROWDED = 8.0


@dataclasses.dataclass(frozen=True)
class Listed:
    """A schedule.

    Attributes:
        order: nodes as they are issued; empty for one made backward.
        begin: of each node, milliseconds.
        makespan: milliseconds.
        peak: bytes.
    """

    order: list[int]
    begin: list[float]
    makespan: float
    peak: int


class Problem:
    """What all schedules of `dag` go by, worked out once.

    Args:
        order: a known order of the nodes, which holds all limits.
        guards: the limits; that of memory first.

    Attributes:
        machine: of each node, its stream: 0 for compute, one number for each group, -1 for a wait.
        longest: milliseconds of the longest path.
        rest: of each node, the longest path from when it is issued to the end of all.
        slack: of each node, what is missing from the longest path through it to `longest`.
        scarce: bytes of memory from which on waits are not put off, and little runs ahead.
    """

    def __init__(self, dag: Dag, order: Sequence[int], guards: Sequence[Guard]) -> None:
        self.dag, self.order, self.guards = dag, order, guards
        self.ms, self.users = dag.ms.tolist(), dag.users
        self.deps = dag.unique_deps
        numbers = {group: number for number, group in enumerate(dag.groups, 1)}
        self.streams = 1 + len(numbers)
        self.machine = [numbers[n.group] if n.kind == _START else -(n.kind == _WAIT) for n in dag.nodes]
        self.start_of = [node.start for node in dag.nodes]
        heads, self.rest = heads_and_rest(dag)
        self.longest = max((head + rest for head, rest in zip(heads, self.rest, strict=True)), default=0.0)
        self.slack = [self.longest - head - rest for head, rest in zip(heads, self.rest, strict=True)]
        peak = dag.peak_bytes(order)
        self.scarce = peak + (guards[0].budget - peak) // 2
        # What takes no time and no room may as well run at once.
        self.free = [m == 0 and ms == 0.0 for m, ms in zip(self.machine, self.ms, strict=True)]
        for guard in guards:
            self.free = [free and not new for free, new in zip(self.free, guard.takes, strict=True)]


def paced(problem: Problem, lead: float, margin: float = 0.0) -> list[float]:
    """Due dates, milliseconds by node, that keep to the known order.

    A node is due when all compute before it in that order has run, and by up to `lead` milliseconds, but no more than
    its slack, later; and early enough for those that depend on it, a start and what it needs by `margin` more. With a
    `lead` of infinity, the order does not matter: what has the longest path after it comes first.
    """
    ms, slack, machine = problem.ms, problem.slack, problem.machine
    if lead == math.inf:
        return [-rest for rest in problem.rest]
    due = [0.0] * len(ms)
    turn = 0.0
    for i in problem.order:
        due[i] = turn + min(lead, slack[i])
        if machine[i] == 0:
            turn += ms[i]
    return eased(problem, due, margin)


def eased(problem: Problem, due: Sequence[float], margin: float) -> list[float]:
    """Due dates early enough for those that depend on a node, and of a start and what it needs by `margin` more."""
    ms, machine, start_of = problem.ms, problem.machine, problem.start_of
    due, early = list(due), [0.0] * len(ms)
    for i in reversed(problem.order):
        # Whoever depends on a start may go on when it is issued; its wait alone, when the collective has ended.
        long = machine[i] == 0
        for user in problem.users[i]:
            due[i] = min(due[i], due[user] - (ms[i] if long or start_of[user] == i else 0.0))
        # Margins do not add up over collectives one after another.
        early[i] = due[i] - margin if machine[i] > 0 else due[i]
        if long:
            for user in problem.users[i]:
                early[i] = min(early[i], early[user] - ms[i])
    return early


def latest(problem: Problem, schedule: Listed) -> Listed:
    """A schedule made from the end backward: of what may come last, what ends last in `schedule` does.

    Memory and other limits are left out of account, and a collective begins whenever its stream is free. Its `begin`
    are due dates.
    """
    ms, machine, deps, start_of = problem.ms, problem.machine, problem.deps, problem.start_of
    count = len(ms)
    # Ranks for heaps: what ends last comes first; of equals, the later one of the known order.
    ends = [begin + long for begin, long in zip(schedule.begin, ms, strict=True)]
    by_end = sorted(reversed(problem.order), key=ends.__getitem__, reverse=True)
    rank = [0] * count
    for at, i in enumerate(by_end):
        rank[i] = at
    left = [len(users) for users in problem.users]
    release, until_end = [0.0] * count, [0.0] * count  # from the end of all, when a node may end, and where it begins
    ready: list[list[int]] = [[] for _ in range(problem.streams)]
    runs = [-1] * problem.streams
    # Times from the end, and nodes that may be placed then; streams, as negative numbers, that have placed theirs.
    events: list[tuple[float, int]] = [(0.0, i) for i in range(count) if not left[i]]
    now = 0.0
    while events:
        now = events[0][0]
        placed = []
        touched = set()
        while events and events[0][0] <= now:
            i = heappop(events)[1]
            if i < 0:
                stream = -i - 1
                placed.append(runs[stream])
                runs[stream] = -1
                touched.add(stream)
            elif machine[i] < 0 or ms[i] == 0.0:
                placed.append(i)
            else:
                heappush(ready[machine[i]], rank[i])
                touched.add(machine[i])
            while placed:
                i = placed.pop()
                until_end[i] = now
                for dep in deps[i]:
                    may_end = now if machine[dep] <= 0 or start_of[i] == dep else now - ms[dep]
                    if may_end > release[dep]:
                        release[dep] = may_end
                    left[dep] -= 1
                    if not left[dep]:
                        if release[dep] > now:
                            heappush(events, (release[dep], dep))
                        elif machine[dep] < 0 or ms[dep] == 0.0:
                            placed.append(dep)
                        else:
                            heappush(ready[machine[dep]], rank[dep])
                            touched.add(machine[dep])
        for stream in sorted(touched):
            if runs[stream] < 0 and ready[stream]:
                i = runs[stream] = by_end[heappop(ready[stream])]
                heappush(events, (now + ms[i], -stream - 1))
    return Listed([], [now - time for time in until_end], now, 0)


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


def sunk(problem: Problem, order: Sequence[int], tiny: float) -> list[int]:
    """The same order, but what takes memory and next to no time comes right before whoever needs it first.

    Args:
        tiny: milliseconds of compute at most.
    """
    takes, deps = problem.guards[0].takes, problem.deps
    late = [m == 0 and takes[i] > 0 and problem.ms[i] <= tiny for i, m in enumerate(problem.machine)]
    has_run = bytearray(len(order))
    found: list[int] = []

    def issue(i: int) -> None:
        stack = [i]
        while stack:
            i = stack[-1]
            before = [dep for dep in deps[i] if not has_run[dep]]
            if before:
                stack += before
                continue
            stack.pop()
            if not has_run[i]:
                has_run[i] = True
                found.append(i)

    for i in order:
        if not late[i]:
            issue(i)
    for i in order:
        if not has_run[i]:
            issue(i)
    return found
