"""Slack of a schedule: time until later nodes would be late, and memory below the budget.

dag, numbered in the order of its schedule ─► slack ─► greedy
"""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from spanwise.overlap.ir.dag import Dag, Kind
from spanwise.overlap.ir.memory import Profile, interval_sums
from spanwise.overlap.ir.simulate import Timeline

_COMPUTE, _START, _WAIT = int(Kind.COMPUTE), int(Kind.START), int(Kind.WAIT)
_CHEAP = 1 / 16  # share of all compute that the cheapest nodes, taken together, may have; at 0, dit: 1.0 % longer
_HALVINGS = 3  # of the delay of a wait until memory has space for it; with 14, no order of the zoo changes
_OVERTAKEN = 32  # starts of other buckets that a start may overtake; with 2, sync-norm takes 2.0 % longer
_LOOKAHEAD = 16  # starts tried when a stream would be idle; with 1, dit takes 1.0 % longer


class MemorySlack:
    """Bytes alive at each position of a schedule, with memory reserved for waits that come late.

    A late wait frees its memory late. Each wait may be delayed for as long as the budget has space for that.

    Args:
        timeline: of the dag's own order.
        budget: most bytes; the order keeps it.

    Attributes:
        frees_early: of each start, whether it uses memory that may be freed before its wait.
        latest: of each wait that frees memory, the position by which it must be done.
    """

    def __init__(self, timeline: Timeline, budget: int) -> None:
        dag, kinds = timeline.dag, timeline.dag.kinds.tolist()
        self._budget, self._allocated = budget, dag.lifetimes.allocated
        self.frees_early = [False] * len(dag)
        freed: dict[int, int] = {}  # bytes by wait
        for storage, users in zip(dag.storages, dag.lifetimes.users, strict=True):
            if storage.kept:
                continue
            last = max(users)
            if kinds[last] == _WAIT:
                freed[last] = freed.get(last, 0) + storage.num_bytes
            for user in users:
                if kinds[user] == _START and dag.wait_of.get(user) not in storage.users:
                    self.frees_early[user] = True
        waits = np.array(sorted(freed), np.int64)
        num_bytes = np.array([freed[i] for i in waits.tolist()], np.int64)
        alive = dag.lifetimes.profile()
        until, late = _delayed(timeline, waits, num_bytes, alive, budget)
        self._profile = Profile(alive + late)
        self.latest = dict(zip(waits.tolist(), until.tolist(), strict=True))

    def copy(self) -> MemorySlack:
        """An independent one; both may `move`."""
        other = copy.copy(self)
        other._profile = self._profile.copy()
        return other

    def fits_at(self, node: int, position: int) -> bool:
        """Whether the memory that `node` allocates fits if it runs at a position before its own."""
        num_bytes = self._allocated[node]
        return not num_bytes or node <= position or self._profile.peak(position, node) + num_bytes <= self._budget

    def move(self, node: int, position: int) -> None:
        """Count the memory of `node` from a position before its own."""
        if self._allocated[node] and node > position:
            self._profile.pending.append((position, node, self._allocated[node]))


def _delayed(
    timeline: Timeline,
    waits: NDArray[np.int64],
    num_bytes: NDArray[np.int64],
    alive: NDArray[np.int64],
    budget: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How late waits may come for their memory; found by halving their delays.

    Args:
        waits, num_bytes: waits that free memory, and how much.
        alive: bytes at each position.

    Returns:
        The position by which each wait must be done, and the bytes that are alive longer at each position.
    """
    count, times = len(timeline.dag), timeline.issued
    allowed = alive + (budget - alive) // 2  # the other half is for results that are made sooner
    delay = np.full(len(waits), timeline.makespan)
    for _ in range(_HALVINGS):
        until = np.maximum(np.minimum(np.searchsorted(times, times[waits] + delay, "right"), count), waits + 1)
        late = interval_sums(count, waits, until, num_bytes)
        full = np.concatenate([[0], (alive + late > allowed).cumsum()])
        too_long = full[until] > full[waits]
        delay[too_long] /= 2
        if not too_long.any():
            return until, late
    until[too_long] = waits[too_long] + 1
    return until, interval_sums(count, waits, until, num_bytes)


class LatestTimes:
    """Latest times of all nodes for which the schedule still ends in time, as in the critical path method; ms.

    The order on each stream is kept (J. E. Kelley and M. R. Walker, "Critical-path planning and scheduling", 1959).

    Args:
        timeline: of the dag's own order.
        memory: how late waits may come.

    Attributes:
        begin: of each start, the time by which it must begin, for its stream and its users.
        end: of each start, the time by which its readers need it.
        reach: by position, the time by which compute must get there.
        is_cheap: of each node, whether it is no expensive compute.
        is_last: of each cheap node, whether no expensive compute depends on it.
        may_be_late: of each node, whether it may run after its position: waits, and cheap last ones.
    """

    def __init__(self, timeline: Timeline, memory: MemorySlack) -> None:
        dag = timeline.dag
        self._timeline = timeline
        self.is_cheap = _cheap_nodes(dag)
        self.is_last, self.may_be_late = [False] * len(dag), [False] * len(dag)
        self.begin, self.end, self.reach = self._backward_pass(dag, timeline.makespan, memory)

    def of_share(self, share: float) -> LatestTimes:
        """The times if a share of the slack may be used, from 0 (the timeline) to 1 (the latest times)."""
        real, found = self._timeline, copy.copy(self)
        begin, end, reach = map(np.array, (self.begin, self.end, self.reach[:-1]))
        found.begin = (real.begin + share * (begin - real.begin)).tolist()
        found.end = (real.end + share * (end - real.end)).tolist()
        found.reach = [*(real.issued + share * (reach - real.issued)).tolist(), real.makespan]
        return found

    def _backward_pass(
        self, dag: Dag, total: float, memory: MemorySlack
    ) -> tuple[list[float], list[float], list[float]]:
        """Latest begin and end of each node, and when compute must reach each position."""
        count, kinds, ms = len(dag), dag.kinds.tolist(), dag.ms.tolist()
        begin, end, reach, issue = [0.0] * count, [total] * count, [total] * (count + 1), [total] * count
        chain = last = total  # of the compute stream; the second one of nodes that may go to the end
        stream = dict.fromkeys(dag.groups, total)
        for i in range(count - 1, -1, -1):
            node, kind, cost = dag.nodes[i], kinds[i], ms[i]
            self.is_last[i] = is_last = self.is_cheap[i] and all(self.is_last[user] for user in dag.users[i])
            self.may_be_late[i] = kind == _WAIT or is_last
            if kind == _START:
                begin[i] = min(end[i] - cost, stream[node.group] - cost, issue[i])
                stream[node.group] = begin[i]
                if not is_last:
                    chain = min(chain, begin[i])
            elif kind == _WAIT:
                begin[i] = end[i] = min(end[i], reach[memory.latest.get(i, count)])
            elif self.may_be_late[i]:
                end[i] = min(end[i], last)
                last -= cost
                chain -= cost
                begin[i] = end[i] - cost
            else:
                end[i] = min(end[i], chain)
                begin[i] = chain = end[i] - cost
            reach[i] = chain
            for dep in node.deps:
                # A user of a start may go on when that is issued; only its wait must let the collective end.
                of = issue if kinds[dep] == _START and dep != node.start else end
                of[dep] = min(of[dep], begin[i])
        return begin, end, reach


def _cheap_nodes(dag: Dag) -> list[bool]:
    """All nodes but compute that costs more than the cheapest nodes that make up `_CHEAP` of all compute."""
    work = np.sort(dag.ms[dag.kinds == Kind.COMPUTE])
    summed = work.cumsum()  # one after another, so that every machine gets the same
    cheap = int(np.searchsorted(summed, _CHEAP * summed[-1], "right")) if len(work) else 0
    expensive = float(work[cheap]) if cheap < len(work) else math.inf
    return ((dag.kinds != Kind.COMPUTE) | (dag.ms < expensive)).tolist()


@dataclasses.dataclass(eq=False, slots=True)
class OpenBucket:
    """Starts of one key that are not issued yet.

    Attributes:
        ms: milliseconds that they take together at most.
        deadline: when they must have ended; milliseconds.
    """

    starts: list[int]
    ms: float
    deadline: float


class StreamQueues:
    """Work left on the streams of the groups, in the order of the schedule, and whether it would be in time.

    Args:
        timeline: of the dag's own order.
        state: of each node, nonzero once it is issued or deferred; the caller updates it.

    Attributes:
        free: of each group, when its stream has ended the collectives that are issued; milliseconds.
        open: of each group, the buckets that wait for more starts.
        follows_at_once: of each start, whether its stream was busy until it began; others were not to begin earlier.
    """

    def __init__(self, timeline: Timeline, latest: LatestTimes, state: bytearray) -> None:
        dag = timeline.dag
        self.free = dict.fromkeys(dag.groups, 0.0)
        self.open: dict[str, list[OpenBucket]] = {group: [] for group in dag.groups}
        self.follows_at_once = [False] * len(dag)
        self._latest, self._state, self._ms = latest, state, dag.ms.tolist()
        self._issued_at = timeline.issued.tolist()
        self._rounding = 1e-9 * timeline.makespan
        self._starts: dict[str, list[int]] = {group: [] for group in dag.groups}
        self._first = dict.fromkeys(dag.groups, 0)  # no start before it is left
        self._number: dict[int, int] = {}
        for i in dag.starts:
            of_group = self._starts[dag.nodes[i].group]
            if of_group:
                self.follows_at_once[i] = bool(timeline.begin[i] <= timeline.end[of_group[-1]] + self._rounding)
            self._number[i] = len(of_group)
            of_group.append(i)

    def next_starts(self, group: str) -> list[int]:
        """The next starts of a stream; the first of them is left."""
        at = self._first_left(group)
        return self._starts[group][at : at + _LOOKAHEAD]

    def most_urgent(self, group: str) -> OpenBucket:
        """The open bucket with the earliest deadline."""
        return min(self.open[group], key=lambda bucket: bucket.deadline)

    def in_time(self, group: str, now: float, buckets: list[OpenBucket], new: int, ms: float = 0.0) -> bool:
        """Whether a stream runs `new` for `ms`, then `buckets`, then the starts before `new`, all in time."""
        free = self.free[group]
        # A stream that is late already may stay as late; its readers must be in time all the same.
        first = min((i for bucket in buckets for i in bucket.starts), default=new)
        lateness = max(0.0, free - self._latest.begin[min(first, new)])
        free = max(now, free) + ms
        for bucket in sorted(buckets, key=lambda bucket: bucket.deadline):
            free += bucket.ms
            if free > bucket.deadline + self._rounding:
                return False
        stream, overtaken = self._starts[group], 0
        for at in range(self._first_left(group), len(stream)):
            i = stream[at]
            if self._state[i] or i == new:
                continue
            if self._number[i] > self._number[new]:
                return free <= self._latest.begin[i] + lateness + self._rounding
            overtaken += 1
            free = max(free, self._issued_at[i]) + self._ms[i]
            if overtaken > _OVERTAKEN or free > self._latest.end[i] + self._rounding:
                return False
        return True

    def _first_left(self, group: str) -> int:
        """Where the first start of a stream is that is not issued."""
        stream, at = self._starts[group], self._first[group]
        while at < len(stream) and self._state[stream[at]]:
            at += 1
        self._first[group] = at
        return at
