"""Schedules of a `Dag`: orders that hide collectives behind compute, within a memory budget and limits in flight.

Several list schedules (`listed`) are made, by due dates (`due`) that keep more or less close to the graph's own order,
and then by due dates that are read off the best schedule so far, from its end backward. The best is kept, by its
makespan and, where these are close, by its peak of memory, and polished; the graph's own order is among them, so that
no schedule is worse. Pure and deterministic.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence

from spanwise.overlap.ir.bounds import Bounds, lower_bounds
from spanwise.overlap.ir.dag import Dag, Kind, Storage
from spanwise.overlap.ir.memory import Guard
from spanwise.overlap.ir.simulate import Timeline, simulate
from spanwise.overlap.search.list_scheduler import forward, loosened, sunk
from spanwise.overlap.search.low_memory import within
from spanwise.overlap.search.priorities import Listed, Problem, eased, latest, paced
from spanwise.overlap.search.slack import touched_bytes

GIB = 2**30
EFFORT = 8  # orders tried of a large graph
# Of orders about as good, the one with the lower peak: a budget that is filled counts as so much of the makespan.
_FILLED = 0.0025
_CLOSE = 1.001  # of a lower bound: no more is tried, where the peak is no higher than before
_NEAR, _PATIENCE = 1.05, 3  # of a lower bound: of the first of a large graph so many on end may be no better
# Due dates that keep to the known order, all as shares of the longest path: by how much others lag behind it; how much
# earlier than needed collectives are started; how far ahead of what is due first a node that takes memory may run; and
# patience (see `forward`). The best of the first few is what is improved first.
_PACED = (
    (5 / 64, 1 / 64, 5 / 64, 0.25), (3 / 64, 1 / 64, 5 / 64, 0.0), (1 / 32, 0.0, 1 / 16, 0.25),
    (5 / 64, 1 / 64, 5 / 64, 0.0), (math.inf, 0.0, math.inf, 0.0), (1 / 8, 1 / 64, 1 / 8, 0.5),
    (1 / 4, 1 / 64, 1 / 4, 0.0), (1 / 32, 1 / 64, 1 / 32, 0.0), (1, 0.0, 1 / 4, 0.25), (1 / 64, 0.0, 1 / 64, 0.25),
    (1 / 16, 1 / 32, 3 / 32, 0.25),
)  # fmt: skip
_FIRST = 4
_ROUNDS = 3
_NARROW, _WIDE = 5 / 64, 1 / 4  # how far ahead, where due dates are read off a schedule
# How much work is handed to the stream of a group before it needs it: other costs than were thought leave it no gap.
_QUEUE = 1 / 32
_MARGIN = 1 / 32  # how much earlier collectives are started in the end
_TINY = 1e-4  # what may come right before whoever needs it


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The best order found.

    Attributes:
        timeline: of that order, with the costs as they were given.
        before: of the order that was there: the graph's own, the fallback, or one that `lean` found.
        budget: bytes that the order was allowed.
    """

    timeline: Timeline
    before: Timeline
    budget: int
    _bounds: Bounds | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def order(self) -> list[int]:
        """Nodes as they are to be issued."""
        return self.timeline.order.tolist()

    @functools.cached_property
    def bounds(self) -> Bounds:
        """What no order can beat, memory and limits in flight aside."""
        return self._bounds or lower_bounds(self.timeline.dag)


def default_budget(dag: Dag, order: Sequence[int] | None = None) -> int:
    """The peak of an order (default: the graph's own), and the larger of 1 GiB and a twentieth of it more; bytes."""
    peak = dag.peak_bytes(order)
    return peak + max(GIB, peak // 20)


def default_effort(dag: Dag) -> int:
    """How many orders are tried: `EFFORT` of a large graph, up to four times as many of a small one."""
    return min(4 * EFFORT, max(EFFORT, 32_000 // max(1, len(dag))))


def schedule(
    dag: Dag,
    *,
    budget: int | None = None,
    multiplier: float = 1.0,
    in_flight: int | None = None,
    in_flight_bytes: int | None = None,
    effort: int | None = None,
    fallback: Sequence[int] | None = None,
) -> Schedule:
    """Look for the order of the shortest makespan.

    Args:
        budget: bytes of the dag's storages at most; default: `default_budget`. Where the graph's own order exceeds it,
            one is looked for that does not (`lean`), and is the order that is there.
        multiplier: collectives are scheduled as if they took so many times as long, for costs that are guesses.
        in_flight: collectives of each group at most that have been started and not yet waited for. Where the order
            that is there has more of a group, its most is that group's limit. A collective without a wait is not
            counted.
        in_flight_bytes: the same of the bytes of the storages that these collectives make, read or write.
        effort: how many orders are tried at most, besides the one that is there; default: `default_effort`. From
            `EFFORT` on, the makespan is never longer with more.
        fallback: an order that is there instead of the graph's own. The schedule is no worse than it.

    Raises:
        ValueError: no order was found within the budget, the fallback exceeds it or is no order, the multiplier is not
            positive and finite, or a limit or the effort is too small.
    """
    if not (math.isfinite(multiplier) and multiplier > 0):
        raise ValueError(f"the multiplier must be positive and finite, got {multiplier}")
    for name, limit, least in (("in_flight", in_flight, 1), ("in_flight_bytes", in_flight_bytes, 0)):
        if limit is not None and not limit >= least:  # NaN is not, either
            raise ValueError(f"{name} must be at least {least}, got {limit}")
    effort = default_effort(dag) if effort is None else effort
    if effort < 0:
        raise ValueError(f"effort must not be negative, got {effort}")
    before = simulate(dag, fallback)
    if fallback is None and budget is not None and before.peak_bytes > budget:
        before = simulate(dag, within(dag, budget))
    order = before.order.tolist()
    budget = default_budget(dag, order) if budget is None else budget
    guards = [Guard(dag, budget, order=order), *_flight_guards(dag, order, in_flight, in_flight_bytes)]
    assumed = dag if multiplier == 1.0 else _slower(dag, multiplier)
    problem = Problem(assumed, order, guards)
    search = _Search(dag, problem, before, budget)
    search.run(effort)
    return Schedule(search.best, before, budget, search.bounds)


class _Search:
    """Schedules one after another, and the best so far; a shorter search is the beginning of a longer one.

    Args:
        dag: with the costs as they were given; `problem` has them as they are assumed.
    """

    def __init__(self, dag: Dag, problem: Problem, before: Timeline, budget: int) -> None:
        self.dag, self.problem, self.before, self.budget = dag, problem, before, budget
        self.same_costs = problem.dag is dag
        busiest = max(_stream_ms(dag).values())
        self.floor = max(busiest, problem.longest if self.same_costs else 0.0)
        self.scale = problem.longest
        self.best, self.makespan, self.peak = before, before.makespan, before.peak_bytes
        self.bounds: Bounds | None = None

    def _score(self, makespan: float, peak: int) -> float:
        """Smaller is better: milliseconds, and something for memory."""
        return makespan * (1.0 + _FILLED * peak / max(1, self.budget))

    def _simulated(self, order: list[int]) -> float:
        return simulate(self.dag, order).makespan

    def run(self, effort: int) -> None:
        """Try `effort` orders, or fewer where the best cannot get better.

        Each that is better is polished, but of the first of a large graph only the best: to polish an order takes as
        long as to try three.
        """
        if effort > 1 and not self.done:
            self.bounds = lower_bounds(self.dag)  # takes as long as two tries, and often saves more
            self.floor = self.bounds.makespan
        moves = self._moves()
        is_large = default_effort(self.dag) == EFFORT
        first = EFFORT if is_large else 1
        self._try(moves, min(effort, first))
        for _ in range(first, effort):
            if self.done:
                break
            self._try(moves, 1)

    def _try(self, moves: Iterator[Listed], most: int) -> None:
        """Keep the best of so many orders, polished; fewer if near the bound and `_PATIENCE` on end are no better."""
        better: list[int] | None = None
        no_better = 0
        for _ in range(most):
            if self.done or (no_better >= _PATIENCE and self.makespan <= _NEAR * self.floor):
                break
            found = next(moves)
            makespan = found.makespan if self.same_costs else self._simulated(found.order)
            no_better += 1
            if makespan <= self.makespan and self._score(makespan, found.peak) < self._score(self.makespan, self.peak):
                better, self.makespan, self.peak, no_better = found.order, makespan, found.peak, 0
        if better is None:
            return
        self.best = simulate(self.dag, self._polished(better, self.makespan, self.peak))
        if self.best.makespan > self.makespan or self.best.peak_bytes > self.peak:
            self.best = simulate(self.dag, better)
        self.makespan, self.peak = self.best.makespan, self.best.peak_bytes

    @property
    def done(self) -> bool:
        """Whether the best is as short as it can be and takes no more memory than what was there."""
        return self.makespan <= _CLOSE * self.floor and self.peak <= self.before.peak_bytes

    def _polished(self, order: list[int], makespan: float, peak: int) -> list[int]:
        """An order with less memory, or with more time before collectives are needed, that takes no longer."""
        problem, scale = self.problem, self.scale
        takes = problem.guards[0].takes
        cheap = [m == 0 and takes[i] > 0 and problem.ms[i] <= _TINY * scale for i, m in enumerate(problem.machine)]
        late = sunk(problem, order, cheap)
        if (late_peak := self.dag.peak_bytes(late)) < peak and (late_span := self._simulated(late)) <= makespan:
            order, makespan, peak = late, late_span, late_peak
        # Costs are guesses: collectives are started earlier, as far as memory that the order takes anyway has room.
        way = problem.along(order, peak)
        due = eased(way, simulate(problem.dag, order).begin.tolist(), _MARGIN * scale)
        found = forward(way, due, _WIDE * scale, queue=_QUEUE * scale)
        if (found.makespan if self.same_costs else self._simulated(found.order)) <= makespan:
            way = problem.along(found.order, found.peak)
        return loosened(way)

    def _moves(self) -> Iterator[Listed]:
        """Schedules without end."""
        problem, scale = self.problem, self.scale

        def value(found: Listed) -> float:
            return self._score(found.makespan, found.peak)

        def run(due: list[float], ahead: float, patience: float = 0.0, budget: int | None = None) -> Listed:
            return forward(problem, due, ahead * scale, patience, queue=_QUEUE * scale, budget=budget)

        def start(number: int) -> Listed:
            lead, margin, ahead, patience = _PACED[number]
            return run(paced(problem, lead * scale, margin * scale), ahead, patience)

        first = []
        for number in range(_FIRST):
            first.append(start(number))
            yield first[-1]
        best, widest = min(first, key=value), _WIDE
        draw = random.Random(0)
        for number in itertools.count(_FIRST):
            # From the end backward, and forward again, as long as that helps.
            current = best
            for _ in range(_ROUNDS):
                due = latest(problem, current).begin
                tried = []
                for ahead in (_NARROW, widest):
                    tried.append(run(due, ahead))
                    yield tried[-1]
                better = min(tried, key=value)
                gained = better.makespan < current.makespan
                current = min(better, current, key=value)
                if not gained:
                    break
            best = min(current, best, key=value)
            least = self.before.peak_bytes
            if best.peak > least:  # the same in half of the room
                yield run(due, _NARROW, budget=(least + best.peak) // 2)
            if number < len(_PACED):
                widest = max(_WIDE, _PACED[number][2])
                best = start(number)
            else:
                best = run([begin + scale / 16 * draw.random() for begin in best.begin], _NARROW)
            yield best


def _slower(dag: Dag, multiplier: float) -> Dag:
    nodes = (dataclasses.replace(n, ms=n.ms * multiplier) if n.kind == Kind.START else n for n in dag.nodes)
    return Dag(tuple(nodes), dag.storages)


def _stream_ms(dag: Dag) -> dict[str, float]:
    """All work of each stream, the same on every machine: added in order; compute is ""."""
    found = dict.fromkeys(("", *dag.groups), 0.0)
    for node in dag.nodes:
        found[node.group if node.kind == Kind.START else ""] += node.ms
    return found


def _flight_guards(dag: Dag, order: Sequence[int], most: int | None, most_bytes: int | None) -> Iterator[Guard]:
    """Guards of what is in flight: taken by a start, and given back by its wait."""
    if most is None and most_bytes is None:
        return
    waits = {node.start: i for i, node in enumerate(dag.nodes) if node.kind == Kind.WAIT}
    touched = touched_bytes(dag)
    for group in dag.groups:
        starts = [i for i in dag.starts if i in waits and dag.nodes[i].group == group]
        for limit, takes in ((most, dict.fromkeys(starts, 1)), (most_bytes, touched)):
            if limit is not None:
                flights = tuple(Storage(takes[i], i, (waits[i],)) for i in starts)
                own = Dag(dag.nodes, flights).peak_bytes(order)
                yield Guard(dag, max(limit, own), order=order, storages=flights)
