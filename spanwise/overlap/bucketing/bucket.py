"""Buckets: several collectives of a `Dag` as one, so that latency is paid once and fewer kernels are launched.

    dag, schedule ─► bucket ─► merged dag, its schedule ─► fx.emit

Two ways to choose buckets take turns:

- `greedy` runs the schedule once more and fuses collectives that have the time to wait for one another. That is nearly
  linear, finds many buckets at once, and delays nothing beyond the schedule's slack.
- Trials find buckets that delay their readers and pay all the same, since later nodes come sooner. `moves` proposes
  collectives on the critical chain to merge, or buckets to cut in two. All is scheduled again after each trial.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

from spanwise.overlap.bucketing.greedy import BucketingProblem, checked_price, greedy_buckets
from spanwise.overlap.bucketing.merge import Merged, MergePlan, renumbered, without_buckets
from spanwise.overlap.bucketing.moves import Move, candidate_moves, in_batches
from spanwise.overlap.ir.bounds import Bounds
from spanwise.overlap.ir.dag import Dag, GraphError
from spanwise.overlap.ir.in_flight import in_flight_limits, peak_in_flight
from spanwise.overlap.ir.simulate import simulate
from spanwise.overlap.search.schedule import EFFORT, OPTIMAL, Schedule, default_effort, schedule

# Shares of the slack that greedy buckets may use: the first ones shorten the makespan and leave the next schedule free
# to move them, the others save launches. Without either, dit or dlrm take 1 % longer.
_SLACKS = (0.1, 0.5)
# Shares of the makespan that one bucket may take, tried one after another where longer ones were found so far. Without
# any, the forward of ResNet-50 has 3 launches and takes longer than with 25; without 1/128, its backward takes 3.4 %
# longer; without 1/32, two towers of images and texts 5.2 %.
_SHORT = (1 / 32, 1 / 128)
_WORTH = 0.995  # of the makespan: below that, shorter buckets are taken; at 1, 4.8 % more launches
_LOW_EFFORT = 1  # effort of all but the first schedule, which start from a good order; at 0, sync-norm: 1.4 % longer
# Trials without a gain after which the search ends: 32, but at most 6,000 nodes in all of them together.
_TRIALS, _TRIED_NODES = 32, 6_000
# A gain of this share of the makespan gives all trials back; at 0, 2 % fewer launches and 1.4 times the time.
_PAYS = 1e-3
# Moves for each trial up to which they are tried one by one, not in batches. With 0, and trials not given back, the
# forward of llama-tp takes 0.5 % longer.
_ONE_BY_ONE = 4
# Of the makespan: not scheduled above, if trials are few. Where this holds for small graphs too, a model of many
# branches takes 1.8 % longer, and in tests of all sets of buckets the worst result is 16 % above the best, not 15 %.
_HOPELESS, _MANY_TRIALS = 1.02, 16
_ROUNDING = 1e-9


def bucket(
    dag: Dag,
    found: Schedule,
    keys: Sequence[Hashable | None],
    merged_ms: Callable[[list[int]], float],
    *,
    multiplier: float = 1.0,
    in_flight: int | None = None,
    in_flight_bytes: int | None = None,
    effort: int | None = None,
    quick: bool = False,
) -> tuple[Merged, Schedule]:
    """Merge collectives of equal keys where that shortens the makespan, or keeps it and saves launches.

    Args:
        found: schedule of `dag`. The result keeps its budget and does not exceed its makespan.
        keys: by node; the starts of a bucket have equal keys. None for a start that must not be merged.
        merged_ms: milliseconds of the collective that some starts, by number, become.
        multiplier, in_flight, in_flight_bytes, effort: as in `schedule`, for the new schedule. A bucket is one
            collective in flight, with all of its bytes. If `found` exceeds a limit, its own peak is the limit.
        quick: only the first greedy buckets, to compare graphs.

    Returns:
        The merged dag and a schedule of it; if no bucket pays, `dag` itself and `found`.

    Raises:
        GraphError: `merged_ms` is negative or not finite; names the first start.
        ValueError: the number of keys is not the number of nodes.

    Examples:
        >>> from spanwise.overlap.ir.dag import Kind, Node
        >>> nodes = [Node(name, Kind.START, 1.0, group="dp") for name in "ab"]
        >>> nodes += [Node(f"wait {i}", Kind.WAIT, deps=(i,), start=i) for i in (0, 1)]
        >>> dag = Dag((*nodes, Node("sum", Kind.COMPUTE, 1.0, (2, 3))))
        >>> merged, found = bucket(dag, schedule(dag), ["dp", "dp", None, None, None], lambda starts: 1.5)
        >>> merged.launches, found.timeline.makespan
        (1, 2.5)
    """
    if len(keys) != len(dag):
        raise ValueError(f"expected a key or None for each of {len(dag)} nodes, got {len(keys)}")
    options: dict[str, Any] = {"in_flight": in_flight, "in_flight_bytes": in_flight_bytes, "multiplier": multiplier}
    effort = default_effort(dag) if effort is None else effort
    trials = min(_TRIALS, _TRIED_NODES // max(1, len(dag))) if effort else 0
    start = _State(without_buckets(dag), found)
    best = _BucketSearch(start, keys, merged_ms, options, effort)
    best.try_all_greedy()
    if not quick:
        best.floor = floor = least_ms(dag, found.bounds, keys, merged_ms)
        for share in _SHORT:
            short = share * found.timeline.makespan
            if floor >= _WORTH * best.makespan or best.merged.longest_bucket <= short:
                break
            other = _BucketSearch(start, keys, merged_ms, options, effort, short, floor)
            other.try_all_greedy()
            if other.makespan < _WORTH * best.makespan:  # fewer launches are worth a little
                best = other
        if best.improve(trials):
            best.try_greedy(_SLACKS[-1])
    return best.merged, best.best


@dataclasses.dataclass
class _State:
    """Buckets and their schedule.

    Attributes:
        problem: what greedy buckets on top of them start from, once it is known.
    """

    merged: Merged
    best: Schedule
    problem: BucketingProblem | None = None


class _BucketSearch:
    """The best buckets so far, and the schedule of the merged dag.

    Args:
        start: without buckets.
        options, effort: of the schedules.

    Attributes:
        most_ms: milliseconds that a greedy bucket may take.
        floor: milliseconds below which no buckets can get.
        allowed: of each group, most collectives and bytes in flight; None for no limits.
        longest: a makespan that must not be exceeded.
        tried: the sets of buckets tried.
        saved: milliseconds that merging two collectives saves, by key.
    """

    def __init__(
        self,
        start: _State,
        keys: Sequence[Hashable | None],
        price: Callable[[list[int]], float],
        options: dict[str, Any],
        effort: int,
        most_ms: float = math.inf,
        floor: float = 0.0,
    ) -> None:
        found = start.best
        self.state, self.dag = start, start.merged.dag
        self.keys, self.price, self.options, self.effort = keys, price, options, effort
        self.most_ms, self.floor = most_ms, floor
        self.longest = found.timeline.makespan * (1 + _ROUNDING)
        self.allowed = in_flight_limits(self.dag, found.order, options["in_flight"], options["in_flight_bytes"])
        self.tried: set[frozenset[tuple[int, ...]]] = set()
        self.saved: dict[Hashable, float] = {}

    @property
    def merged(self) -> Merged:
        return self.state.merged

    @property
    def best(self) -> Schedule:
        return self.state.best

    @property
    def makespan(self) -> float:
        return self.best.timeline.makespan

    def keeps_limits(self, plan: MergePlan) -> bool:
        """Whether memory and collectives in flight are within their limits."""
        if plan.peak_bytes() > self.best.budget:
            return False
        if self.allowed is None:
            return True
        return all(
            now <= most
            for group, of_group in peak_in_flight(plan.merged().dag).items()
            for now, most in zip(of_group, self.allowed[group], strict=True)
        )

    def try_all_greedy(self) -> None:
        for slack in _SLACKS:
            self.try_greedy(slack)

    def try_greedy(self, slack: float) -> None:
        """Add greedy buckets, if the makespan is kept."""
        plan = self._with_greedy(slack)
        limit = min(self.longest, self.makespan * (1 + _ROUNDING))
        if plan is None or plan.makespan > limit or not self.keeps_limits(plan):
            return
        effort = self.effort
        if effort <= EFFORT and plan.makespan > _WORTH * self.makespan:
            effort = self._low_effort()  # gemma2-fsdp takes as long with more orders, which are a quarter of the pass
        self.state = self._scheduled(plan, effort, limit)
        self.effort = self._low_effort()

    def _low_effort(self) -> int:
        return min(self.effort, _LOW_EFFORT)

    def _scheduled(self, plan: MergePlan, effort: int, longest: float) -> _State:
        """The best schedule of the merged dag, or its own order."""
        merged, budget = plan.merged(), self.best.budget
        own = simulate(merged.dag)
        best = schedule(merged.dag, budget=budget, effort=effort, before=own, longest=longest, **self.options)
        return _State(merged, best)

    def improve(self, trials: int) -> bool:
        """Make moves that shorten the makespan, until `trials` in a row do not.

        Returns:
            Whether there were any.
        """
        before, effort = self.best, self._low_effort()
        batches, left = self._batches(trials), trials
        while left > 0 and self.makespan > OPTIMAL * self.floor and (batch := next(batches, None)):
            known, new = self._moved(batch)
            if (buckets := frozenset((*known, *new))) in self.tried:
                continue
            self.tried.add(buckets)
            left -= 1  # also if it is not scheduled
            plan = self._with_buckets(known | {bucket: checked_price(self.dag, bucket, self.price) for bucket in new})
            was = self.makespan
            if plan is None or (trials < _MANY_TRIALS and plan.makespan > _HOPELESS * was):
                continue
            state = self._scheduled(plan, effort, was * (1 - _ROUNDING))
            gain = was - state.best.timeline.makespan
            if gain > _ROUNDING * was:
                self.state = state
                batches, left = self._batches(trials), trials if gain > _PAYS * was else left
        return self.best is not before

    def _batches(self, trials: int) -> Iterator[list[Move]]:
        """Moves one by one if they are few, else many at once."""
        keys = [self.keys[of_node[0]] for of_node in self.merged.members]
        found = candidate_moves(self.best.timeline, self.merged.members, keys, self._saves)
        return iter([[move] for move in found]) if len(found) <= _ONE_BY_ONE * trials else in_batches(found)

    def _saves(self, units: Sequence[int]) -> float:
        """Milliseconds that one collective less of a key saves; one price for each key, since prices take time."""
        both = [self.merged.members[unit][0] for unit in units]
        key = self.keys[both[0]]
        if key not in self.saved:
            self.saved[key] = sum(self.dag.nodes[i].ms for i in both) - checked_price(self.dag, both, self.price)
        return self.saved[key]

    def _moved(self, batch: Sequence[Move]) -> tuple[dict[tuple[int, ...], float], list[tuple[int, ...]]]:
        """The buckets after some moves: those that stay, with their milliseconds, and the new ones."""
        gone = {unit for move in batch for unit in move.units}
        units = [(i, self.merged.members[i]) for i in self.merged.dag.starts if i not in gone]
        stay = {of_unit: self.merged.dag.nodes[i].ms for i, of_unit in units if len(of_unit) > 1}
        return stay, [bucket for move in batch for bucket in move.buckets if len(bucket) > 1]

    def _with_buckets(self, ms: dict[tuple[int, ...], float]) -> MergePlan | None:
        """The dag with these buckets; None if a merge is illegal or a limit exceeded."""
        order = [i for unit in self.best.order for i in self.merged.members[unit]]
        for late in (False, True):
            try:
                plan = MergePlan(self.dag, list(ms), list(ms.values()), order, late=late)
            except GraphError:  # they would wait for one another
                return None
            if self.keeps_limits(plan):
                return plan
        return None

    def _with_greedy(self, slack: float) -> MergePlan | None:
        """The best dag with greedy buckets; None if there are none to add."""
        members = [self.merged.members[i] for i in self.best.order]
        problem = self.state.problem = self.state.problem or self._problem(members)
        dag, multiplier, in_order = self.dag, self.options["multiplier"], problem.timeline.dag
        greedy = greedy_buckets(problem, slack, self.most_ms * multiplier)
        if not greedy.buckets:
            return None
        ms = {i: in_order.nodes[i].ms for i in in_order.starts if len(members[i]) > 1}
        for starts, cost in zip(greedy.buckets, greedy.ms, strict=True):
            ms[starts[0]] = cost
            for i in starts[1:]:
                ms.pop(i, None)
        joint = {starts[0]: starts for starts in greedy.buckets}
        buckets = [_flat(members, joint.get(i, [i])) for i in ms]
        order = _flat(members, greedy.order)
        return MergePlan(dag, buckets, [cost / multiplier for cost in ms.values()], order, late=True)

    def _problem(self, members: Sequence[tuple[int, ...]]) -> BucketingProblem:
        """The best dag, numbered in the order of its schedule; `members`: the original nodes that each node is."""
        multiplier, price = self.options["multiplier"], self.price
        return BucketingProblem(
            simulate(renumbered(self.merged.dag, self.best.order).slower(multiplier)),
            keys=[self.keys[of_node[0]] for of_node in members],
            price=lambda starts: multiplier * price(_flat(members, starts)),
            budget=self.best.budget,
            allowed=self.allowed,
        )


def _flat(members: Sequence[tuple[int, ...]], nodes: Iterable[int]) -> list[int]:
    return [of_node for i in nodes for of_node in members[i]]


def least_ms(dag: Dag, bounds: Bounds, keys: Sequence[Hashable | None], price: Callable[[list[int]], float]) -> float:
    """Milliseconds that `dag` takes at least with any buckets, if none of a key costs less than one of them all.

    Buckets shorten the work of a group's stream, but no collective, so neither the longest path nor compute.

    Args:
        bounds: of `dag`.
    """
    alike: dict[Hashable, list[int]] = {}
    work = dict.fromkeys(dag.groups, 0.0)
    for i in dag.starts:
        work[dag.nodes[i].group] += dag.nodes[i].ms
        if keys[i] is not None:
            alike.setdefault(keys[i], []).append(i)
    for starts in alike.values():
        if len(starts) > 1:
            alone = sum(dag.nodes[i].ms for i in starts)
            work[dag.nodes[starts[0]].group] -= max(0.0, alone - checked_price(dag, starts, price))
    return max(bounds.path, bounds.streams["compute"], *work.values())
