"""Schedules of a `Dag`: orders that hide collectives behind compute, within a memory budget.

A list scheduler (R. L. Graham's, by longest remaining path) on the model of `simulate`: whenever the compute stream is
free it takes the ready node with the most work after it; a collective is started when the stream of its group would
otherwise stand still; a wait is taken when its collective has ended, or nothing else is ready; what is ready long
before it is needed is put off, for it only fills memory. A few variants of these rules are simulated, and the best
order is kept; the graph's own is among them, so that no schedule is worse. Pure and deterministic.
"""

from __future__ import annotations

import dataclasses
import heapq
import math

from spanwise.overlap.bounds import Bounds, lower_bounds, needed_at, remaining
from spanwise.overlap.dag import Dag, Kind
from spanwise.overlap.memory import Guard
from spanwise.overlap.simulate import Timeline, simulate

GIB = 2**30
# How many ready nodes are looked at when the first ones do not fit the budget.
_LOOK = 8
# What is tried. Of a ready node's milliseconds, for what share the compute stream rather waits for a collective on a
# longer path; and how far ahead of the longest path that is left a node may run, as a share of the whole path.
_VARIANTS = (
    (0.1, 1 / 16), (0.25, 1 / 32), (0.0, 1 / 256), (0.0, 1 / 16), (0.0, 1 / 64), (0.25, 1 / 64), (0.0, math.inf)
)  # fmt: skip
_CLOSE = 1.001  # of the bound: no further variant is tried


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The best order found.

    Attributes:
        timeline: of that order, with the costs as they were given.
        before: of the graph's own order.
        bounds: what no order can beat.
        budget: bytes that the order was allowed.
    """

    timeline: Timeline
    before: Timeline
    bounds: Bounds
    budget: int

    @property
    def order(self) -> list[int]:
        """Nodes as they are to be issued."""
        return self.timeline.order.tolist()


def default_budget(dag: Dag) -> int:
    """The peak of the graph's own order, and 1 GiB or a twentieth of it more, whichever is larger; bytes."""
    peak = dag.peak_bytes()
    return peak + max(GIB, peak // 20)


def schedule(dag: Dag, *, budget: int | None = None, multiplier: float = 1.0) -> Schedule:
    """Look for the order of the shortest makespan.

    Args:
        budget: bytes of the dag's storages at most; default: `default_budget`.
        multiplier: collectives are scheduled as if they took so many times as long, for costs that are guesses.

    Raises:
        ValueError: the graph's own order exceeds the budget, or the multiplier is not positive and finite.
    """
    if not (math.isfinite(multiplier) and multiplier > 0):
        raise ValueError(f"the multiplier must be positive and finite, got {multiplier}")
    budget = default_budget(dag) if budget is None else budget
    assumed = dag if multiplier == 1.0 else _slower(dag, multiplier)
    rules = _Rules(assumed, budget)
    best = before = simulate(dag)
    bounds = lower_bounds(dag)
    for patience, ahead in _VARIANTS:
        if best.makespan <= _CLOSE * bounds.makespan:
            break
        timeline = simulate(dag, _listed(rules, patience, ahead))
        if timeline.makespan < best.makespan:
            best = timeline
    return Schedule(best, before, bounds, budget)


def _slower(dag: Dag, multiplier: float) -> Dag:
    nodes = (dataclasses.replace(n, ms=n.ms * multiplier) if n.kind == Kind.START else n for n in dag.nodes)
    return Dag(tuple(nodes), dag.storages)


class _Rules:
    """What all variants go by, worked out once; refuses a budget that the own order exceeds.

    Attributes:
        rest: `bounds.remaining`; `needed`: `bounds.needed_at`.
        longest: nodes, the longest paths first; the first one that is left says how far the whole has come.
        missing: of each node, how many others it depends on.
        guard: of memory before anything has run.
    """

    def __init__(self, dag: Dag, budget: int) -> None:
        self.dag, self.guard = dag, Guard(dag, budget)
        self.rest, self.needed = remaining(dag), needed_at(dag)
        self.longest = sorted(range(len(dag)), key=lambda i: (-self.rest[i], i))
        self.missing = [len(set(node.deps)) for node in dag.nodes]


def _listed(rules: _Rules, patience: float, ahead: float) -> list[int]:
    """One order by the rules."""
    dag, rest, needed, longest = rules.dag, rules.rest, rules.needed, rules.longest
    window = ahead * max(rest, default=0.0) if ahead < math.inf else math.inf
    front, reach = 0, 0.0
    early: list[tuple[float, int]] = []  # ready, and not needed for long
    guard, missing = rules.guard.copy(), rules.missing.copy()
    # By the longest remaining path, then in the graph's own order.
    ready: list[tuple[float, int]] = []
    starts: dict[str, list[tuple[float, int]]] = {group: [] for group in dag.groups}
    waits: list[tuple[float, int]] = []  # by the end of the collective
    free = dict.fromkeys(dag.groups, 0.0)
    end: dict[int, float] = {}
    order: list[int] = []
    has_run = bytearray(len(dag))
    now = 0.0

    def becomes_ready(i: int) -> None:
        node = dag.nodes[i]
        if node.kind == Kind.WAIT:
            heapq.heappush(waits, (end[node.start], i))
        elif needed[i] > reach:
            heapq.heappush(early, (needed[i], i))
        else:
            heapq.heappush(starts[node.group] if node.kind == Kind.START else ready, (-rest[i], i))

    def issue(i: int) -> None:
        nonlocal now
        node = dag.nodes[i]
        guard.run(i)
        has_run[i] = True
        order.append(i)
        if node.kind == Kind.START:
            end[i] = free[node.group] = max(now, free[node.group]) + node.ms
        elif node.kind == Kind.WAIT:
            now = max(now, end[node.start])
        else:
            now += node.ms
        for user in dag.users[i]:
            missing[user] -= 1
            if missing[user] == 0:
                becomes_ready(user)

    def take(heap: list[tuple[float, int]]) -> int | None:
        """Remove and return the first node of the heap that fits the budget."""
        kept: list[tuple[float, int]] = []
        found = None
        while heap and len(kept) < _LOOK:
            entry = heapq.heappop(heap)
            if has_run[entry[1]]:
                continue
            if guard.is_safe(entry[1]):
                found = entry[1]
                break
            kept.append(entry)
        for entry in kept:
            heapq.heappush(heap, entry)
        return found

    for i in range(len(dag)):
        if missing[i] == 0:
            becomes_ready(i)
    while len(order) < len(dag):
        while waits and (has_run[waits[0][1]] or (waits[0][0] <= now and guard.is_safe(waits[0][1]))):
            wait = heapq.heappop(waits)[1]
            if not has_run[wait]:
                issue(wait)
        if len(order) == len(dag):
            break
        while has_run[longest[front]]:
            front += 1
        reach = max(reach, needed[longest[front]] + window)
        while early and early[0][0] <= reach:
            becomes_ready(heapq.heappop(early)[1])
        chosen = take(ready)
        if chosen is not None and waits and patience:
            until, wait = waits[0]
            if until - now < patience * dag.nodes[chosen].ms and rest[wait] > rest[chosen]:
                heapq.heappush(ready, (-rest[chosen], chosen))
                chosen = None
        until = math.inf if chosen is None else now + dag.nodes[chosen].ms
        started = False
        for group, heap in starts.items():
            while heap and free[group] <= (now if chosen is None else until):
                start = take(heap)
                if start is None:
                    break
                issue(start)
                started = True
                if chosen is None:
                    break
        if chosen is not None:
            # What was started may have taken the room that there was.
            if has_run[chosen] or not guard.is_safe(chosen):
                heapq.heappush(ready, (-rest[chosen], chosen))
                chosen = None
            else:
                issue(chosen)
        if chosen is None and not started:
            soonest = waits[0][1] if waits else guard.next_in_order
            issue(soonest if guard.is_safe(soonest) else guard.next_in_order)
    return order
