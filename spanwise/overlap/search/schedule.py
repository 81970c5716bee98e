"""Schedules of a `Dag`: orders that hide collectives behind compute, within a memory budget and limits in flight.

    1. list schedules: in the graph's own order, to the nearest collective, along the longest path; plain greedy ones
    2. list schedules by priorities from a backward pass over these, the best first
    3. the best schedule, with its collectives started earlier and waited for later

The best has the shortest makespan; of makespans that are close, the lowest peak memory decides. The graph's own order
is a candidate, so the result is never worse. The same input gives the same order on every machine.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from spanwise.overlap.ir.bounds import Bounds, lower_bounds
from spanwise.overlap.ir.dag import Dag
from spanwise.overlap.ir.in_flight import flight_sizes, flights, in_flight_limits
from spanwise.overlap.ir.memory import ResourceLimit
from spanwise.overlap.ir.order import positions
from spanwise.overlap.ir.simulate import Timeline, simulate
from spanwise.overlap.search.greedy import WAITS, greedy_schedule
from spanwise.overlap.search.justify import starts_early_waits_late
from spanwise.overlap.search.list_scheduler import ListOptions, list_schedule
from spanwise.overlap.search.low_memory import low_memory_order
from spanwise.overlap.search.priorities import (
    ListSchedule,
    SchedulingProblem,
    backward_pass,
    nearest_collective,
    order_priorities,
)

GIB = 2**30
_ROUNDING = 1e-9
# Orders tried of a large graph: the first ones, and the best of them improved once. With this, a pass takes half of the
# time of PyTorch's for 2,000 nodes, which grows faster. benchmarks/results/overlap-zoo.json
EFFORT, LARGE = 8, 1_800
_MEMORY_WEIGHT = 0.0025  # share of the makespan that a full budget counts as; at 0, sync-norm takes 13 % more memory
OPTIMAL = 1.001  # of the lower bound: the search stops; docs/decisions.md, "Lower bounds"
# Rules of list schedules, in shares of the longest path: near the priorities or as early as memory allows, with a short
# queue at each stream or a long one. Where the budget is the own order's peak, random-1 takes 9.4 % longer without the
# near ones; otherwise nothing changes.
_RULES = tuple(ListOptions(ahead, queue) for queue in (1 / 32, 1 / 2) for ahead in (5 / 64, math.inf))
_NEAR, _EAGER, _, _EAGER_DEEP = _RULES
# Tried where these do not help: with a short queue, a collective that compute waits for goes before the gathers on its
# stream. Without, experts and parameters on one slow stream take 6.1 % longer.
_SHORT_QUEUE = ListOptions(math.inf, 1 / 128)
# Where an order takes this share of the budget, memory binds, and four orders near their priorities are tried more.
# Without, the backward of llama-cp on slow links takes 4.6 % longer, and with 5 % more than its own peak that of
# ResNet-50 8 %.
_BINDING, _NEARER = 0.97, ListOptions(1 / 4, 1 / 128)


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
    """Number of orders to try: `EFFORT` of a large graph, four times as many of a small one."""
    return 4 * EFFORT if len(dag) < LARGE else EFFORT


def schedule(
    dag: Dag,
    *,
    budget: int | None = None,
    multiplier: float = 1.0,
    in_flight: int | None = None,
    in_flight_bytes: int | None = None,
    effort: int | None = None,
    before: Timeline | None = None,
    longest: float = math.inf,
    bounds: Bounds | None = None,
) -> Schedule:
    """Search for the order of the shortest makespan.

    Args:
        budget: most bytes of the dag's storages; default: `default_budget`. If the order to start from exceeds it, the
            search first finds an order that does not, and starts from that one (`low_memory_order`).
        multiplier: factor on the milliseconds of collectives while scheduling, for costs that are estimates.
        in_flight: most collectives of a group that are started and not yet waited for. If the order to start from has
            more, its number is the limit of that group. A collective without a wait is not counted.
        in_flight_bytes: the same limit for the bytes of the storages that these collectives make, read or write.
        effort: most orders to try, and four more where memory binds; default: `default_effort`. Above `EFFORT`, more
            never gives a longer makespan.
        before: timeline of the order to start from; default: of the graph's own. The schedule is no worse than it.
        longest: milliseconds above which the caller has no use for an order: such ones are left early, and the result
            is the order to start from.
        bounds: `lower_bounds` of `dag`, if they are known.

    Raises:
        ValueError: no order was found within the budget, the multiplier is not positive and finite, or a limit or the
            effort is too small.

    Examples:
        >>> from spanwise.overlap.ir.dag import Kind, Node
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
    before = before or simulate(dag)
    if budget is not None and before.peak_bytes > budget:
        before = simulate(dag, low_memory_order(dag, budget))
    order = before.order.tolist()
    budget = default_budget(dag, order) if budget is None else budget
    limits = [ResourceLimit(dag.lifetimes, budget, order), *_flight_limits(dag, order, in_flight, in_flight_bytes)]
    problem = SchedulingProblem(dag.slower(multiplier), order, limits)
    search = _ScheduleSearch(dag, problem, before, budget, bounds, longest)
    search.run(effort)
    return Schedule(search.best, before, budget, search.bounds)


class _ScheduleSearch:
    """The best schedule so far. A shorter search is the beginning of a longer one.

    Args:
        dag: with the costs as given; `problem` has them with the multiplier.

    Attributes:
        floor: milliseconds that no order beats.
        scale: milliseconds of the longest path, of which constants are shares.
        most: orders to try.
        is_short: whether these are few, as for a large graph.
        tried: orders tried so far.
    """

    def __init__(
        self,
        dag: Dag,
        problem: SchedulingProblem,
        before: Timeline,
        budget: int,
        bounds: Bounds | None,
        longest: float,
    ) -> None:
        self.dag, self.problem, self.budget = dag, problem, budget
        self.same_costs = problem.dag is dag
        self.floor = max(max(problem.work_of(dag.ms)), problem.longest if self.same_costs else 0.0)
        self.scale = problem.longest
        self.best, self.makespan, self.peak = before, before.makespan, before.peak_bytes
        if longest < self.makespan:
            self.makespan, self.peak = longest, budget + 1  # any order that is no longer is better
        self.bounds = bounds
        self.most = self.tried = 0
        self.is_short = False

    def _score(self, makespan: float, peak: int) -> float:
        """Milliseconds, and a little for memory; smaller is better."""
        return makespan * (1.0 + _MEMORY_WEIGHT * peak / max(1, self.budget))

    def run(self, effort: int) -> None:
        """Try `effort` orders, or fewer if the best is as short as the bound, and polish the best."""
        if effort == 0 or self.floor > self.makespan * (1 + _ROUNDING):
            return
        self.most, self.is_short = effort, effort <= EFFORT
        if effort > 1 and not self.done:
            self.bounds = self.bounds or lower_bounds(self.dag)  # takes as long as two tries, and often saves more
            self.floor = self.bounds.makespan
        better: list[int] | None = None
        for found in self._candidates():
            makespan = found.makespan
            if not self.same_costs and makespan < math.inf:
                makespan = simulate(self.dag, found.order).makespan
            if makespan <= self.makespan and self._score(makespan, found.peak) < self._score(self.makespan, self.peak):
                better, self.makespan, self.peak = found.order, makespan, found.peak
            if self.done or self.tried >= self.most:
                break
        if not self.same_costs and effort > 1 and not self.done:
            # Orders for the costs as given; the multiplier asks for one that is as good if collectives are slower.
            given = SchedulingProblem(self.dag, self.problem.order, self.problem.limits)
            slower = simulate(self.problem.dag, better or self.best.order.tolist()).makespan
            for found in self._plain(given, self.makespan):
                if found.makespan < self.makespan and simulate(self.problem.dag, found.order).makespan <= slower:
                    better, self.makespan, self.peak = found.order, found.makespan, found.peak
        if better is None:
            return
        # Costs are estimates: collectives start earlier, as far as the order's own peak allows. Where collectives take
        # other times (by 0.3, log-normal), random-1 would be 3.2 % longer without; overlap-ablation.json.
        self.best = simulate(self.dag, starts_early_waits_late(self.problem, better, self.peak))
        if self.best.makespan > self.makespan or self.best.peak_bytes > self.peak:
            self.best = simulate(self.dag, better)

    @property
    def done(self) -> bool:
        """Whether the best is as short as the bound."""
        return self.makespan <= OPTIMAL * self.floor

    def _candidates(self) -> Iterator[ListSchedule]:
        """Greedy schedules that differ, then each of the first ones improved, the best first."""
        first: list[ListSchedule] = []
        for greedy in self._first():
            first.append(self._run(*greedy, math.inf))
            yield first[-1]
        is_tight = max(found.peak for found in first) > _BINDING * self.budget
        plain: list[ListSchedule] = []
        for found in self._plain(self.problem, math.inf):
            plain.append(found)
            yield found
        if is_tight:
            near = list(self._near())
            self.most += len(near)
            yield from (self._run(*greedy, self.makespan if self.same_costs else math.inf) for greedy in near)
        first, plain, last = (
            [f for f in sorted(each, key=self._value) if f.makespan < math.inf]
            for each in (first, plain[:-2], plain[-2:])
        )
        if plain and not self.is_short:
            # A quarter of the orders: without, random-0 takes up to 6 % longer, and llama-step where it takes more.
            yield from self._improved(plain.pop(0), self.tried + self.most // 4)
        for current in (*first, *plain, *last):
            yield from self._improved(current)

    def _improved(self, current: ListSchedule, last: float = math.inf) -> Iterator[ListSchedule]:
        """Schedules from a backward pass over one, and so on, as long as that helps or until `last` were tried."""
        while self.tried < last:
            priorities = backward_pass(self.problem, current).begin
            # No longer one has the best score of these four; of the last four, only one of the best counts.
            longest = current.makespan * (1 + _MEMORY_WEIGHT)
            if self.same_costs and self.tried + len(_RULES) >= self.most:
                longest = min(longest, self.makespan)
            tried = []
            for rule in _RULES:
                tried.append(self._run(priorities, rule, longest))
                yield tried[-1]
            better = min(tried, key=self._value)
            if better.makespan >= current.makespan:
                better = self._run(priorities, _SHORT_QUEUE, current.makespan)
                yield better
                if better.makespan >= current.makespan:
                    return
            current = better

    def _value(self, found: ListSchedule) -> float:
        return self._score(found.makespan, found.peak)

    def _run(self, priorities: list[float], rule: ListOptions, longest: float) -> ListSchedule:
        self.tried += 1
        if self.same_costs and self.tried == self.most:
            longest = min(longest, self.makespan)
        return list_schedule(self.problem, priorities, rule, longest)

    def _first(self) -> Iterator[tuple[list[float], ListOptions]]:
        """Priorities and rules of greedy orders that differ."""
        problem = self.problem
        yield order_priorities(problem, 0.0), _EAGER  # the known order, collectives when ready
        yield nearest_collective(problem), _EAGER  # without: random-0 7.1 % longer
        yield order_priorities(problem, math.inf), _EAGER_DEEP  # longest path first
        # The known order, but what nothing waits for later. Without, 8.4 % longer with 2 in flight.
        yield order_priorities(problem, self.scale / 8, self.scale / 64), _EAGER

    def _plain(self, problem: SchedulingProblem, longest: float) -> Iterator[ListSchedule]:
        """Greedy schedules that care for nothing but what is ready: half of the time of others, at times the shortest.

        Without, graphs of two chains take up to 8.8 % longer than such an order (tests/overlap/test_greedy.py). Waits
        by priority are last: random-0 takes up to 6 % longer where such an order is the first to be improved. Without
        them, graphs of at most 150 nodes take up to 32 % longer; large graphs do without.
        """
        by = [-tail for tail in problem.tail], positions(problem.order).tolist()
        for priorities, waits in itertools.product(by, WAITS[:-1]):
            yield greedy_schedule(problem, priorities, waits, longest)
        for priorities in () if self.is_short else by:
            yield greedy_schedule(problem, priorities, WAITS[-1], longest)

    def _near(self) -> Iterator[tuple[list[float], ListOptions]]:
        """Priorities and rules of orders that keep near to the priorities, for where memory binds."""
        problem = self.problem
        yield order_priorities(problem, 0.0), _NEAR
        yield order_priorities(problem, math.inf), _NEARER
        yield order_priorities(problem, self.scale / 8, self.scale / 64), _NEARER
        # Without, a backward of 32 layers takes 2.4 % longer.
        yield order_priorities(problem, 5 / 64 * self.scale, self.scale / 64), _NEAR


def _flight_limits(dag: Dag, order: Sequence[int], most: int | None, most_bytes: int | None) -> Iterator[ResourceLimit]:
    """Limits on collectives in flight, by group; at least the peak of the known order."""
    for group, limits in (in_flight_limits(dag, order, most, most_bytes) or {}).items():
        for size, limit in zip(flight_sizes(dag), limits, strict=True):
            if limit < math.inf:
                yield ResourceLimit(flights(dag, group, size), limit, order)
