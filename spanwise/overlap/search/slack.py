"""What a schedule has to spare: time, before what follows would be late, and memory, below the budget.

Asked by `replay`, of a dag that is numbered in the order of the schedule. Pure.
"""

from __future__ import annotations

import collections
import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from spanwise.overlap.ir.dag import Dag, Kind
from spanwise.overlap.ir.simulate import Timeline

_COMPUTE, _START, _WAIT = int(Kind.COMPUTE), int(Kind.START), int(Kind.WAIT)
# Compute is cheap if all that costs no more is at most this share of it.
_CHEAP = 1 / 16
_HALVINGS = 14
_OVERTAKEN = 32  # how many starts of other buckets one that joins a bucket may overtake
_LOOK = 16  # starts that are looked at when a stream would stand still


class Room:
    """Bytes alive at each place of the order, with room for waits that come later than they did.

    What a wait gives back is counted for some time after its turn, as long as the budget has room for that.

    Args:
        timeline: of the dag's own order.
        budget: bytes, which that order keeps.

    Attributes:
        allocated: bytes by node; given_back: of each start, whether something may be before its wait.
        latest: of each wait that gives back memory, the place by which it has to be done.
    """

    def __init__(self, dag: Dag, timeline: Timeline, budget: int) -> None:
        count, kinds = len(dag), dag.kinds.tolist()
        self._budget = budget
        self.allocated, self.given_back = [0] * count, [False] * count
        change = np.zeros(count + 1, np.int64)
        waits_of = {node.start: i for i, node in enumerate(dag.nodes) if node.kind == Kind.WAIT}
        given: dict[int, int] = collections.defaultdict(int)
        for storage in dag.storages:
            self.allocated[storage.maker] += storage.num_bytes
            change[storage.maker] += storage.num_bytes
            if not storage.kept:
                last = max((storage.maker, *storage.users))
                change[last + 1] -= storage.num_bytes
                if kinds[last] == _WAIT:
                    given[last] += storage.num_bytes
                for user in {storage.maker, *storage.users}:
                    if kinds[user] == _START and waits_of.get(user) not in storage.users:
                        self.given_back[user] = True
        profile = change[:-1].cumsum()
        waits = np.array(sorted(given), np.int64)
        num_bytes = np.array([given[i] for i in waits.tolist()], np.int64)
        times = timeline.issued
        # Half of what is free is for them, the other half for results that are made sooner.
        allowed = profile + (budget - profile) // 2
        delay = np.full(len(waits), timeline.makespan)
        for _ in range(_HALVINGS):
            until = np.maximum(np.minimum(np.searchsorted(times, times[waits] + delay, "right"), count), waits + 1)
            late = self._between(count, waits, until, num_bytes)
            full = np.concatenate([[0], (profile + late > allowed).cumsum()])
            too_long = full[until] > full[waits]
            delay[too_long] /= 2
            if not too_long.any():
                break
        else:
            until[too_long] = waits[too_long] + 1
            late = self._between(count, waits, until, num_bytes)
        self._profile = profile + late
        self.latest = dict(zip(waits.tolist(), until.tolist(), strict=True))

    @staticmethod
    def _between(
        count: int, first: NDArray[np.int64], until: NDArray[np.int64], num_bytes: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        change = np.zeros(count + 1, np.int64)
        np.add.at(change, first, num_bytes)
        np.add.at(change, until, -num_bytes)
        return change[:-1].cumsum()

    def fits_at(self, node: int, place: int) -> bool:
        """Whether there is room for what `node` allocates if it runs at a place before its own."""
        num_bytes = self.allocated[node]
        return not num_bytes or node <= place or int(self._profile[place:node].max()) + num_bytes <= self._budget

    def move(self, node: int, place: int) -> None:
        """Count what `node` allocates from a place before its own."""
        if self.allocated[node] and node > place:
            self._profile[place:node] += self.allocated[node]


class Latest:
    """When everything has to run so that the order still ends in time, as far as the slack may be used; milliseconds.

    Args:
        timeline: of the dag's own order.
        room: how late waits may come.
        slack: where between the timeline (0) and the latest times (1); whatever is between keeps all dependencies, too.

    Attributes:
        begin: of each start, when what follows on its stream and all else has to find it begun.
        end: of each start, when its readers need it.
        reach: by place of the order, when compute has to get there.
        is_cheap: all but compute of weight; is_last: of these, what no compute of weight depends on.
        may_lag: nodes that need not run at their place: waits, what is free, and what is last and cheap.
    """

    def __init__(self, dag: Dag, timeline: Timeline, room: Room, slack: float) -> None:
        count, kinds, ms = len(dag), dag.kinds.tolist(), dag.ms.tolist()
        total = timeline.makespan
        work = np.sort(dag.ms[dag.kinds == Kind.COMPUTE])
        summed = work.cumsum()  # one after another: the same on every machine
        few = int(np.searchsorted(summed, _CHEAP * summed[-1], "right")) if len(work) else 0
        dear = float(work[few]) if few < len(work) else math.inf
        self.is_cheap = [kind != _COMPUTE or cost < dear for kind, cost in zip(kinds, ms, strict=True)]
        self.is_last, self.may_lag = [False] * count, [False] * count
        begin, end, reach, issue = [0.0] * count, [total] * count, [total] * (count + 1), [total] * count
        chain = last = total  # what is left on the compute stream; of that, what may go to the end
        stream = dict.fromkeys(dag.groups, total)
        for i in range(count - 1, -1, -1):
            node, kind, cost = dag.nodes[i], kinds[i], ms[i]
            self.is_last[i] = is_last = self.is_cheap[i] and all(self.is_last[user] for user in dag.users[i])
            self.may_lag[i] = kind == _WAIT or is_last or (kind == _COMPUTE and not cost)
            if kind == _START:
                begin[i] = min(end[i] - cost, stream[node.group] - cost, issue[i])
                stream[node.group] = begin[i]
                if not is_last:
                    chain = min(chain, begin[i])
            elif kind == _WAIT:
                begin[i] = end[i] = min(end[i], reach[room.latest.get(i, count)])
            elif self.may_lag[i]:
                if cost:
                    end[i] = min(end[i], last)
                    last -= cost
                    chain -= cost
                begin[i] = end[i] - cost
            else:
                end[i] = min(end[i], chain)
                begin[i] = chain = end[i] - cost
            reach[i] = chain
            for dep in node.deps:
                # Whoever depends on a start may go on when it is issued; its wait alone, when the collective has ended.
                of = issue if kinds[dep] == _START and dep != node.start else end
                of[dep] = min(of[dep], begin[i])

        def within(real: NDArray[np.float64], latest: list[float]) -> list[float]:
            return (real + slack * (np.array(latest[:count]) - real)).tolist()

        self.begin, self.end = within(timeline.begin, begin), within(timeline.end, end)
        self.reach = [*within(timeline.issued, reach), total]


@dataclasses.dataclass(eq=False, slots=True)
class Held:
    """Starts of one key that are not issued yet; how long they take together at most, and when they have to end."""

    starts: list[int]
    ms: float
    until: float


class Streams:
    """What the streams of the groups have still to run, in the order of the schedule, and whether it would be in time.

    Args:
        timeline: of the dag's own order.
        state: of each node, whether it has been issued or is held back; kept by who asks.

    Attributes:
        free: of each group, when its stream has ended what was issued; held: buckets that wait for more.
        at_once: starts that found their stream busy and begin as soon as it is free; the others were not to begin
            earlier.
    """

    def __init__(self, timeline: Timeline, late: Latest, state: bytearray) -> None:
        dag = timeline.dag
        self.free = dict.fromkeys(dag.groups, 0.0)
        self.held: dict[str, list[Held]] = {group: [] for group in dag.groups}
        self.at_once = [False] * len(dag)
        self._late, self._state, self._ms = late, state, dag.ms.tolist()
        self._issued_at = timeline.issued.tolist()
        self._tiny = 1e-9 * timeline.makespan
        self._starts: dict[str, list[int]] = {group: [] for group in dag.groups}
        self._first = dict.fromkeys(dag.groups, 0)  # before it, nothing is left
        self._number: dict[int, int] = {}
        for i in dag.starts:
            of_group = self._starts[dag.nodes[i].group]
            if of_group:
                self.at_once[i] = bool(timeline.begin[i] <= timeline.end[of_group[-1]] + self._tiny)
            self._number[i] = len(of_group)
            of_group.append(i)

    def ahead(self, group: str) -> list[int]:
        """The next starts of a stream, the first of which is left."""
        at = self._next(group)
        return self._starts[group][at : at + _LOOK]

    def most_urgent(self, group: str) -> Held:
        """What is held back and has to end first."""
        return min(self.held[group], key=lambda bucket: bucket.until)

    def in_time(self, group: str, now: float, buckets: list[Held], new: int, ms: float = 0.0) -> bool:
        """Whether a stream runs `new` for `ms`, then `buckets`, then what was to run before `new`, all in time."""
        free = self.free[group]
        # A stream that is late already may stay as late; its readers, though, are to be in time.
        first = min((i for bucket in buckets for i in bucket.starts), default=new)
        lateness = max(0.0, free - self._late.begin[min(first, new)])
        free = max(now, free) + ms
        for bucket in sorted(buckets, key=lambda bucket: bucket.until):
            free += bucket.ms
            if free > bucket.until + self._tiny:
                return False
        stream, overtaken = self._starts[group], 0
        for at in range(self._next(group), len(stream)):
            i = stream[at]
            if self._state[i] or i == new:
                continue
            if self._number[i] > self._number[new]:
                return free <= self._late.begin[i] + lateness + self._tiny
            overtaken += 1
            free = max(free, self._issued_at[i]) + self._ms[i]
            if overtaken > _OVERTAKEN or free > self._late.end[i] + self._tiny:
                return False
        return True

    def _next(self, group: str) -> int:
        """Where the first start of a stream is that is left."""
        stream, at = self._starts[group], self._first[group]
        while at < len(stream) and self._state[stream[at]]:
            at += 1
        self._first[group] = at
        return at


def touched_bytes(dag: Dag) -> dict[int, int]:
    """Bytes of the storages that each collective makes, reads or writes, by its start; of those that are waited for."""
    found = {node.start: 0 for node in dag.nodes if node.kind == Kind.WAIT}
    for storage in dag.storages:
        for user in {storage.maker, *storage.users}:
            if user in found:
                found[user] += storage.num_bytes
    return found


def in_flight(timeline: Timeline) -> dict[str, tuple[int, int]]:
    """Of each group, how many collectives at most are between their start and their wait, and how many bytes.

    As `schedule` counts them; a bucket is one collective, with all of its bytes.
    """
    dag, touched = timeline.dag, touched_bytes(timeline.dag)
    now, most = ({group: [0, 0] for group in dag.groups} for _ in range(2))
    for i in timeline.order.tolist():
        node = dag.nodes[i]
        start = node.start if node.kind == Kind.WAIT else i
        if start not in touched:
            continue
        group, sign = dag.nodes[start].group, -1 if node.kind == Kind.WAIT else 1
        for at, takes in enumerate((1, touched[start])):
            now[group][at] += sign * takes
            most[group][at] = max(most[group][at], now[group][at])
    return {group: (count, num_bytes) for group, (count, num_bytes) in most.items()}


def limits_in_flight(
    timeline: Timeline, most: int | None, most_bytes: int | None
) -> dict[str, tuple[float, float]] | None:
    """Of each group, how many collectives and bytes may be in flight: the limits, or what the timeline has."""
    if most is None and most_bytes is None:
        return None
    limits = (math.inf if most is None else most), (math.inf if most_bytes is None else most_bytes)
    return {group: (max(limits[0], now[0]), max(limits[1], now[1])) for group, now in in_flight(timeline).items()}
