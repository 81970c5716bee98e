"""A dag run node by node in a known good order that need not be kept; `greedy` runs a schedule with it.

Compute keeps the order. A wait is done when its collective has ended, or when its result is needed. Memory and
collectives in flight are limited. The subclass decides when, and with which others, a collective is started.
"""

from __future__ import annotations

import collections
import heapq
import math
from collections.abc import Mapping, Sequence

from spanwise.overlap.bucketing.slack import LatestTimes
from spanwise.overlap.ir.dag import Dag, Kind
from spanwise.overlap.ir.in_flight import collective_bytes
from spanwise.overlap.ir.memory import ResourceLimit

_START, _WAIT = int(Kind.START), int(Kind.WAIT)
UNISSUED, DEFERRED, ISSUED = 0, 1, 2


class EventLoop:
    """State of compute, memory and collectives in flight while nodes are issued.

    Args:
        dag: numbered in the known order.
        latest: when each node has to run.
        memory: the budget, before any node has run; the known order keeps it.
        allowed: by group, most collectives and bytes in flight; None for no limits.

    Attributes:
        order: nodes as issued.
        state: of each node, `UNISSUED`, `DEFERRED` (a start in an open bucket) or `ISSUED`.
        now: milliseconds on the compute stream.
        position: of the loop in the known order.
        missing: of each node, its dependencies that have not run.
        ends: of each collective in flight, by its start, its end.
        together: the starts that are one collective with it.
        in_flight: of each group, bytes by the first start.
        running: collectives in flight that have a wait, by their end.
        ready_late: nodes that became ready after their position.
        fillers: of these, compute.
    """

    def __init__(
        self,
        dag: Dag,
        latest: LatestTimes,
        memory: ResourceLimit,
        allowed: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        self.dag, self.latest, self.allowed = dag, latest, allowed
        self.kinds, self.ms = dag.kinds.tolist(), dag.ms.tolist()
        self.memory = memory
        self.missing = [len(deps) for deps in dag.unique_deps]
        self.state = bytearray(len(dag))
        self.order: list[int] = []
        self.now, self.position = 0.0, 0
        self.ends: dict[int, float] = {}
        self.together: dict[int, list[int]] = {}
        self.in_flight: dict[str, dict[int, int]] = {group: {} for group in dag.groups}
        self.num_bytes = collective_bytes(dag) if allowed is not None else {}
        self.running: list[tuple[float, int]] = []
        self.ready_late: collections.deque[int] = collections.deque()
        self.fillers: list[int] = []

    def start(self, i: int, *, may_defer: bool = True) -> None:
        """Start `i` now, or defer it."""
        raise NotImplementedError

    def launch_deferred(self, i: int) -> None:
        """Start `i`, which is deferred."""
        raise NotImplementedError

    def start_before(self, until: float) -> None:
        """Start the collectives that must, or can, start before compute gets to `until`."""
        raise NotImplementedError

    def run(self) -> None:
        """Run all nodes: compute in the known order, and nodes that may be late behind it where that takes no time."""
        count = len(self.dag)
        for i in range(count):
            self.position = i
            if self.state[i]:
                continue
            if self.latest.may_be_late[i]:
                if not self.missing[i]:
                    self.run_ready(i)
                    self.catch_up()
                continue
            self.run_dependencies(i)
            if self.kinds[i] == _START:
                if not self.state[i]:
                    self.start(i)
                continue
            self.start_before(self.now + self.ms[i])
            self.run_compute(i)
            self.catch_up()
            self.fill_until(self.latest.reach[i + 1])
        while len(self.order) < count:  # late nodes
            self.start_before(math.inf)
            self.catch_up()
            self.fill_until(math.inf)
            if self.running:
                self.finish(*heapq.heappop(self.running))
            elif len(self.order) < count:
                self.force(self.memory.next_in_order)

    def issue(self, i: int) -> None:
        """Issue a node whose dependencies have all run; the caller counts its time."""
        self.memory.run(i)
        self.state[i] = ISSUED
        self.order.append(i)
        for user in self.dag.users[i]:
            self.missing[user] -= 1
            if not self.missing[user] and user <= self.position and self.latest.may_be_late[user]:
                self.ready_late.append(user)

    def run_compute(self, i: int) -> None:
        """Run compute, once there is memory for it."""
        self.wait_for_memory(i)
        if not self.state[i]:
            self.now += self.ms[i]
            self.issue(i)

    def finish(self, end: float, start: int) -> None:
        """Wait for a collective and the others of its bucket."""
        self.now = max(self.now, end)
        for member in self.together[start]:
            wait = self.dag.wait_of.get(member)
            if wait is not None and not self.state[wait]:
                self.run_dependencies(wait)
                if not self.state[wait]:
                    self.issue(wait)
        self.in_flight[self.dag.nodes[start].group].pop(self.together[start][0], None)

    def stall(self, end: float, start: int) -> None:
        """Wait until a collective has ended, and use the time for other nodes."""
        if end > self.now:
            self.start_before(end)
            self.fill_until(end)
        self.finish(end, start)

    def run_ready(self, i: int) -> None:
        """Issue a ready node that may be late, or leave it for later if it takes time."""
        if self.kinds[i] == _WAIT:
            start = self.dag.nodes[i].start
            if self.ends.get(start, math.inf) <= self.now:
                self.finish(self.ends[start], start)
            elif start in self.ends:
                heapq.heappush(self.running, (self.ends[start], start))
        elif self.kinds[i] == _START:
            self.start(i)
        elif i != self.position:
            heapq.heappush(self.fillers, i)
        else:
            self.run_compute(i)

    def catch_up(self) -> None:
        """Wait for collectives that have ended, and run the nodes that were late for them."""
        while True:
            if self.ready_late:
                i = self.ready_late.popleft()
                if not self.state[i]:
                    self.run_ready(i)
            elif self.running and self.running[0][0] <= self.now:
                self.finish(*heapq.heappop(self.running))
            else:
                return

    def fill_until(self, until: float) -> None:
        """Run late compute as far as it ends in time."""
        while self.fillers and (self.state[self.fillers[0]] or self.now + self.ms[self.fillers[0]] <= until):
            i = heapq.heappop(self.fillers)
            if not self.state[i]:
                self.run_compute(i)
                self.catch_up()

    def run_dependencies(self, i: int) -> None:
        """Run all nodes that `i` still needs."""
        path = [i]
        while path:
            if self.missing[path[-1]]:
                path.append(next(dep for dep in self.dag.nodes[path[-1]].deps if self.state[dep] != ISSUED))
                continue
            last = path.pop()
            if last != i and self.state[last] != ISSUED:
                self.force(last)

    def force(self, i: int) -> None:
        """Run `i` now, after its dependencies."""
        self.run_dependencies(i)
        if self.state[i] == DEFERRED:
            self.launch_deferred(i)
        elif self.state[i] == UNISSUED and self.kinds[i] == _START:
            self.start(i, may_defer=False)
        elif self.state[i] == UNISSUED and self.kinds[i] == _WAIT:
            start = self.dag.nodes[i].start
            self.stall(self.ends[start], start)
        elif self.state[i] == UNISSUED:
            self.run_compute(i)

    def wait_for_memory(self, i: int) -> None:
        """Wait for collectives, or go on in the known order, until there is memory for `i`."""
        while not self.state[i] and not self.memory.is_safe(i):
            if self.memory.next_in_order == i:
                return
            if self.running:
                self.stall(*heapq.heappop(self.running))
            else:
                self.force(self.memory.next_in_order)

    def record_start(self, starts: list[int], end: float) -> None:
        """Record that `starts` were started as one collective, which ends at `end`."""
        for i in starts:
            self.ends[i], self.together[i] = end, starts
        if any(i in self.dag.wait_of for i in starts):
            heapq.heappush(self.running, (end, starts[0]))
            self.in_flight[self.dag.nodes[starts[0]].group][starts[0]] = self.bytes_of(starts)

    def bytes_of(self, starts: Sequence[int]) -> int:
        """Bytes that collectives make, read and write; shared storages count for each."""
        return sum(self.num_bytes.get(i, 0) for i in starts)

    def exceeds_bytes(self, group: str, starts: Sequence[int]) -> bool:
        """Whether these collectives and those in flight exceed the limit on bytes."""
        if self.allowed is None:
            return False
        return sum(self.in_flight[group].values()) + self.bytes_of(starts) > self.allowed[group][1]

    def exceeds_limits(self, group: str, starts: Sequence[int]) -> bool:
        """Whether these, as one collective, and those in flight exceed a limit."""
        if self.allowed is None or not any(i in self.dag.wait_of for i in starts):
            return False
        return len(self.in_flight[group]) >= self.allowed[group][0] or self.exceeds_bytes(group, starts)

    def wait_for_flights(self, group: str, starts: Sequence[int]) -> None:
        """Wait for collectives until these may be in flight."""
        while self.running and self.exceeds_limits(group, starts):
            self.stall(*heapq.heappop(self.running))
