"""Greedy buckets: a schedule run once more, its collectives fused where that costs no time and no memory.

    schedule ─► greedy_buckets ─► buckets, an order ─► merge

The nodes are issued in the schedule's order on the streams of `simulate` (`event_loop`), but for collectives:

1. At a start's turn, later starts of equal key on its stream join it if their dependencies have run, or are a little
   cheap compute that is run for them.
2. If more could join soon, the bucket stays open. It is launched when it is full, when it would be late otherwise, or
   when one of its members is needed.
3. A stream that would be idle meanwhile gets the collectives that were to begin as soon as it is free.

Two rules keep the schedule's makespan. Each node has a latest time, as in the critical path method, and a bucket must
end in time for all of its readers and for the next collective on the stream (`slack`). Memory and collectives in flight
are limited: results that are made sooner, and arguments that are freed later, must fit. No bucket waits for itself,
because its members are started one after another in a legal order before any of them is waited for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence

from spanwise.overlap.bucketing.event_loop import DEFERRED, ISSUED, UNISSUED, EventLoop
from spanwise.overlap.bucketing.slack import LatestTimes, MemorySlack, OpenBucket, StreamQueues
from spanwise.overlap.ir.dag import Dag, GraphError, Kind
from spanwise.overlap.ir.memory import ResourceLimit
from spanwise.overlap.ir.simulate import Timeline

_COMPUTE = int(Kind.COMPUTE)
_MAX_REFUSED = 4  # later starts of a key that may be refused before the search for more ends; with 1, dit: 0.6 % longer
_MAX_EXTRAS = 8  # cheap nodes that may run early for a start; with none, dit takes 1.0 % longer
_FULL = 64  # a bucket's time in units of what one more saves; docs/decisions.md, "A bucket is full"
_SMALL = 1.5  # the same for a start that is mostly latency, which may always join. At 0, 1.5 % longer
# at wrong costs, 3.7 % more launches


@dataclasses.dataclass(frozen=True, eq=False)
class BucketingProblem:
    """A schedule and the rules by which its collectives may be fused, for any number of runs.

    Attributes:
        timeline: of a dag in its own order, which is that of the schedule.
        keys: by node; starts of equal keys may be fused, those of None never.
        price: milliseconds of a fused collective, by its starts.
        budget: most bytes; the order keeps it, and the result will.
        allowed: by group, most collectives and bytes in flight; a bucket is one, with all of its bytes. It is exceeded
            only where there is no other way to go on.
    """

    timeline: Timeline
    keys: Sequence[Hashable | None]
    price: Callable[[list[int]], float]
    budget: int
    allowed: Mapping[str, tuple[float, float]] | None = None

    @functools.cached_property
    def limit(self) -> ResourceLimit:
        """The budget, before any node has run."""
        return ResourceLimit(self.timeline.dag.lifetimes, self.budget)

    @functools.cached_property
    def memory_slack(self) -> MemorySlack:
        """Memory below the budget."""
        return MemorySlack(self.timeline, self.budget)

    @functools.cached_property
    def latest(self) -> LatestTimes:
        """Latest times of the nodes."""
        return LatestTimes(self.timeline, self.memory_slack)


@dataclasses.dataclass(frozen=True)
class GreedyBuckets:
    """Buckets, and an order with them.

    Attributes:
        order: all nodes, as issued.
        buckets: the starts of each bucket, two or more, ascending.
        ms: milliseconds of each bucket.
    """

    order: list[int]
    buckets: list[list[int]]
    ms: list[float]


def greedy_buckets(problem: BucketingProblem, slack: float, most_ms: float = math.inf) -> GreedyBuckets:
    """Run a schedule once more and fuse starts of equal keys.

    Args:
        slack: share of the slack that may be used, between 0 and 1; the rest is for costs that are wrong.
        most_ms: milliseconds that a bucket may take.

    Raises:
        GraphError: a price is negative or not finite.
        ValueError: the order exceeds the budget.
    """
    loop = _GreedyBucketing(problem, slack, most_ms)
    loop.run()
    return GreedyBuckets(loop.order, loop.buckets, loop.prices)


class _GreedyBucketing(EventLoop):
    """The event loop with buckets.

    Attributes:
        memory_slack: memory below the budget.
        streams: work left, and the open buckets.
        open: the open bucket of each key.
        saved: milliseconds that one more member saves, by key.
        alike: starts by key, ascending.
    """

    def __init__(self, problem: BucketingProblem, slack: float, most_ms: float) -> None:
        timeline = problem.timeline
        dag, keys = timeline.dag, problem.keys
        self.memory_slack = problem.memory_slack.copy()
        latest = problem.latest.of_share(slack)
        super().__init__(dag, latest, problem.limit.copy(), problem.allowed)
        self.keys, self.price, self.most_ms = keys, problem.price, most_ms
        self.issued_at = timeline.issued.tolist()
        self.rounding = 1e-9 * timeline.makespan
        self.streams = StreamQueues(timeline, latest, self.state)
        self.buckets: list[list[int]] = []
        self.prices: list[float] = []
        self.saved: dict[Hashable, float] = {}
        self.open: dict[Hashable, OpenBucket] = {}
        self.alike: dict[Hashable, list[int]] = {}
        for i in dag.starts:
            if keys[i] is not None:
                self.alike.setdefault(keys[i], []).append(i)

    def start(self, i: int, *, may_defer: bool = True) -> None:
        """Start `i` together with the starts that can join it, or defer it until more can."""
        key, group = self.keys[i], self.dag.nodes[i].group
        bucket = self.open.get(key) if key is not None else None
        if bucket is not None and not (self.has_space(bucket, i) and self.add_if_in_time(bucket, i)):
            self.launch(bucket)
            bucket = None
        if bucket is None:
            # It goes before the open buckets, unless these cannot wait.
            of_group = self.streams.open[group]
            while of_group and not self.streams.in_time(group, self.now, of_group, i, self.ms[i]):
                self.launch(self.streams.most_urgent(group))
            while key in self.open:  # one that was opened while a launch waited for memory
                self.launch(self.open[key])
            if self.state[i]:
                return
            bucket = OpenBucket([i], self.ms[i], self.latest.end[i])
        self.state[i] = DEFERRED
        more = self.add_followers(bucket, i) if self.may_share(i) else None
        is_open = bucket in self.streams.open[group]
        if may_defer and more is not None and self.is_worth_waiting(bucket, more):
            if not is_open:
                self.streams.open[group].append(bucket)
                self.open[key] = bucket
            return
        self.launch(bucket)

    def may_share(self, i: int) -> bool:
        """Whether `i` may be in a bucket.

        Its wait must need no other node that has not run, since that might depend on the bucket. And it must free
        nothing before its wait, since that would outlive the other starts.
        """
        if self.keys[i] is None or self.memory_slack.frees_early[i]:
            return False
        wait = self.dag.wait_of.get(i)
        return wait is None or self.missing[wait] <= 1

    def add_followers(self, bucket: OpenBucket, i: int) -> int | None:
        """Add to the bucket later starts of the key of `i`.

        Returns:
            The first start that could not be added although the bucket has space for it.
        """
        alike = self.alike[self.keys[i]]
        more: int | None = None
        refused = 0
        for at in range(bisect_right(alike, i), len(alike)):
            other = alike[at]
            if self.state[other]:
                continue
            has_space = self.has_space(bucket, other)
            extras = self.extras(other) if has_space else None
            if (
                extras is not None
                and self.memory_slack.fits_at(other, self.position)
                and self.extras_fit(extras)
                and self.add_if_in_time(bucket, other, extras)
            ):
                self.run_extras(extras)
            else:
                more = other if has_space and more is None else more
                refused += 1
                if refused == _MAX_REFUSED:
                    break
        return more

    def extras(self, i: int) -> list[int] | None:
        """Compute that must run before `i`, in a legal order; None if it is expensive or waits for a collective."""
        if not self.missing[i]:
            return []
        found: list[int] = []
        return found if self._needs(i, set(), found) else None

    def _needs(self, node: int, seen: set[int], found: list[int]) -> bool:
        """Add what must run before `node`; whether that is cheap compute. No closure: it would be a cycle in memory."""
        for dep in self.dag.nodes[node].deps:
            if self.state[dep] == ISSUED or dep in seen:
                continue
            seen.add(dep)
            if self.kinds[dep] != _COMPUTE or not self.latest.is_cheap[dep] or len(seen) > _MAX_EXTRAS:
                return False
            if not self._needs(dep, seen, found):
                return False
            found.append(dep)
        return True

    def extras_fit(self, extras: list[int]) -> bool:
        """Whether there is memory for all of them; only one that allocates is known to leave space for the others."""
        allocating = [extra for extra in extras if self.memory.allocated[extra]]
        return not allocating or (len(allocating) == 1 and self.memory.is_safe(allocating[0]))

    def run_extras(self, extras: Sequence[int]) -> None:
        for extra in extras:
            self.now += self.ms[extra]
            self.issue(extra)

    def saving(self, i: int) -> float:
        """Milliseconds that one more member like `i` saves; computed for the two longest of its key."""
        key = self.keys[i]
        if key not in self.saved:
            pair = sorted(self.alike[key], key=self.ms.__getitem__)[-2:]
            saved = sum(self.ms[j] for j in pair) - checked_price(self.dag, pair, self.price)
            self.saved[key] = saved if saved > self.rounding else 0.0
        return self.saved[key]

    def has_space(self, bucket: OpenBucket, i: int) -> bool:
        """Whether the bucket is not full; or `i`, or each of its members, is little more than a latency."""
        saved = self.saving(i)
        if bucket.ms + self.ms[i] - saved > self.most_ms:
            return False
        if saved == 0.0 or bucket.ms + self.ms[i] - saved <= _FULL * saved:
            return True
        return min(self.ms[i], max(self.ms[j] for j in bucket.starts)) <= _SMALL * saved

    def add_if_in_time(self, bucket: OpenBucket, i: int, extras: Sequence[int] = ()) -> bool:
        """Add `i` to the bucket if all stay in time; `extras` run before it."""
        if not self.may_share(i):
            return False
        ready = self.now + sum(self.ms[extra] for extra in extras)
        if extras and ready > self.latest.reach[self.position] + self.rounding:
            return False
        group = self.dag.nodes[i].group
        ms = bucket.ms + max(0.0, self.ms[i] - self.saving(i))
        joint = OpenBucket([*bucket.starts, i], ms, min(bucket.deadline, self.latest.end[i]))
        if self.exceeds_bytes(group, joint.starts):
            return False
        others = [other for other in self.streams.open[group] if other is not bucket]
        if not self.streams.in_time(group, ready, [*others, joint], i):
            return False
        bucket.starts, bucket.ms, bucket.deadline = joint.starts, joint.ms, joint.deadline
        self.state[i] = DEFERRED
        return True

    def is_worth_waiting(self, bucket: OpenBucket, more: int) -> bool:
        """Whether the start `more` will come in time to join."""
        comes = self.now + self.issued_at[more] - self.issued_at[self.position]
        return max(comes, self.streams.free[self.dag.nodes[more].group]) + bucket.ms + self.ms[more] <= bucket.deadline

    def launch_deferred(self, i: int) -> None:
        self.launch(self.open[self.keys[i]])

    def start_before(self, until: float) -> None:
        self.launch_urgent(until)
        if until < math.inf:
            self.keep_streams_busy(until)

    def launch_urgent(self, until: float) -> None:
        """Launch the open buckets that cannot wait until then."""
        for group, buckets in self.streams.open.items():
            while buckets and not self.streams.in_time(
                group, until, buckets, max(max(bucket.starts) for bucket in buckets)
            ):
                self.launch(self.streams.most_urgent(group))

    def keep_streams_busy(self, until: float) -> None:
        """Start collectives that only waited for their stream, where a stream would be idle before `until`."""
        for group in self.dag.groups:
            while self.streams.free[group] <= until:
                following = self.streams.next_starts(group)
                chosen = next((i for i in following if self.may_begin(i, is_next=i == following[0])), None)
                if chosen is None:
                    break
                self.run_extras(self.extras(chosen) or ())
                self.start(chosen)

    def may_begin(self, i: int, *, is_next: bool) -> bool:
        """Whether `i` may be started before its turn."""
        group = self.dag.nodes[i].group
        if self.state[i] or not (self.streams.follows_at_once[i] or (self.latest.is_last[i] and not self.missing[i])):
            return False
        extras = self.extras(i)
        if extras is None or not self.memory_slack.fits_at(i, self.position):
            return False
        if not self.extras_fit(extras) or not self.memory.is_safe(i) or self.exceeds_limits(group, [i]):
            return False
        if extras and self.now + sum(self.ms[extra] for extra in extras) > self.latest.reach[self.position]:
            return False
        return is_next or self.streams.in_time(group, self.now, [], i, self.ms[i])

    def launch(self, bucket: OpenBucket) -> None:
        """Start the collectives of a bucket as one."""
        group, key = self.dag.nodes[bucket.starts[0]].group, self.keys[bucket.starts[0]]
        if bucket in self.streams.open[group]:
            self.streams.open[group].remove(bucket)
            del self.open[key]
        for i in bucket.starts:
            self.state[i] = UNISSUED
        self.wait_for_flights(group, bucket.starts)
        taken: list[int] = []
        left: list[int] = []
        for i in sorted(bucket.starts):
            if taken and not self.state[i] and not self.memory.is_safe(i):
                left.append(i)
                continue
            self.wait_for_memory(i)
            if not self.state[i]:  # it may have run while memory or flights were waited for
                self.memory_slack.move(i, self.position)
                self.issue(i)
                taken.append(i)
        if not taken:
            return
        alone = sum(self.ms[i] for i in taken)
        price = alone if len(taken) == 1 else checked_price(self.dag, taken, self.price)
        if price > alone + self.rounding:  # not worth it: one after another
            parts, costs = [[i] for i in taken], [self.ms[i] for i in taken]
        else:
            parts, costs = [taken], [price]
        for part, cost in zip(parts, costs, strict=True):
            end = self.streams.free[group] = max(self.now, self.streams.free[group]) + cost
            self.record_start(part, end)
            if len(part) > 1:
                self.buckets.append(part)
                self.prices.append(cost)
        for i in left:
            if i <= self.position and not self.state[i]:
                self.start(i, may_defer=False)


def checked_price(dag: Dag, starts: Sequence[int], price: Callable[[list[int]], float]) -> float:
    """Milliseconds of a fused collective.

    Raises:
        GraphError: the price is negative or not finite.
    """
    ms = price(list(starts))
    if not (math.isfinite(ms) and ms >= 0):
        names = ", ".join(repr(dag.nodes[i].name) for i in starts)
        raise GraphError(dag.nodes[starts[0]].name, f"merged ({names}) it would cost {ms} ms")
    return ms
