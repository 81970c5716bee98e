"""Reasons why collectives are exposed: exposed milliseconds by the change that would avoid them.

    dag ─► schedule ─► timeline ─► reasons ─► report

Each collective is looked at alone, with all others in their places.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from spanwise.overlap.bounds import independent_compute
from spanwise.overlap.dag import Dag, Kind, positions, rounding
from spanwise.overlap.explain.units import milliseconds
from spanwise.overlap.timeline import Intervals


class Why(enum.Enum):
    """Reasons for exposed milliseconds.

    STREAM: the stream of its group was busy with other collectives; a separate stream would end it earlier, an order
        of the same stream only at the cost of others.
    IDLE: the same, but the stream was idle before, and the time could have been used: by the others, had the compute
        that leads to them gone first, or by this one, had it gone first.
    NO_COMPUTE: the compute independent of it (it neither leads to the start nor depends on the wait) is shorter.
    MEMORY: it could start earlier, or compute after its wait could run before, but the order would exceed the budget.
    ORDER: the same within the budget: another order would hide it, though perhaps expose others.
    DEPENDENCY: it could not start earlier, and nothing is left to run at its wait. Independent compute ran too early,
        or depends on nodes that have not run.
    """

    STREAM = "stream is saturated"
    IDLE = "stream was idle earlier"
    NO_COMPUTE = "no independent compute"
    MEMORY = "memory budget"
    ORDER = "order of compute"
    DEPENDENCY = "dependency"


@dataclasses.dataclass(frozen=True)
class Reason:
    """Reasons for one exposed collective.

    Attributes:
        exposed: milliseconds that compute waits for it.
        parts: milliseconds by reason, in the order of `Why`; positive, with the sum `exposed`.
    """

    exposed: float
    parts: dict[Why, float]

    @property
    def main(self) -> Why:
        """The reason for most of it."""
        return max(self.parts, key=lambda why: self.parts[why])

    def __str__(self) -> str:
        ranked = sorted(self.parts.items(), key=lambda part: -part[1])
        ranked = [(why, ms) for why, ms in ranked if ms >= 0.01 * self.exposed]  # skip parts below 1 %
        if len(ranked) == 1:
            return self.main.value
        return ", ".join(f"{why.value} ({milliseconds(ms)})" for why, ms in ranked)


def hideable(dag: Dag, among: Iterable[int] | None = None) -> set[int]:
    """Starts of the collectives that have independent compute; no order can hide the others.

    Args:
        among: compute nodes that count; default: all. PyTorch's pass counts matrix products, convolutions and attention
            (pytorch/pytorch#163215).
    """
    return {start for start, ms in independent_compute(dag, among).items() if ms > 0}


def reasons(timeline: Intervals, *, budget: int | None = None) -> dict[int, Reason]:
    """Reasons for each exposed collective of a timeline, by its start.

    The exposed milliseconds of a collective are assigned in this order, until none are left:

    1. IDLE and STREAM: from its issue to its begin. IDLE is what it would gain if the compute that leads to the
       collectives since the stream was last idle had gone first, in their order; or if it had itself gone before them,
       less the time by which they would end later.
    2. NO_COMPUTE: its time beyond all independent compute.
    3. How much earlier it could be issued if the nodes that lead to it went first, with collectives in their places:
       MEMORY or ORDER for the time that its stream is idle, then STREAM for the time that it is busy.
    4. MEMORY or ORDER: compute after its wait that could run when the wait is reached.
    5. DEPENDENCY: the rest.

    The peak of the order with the nodes of 3 or 4 moved decides between MEMORY and ORDER. Compute that could hide
    several collectives counts for the first in the order: the sum is what could be hidden in all.

    Args:
        timeline: a timeline without contention.
        budget: most bytes of the order; None: no limit.
    """
    dag = timeline.dag
    exposed = {start: ms for start, ms in timeline.exposed.items() if ms > rounding(timeline.makespan)}
    if not exposed:
        return {}
    analysis = _Analysis(timeline, budget)
    independent = independent_compute(dag)
    found = {
        start: analysis.reason(start, exposed[start], independent[start])
        for start in timeline.order.tolist()
        if start in exposed
    }
    return dict(sorted(found.items()))


class _Analysis:
    """Tables about a timeline that every collective's reasons use.

    Attributes:
        place: place of each node in the order.
        ready: when each node could be issued with collectives in their places: a wait when its collective has ended,
            others after the longest path of compute to them. Never later than it was issued.
        streams: of each group, the numbers of its starts as they are issued.
        run, run_ends: compute nodes as they are issued, and when they end.
        gained: for each start, how much of the time before its stream was last idle it could have used; see `reasons`.
        spare: milliseconds of each compute node that do not yet hide a collective in a reason.
    """

    def __init__(self, timeline: Intervals, budget: int | None) -> None:
        self.timeline, self.dag, self.budget = timeline, timeline.dag, budget
        dag, order = self.dag, timeline.order.tolist()
        self.order, self.place = timeline.order, positions(order)
        self.begin, self.end, self.issued = (x.tolist() for x in (timeline.begin, timeline.end, timeline.issued))
        self.tiny = rounding(timeline.makespan)
        self.spare = np.where(dag.kinds == Kind.COMPUTE, timeline.end - timeline.begin, 0.0)
        ready = [0.0] * len(dag)
        for i, node in enumerate(dag.nodes):
            if node.kind == Kind.WAIT:
                ready[i] = self.end[node.start]
            for dep in node.deps:
                ms = dag.nodes[dep].ms if dag.nodes[dep].kind == Kind.COMPUTE else 0.0
                ready[i] = max(ready[i], ready[dep] + ms)
        self.ready = np.array(ready)
        starts = [i for i in order if dag.nodes[i].kind == Kind.START]
        self.streams = {group: np.array([i for i in starts if dag.nodes[i].group == group]) for group in dag.groups}
        self.run = [i for i in order if dag.nodes[i].kind == Kind.COMPUTE]
        self.run_ends = timeline.end[self.run]
        self.gained: dict[int, float] = {}
        for stream in self.streams.values():
            self.use_idle(stream.tolist())
        self.allocated = dag.allocated

    def reason(self, start: int, exposed: float, independent: float) -> Reason:
        parts = dict.fromkeys(Why, 0.0)
        left = exposed

        def account(why: Why, ms: float) -> None:
            nonlocal left
            ms = min(left, max(0.0, ms))
            parts[why] += ms
            left = left - ms if left - ms > self.tiny else 0.0

        queued = self.begin[start] - self.issued[start]
        idle = min(queued, self.gained[start])
        account(Why.IDLE, idle)
        account(Why.STREAM, queued - idle)
        account(Why.NO_COMPUTE, self.dag.nodes[start].ms - independent)
        if left:
            most, begin = left, self.issued[start]
            earlier, moved, first = self.earlier(start, most)
            idle = earlier - self.busy(start, earlier)
            while idle < left - self.tiny and earlier >= most - self.tiny and earlier < begin - self.tiny:
                most *= 2  # before the stream was busy, it may have been idle
                earlier, moved, first = self.earlier(start, most)
                idle = earlier - self.busy(start, earlier)
            if earlier > self.tiny:
                if idle > self.tiny:
                    account(self.fits(moved, first), idle)
                    passed = self.order[first : self.place[start]][::-1]
                    self.use(passed[~np.isin(passed, moved)], idle)
                account(Why.STREAM, earlier - idle)
        if left:
            wait = self.dag.wait_of[start]
            behind, moved = self.behind(wait, left)
            if behind > self.tiny:
                account(self.fits(moved, int(self.place[wait])), behind)
                self.use(np.array(moved), behind)
        parts[Why.DEPENDENCY] += left
        return Reason(exposed, {why: ms for why, ms in parts.items() if ms > self.tiny})

    def use_idle(self, stream: list[int]) -> None:
        """Fill `gained` for the collectives of one stream."""
        dag, last, since, opened, could, now = self.dag, 0.0, 0.0, 0.0, 0.0, 0.0
        led: set[int] = set()
        own = set(stream)
        for i in stream:
            ms = dag.nodes[i].ms
            if self.begin[i] > last + self.tiny:  # the stream was idle before
                since = could = now = last
                opened, led = self.begin[i], set()
            now = self.ran(self.leading(i, since, led), since, now)
            could = max(could, now) + ms
            gained = self.end[i] - could
            if opened > since and self.begin[i] > opened and self.ready[i] < opened:
                alone = self.leading(i, since, set())
                if not any(self.spare[j] or j in own for j in alone):  # no compute of others would be later
                    begin = self.ran(alone, since, since)
                    if begin < opened:
                        gained = max(gained, self.begin[i] - begin - max(0.0, begin + ms - opened))
            self.gained[i], last = gained, self.end[i]

    def leading(self, start: int, since: float, known: set[int]) -> list[int]:
        """Nodes that lead to `start`, ran after `since` and are not `known`, as they are issued; adds them there."""
        found, open_ = [], list(self.dag.nodes[start].deps)
        while open_:
            i = open_.pop()
            done = self.issued[i] if self.dag.nodes[i].kind == Kind.START else self.end[i]
            if done > since and i not in known:
                known.add(i)
                found.append(i)
                open_ += self.dag.nodes[i].deps
        return sorted(found, key=self.place.__getitem__)

    def ran(self, nodes: list[int], since: float, now: float) -> float:
        """When `nodes` have run if nothing else does from `now` on; compute begun before `since` ends first."""
        at = int(np.searchsorted(self.run_ends, since, side="right"))
        if nodes and at < len(self.run) and self.begin[self.run[at]] < since:
            now = max(now, float(self.run_ends[at]))
        for i in nodes:
            node = self.dag.nodes[i]
            if node.kind == Kind.WAIT:
                now = max(now, self.end[node.start])
            elif node.kind == Kind.COMPUTE and self.begin[i] >= since:
                now += node.ms
        return now

    def busy(self, start: int, ms: float) -> float:
        """Milliseconds for which its stream is busy in the last `ms` before `start` is issued."""
        stream, until = self.streams[self.dag.nodes[start].group], self.issued[start]
        begin, end = self.timeline.begin[stream], self.timeline.end[stream]
        return float(np.clip(np.minimum(end, until) - np.maximum(begin, until - ms), 0.0, None).sum())

    def earlier(self, start: int, most: float) -> tuple[float, list[int], int]:
        """How much earlier a start could be issued (at most `most`), nodes that must move, and the place to move to.

        Nodes that lead to the start go first, all others before it go after. A wait among them stays after the end of
        its collective.
        """
        dag, place = self.dag, int(self.place[start])
        leads, gained, limit, first = {start, *dag.nodes[start].deps}, 0.0, most, place
        found = [start]
        for at in range(place - 1, -1, -1):
            if gained >= limit - self.tiny:
                break
            i = int(self.order[at])
            node = dag.nodes[i]
            if i not in leads:
                spent = self.end[i] - self.begin[i] if node.kind == Kind.WAIT else float(self.spare[i])
                if spent > 0:
                    gained, first = gained + spent, at
                continue
            if node.kind == Kind.WAIT:
                limit = min(limit, gained + max(0.0, self.begin[i] - self.end[node.start]))
            leads.update(node.deps)
            found.append(i)
        moved = [i for i in reversed(found) if self.place[i] > first]
        return min(gained, limit), moved, first

    def behind(self, wait: int, most: float) -> tuple[float, list[int]]:
        """Milliseconds of compute after `wait` that could run when it is reached (at most `most`), and its nodes."""
        after = self.order[int(self.place[wait]) + 1 :]
        can = after[self.ready[after] <= self.begin[wait] + self.tiny]
        ms = self.spare[can].cumsum()
        count = int(np.searchsorted(ms, most - self.tiny)) + 1
        return (float(min(most, ms[-1])), can[:count].tolist()) if len(ms) else (0.0, [])

    def use(self, nodes: NDArray[np.int64], ms: float) -> None:
        """Take `ms` of the nodes' spare milliseconds, first nodes first."""
        spare = self.spare[nodes]
        before = spare.cumsum() - spare
        self.spare[nodes] = spare - np.clip(ms - before, 0.0, spare)

    def fits(self, moved: Iterable[int], first: int) -> Why:
        """MEMORY if moving `moved`, in this order, to place `first` would exceed the budget; else ORDER."""
        nodes = np.fromiter(moved, np.int64)
        # The peak grows by no more than the moved nodes allocate.
        if self.budget is None or int(self.allocated[nodes].sum()) <= self.budget - self.timeline.peak_bytes:
            return Why.ORDER
        peak = self.dag.peak_bytes(self.with_moved(nodes, first).tolist())
        return Why.MEMORY if peak > self.budget else Why.ORDER

    def with_moved(self, nodes: NDArray[np.int64], first: int) -> NDArray[np.int64]:
        """The order with `nodes`, which all come later, moved to place `first`."""
        rest = np.delete(self.order, self.place[nodes])
        return np.concatenate([rest[:first], nodes, rest[first:]])


def hidden_counts(
    timeline: Intervals, among: Iterable[int] | None = None, members: Sequence[Sequence[int]] | None = None
) -> dict[str, int]:
    """Numbers of collectives that are "hidden", "partly" hidden, or "exposed", as in `Timeline.counts`.

    Args:
        among: starts to count; those that take no time are left out. Default: `hideable`.
        members: for each node, the nodes of another dag that it stands for. Then `among` are starts of that dag, and
            each counts like the collective that it is part of.
    """
    chosen = hideable(timeline.dag) if among is None else among
    if members is not None:
        became = {i: start for start in timeline.dag.starts for i in members[start]}
        chosen = [became[i] for i in chosen]
    return timeline.count(start for start in chosen if timeline.dag.nodes[start].ms)
