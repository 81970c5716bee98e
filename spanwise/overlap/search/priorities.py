"""Priorities for list schedules of a `Dag`: the time at which each node should be issued, in milliseconds.

    dag ─► priorities ─► list_scheduler ─► schedule

The smaller time goes first. There are three sources:

- `order_priorities`: the time of a node's turn in a known order, if all collectives were hidden. Nodes off the longest
  paths come later by up to `lead`. So the compute that collectives need comes first, and other compute is kept to hide
  them, but no more than `lead` of it: memory and the streams of gradients keep flowing. Without that limit the longest
  path runs ahead and memory fills up.
- `nearest_collective`: the time at which the next collective that a node leads to could start. Streams are busy early.
- `backward_pass`: the times of a schedule made from the end backward, which places first whatever ended last in an
  earlier schedule ("justification": K. Y. Li and R. J. Willis, "An iterative scheduling technique for
  resource-constrained project scheduling", European Journal of Operational Research 56, 1992; V. Valls, F. Ballestin
  and S. Quintanilla, "Justification and RCPSP: a technique that pays", ibid. 165, 2005). Each stream runs one node at a
  time there. So a stream that is the bottleneck gets times that leave space for all its work, and the compute that
  leads to its next collective comes early enough to keep it busy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from spanwise.overlap.ir.critical_path import heads, tails
from spanwise.overlap.ir.dag import Dag, Kind
from spanwise.overlap.ir.memory import ResourceLimit
from spanwise.overlap.ir.order import positions

_START, _WAIT = int(Kind.START), int(Kind.WAIT)


@dataclasses.dataclass(frozen=True)
class ListSchedule:
    """A schedule made by one pass over the graph.

    Attributes:
        order: nodes as they are issued; empty for one made backward.
        begin: milliseconds of each node.
        makespan: milliseconds.
        peak: most bytes alive at once.
    """

    order: list[int]
    begin: list[float]
    makespan: float
    peak: int


class SchedulingProblem:
    """Figures of `dag` that every schedule needs, computed once.

    Args:
        order: the known order, which keeps all limits.
        limits: the limit of memory first.

    Attributes:
        stream: of each node: 0 for compute, a number for each group, -1 for a wait.
        work: milliseconds of all work of each stream.
        longest: milliseconds of the longest path.
        head: of each node, the earliest time at which it can be issued.
        tail: of each node, the longest path from its issue to the end of the graph.
        slack: of each node, `longest` less the longest path through it.
        scarce: bytes alive above which waits are not deferred.
        feeds_stream: of each node, whether a start depends on it.
        is_instant: of each node, whether it takes neither time nor memory. It runs at once: collectives may follow it.
    """

    def __init__(self, dag: Dag, order: Sequence[int], limits: Sequence[ResourceLimit]) -> None:
        self.dag, self.order, self.limits = dag, order, limits
        self.ms, self.users = dag.ms.tolist(), dag.users
        self.deps = dag.unique_deps
        numbers = {group: number for number, group in enumerate(dag.groups, 1)}
        self.num_streams = 1 + len(numbers)
        self.stream = [numbers[n.group] if n.kind == _START else -(n.kind == _WAIT) for n in dag.nodes]
        self.work = self.work_of(dag.ms)
        self.start_of = [node.start for node in dag.nodes]
        self.head, self.tail = heads(dag).tolist(), tails(dag)[0].tolist()
        self.longest = max((first + rest for first, rest in zip(self.head, self.tail, strict=True)), default=0.0)
        self.slack = [self.longest - first - rest for first, rest in zip(self.head, self.tail, strict=True)]
        peak = dag.peak_bytes(order)
        self.scarce = peak + (limits[0].budget - peak) // 2
        self.is_instant = [
            not (stream or ms or new) for stream, ms, new in zip(self.stream, self.ms, limits[0].allocated, strict=True)
        ]
        self.feeds_stream = [any(self.stream[user] > 0 for user in users) for users in self.users]

    def work_of(self, ms: NDArray[np.float64]) -> list[float]:
        """Milliseconds of each stream if the nodes take `ms`; added in order, so that every machine gets the same."""
        streams = np.maximum(np.array(self.stream, np.int64), 0)
        return np.bincount(streams, ms, self.num_streams).tolist()


def order_priorities(problem: SchedulingProblem, lead: float, margin: float = 0.0) -> list[float]:
    """Priorities that keep close to the known order; milliseconds by node.

    A node's time is the compute before it in that order, and up to `lead` milliseconds more, but no more than its
    slack. It is then brought forward for its users (`before_users`).

    Args:
        lead: infinity ignores the order: the node with the longest path after it comes first.
        margin: see `before_users`.
    """
    ms, slack, stream = problem.ms, problem.slack, problem.stream
    if lead == math.inf:
        return [-tail for tail in problem.tail]
    times = [0.0] * len(ms)
    turn = 0.0
    for i in problem.order:
        times[i] = turn + min(lead, slack[i])
        if stream[i] == 0:
            turn += ms[i]
    return before_users(problem, times, margin)


def nearest_collective(problem: SchedulingProblem) -> list[float]:
    """Priorities by which every stream gets work as soon as it can.

    A node's time is the earliest at which a collective that it leads to could start, other nodes aside. Nodes that lead
    to none come last, in the known order. A stream that is the bottleneck must not wait for its first collective.
    """
    early, stream, start_of = problem.head, problem.stream, problem.start_of
    found = [math.inf] * len(early)
    last = problem.longest
    for i in reversed(problem.order):
        # What the wait of a start leads to is later than the start.
        users = [found[user] for user in problem.users[i] if start_of[user] != i]
        found[i] = min(users, default=math.inf)
        if stream[i] > 0:
            found[i] = min(found[i], early[i])
    turn = {i: place for place, i in enumerate(problem.order)}
    return [last + turn[i] if time == math.inf else time for i, time in enumerate(found)]


def before_users(problem: SchedulingProblem, times: Sequence[float], margin: float) -> list[float]:
    """Priorities brought forward so that each node ends in time for its users.

    Args:
        times: milliseconds by node.
        margin: milliseconds by which starts, and the nodes that they depend on, come earlier still. The margins of
            successive collectives do not add up.
    """
    ms, stream, start_of = problem.ms, problem.stream, problem.start_of
    times, found = list(times), [0.0] * len(ms)
    for i in reversed(problem.order):
        # A user of a start may go on when that is issued; only its wait must let the collective end.
        is_compute, time, cost = stream[i] == 0, times[i], ms[i]
        for user in problem.users[i]:
            latest = times[user] - cost if is_compute or start_of[user] == i else times[user]
            if latest < time:
                time = latest
        times[i] = time
        if stream[i] > 0:
            time -= margin
        if is_compute:
            for user in problem.users[i]:
                latest = found[user] - cost
                if latest < time:
                    time = latest
        found[i] = time
    return found


def backward_pass(problem: SchedulingProblem, schedule: ListSchedule) -> ListSchedule:
    """A schedule made from the end backward: of the nodes that may come last, the one that ends last in `schedule`.

    Limits are ignored, and a collective begins whenever its stream is free. The result's `begin` are priorities.
    """
    ms, stream_of, deps, start_of = problem.ms, problem.stream, problem.deps, problem.start_of
    count = len(ms)
    # Heaps hold ranks: the node that ends last first; of equals, the later one in the known order.
    ends = [begin + duration for begin, duration in zip(schedule.begin, ms, strict=True)]
    by_end = sorted(reversed(problem.order), key=ends.__getitem__, reverse=True)
    rank = positions(by_end).tolist()
    left = [len(users) for users in problem.users]
    # Times run from the end of the graph: when a node may end, and when it begins.
    release, begin = [0.0] * count, [0.0] * count
    ready: list[list[int]] = [[] for _ in range(problem.num_streams)]
    running = [-1] * problem.num_streams
    # Nodes at the time from which they may be placed; as -1 - stream, streams at the time at which they are free.
    events: list[tuple[float, int]] = [(0.0, i) for i in range(count) if not left[i]]
    now = 0.0
    placed: list[int] = []
    touched: set[int] = set()

    def may_end_now(i: int) -> None:
        if stream_of[i] < 0:
            placed.append(i)
        else:
            heappush(ready[stream_of[i]], rank[i])
            touched.add(stream_of[i])

    while events:
        now = events[0][0]
        touched.clear()
        while events and events[0][0] <= now:
            i = heappop(events)[1]
            if i < 0:
                stream = -i - 1
                placed.append(running[stream])
                running[stream] = -1
                touched.add(stream)
            else:
                may_end_now(i)
            while placed:
                i = placed.pop()
                begin[i] = now
                for dep in deps[i]:
                    may_end = now if stream_of[dep] <= 0 or start_of[i] == dep else now - ms[dep]
                    if may_end > release[dep]:
                        release[dep] = may_end
                    left[dep] -= 1
                    if not left[dep]:
                        if release[dep] > now:
                            heappush(events, (release[dep], dep))
                        else:
                            may_end_now(dep)
        for stream in sorted(touched):
            if running[stream] < 0 and ready[stream]:
                i = running[stream] = by_end[heappop(ready[stream])]
                heappush(events, (now + ms[i], -stream - 1))
    return ListSchedule([], [now - time for time in begin], now, 0)
