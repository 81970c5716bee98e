"""Plain greedy schedules: whatever is ready runs, as far as memory allows now. The search may not lose to them.

R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM Journal on Applied Mathematics 17, 1969. Collectives
start when they are ready and are waited for when they have ended. That is short where no memory and no gap has to be
kept free for later; `list_scheduler` keeps both free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Literal, get_args

import numpy as np

from spanwise.overlap.ir.memory import ResourceLimit
from spanwise.overlap.search.priorities import ListSchedule, SchedulingProblem

# Ready nodes tried when the first ones do not fit; with 8, up to 7 % longer where the own peak is the budget.
_LOOKAHEAD = 32

Waits = Literal["ended", "first to end", "by priority"]
WAITS: tuple[Waits, ...] = get_args(Waits)


def greedy_schedule(
    problem: SchedulingProblem, priorities: Sequence[float], waits: Waits = "ended", longest: float = math.inf
) -> ListSchedule:
    """A schedule by priorities, the smallest first, that keeps all limits; its makespan is infinite if it ends early.

    It ends early where nothing that is ready fits, and where it takes more than `longest` milliseconds.

    Args:
        waits: when a wait comes: as soon as its collective has ended, or when nothing else is ready, and then the one
            whose collective ends first, or by priority.
    """
    return _GreedySchedule(problem, priorities, waits).run(longest)


class _Usage:
    """What a partly issued graph takes of a limit now, and its peak."""

    def __init__(self, limit: ResourceLimit) -> None:
        lifetimes = limit.lifetimes
        self.allocated, self.budget, self.alive, self.peak = limit.allocated, limit.budget, 0, 0
        self._used, self._left = lifetimes.used, [len(users) for users in lifetimes.users]
        self._freed = np.where(lifetimes.kept, 0, lifetimes.num_bytes).tolist()

    def run(self, node: int) -> None:
        new = self.allocated[node]
        if new:
            self.alive += new
            self.peak = max(self.peak, self.alive)
        left = self._left
        for storage in self._used[node]:
            left[storage] -= 1
            if not left[storage]:
                self.alive -= self._freed[storage]


class _GreedySchedule:
    """State of one schedule.

    Attributes:
        compute, starts: ready nodes by priority. Instant nodes are among the starts, in front.
        waits: ready ones by the end of their collective, or by priority.
    """

    def __init__(self, problem: SchedulingProblem, priorities: Sequence[float], waits: Waits) -> None:
        self.problem, self.priorities = problem, priorities
        self.eager, self.by_priority = waits == "ended", waits == "by priority"
        self.missing = [len(deps) for deps in problem.deps]
        self.compute: list[tuple[float, int]] = []
        self.starts: list[tuple[float, int]] = []
        self.waits: list[tuple[float, int]] = []
        self.usages = [_Usage(limit) for limit in problem.limits]
        self.order: list[int] = []
        self.begin, self.end = [0.0] * len(self.missing), [0.0] * len(self.missing)

    def run(self, longest: float) -> ListSchedule:
        ms, stream, start_of, begin, end = (
            self.problem.ms, self.problem.stream, self.problem.start_of, self.begin, self.end,
        )  # fmt: skip
        free = [0.0] * self.problem.num_streams
        now = 0.0
        for i in self.problem.order:
            if not self.missing[i]:
                self.add_ready(i)
        while len(self.order) < len(ms):
            i = self.take(self.starts)
            if i < 0 and not (self.eager and self.waits and self.waits[0][0] <= now):
                i = self.take(self.compute)
            if i < 0:
                i = self.take(self.waits)
            if i < 0 or max(free) > longest:
                return ListSchedule(self.order, begin, math.inf, self.usages[0].peak)
            begin[i] = now
            if stream[i] > 0:
                begin[i] = max(now, free[stream[i]])
                end[i] = free[stream[i]] = begin[i] + ms[i]
            else:
                free[0] = now = now + ms[i] if stream[i] == 0 else max(now, end[start_of[i]])
            self.issue(i)
        return ListSchedule(self.order, begin, max(free), self.usages[0].peak)

    def take(self, heap: list[tuple[float, int]]) -> int:
        """Remove and return the first node that fits now; -1 if none of the first ones does."""
        too_large: list[tuple[float, int]] = []
        found = -1
        while heap and len(too_large) < _LOOKAHEAD:
            entry = heappop(heap)
            node = entry[1]
            for usage in self.usages:
                new = usage.allocated[node]
                if new and usage.alive + new > usage.budget:
                    too_large.append(entry)
                    break
            else:
                found = node
                break
        for entry in too_large:
            heappush(heap, entry)
        return found

    def issue(self, i: int) -> None:
        self.order.append(i)
        for usage in self.usages:
            usage.run(i)
        missing = self.missing
        for user in self.problem.users[i]:
            missing[user] -= 1
            if not missing[user]:
                self.add_ready(user)

    def add_ready(self, i: int) -> None:
        stream = self.problem.stream[i]
        if stream < 0:
            heappush(self.waits, (self.priorities[i] if self.by_priority else self.end[self.problem.start_of[i]], i))
        elif self.problem.is_instant[i]:
            heappush(self.starts, (-math.inf, i))
        else:
            heappush(self.starts if stream else self.compute, (self.priorities[i], i))
