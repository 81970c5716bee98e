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

from spanwise.overlap.explain.units import milliseconds
from spanwise.overlap.ir.critical_path import independent_compute
from spanwise.overlap.ir.dag import Dag, Kind, rounding
from spanwise.overlap.ir.order import positions
from spanwise.overlap.ir.timeline import Intervals


class Why(enum.Enum):
    """Reasons for exposed milliseconds.

    STREAM: other collectives went first on the stream of its group, which has been busy since they could start; a
        separate stream would end it earlier, an order of the same stream only at the cost of others.
    IDLE: the same, but the stream was idle before: had the others started when they were ready, it would end earlier.
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

    1. IDLE and STREAM: from its issue to its begin. IDLE is what it would gain if all collectives since the stream was
       last idle started as soon as they are ready.
    2. NO_COMPUTE: its time beyond all independent compute.
    3. How much earlier it could be issued if the nodes that lead to it went first, with collectives in their places:
       STREAM while its stream is busy, else MEMORY or ORDER.
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
        idle_since: for each start, when the previous collective on its stream ended.
        gained: for each start, how much earlier it would end if it and all collectives since its stream was last idle
            started when they are ready.
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
        self.idle_since: dict[int, float] = {}
        self.gained: dict[int, float] = {}
        last, could = dict.fromkeys(dag.groups, 0.0), dict.fromkeys(dag.groups, 0.0)
        for i in order:
            node = dag.nodes[i]
            if node.kind == Kind.START:
                self.idle_since[i] = last[node.group]
                if self.begin[i] > last[node.group] + self.tiny:
                    could[node.group] = last[node.group]
                could[node.group] = max(could[node.group], ready[i]) + node.ms
                last[node.group] = self.end[i]
                self.gained[i] = self.end[i] - could[node.group]
        self.allocated = np.array(dag.lifetimes.allocated, np.int64)

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
            earlier, moved, first = self.earlier(start, left)
            if earlier > self.tiny:
                idle = max(0.0, min(earlier, self.issued[start] - self.idle_since[start]))
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
