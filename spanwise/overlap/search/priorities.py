"""Due dates for list schedules of a `Dag`: when each node should be issued, by what is known of the whole graph.

    dag ─► due ─► listed ─► schedule

They are of two kinds:

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

import copy
import dataclasses
import math
from collections.abc import Sequence
from heapq import heappop, heappush

from spanwise.overlap.ir.bounds import heads_and_rest
from spanwise.overlap.ir.dag import Dag, Kind
from spanwise.overlap.ir.memory import Guard

_START, _WAIT = int(Kind.START), int(Kind.WAIT)


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

    def along(self, order: Sequence[int], budget: int) -> Problem:
        """The same problem with another known order, which keeps the other limits, and other bytes of memory."""
        found = copy.copy(self)
        memory, *others = self.guards
        found.order = order
        found.guards = [memory.along(order, budget), *(guard.along(order, guard.budget) for guard in others)]
        found.scarce = budget
        return found


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
