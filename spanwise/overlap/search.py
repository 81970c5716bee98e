"""Schedules of a `Dag`: orders that hide collectives behind compute, within a memory budget and limits in flight.

    1. list schedules by a few priorities, and by random ones
    2. each improved by passes backward and forward, as long as that helps
    3. restarts from the best ones with noise in their priorities, until the effort is spent or the bound reached
    4. all of that at each of a few budgets, up to the given one
    5. the best schedule, with its collectives started earlier and waited for later

The graph's own order is a candidate, so the result is never longer. Budgets are searched one by one, each as if it were
the given one: more memory or more effort adds candidates and removes none. The same input gives the same order
everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from spanwise.overlap.arrays import GREEDILY, Floats, Ints, Limits, Rule, Run, limits_of
from spanwise.overlap.bounds import Bounds, heads, lower_bounds, tails
from spanwise.overlap.dag import Dag, Order
from spanwise.overlap.engine import Engine, Timeline, simulate

GIB = 2**30
OPTIMAL = 1.001  # of the lower bound: the search stops; docs/decisions.md, "Lower bounds"
# Nodes issued in all schedules of one budget together, and the fewest and most schedules.
_ISSUED, _FEWEST, _MOST = 40_000, 16, 500
# Rules of list schedules; queue and lead are shares of the bound.
_EAGER, _PACED, _QUEUED = Rule(), Rule(1 / 32, 5 / 64), Rule(1 / 2)
_GREEDY, _EARLY, _LATE = (Rule(queue, memory=GREEDILY) for queue in (0.0, math.inf, -math.inf))
_RULES, _RANDOM = (_EAGER, _GREEDY, _PACED, _QUEUED, _LATE), (_GREEDY, _EARLY, _LATE)
# Budgets that are searched, in percent of the own order's peak, and after these any memory; with few schedules, those
# in between.
_BUDGETS, _BETWEEN, _FEW = (100, 110, 125, 150, 200, 300), range(104, 200, 4), 24
_FRONT = 6  # schedules that are improved, and from which noise starts
_LISTS = 60  # list schedules by random priorities
_REBASED = 8  # restarts after which the best order becomes the known one, which says what is safe


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The best order found.

    Attributes:
        timeline: of that order, with the costs as they were given.
        before: of the order to improve on: the one given, the graph's own, or that of `low_memory_order`.
        budget: most bytes that the order was allowed.
    """

    timeline: Timeline
    before: Timeline
    budget: int
    _bounds: Bounds | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def order(self) -> list[int]:
        """Nodes as they should be issued."""
        return self.timeline.order.tolist()

    @functools.cached_property
    def bounds(self) -> Bounds:
        """Lower bounds on every order, memory and limits in flight ignored."""
        return self._bounds or lower_bounds(self.timeline.dag)


def default_budget(dag: Dag, order: Sequence[int] | None = None) -> int:
    """Bytes: the peak of an order (default: the graph's own) plus the larger of 1 GiB and a twentieth of the peak."""
    peak = dag.peak_bytes(order)
    return peak + max(GIB, peak // 20)


def default_effort(dag: Dag) -> int:
    """Number of orders to try: the larger the graph, the fewer."""
    return min(_MOST, max(_FEWEST, _ISSUED // max(1, len(dag))))


def schedule(
    dag: Dag,
    *,
    budget: int | None = None,
    multiplier: float = 1.0,
    in_flight: int | None = None,
    in_flight_bytes: int | None = None,
    effort: int | None = None,
    before: Timeline | None = None,
    bounds: Bounds | None = None,
) -> Schedule:
    """Search for the order of the shortest makespan.

    Args:
        budget: most bytes of the dag's storages; default: `default_budget`. If the order to start from exceeds it, the
            search first finds an order that does not, and starts from that one (`low_memory_order`).
        multiplier: factor on the milliseconds of collectives while scheduling, for costs that are estimates.
        in_flight: most collectives of a stream that are started and not yet waited for. If the order to start from has
            more, its number is the limit of that stream. A collective without a wait is not counted.
        in_flight_bytes: the same limit for the bytes of the storages that these collectives make, read or write.
        effort: most orders to try at each budget; default: `default_effort`. More never gives a longer makespan.
        before: timeline of the order to start from; default: of the graph's own. The schedule is no worse than it.
            From a given one, no smaller budgets are searched.
        bounds: `lower_bounds` of `dag`, if they are known.

    Raises:
        ValueError: no order was found within the budget, the multiplier is not positive and finite, or a limit or the
            effort is too small.

    Examples:
        >>> from spanwise.overlap.dag import Kind, Node
        >>> start, wait = Node("gather", Kind.START, 4.0, group="dp"), Node("wait", Kind.WAIT, deps=(0,), start=0)
        >>> reader, other = Node("reader", Kind.COMPUTE, 2.0, (1,)), Node("other", Kind.COMPUTE, 3.0)
        >>> found = schedule(Dag((start, wait, reader, other)))
        >>> found.order, found.before.makespan, found.timeline.makespan
        ([0, 3, 1, 2], 9.0, 6.0)
    """
    if not (math.isfinite(multiplier) and multiplier > 0):
        raise ValueError(f"the multiplier must be positive and finite, got {multiplier}")
    for name, limit, least in (("in_flight", in_flight, 1), ("in_flight_bytes", in_flight_bytes, 0)):
        if limit is not None and not limit >= least:  # NaN is not, either
            raise ValueError(f"{name} must be at least {least}, got {limit}")
    effort = default_effort(dag) if effort is None else effort
    if effort < 0:
        raise ValueError(f"effort must not be negative, got {effort}")
    is_given = before is not None
    before = before or simulate(dag)
    if budget is not None and before.peak_bytes > budget:
        before = simulate(dag, low_memory_order(dag, budget))
    own = before.peak_bytes
    budget = default_budget(dag, before.order.tolist()) if budget is None else budget
    if not effort:
        return Schedule(before, before, budget, bounds)
    bounds = lower_bounds(dag) if bounds is None else bounds
    slower = dag.slower(multiplier)
    floor = bounds.makespan if multiplier == 1.0 else lower_bounds(slower).makespan
    in_flight_now = flight_limits(dag, before.order.tolist(), in_flight, in_flight_bytes)
    best = _Best(dag, slower, before, budget, OPTIMAL * floor)
    search, most = _Search(slower, best, floor), math.inf
    for rung, tries in [(budget, effort)] if is_given else _rungs(own, budget, effort):
        if rung < most and not best.done:  # else all orders that were tried fit into less
            most = search.run(limits_of(dag, before.order, rung, in_flight_now), tries)
    found = before if best.order is before.order else simulate(dag, best.order.tolist())
    return Schedule(found, before, budget, bounds)


def _rungs(own: int, budget: int, effort: int) -> list[tuple[float, int]]:
    """Budgets up to the given one, the largest first, and the orders to try; they depend on the own peak alone."""
    found: dict[float, int] = {own * percent // 100: min(effort // 4, _FEW) for percent in _BETWEEN}
    found |= dict.fromkeys([own * percent // 100 for percent in _BUDGETS] + [own + max(GIB, own // 20)], effort)
    if budget >= own * _BUDGETS[-1] // 100:
        found[math.inf] = effort
    return sorted(((rung, of) for rung, of in found.items() if rung <= budget or rung == math.inf), reverse=True)


def flight_limits(dag: Dag, order: Sequence[int], count: int | None, num_bytes: int | None) -> Floats:
    """Most collectives and bytes in flight of each stream, or those of `order` where these are more; float64."""
    found = np.full((1 + len(dag.streams), 2), np.inf)
    if count is None and num_bytes is None:
        return found
    for number, of_stream in enumerate(dag.peak_in_flight(order).values(), 1):
        for unit, limit in enumerate((count, num_bytes)):
            if limit is not None:
                found[number, unit] = max(limit, of_stream[unit])
    return found


_NOTHING = Run(math.inf, 0, np.zeros(0, np.int64), np.zeros(0), np.zeros(0), np.zeros(0))


class _Best:
    """The shortest order so far; of equally short ones, the one with the lowest peak.

    Args:
        dag, slower: with the costs as given, and with the multiplier, which the search sees.
        budget: most bytes of an order; the search may try larger ones.
        enough: milliseconds at which the search stops.
    """

    def __init__(self, dag: Dag, slower: Dag, before: Timeline, budget: int, enough: float) -> None:
        self.dag, self.slower, self.before, self.budget, self.enough = dag, slower, before, budget, enough
        self.order = before.order
        self.peak = before.peak_bytes
        self.makespan = before.makespan if slower is dag else simulate(slower, before.order.tolist()).makespan

    @property
    def done(self) -> bool:
        return self.makespan <= self.enough

    def offer(self, found: Run) -> None:
        """Keep an order that is better; none is longer than the one before at the costs as given."""
        if found.peak > self.budget or (found.makespan, found.peak) >= (self.makespan, self.peak):
            return
        if self.slower is self.dag or simulate(self.dag, found.order.tolist()).makespan <= self.before.makespan:
            self.makespan, self.peak, self.order = found.makespan, found.peak, found.order


class _Search:
    """Samples of list schedules. A search with less effort is the beginning of one with more.

    Args:
        dag: with the costs that the search sees.
        floor: milliseconds that no order beats, of which rules and noise are shares.
    """

    def __init__(self, dag: Dag, best: _Best, floor: float) -> None:
        self.dag, self.best, self.floor = dag, best, floor
        order = best.before.order
        self.engine = Engine(dag, limits_of(dag, order, math.inf))
        compute = np.where(self.engine.graph.stream == 0, dag.ms, 0.0)
        turn = np.empty(len(dag))
        turn[order] = np.cumsum(compute[order])
        self.priorities = (turn, -tails(dag)[0], _nearest_collective(self.engine, order, heads(dag)))

    def run(self, limits: Limits, effort: int) -> int:
        """Try so many orders within these limits; the highest peak of all of them."""
        self.left, self.most, self.ours = effort, 0, _NOTHING
        self.engine = self.engine.with_limits(limits)
        front = self._best_of([(priority, rule, False) for rule in _RULES[:2] for priority in self.priorities])
        trials = [(priority, rule, False) for rule in _RULES[2:] for priority in self.priorities]
        front += self._best_of(trials + [(priority, _EAGER, True) for priority in self.priorities])
        random = [(_uniform(-seed, len(self.dag)), _RANDOM[seed % len(_RANDOM)], False) for seed in range(_LISTS)]
        front += self._best_of(random)
        front.sort(key=lambda found: found[1].makespan)
        for number in range(self.left if front else 0):
            if self.left <= 0 or self.best.done:
                break
            if number % _REBASED == _REBASED - 1:
                known = limits_of(self.dag, self.ours.order, limits.budget, limits.in_flight)
                self.engine = self.engine.with_limits(known)
            at = number % min(_FRONT, len(front))
            priorities, found = front[at]
            draw = _integers(number, 4)
            rule, noise = _RULES[int(draw[2] % len(_RULES))], _uniform(number, len(self.dag))
            if draw[0] % 4 == 0:
                priorities, rule = noise, _RANDOM[int(draw[2] % len(_RANDOM))]
            else:
                priorities = self.engine.backward(found.end) if draw[0] % 2 else priorities
                priorities = priorities + noise * self.floor / 2.0 ** (2 + draw[1] % 6)
            new = self._try(priorities, rule, bool(draw[3] % 2), longest=found.makespan)
            if new is not None and new[1].makespan < found.makespan:
                front[at] = new
        return self.most

    def _best_of(self, trials: Sequence[tuple[Floats, Rule, bool]]) -> list[tuple[Floats, Run]]:
        """Schedules that differ, the shortest first and improved."""
        tried = [self._try(*trial) for trial in trials]
        found = {round(one[1].makespan / max(self.floor, 1e-300), 9): one for one in tried if one is not None}
        return [self._improved(*found[share]) for share in sorted(found)[:_FRONT] if share < math.inf]

    def _improved(self, priorities: Floats, found: Run) -> tuple[Floats, Run]:
        """Passes backward and forward from a schedule, as long as they make it shorter."""
        while self.left > 0 and not self.best.done:
            back = self.engine.backward(found.end)
            tried = [self._try(back, rule, longest=found.makespan) for rule in _RULES]
            new = min((one for one in tried if one is not None), key=lambda one: one[1].makespan, default=None)
            if new is None or new[1].makespan >= found.makespan * (1 - 1e-9):
                break
            priorities, found = new
        return priorities, found

    def _try(
        self, priorities: Floats, rule: Rule, by_priority: bool = False, longest: float = math.inf
    ) -> tuple[Floats, Run] | None:
        if self.left <= 0 or self.best.done:
            return None
        self.left -= 1
        floor = max(self.floor, 1e-300)  # infinite shares stay infinite
        rule = Rule(
            rule.queue * floor,
            rule.ahead * floor,
            rule.memory,
            by_priority,
        )
        found = self.engine.forward(priorities, rule, longest)
        if (found.makespan, found.peak) < (self.ours.makespan, self.ours.peak):
            own = limits_of(self.dag, found.order, found.peak, self.engine.limits.in_flight)
            settled = self.engine.with_limits(own).settled()
            self.ours = settled if (settled.makespan, settled.peak) <= (found.makespan, found.peak) else found
            self.best.offer(self.ours)
            self.best.offer(found)  # it may take less memory
        self.most = max(self.most, found.peak)
        return priorities, found


def _nearest_collective(engine: Engine, order: Ints, head: Floats) -> Floats:
    """Priorities: the earliest time at which a collective that a node leads to could start; the others come last.

    Every stream gets work as soon as it can.
    """
    graph = engine.graph
    stream, partner, at, users = (x.tolist() for x in (graph.stream, graph.partner, graph.users_at, graph.users))
    early = [time if of > 0 else math.inf for time, of in zip(head.tolist(), stream, strict=True)]
    for i in reversed(order.tolist()):
        for user in users[at[i] : at[i + 1]]:
            if partner[user] != i and early[user] < early[i]:  # what the wait of a start leads to is later than it
                early[i] = early[user]
    found, last = np.array(early), float(head.max(initial=0.0) + graph.ms.max(initial=0.0))
    none = np.isinf(found[order])
    found[order[none]] = last + np.arange(len(order))[none]
    return found


def _integers(seed: int, count: int) -> np.ndarray:
    """Integers from 0 to 2**64 that are the same on every machine (splitmix64: Steele, Lea, Flood, OOPSLA 2014)."""
    z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _uniform(seed: int, count: int) -> Floats:
    """Numbers from 0 to 1 by node."""
    return (_integers(seed + 2**20, count) >> np.uint64(11)).astype(np.float64) / 2.0**53


def low_memory_order(dag: Dag, budget: int) -> list[int]:
    """An order whose peak is at most `budget` bytes: the graph's own, or one that is found.

    An optimal order is NP-hard to find (R. Sethi, "Complete register allocation problems", SIAM Journal on Computing 4,
    1975), and not promised.

    Raises:
        ValueError: no such order was found; names the lowest peak that was.
    """
    order = np.arange(len(dag))
    peak = dag.peak_bytes()
    engine = Engine(dag, limits_of(dag, order, peak))
    ends = -tails(dag)[0]
    while peak > budget:
        engine = engine.with_limits(limits_of(dag, order, peak))
        place = np.empty(len(dag))
        place[order] = np.arange(len(dag))
        tried: list[Order] = [order, *_freed_first(dag, order)]
        for priorities in (place, ends):
            for ahead in (0.0, math.inf):
                found = engine.forward(priorities, Rule(0.0, ahead))
                if found.makespan < math.inf:
                    tried += [found.order, *_freed_first(dag, found.order)]
        best: Order = min(tried, key=dag.peak_bytes)
        lower = dag.peak_bytes(best)
        if lower >= peak:
            raise ValueError(
                f"no order was found that takes {budget:,} bytes at its peak: the graph's own takes "
                f"{dag.peak_bytes():,}, the least that was found {peak:,}; allow as many"
            )
        order, peak = np.asarray(best), lower
    return order.tolist()


def _freed_first(dag: Dag, order: Ints) -> list[list[int]]:
    """The order with compute that allocates memory, or more than it frees, right before its first user."""
    freed = np.zeros(len(dag), np.int64)
    position = np.empty(len(dag), np.int64)
    position[order] = np.arange(len(dag))
    for storage in dag.storages:
        if not storage.kept:
            freed[max(storage.touched_by, key=position.__getitem__)] += storage.num_bytes
    compute = dag.kinds == 0
    found = []
    for late in (compute & (dag.allocated > 0), compute & (dag.allocated > freed)):
        done = np.zeros(len(dag), bool)
        new: list[int] = []
        for wanted in (~late, np.ones(len(dag), bool)):
            for i in order[wanted[order]]:
                stack = [int(i)]
                while stack:
                    missing = [dep for dep in dag.nodes[stack[-1]].deps if not done[dep]]
                    if missing:
                        stack += missing
                    elif done[i := stack.pop()]:
                        continue
                    else:
                        done[i] = True
                        new.append(i)
        found.append(new)
    return found
