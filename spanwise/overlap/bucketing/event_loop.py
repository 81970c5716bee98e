"""A dag run node by node, in an order that is known to be good but need not be kept: what `replay` does to a schedule.

Compute goes in that order; a wait is done when its collective has ended, or when somebody needs what it waits for.
Memory and what is in flight are guarded. When and with what a collective is started is said by who inherits.
"""

from __future__ import annotations

import collections
import heapq
import math
from collections.abc import Mapping, Sequence

from spanwise.overlap.ir.dag import Dag, Kind
from spanwise.overlap.ir.memory import Guard
from spanwise.overlap.search.slack import Latest, touched_bytes

_START, _WAIT = int(Kind.START), int(Kind.WAIT)
UNTOUCHED, HELD, DONE = 0, 1, 2


class Running:
    """State of compute, of memory and of what is in flight while nodes are issued.

    Args:
        dag: numbered in the known order.
        late: when each node has to run.
        budget: bytes that the known order keeps.
        allowed: by group, how many collectives and how many bytes may be in flight; None for no limits.

    Attributes:
        order: nodes as issued; state: of each, whether it is `UNTOUCHED`, a start that is `HELD` back, or `DONE`.
        now: milliseconds on the compute stream; place: in the known order; missing: dependencies that have not run.
        ended: of each collective under way, by its start, its end; together: the starts that are one with it.
    """

    def __init__(
        self, dag: Dag, late: Latest, budget: int, allowed: Mapping[str, tuple[float, float]] | None = None
    ) -> None:
        self.dag, self.late, self.allowed = dag, late, allowed
        self.kinds, self.ms = dag.kinds.tolist(), dag.ms.tolist()
        self.guard = Guard(dag, budget)
        self.wait_of = {node.start: i for i, node in enumerate(dag.nodes) if node.kind == Kind.WAIT}
        self.missing = [len(deps) for deps in dag.unique_deps]
        self.state = bytearray(len(dag))
        self.order: list[int] = []
        self.now, self.place = 0.0, 0
        self.ended: dict[int, float] = {}
        self.together: dict[int, list[int]] = {}
        self.under_way: dict[str, dict[int, int]] = {group: {} for group in dag.groups}  # bytes by first start
        self.touched = touched_bytes(dag) if allowed is not None else {}
        self.waiting: list[tuple[float, int]] = []  # collectives under way, by their end
        self.lagging: collections.deque[int] = collections.deque()  # became ready after their turn
        self.fillers: list[int] = []  # of those, compute that takes time

    def start(self, i: int, *, hold: bool = True) -> None:
        """Start `i` now, or hold it back if it may be."""
        raise NotImplementedError

    def launch_held(self, i: int) -> None:
        """Start `i`, which is held back."""
        raise NotImplementedError

    def meanwhile(self, until: float) -> None:
        """Start what has to be, or can be, before compute gets to `until`."""
        raise NotImplementedError

    def run(self) -> None:
        """Run all nodes: compute in the known order, what may lag behind it when that costs no time."""
        count = len(self.dag)
        for i in range(count):
            self.place = i
            if self.state[i]:
                continue
            kind = self.kinds[i]
            if self.late.may_lag[i]:
                if not self.missing[i]:
                    self.ready(i)
                    self.catch_up()
                continue
            self.run_for(i)
            if kind == _START:
                if not self.state[i]:
                    self.start(i)
                continue
            until = self.now + self.ms[i]
            self.meanwhile(until)
            self.work(i)
            self.catch_up()
            self.fill(self.late.reach[i + 1])
        while len(self.order) < count:  # only what lags is left
            self.meanwhile(math.inf)
            self.catch_up()
            self.fill(math.inf)
            if self.waiting:
                self.finish(*heapq.heappop(self.waiting))
            elif len(self.order) < count:
                self.force(self.guard.next_in_order)

    def issue(self, i: int) -> None:
        """Run a node all of whose dependencies have run; whose time it takes is said by who calls."""
        self.guard.run(i)
        self.state[i] = DONE
        self.order.append(i)
        for user in self.dag.users[i]:
            self.missing[user] -= 1
            if not self.missing[user] and user <= self.place and self.late.may_lag[user]:
                self.lagging.append(user)

    def work(self, i: int) -> None:
        """Run compute."""
        self.make_room(i)
        if not self.state[i]:
            self.now += self.ms[i]
            self.issue(i)

    def finish(self, end: float, start: int) -> None:
        """Wait for a collective and those of its bucket."""
        self.now = max(self.now, end)
        for member in self.together[start]:
            wait = self.wait_of.get(member)
            if wait is not None and not self.state[wait]:
                self.run_for(wait)
                if not self.state[wait]:
                    self.issue(wait)
        self.under_way[self.dag.nodes[start].group].pop(self.together[start][0], None)

    def stall(self, end: float, start: int) -> None:
        """Let compute stand still until a collective has ended, after what can be done meanwhile."""
        if end > self.now:
            self.meanwhile(end)
            self.fill(end)
        self.finish(end, start)

    def ready(self, i: int) -> None:
        """Issue a node that may lag, if that takes no time."""
        kind = self.kinds[i]
        if kind == _WAIT:
            start = self.dag.nodes[i].start
            if self.ended.get(start, math.inf) <= self.now:
                self.finish(self.ended[start], start)
            elif start in self.ended:
                heapq.heappush(self.waiting, (self.ended[start], start))
        elif kind == _START:
            self.start(i)
        elif self.ms[i] and i != self.place:
            heapq.heappush(self.fillers, i)
        else:
            self.work(i)

    def catch_up(self) -> None:
        """Waits for what has ended, and all that had been waiting for that."""
        while True:
            if self.lagging:
                i = self.lagging.popleft()
                if not self.state[i]:
                    self.ready(i)
            elif self.waiting and self.waiting[0][0] <= self.now:
                self.finish(*heapq.heappop(self.waiting))
            else:
                return

    def fill(self, until: float) -> None:
        """Compute that lags, as far as there is time for it."""
        while self.fillers and (self.state[self.fillers[0]] or self.now + self.ms[self.fillers[0]] <= until):
            i = heapq.heappop(self.fillers)
            if not self.state[i]:
                self.work(i)
                self.catch_up()

    def run_for(self, i: int) -> None:
        """Run all that `i` still needs."""
        path = [i]
        while path:
            if self.missing[path[-1]]:
                path.append(next(dep for dep in self.dag.nodes[path[-1]].deps if self.state[dep] != DONE))
                continue
            last = path.pop()
            if last != i and self.state[last] != DONE:
                self.force(last)

    def force(self, i: int) -> None:
        """Run `i` now, and before it what it needs."""
        self.run_for(i)
        if self.state[i] == HELD:
            self.launch_held(i)
        elif self.state[i] == UNTOUCHED and self.kinds[i] == _START:
            self.start(i, hold=False)
        elif self.state[i] == UNTOUCHED and self.kinds[i] == _WAIT:
            start = self.dag.nodes[i].start
            self.stall(self.ended[start], start)
        elif self.state[i] == UNTOUCHED:
            self.work(i)

    def make_room(self, i: int) -> None:
        """Wait for collectives, or go on in the own order, until there is memory for `i`."""
        while not self.state[i] and not self.guard.is_safe(i):
            if self.guard.next_in_order == i:
                return
            if self.waiting:
                self.stall(*heapq.heappop(self.waiting))
            else:
                self.force(self.guard.next_in_order)

    def is_under_way(self, starts: list[int], end: float) -> None:
        """Note that these were started as one, which ends then."""
        for i in starts:
            self.ended[i], self.together[i] = end, starts
        if any(i in self.wait_of for i in starts):
            heapq.heappush(self.waiting, (end, starts[0]))
            self.under_way[self.dag.nodes[starts[0]].group][starts[0]] = self.bytes_of(starts)

    def bytes_of(self, starts: Sequence[int]) -> int:
        """Bytes that collectives make, read and write; what they share is counted for each."""
        return sum(self.touched.get(i, 0) for i in starts)

    def is_too_much(self, group: str, starts: Sequence[int]) -> bool:
        """Whether these would exceed the limit on bytes beside what is in flight."""
        if self.allowed is None:
            return False
        return sum(self.under_way[group].values()) + self.bytes_of(starts) > self.allowed[group][1]

    def is_full(self, group: str, starts: Sequence[int]) -> bool:
        """Whether as much is in flight that these, as one, would exceed a limit."""
        if self.allowed is None or not any(i in self.wait_of for i in starts):
            return False
        return len(self.under_way[group]) >= self.allowed[group][0] or self.is_too_much(group, starts)

    def make_way(self, group: str, starts: Sequence[int]) -> None:
        """Wait for collectives until these may be in flight."""
        while self.waiting and self.is_full(group, starts):
            self.stall(*heapq.heappop(self.waiting))
