"""A schedule run once more, its collectives taken together where that costs no time and no memory.

    dag, a schedule of it ─► replay ─► buckets, an order ─► bucket.merge

The nodes are issued in the schedule's order on the streams of `simulate` (`running`), but for collectives:

1. When a start's turn comes, starts of equal key that follow it on its stream join it if they can: what they depend on
   has run, or is a little cheap compute that is run for them.
2. If more could join soon, the bucket is held back. It is launched when it is full, when it would be late otherwise, or
   when somebody needs one of its members.
3. A stream that would stand still meanwhile is given what was to begin as soon as it is free.

Two rules keep the schedule's makespan. Each node has a time by which it must run so that what follows it in the
schedule is in time, as in the critical path method (J. E. Kelley and M. R. Walker, 1959), and what is taken together
has to end in time for all of its readers and for what comes next on the stream (`spare`). And memory and what is in
flight are guarded: results that are made sooner and arguments that are given back later must fit. No bucket waits for
itself: its members have been started, one after another in a legal order, before any of them is waited for. Pure,
deterministic, near-linear.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence

from spanwise.overlap.bucketing.event_loop import DONE, HELD, UNTOUCHED, Running
from spanwise.overlap.ir.dag import Dag, GraphError, Kind
from spanwise.overlap.ir.simulate import Timeline
from spanwise.overlap.search.slack import Held, Latest, Room, Streams

_COMPUTE = int(Kind.COMPUTE)
# Of a bucket's followers on the stream, how many that cannot join are passed over; how many cheap nodes at most are run
# for a start that still needs them.
_REFUSED, _EXTRAS = 4, 8
# A bucket is full that takes so many times what one more saves: it would hold memory, and keep its readers waiting, for
# next to nothing. For what is little more than a latency there is room in any.
_FULL, _SMALL = 64, 1.5


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What was taken together.

    Attributes:
        order: all nodes, as issued.
        buckets: starts that became one, two or more of each, ascending.
        ms: what each bucket takes.
    """

    order: list[int]
    buckets: list[list[int]]
    ms: list[float]


def replay(
    dag: Dag,
    timeline: Timeline,
    keys: Sequence[Hashable | None],
    price: Callable[[list[int]], float],
    *,
    budget: int,
    slack: float,
    allowed: Mapping[str, tuple[float, float]] | None = None,
) -> Replayed:
    """Run `dag` in its own order, and take starts of equal keys together.

    Args:
        dag: numbered in the order of the schedule.
        timeline: of that order.
        keys: by node; None for what is never taken together.
        price: milliseconds of a merged collective, by its starts.
        budget: bytes that the own order keeps, and the result will.
        slack: share of the time to spare that may be used, between 0 and 1; what is left is for costs that are wrong.
        allowed: by group, how many collectives and how many bytes may be in flight; a bucket is one, with all of its
            bytes. Where there is no other way on, it is exceeded.

    Raises:
        GraphError: a price that is negative or not finite.
        ValueError: the own order exceeds the budget.
    """
    replayed = _Replay(dag, timeline, keys, price, budget, slack, allowed)
    replayed.run()
    return Replayed(replayed.order, replayed.buckets, replayed.prices)


class _Replay(Running):
    """What is held back and taken together while nodes are issued."""

    def __init__(
        self,
        dag: Dag,
        timeline: Timeline,
        keys: Sequence[Hashable | None],
        price: Callable[[list[int]], float],
        budget: int,
        slack: float,
        allowed: Mapping[str, tuple[float, float]] | None,
    ) -> None:
        self.room = Room(dag, timeline, budget)
        super().__init__(dag, Latest(dag, timeline, self.room, slack), budget, allowed)
        self.keys, self.price = keys, price
        self.issued_at = timeline.issued.tolist()
        self.tiny = 1e-9 * timeline.makespan
        self.streams = Streams(timeline, self.late, self.state)
        self.buckets: list[list[int]] = []
        self.prices: list[float] = []
        self.saved: dict[Hashable, float] = {}  # by taking one more together, by key
        self.open: dict[Hashable, Held] = {}
        self.alike: dict[Hashable, list[int]] = {}
        for i in dag.starts:
            if keys[i] is not None:
                self.alike.setdefault(keys[i], []).append(i)

    def start(self, i: int, *, hold: bool = True) -> None:
        """Start `i`, with what can be started with it, or hold it back for more."""
        key, group = self.keys[i], self.dag.nodes[i].group
        bucket = self.open.get(key) if key is not None else None
        if bucket is not None and not (self.has_room(bucket, i) and self.add_if_in_time(bucket, i)):
            self.launch(bucket)
            bucket = None
        if bucket is None:
            # It goes in front of what is held back, unless that cannot wait.
            held = self.streams.held[group]
            while held and not self.streams.in_time(group, self.now, held, i, self.ms[i]):
                self.launch(self.streams.most_urgent(group))
            if self.state[i]:
                return
            bucket = Held([i], self.ms[i], self.late.end[i])
        self.state[i] = HELD
        more = self.add_followers(bucket, i) if self.may_share(i) else None
        is_open = bucket in self.streams.held[group]
        if hold and more is not None and self.is_worth_holding(bucket, more):
            if not is_open:
                self.streams.held[group].append(bucket)
                self.open[key] = bucket
            return
        self.launch(bucket)

    def may_share(self, i: int) -> bool:
        """Whether its wait needs nothing else that has not run, which might depend on the bucket, and all is kept till
        then: what a start gives back would outlive the others' starts."""
        wait = self.wait_of.get(i)
        return self.keys[i] is not None and not self.room.given_back[i] and (wait is None or self.missing[wait] <= 1)

    def add_followers(self, bucket: Held, i: int) -> int | None:
        """Add to the bucket what follows `i`; the first that could not be added, though there is room for it."""
        alike = self.alike[self.keys[i]]
        more: int | None = None
        passed = 0
        for at in range(bisect_right(alike, i), len(alike)):
            other = alike[at]
            if self.state[other]:
                continue
            has_room = self.has_room(bucket, other)
            extras = self.extras(other) if has_room else None
            if (
                extras is not None
                and self.room.fits_at(other, self.place)
                and self.extras_fit(extras)
                and self.add_if_in_time(bucket, other, extras)
            ):
                for extra in extras:
                    self.now += self.ms[extra]
                    self.issue(extra)
            else:
                more = other if has_room and more is None else more
                passed += 1
                if passed == _REFUSED:
                    break
        return more

    def extras(self, i: int) -> list[int] | None:
        """Compute that has to run before `i` can be issued, in a legal order; None if it is much or waits for more."""
        if not self.missing[i]:
            return []
        found: list[int] = []
        seen: set[int] = set()
        cheap = self.late.is_cheap

        def needs(node: int) -> bool:
            for dep in self.dag.nodes[node].deps:
                if self.state[dep] == DONE or dep in seen:
                    continue
                seen.add(dep)
                if self.kinds[dep] != _COMPUTE or not cheap[dep] or len(seen) > _EXTRAS or not needs(dep):
                    return False
                found.append(dep)
            return True

        return found if needs(i) else None

    def extras_fit(self, extras: list[int]) -> bool:
        """Whether there is memory for all of them; only one that takes any is known to leave room for the others."""
        taking = [extra for extra in extras if self.room.allocated[extra]]
        return not taking or (len(taking) == 1 and self.guard.is_safe(taking[0]))

    def saving(self, i: int) -> float:
        """Milliseconds by which a bucket with one more like `i` is shorter than both; that of the two longest."""
        key = self.keys[i]
        if key not in self.saved:
            pair = sorted(self.alike[key], key=self.ms.__getitem__)[-2:]
            saved = sum(self.ms[j] for j in pair) - checked_price(self.dag, pair, self.price)
            self.saved[key] = saved if saved > self.tiny else 0.0  # not what rounding leaves
        return self.saved[key]

    def has_room(self, bucket: Held, i: int) -> bool:
        """Whether the bucket is not full, or `i`, or each of its members, is little more than a latency."""
        saved = self.saving(i)
        if saved == 0.0 or bucket.ms + self.ms[i] - saved <= _FULL * saved:
            return True
        return min(self.ms[i], max(self.ms[j] for j in bucket.starts)) <= _SMALL * saved

    def add_if_in_time(self, bucket: Held, i: int, extras: Sequence[int] = ()) -> bool:
        """Add `i` to the bucket if all stay in time; `extras` run before it."""
        if not self.may_share(i):
            return False
        ready = self.now + sum(self.ms[extra] for extra in extras)
        if extras and ready > self.late.reach[self.place] + self.tiny:
            return False
        group = self.dag.nodes[i].group
        ms = bucket.ms + max(0.0, self.ms[i] - self.saving(i))
        joint = Held([*bucket.starts, i], ms, min(bucket.until, self.late.end[i]))
        if self.is_too_much(group, joint.starts):
            return False
        others = [other for other in self.streams.held[group] if other is not bucket]
        if not self.streams.in_time(group, ready, [*others, joint], i):
            return False
        bucket.starts, bucket.ms, bucket.until = joint.starts, joint.ms, joint.until
        self.state[i] = HELD
        return True

    def is_worth_holding(self, bucket: Held, more: int) -> bool:
        """Whether the start `more` will come in time to join."""
        comes = self.now + self.issued_at[more] - self.issued_at[self.place]
        return max(comes, self.streams.free[self.dag.nodes[more].group]) + bucket.ms + self.ms[more] <= bucket.until

    def launch_held(self, i: int) -> None:
        self.launch(self.open[self.keys[i]])

    def meanwhile(self, until: float) -> None:
        self.launch_urgent(until)
        if until < math.inf:
            self.keep_streams_busy(until)

    def launch_urgent(self, until: float) -> None:
        """Launch the buckets that cannot wait until then."""
        for group, held in self.streams.held.items():
            while held and not self.streams.in_time(group, until, held, max(max(bucket.starts) for bucket in held)):
                self.launch(self.streams.most_urgent(group))

    def keep_streams_busy(self, until: float) -> None:
        """Start what can be, of what was only kept by its stream, where a stream would stand still before `until`."""
        for group in self.dag.groups:
            while self.streams.free[group] <= until:
                ahead = self.streams.ahead(group)
                chosen = next((i for i in ahead if self.may_begin(i, is_next=i == ahead[0])), None)
                if chosen is None:
                    break
                for extra in self.extras(chosen) or ():
                    self.now += self.ms[extra]
                    self.issue(extra)
                self.start(chosen)

    def may_begin(self, i: int, *, is_next: bool) -> bool:
        """Whether `i` may be started before its turn."""
        if self.state[i] or not (self.streams.at_once[i] or (self.late.is_last[i] and not self.missing[i])):
            return False
        extras = self.extras(i)
        if extras is None or not self.room.fits_at(i, self.place):
            return False
        if not self.extras_fit(extras) or not self.guard.is_safe(i) or self.is_full(self.dag.nodes[i].group, [i]):
            return False
        if extras and self.now + sum(self.ms[extra] for extra in extras) > self.late.reach[self.place]:
            return False
        return is_next or self.streams.in_time(self.dag.nodes[i].group, self.now, [], i, self.ms[i])

    def launch(self, bucket: Held) -> None:
        """Start the collectives of a bucket as one."""
        group, key = self.dag.nodes[bucket.starts[0]].group, self.keys[bucket.starts[0]]
        if bucket in self.streams.held[group]:
            self.streams.held[group].remove(bucket)
            del self.open[key]
        for i in bucket.starts:
            self.state[i] = UNTOUCHED
        self.make_way(group, bucket.starts)
        taken: list[int] = []
        left: list[int] = []
        for i in sorted(bucket.starts):
            if taken and not self.state[i] and not self.guard.is_safe(i):
                left.append(i)
                continue
            self.make_room(i)
            if not self.state[i]:  # as it may be, if room or way had to be made
                self.room.move(i, self.place)
                self.issue(i)
                taken.append(i)
        if not taken:
            return
        alone = sum(self.ms[i] for i in taken)
        price = alone if len(taken) == 1 else checked_price(self.dag, taken, self.price)
        if price > alone + self.tiny:  # not worth it: one after another
            parts, costs = [[i] for i in taken], [self.ms[i] for i in taken]
        else:
            parts, costs = [taken], [price]
        for part, cost in zip(parts, costs, strict=True):
            end = self.streams.free[group] = max(self.now, self.streams.free[group]) + cost
            self.is_under_way(part, end)
            if len(part) > 1:
                self.buckets.append(part)
                self.prices.append(cost)
        for i in left:
            if i <= self.place and not self.state[i]:
                self.start(i, hold=False)


def checked_price(dag: Dag, starts: Sequence[int], price: Callable[[list[int]], float]) -> float:
    """Milliseconds of a merged collective; ``GraphError`` for what is negative or not finite."""
    ms = price(list(starts))
    if not (math.isfinite(ms) and ms >= 0):
        names = ", ".join(repr(dag.nodes[i].name) for i in starts)
        raise GraphError(dag.nodes[starts[0]].name, f"merged ({names}) it would cost {ms} ms")
    return ms
