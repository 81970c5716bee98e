"""Schedules of a `Dag`: orders that hide collectives behind compute, within a memory budget.

    1. list schedules by a few priorities, and by random ones
    2. the best of them improved by passes backward and forward, as long as that helps
    3. restarts from these with noise in their priorities, until the effort is spent or the bound reached
    4. all of that at each of a few budgets up to the given one, in turns; larger ones adopt what smaller ones find
    5. each best schedule with its collectives started earlier and waited for later

The graph's own order is a candidate, so the result is never longer, unless its own peak exceeds the budget. More memory
or more effort adds candidates and removes none. The same input gives the same order everywhere.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from spanwise.overlap.bounds import Bounds, heads, lower_bounds, tails
from spanwise.overlap.dag import Dag, Kind, positions
from spanwise.overlap.engine import Timeline, simulate
from spanwise.overlap.scheduler import Floats, Ints, ListScheduler, Rule, Run

GIB = 2**30
OPTIMAL = 1.001  # of the lower bound: the search stops; docs/decisions.md, "Lower bounds"
# Nodes issued in all schedules of one budget together, and the fewest and most schedules.
_ISSUED, FEWEST, _MOST = 50_000, 16, 500
# Rules of list schedules; `Rule.ahead` is a share of the bound. Without the paced rule, a random step is 37 % longer.
_GREEDY, _EARLY, _LATE = (Rule(queue, safely=False) for queue in (0.0, math.inf, -math.inf))
_RULES, _RANDOM = (Rule(), _GREEDY, Rule(ahead=5 / 64), _LATE), (_GREEDY, _EARLY, _LATE)
# Budgets that are searched, in percent of the own order's peak; after these any memory. Orders that are made in little
# memory are often short in more, too.
_BUDGETS = (100, 110, 125, 150, 200)
_CHANCE = 4  # of how many orders one is a list by random priorities; without, steps of DLRM are 1 % longer
# Schedules that are improved, and from which noise starts. After each has had a turn, the best order becomes the known
# one, which says what is safe.
_FRONT = 8


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The best order found.

    Attributes:
        timeline: of that order, with the costs as they were given.
        before: of the order to improve on: the one given, the graph's own, or that of `low_memory_order`.
        budget: most bytes that the order was allowed.
        bounds: lower bounds on every order, memory ignored.
    """

    timeline: Timeline
    before: Timeline
    budget: int
    bounds: Bounds

    @property
    def order(self) -> list[int]:
        """Nodes as they should be issued."""
        return self.timeline.order.tolist()


def default_budget(peak: int) -> int:
    """Bytes: the peak of the graph's own order plus the larger of 1 GiB and a twentieth of it."""
    return peak + max(GIB, peak // 20)


def default_effort(dag: Dag) -> int:
    """Number of orders to try: the larger the graph, the fewer."""
    return min(_MOST, max(FEWEST, _ISSUED // max(1, len(dag))))


def schedule(
    dag: Dag,
    *,
    budget: int | None = None,
    multiplier: float = 1.0,
    effort: int | None = None,
    before: Timeline | None = None,
) -> Schedule:
    """Search for the order of the shortest makespan.

    Args:
        budget: most bytes of the dag's storages; default: `default_budget`. If the order to start from exceeds it, the
            search first finds an order that does not, and starts from that one (`low_memory_order`).
        multiplier: factor on the milliseconds of collectives while scheduling, for costs that are estimates.
        effort: most orders to try at each budget; default: `default_effort`. More never gives a longer makespan.
        before: timeline of the order to start from; default: of the graph's own. The schedule is no worse than it.
            From a given one, no smaller budgets are searched.

    Raises:
        ValueError: no order was found within the budget, the multiplier is not positive and finite, or the effort is
            negative.

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
    effort = default_effort(dag) if effort is None else effort
    if effort < 0:
        raise ValueError(f"effort must not be negative, got {effort}")
    is_given = before is not None
    before = before or simulate(dag)
    if budget is not None and before.peak_bytes > budget:
        before = simulate(dag, low_memory_order(dag, budget))
    own = before.peak_bytes
    budget = default_budget(own) if budget is None else budget
    bounds = lower_bounds(dag)
    if not effort:
        return Schedule(before, before, budget, bounds)
    slower = dag
    if multiplier != 1.0:
        nodes = (dataclasses.replace(n, ms=n.ms * multiplier) if n.kind == Kind.START else n for n in dag.nodes)
        slower = Dag(tuple(nodes), dag.storages)
    floor = (bounds if slower is dag else lower_bounds(slower)).makespan
    best = _Best(dag, slower, before, budget, OPTIMAL * floor)
    # Budgets up to the given one, ascending, and any memory after them; they depend on the own peak alone.
    rungs = sorted({*(own * percent // 100 for percent in _BUDGETS), default_budget(own)})
    allowed = [*(rung for rung in rungs if rung <= budget), *[math.inf] * (budget >= own * _BUDGETS[-1] // 100)]
    first = _Search(slower, best, floor)
    searches = [first.within(rung) for rung in ([budget] if is_given else allowed)]
    for _ in range(effort):
        smaller = None
        for search in searches:
            if best.done:
                break
            search.sample(smaller)
            if search.needed <= search.budget:
                break  # nothing was refused for memory: a larger budget would find the same
            smaller = search
    found = before if best.order is before.order else simulate(dag, best.order.tolist())
    return Schedule(found, before, budget, bounds)


_NOTHING = Run(math.inf, 0, 0, np.zeros(0, np.int64), np.zeros(0), np.zeros(0), np.zeros(0))


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
        self.makespan = before.makespan if slower is dag else simulate(slower, before.order).makespan

    @property
    def done(self) -> bool:
        return self.makespan <= self.enough

    def offer(self, found: Run) -> None:
        """Keep an order that is better; none is longer than the one before at the costs as given."""
        if found.peak > self.budget or (found.makespan, found.peak) >= (self.makespan, self.peak):
            return
        if self.slower is self.dag or simulate(self.dag, found.order).makespan <= self.before.makespan:
            self.makespan, self.peak, self.order = found.makespan, found.peak, found.order


_Sample = tuple[Floats, Run]  # priorities, and their schedule


class _Search:
    """Samples of list schedules within one budget. A search with less effort is the beginning of one with more.

    Args:
        dag: with the costs that the search sees.
        floor: milliseconds that no order beats, of which rules and noise are shares.
    """

    budget: float
    needed: int  # with more bytes than this, all runs are the same
    ours: Run  # the best one
    front: list[_Sample]
    smaller: _Search | None
    samples: Iterator[None]

    def __init__(self, dag: Dag, best: _Best, floor: float) -> None:
        self.dag, self.best, self.floor = dag, best, max(floor, 1e-300)  # infinite shares stay infinite
        order, issued = best.before.order, tails(dag)[0]
        self.engine = ListScheduler(dag, order)
        self.engine.graph = self.engine.graph._replace(tail=issued)
        compute = np.where(self.engine.graph.stream == 0, dag.ms, 0.0)
        turn = np.empty(len(dag))
        turn[order] = np.cumsum(compute[order])
        self.priorities = (turn, -issued, _nearest_collective(self.engine, order, heads(dag)))

    def within(self, budget: float) -> _Search:
        """A search of the same graph within this budget."""
        other = copy.copy(self)
        other.budget, other.engine = budget, self.engine.within(budget, self.best.before.order)
        other.needed, other.ours, other.front = 0, _NOTHING, []
        other.smaller, other.samples = None, other._samples()
        return other

    def sample(self, smaller: _Search | None) -> None:
        """Try one order more; `smaller` is the search of the next smaller budget."""
        self.smaller = smaller
        next(self.samples)

    def _samples(self) -> Iterator[None]:
        by_rule = [(priorities, rule) for rule in _RULES for priorities in self.priorities]
        count = default_effort(self.dag) // _CHANCE
        lists = [(_uniform(-seed, len(self.dag)), _RANDOM[seed % len(_RANDOM)]) for seed in range(count)]
        first = 2 * len(self.priorities)
        for trials, most in ((by_rule[:first], 1), (by_rule[first:] + lists, _FRONT)):
            tried: dict[float, _Sample] = {}
            for trial in trials:
                new = self._try(*trial)
                tried[round(new[1].makespan / self.floor, 9)] = new
                yield
            for share in sorted(tried)[:most]:
                if share < math.inf:
                    yield from self._improved(*tried[share])
        self.front = sorted(self.front, key=lambda sample: sample[1].makespan)[:_FRONT]
        for number in itertools.count():
            if number % _FRONT == _FRONT - 1:
                self._rebase()
            draw = _integers(number, 3)
            at, rule = number % max(1, len(self.front)), _RULES[int(draw[2] % len(_RULES))]
            priorities = noise = _uniform(number, len(self.dag))
            if draw[0] % _CHANCE == 0 or not self.front:
                at, rule = len(self.front) - 1, _RANDOM[int(draw[2] % len(_RANDOM))]
            else:
                priorities, found = self.front[at]
                priorities = self.engine.backward(found.end) if draw[0] % 2 else priorities
                priorities = priorities + noise * self.floor / 2.0 ** (2 + draw[1] % 6)
            longest = self.front[at][1].makespan if self.front else math.inf
            new = self._try(priorities, rule, longest)
            if new[1].makespan < longest:
                self.front[at : at + 1] = [new]
            yield

    def _rebase(self) -> None:
        """Take the best order for the known one, be it of this budget or of the one below."""
        if self.smaller is not None and self.smaller.ours.makespan < self.ours.makespan:
            self.ours = self.smaller.ours
            self.front[-1:] = [(self.engine.backward(self.ours.end), self.ours)]
            self.front.sort(key=lambda sample: sample[1].makespan)
        if self.ours is not _NOTHING:
            self.engine = self.engine.within(self.budget, self.ours.order)

    def _improved(self, priorities: Floats, found: Run) -> Iterator[None]:
        """Passes backward and forward from a schedule, as long as they make it shorter."""
        shorter = True
        while shorter:
            back, tried = self.engine.backward(found.end), []
            for rule in _RULES:
                tried.append(self._try(back, rule, found.makespan))
                yield
            new = min(tried, key=lambda sample: sample[1].makespan)
            shorter = new[1].makespan < found.makespan * (1 - 1e-9)
            priorities, found = new if shorter else (priorities, found)
        self.front.append((priorities, found))

    def _try(self, priorities: Floats, rule: Rule, longest: float = math.inf) -> _Sample:
        found = self.engine.forward(priorities, rule._replace(ahead=rule.ahead * self.floor), longest)
        self.needed = max(self.needed, found.needed)
        if (found.makespan, found.peak) < (self.ours.makespan, self.ours.peak):
            settled = self.engine.within(found.peak, found.order).settled()
            self.ours = settled if (settled.makespan, settled.peak) <= (found.makespan, found.peak) else found
            self.best.offer(self.ours)
            self.best.offer(found)  # it may take less memory
        return priorities, found


def _nearest_collective(engine: ListScheduler, order: Ints, head: Floats) -> Floats:
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
    order, engine, ends = np.arange(len(dag)), ListScheduler(dag), -tails(dag)[0]
    while (peak := dag.peak_bytes(order)) > budget:
        engine = engine.within(peak, order)
        place = positions(order).astype(np.float64)
        runs = [engine.forward(by, Rule(ahead=ahead)) for by in (place, ends) for ahead in (0.0, math.inf)]
        tried = [order, *(run.order for run in runs)]  # without the runs, 12 of 385 random graphs need up to 28 % more
        best = min((late for one in tried for late in (one, *_made_late(dag, one))), key=dag.peak_bytes)
        if dag.peak_bytes(best) >= peak:
            raise ValueError(
                f"no order was found that takes {budget:,} bytes at its peak: the graph's own takes "
                f"{dag.peak_bytes():,}, the least that was found {peak:,}; allow as many"
            )
        order = best
    return order.tolist()


def _made_late(dag: Dag, order: Ints) -> list[Ints]:
    """The order with compute that allocates memory, or more than it frees, right before its first user."""
    freed, position = np.zeros(len(dag), np.int64), positions(order)
    for storage in dag.storages:
        if not storage.kept:
            freed[max(storage.touched_by, key=position.__getitem__)] += storage.num_bytes
    found = []
    for least in (0, freed):
        late = (dag.kinds == Kind.COMPUTE) & (dag.allocated > least)
        done: dict[int, None] = {}
        for i in (*order[~late[order]].tolist(), *order.tolist()):
            stack = [i]
            while stack:
                missing = [dep for dep in dag.nodes[stack[-1]].deps if dep not in done]
                if missing:
                    stack += missing
                else:
                    done[stack.pop()] = None
        found.append(np.array(list(done), np.int64))
    return found
