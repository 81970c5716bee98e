"""Reasons why collectives are exposed: the change to the machine or the order that hides each, tried on the engine.

    dag ─► schedule ─► timeline ─► reasons ─► report

Each change is made for one collective alone. It says how many exposed milliseconds it hides and what it costs.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

import numpy as np

from spanwise.overlap.bounds import Reach, compute_of
from spanwise.overlap.dag import rounding
from spanwise.overlap.scheduler import Ints, ListScheduler
from spanwise.units import milliseconds, num_bytes

_TRIED = 3_000_000  # nodes issued in all trials of one timeline, 1 to 2 s; the least exposed collectives get none


class Why(enum.Enum):
    """Reasons for exposed milliseconds, in the order in which they are tried.

    NO_COMPUTE: it takes longer than all compute independent of it, which neither leads to the start nor depends on the
        wait: no order hides that behind compute, on any stream.
    STREAM: others were on the stream of its group; on a stream of its own it ends earlier.
    ORDER: another order within the budget hides it, though perhaps exposes others.
    MEMORY: the same with more memory.
    DEPENDENCY: it is hidden if it depends on nothing, at the begin of the graph.
    TOGETHER: none of these changes alone.
    UNTRIED: there are many collectives, and others are exposed longer.
    """

    NO_COMPUTE = "no independent compute"
    STREAM = "stream is saturated"
    ORDER = "order of compute"
    MEMORY = "memory budget"
    DEPENDENCY = "dependency"
    TOGETHER = "no single change"
    UNTRIED = "not tried"


@dataclasses.dataclass(frozen=True)
class Move:
    """A change that hides a collective.

    Attributes:
        hides: exposed milliseconds that it hides, of those that earlier reasons leave.
        longer: milliseconds by which the step gets longer with it; fewer than 0: shorter.
        more_bytes: bytes that its order takes above the budget.
        needs: what the collective depends on that ends last; "" for other reasons than DEPENDENCY.
    """

    hides: float
    longer: float = 0.0
    more_bytes: int = 0
    needs: str = ""


@dataclasses.dataclass(frozen=True)
class Reason:
    """Reasons for one exposed collective.

    Attributes:
        exposed: milliseconds that compute waits for it.
        moves: the change that hides each part, by reason, in the order of `Why`; they hide `exposed` in all.
    """

    exposed: float
    moves: dict[Why, Move]

    def __str__(self) -> str:
        ranked = sorted(self.moves.items(), key=lambda part: -part[1].hides)
        ranked = [(why, move) for why, move in ranked if move.hides >= 0.01 * self.exposed]  # skip parts below 1 %
        found = []
        for why, move in ranked:
            facts = [milliseconds(move.hides)] if len(ranked) > 1 else []
            if why in (Why.ORDER, Why.MEMORY) and move.longer > 1e-3:
                facts.append(f"another makes the step {milliseconds(move.longer)} longer")
            if move.more_bytes:
                facts.append(f"{num_bytes(move.more_bytes)} more")
            if move.needs:
                facts.append(f"on {move.needs}")
            found.append(f"{why.value} ({'; '.join(facts)})" if facts else why.value)
        return ", ".join(found)


def reasons(timeline: Any, *, budget: int | None = None) -> dict[int, Reason]:
    """Reasons for each exposed collective of a timeline, by its start.

    Its exposed milliseconds go to the reasons in the order of `Why`, each as many as its change hides, until none are
    left.

    Args:
        budget: most bytes of the order; None: no limit.
    """
    tiny = rounding(timeline.makespan)
    exposed = {start: ms for start, ms in timeline.exposed.items() if ms > tiny}
    if not exposed:
        return {}
    reach = Reach(timeline.dag)
    trials = _Trials(timeline, float("inf") if budget is None else budget, reach)
    independent = reach.independent(compute_of(timeline.dag))
    ranked = sorted(exposed, key=lambda start: (-exposed[start], start))
    found = {start: trials.reason(start, exposed[start], independent[start]) for start in ranked}
    return dict(sorted(found.items()))


class _Trials:
    """A timeline, changed for one collective at a time."""

    def __init__(self, timeline: Any, budget: float, reach: Reach) -> None:
        self.timeline, self.dag, self.reach = timeline, timeline.dag, reach
        self.number = {start: number for number, start in enumerate(self.dag.starts)}
        self.budget = max(budget, timeline.peak_bytes)
        self.engine = ListScheduler(self.dag)
        streams = self.engine.graph.streams  # the last one is new, and nothing uses it yet
        self.engine.graph = self.engine.graph._replace(streams=streams + 1)
        self.left = _TRIED

    def reason(self, start: int, exposed: float, independent: float) -> Reason:
        """The reasons for one collective."""
        moves: dict[Why, Move] = {}
        left, tiny = exposed, rounding(self.timeline.makespan)

        def account(why: Why, hides: float, longer: float = 0.0, more_bytes: int = 0, needs: str = "") -> None:
            nonlocal left
            hides = left if hides > left - tiny else hides
            if hides > tiny:
                moves[why] = Move(hides, longer, more_bytes, needs)
                left -= hides

        account(Why.NO_COMPUTE, self.dag.nodes[start].ms - independent)
        if self.left <= 0:
            account(Why.UNTRIED, left)
        if left and self.timeline.begin[start] > self.timeline.issued[start]:
            stream = self.engine.graph.stream.copy()
            stream[start] = self.engine.graph.streams - 1
            account(Why.STREAM, *self.tried(start, self.timeline.order, stream=stream)[:2])
        if left:
            tried = []
            for order in self.orders(start, exposed):
                tried.append(self.tried(start, order))
                if tried[-1][0] > left - tiny and tried[-1][2] <= self.budget:
                    break
            tried.sort(key=lambda one: (-one[0], one[1:]))  # what hides most, and of that what costs least
            within = next(one for one in tried if one[2] <= self.budget)
            account(Why.ORDER, *within[:2])
            hides, longer, peak = tried[0]
            account(Why.MEMORY, hides - within[0], longer, peak - int(min(peak, self.budget)))
        if left and (needed := self.dag.nodes[start].deps):
            first = np.concatenate(([start], self.timeline.order[self.timeline.order != start]))
            last = max(needed, key=lambda i: (self.timeline.end[i], i))
            account(Why.DEPENDENCY, *self.tried(start, first)[:2], needs=self.dag.nodes[last].name)
        account(Why.TOGETHER, left)
        return Reason(exposed, moves)

    def orders(self, start: int, exposed: float) -> Iterator[Ints]:
        """Orders in which what leads to `start` comes earlier, what follows its wait later, or both; the own one first.

        By as much as it is exposed, which moves the least, by four times that, and by all that there is.
        """
        known, number = self.timeline.order, self.number[start]
        leads, follows = (self.reach.has(sets, number) * 1.0 for sets in (self.reach.leads_to, self.reach.follows))
        yield known
        for shift in (exposed, 4 * exposed, 2 * self.timeline.makespan + 1.0):
            for by in (-leads, follows, follows - leads):
                yield known[np.argsort((self.timeline.issued + shift * by)[known], kind="stable")]

    def tried(self, start: int, order: Ints, **changes: Ints) -> tuple[float, float, int]:
        """Exposed milliseconds of a collective that an order hides, by how much it is longer, and its peak of bytes."""
        self.left -= len(self.dag)
        run, wait = self.engine.replay(order, **changes), self.dag.wait_of[start]
        hides = self.timeline.exposed[start] - float(run.end[wait] - run.begin[wait])
        return hides, run.makespan - self.timeline.makespan, run.peak
