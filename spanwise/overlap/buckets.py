"""Buckets: several collectives of a `Dag` as one, so that latency is paid once and fewer kernels are launched.

    dag, schedule ─► bucket ─► merged dag, its schedule ─► fx.emit

Neighbours on a stream are merged, many pairs at once. A batch that makes the step longer is halved until the pairs at
fault are found (group testing). Then the merged dag is scheduled again, and merging goes on from its order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from spanwise.overlap.dag import Dag, GraphError, positions
from spanwise.overlap.engine import simulate
from spanwise.overlap.quotient import Quotient, alone, joined, split_units, units_of
from spanwise.overlap.scheduler import Ints, ListScheduler, Run
from spanwise.overlap.search import FEWEST, Schedule, schedule

Bucket = tuple[int, ...]
_Price = Callable[[list[int]], float]

#: Shares of the makespan that one bucket may take. Short buckets leave slow links enough launches to overlap with.
_LONGEST = (math.inf, 1 / 32)
#: Of a makespan: what costs more, such as shorter buckets, which are more launches, must make it this much shorter.
WORTH = 0.995
_ROUNDING = 1e-9


def bucket(
    dag: Dag,
    found: Schedule,
    keys: Sequence[Hashable | None],
    merged_ms: _Price,
    *,
    multiplier: float = 1.0,
    effort: int | None = None,
    quick: bool = False,
) -> tuple[Quotient, Schedule]:
    """Merge collectives of equal keys where that shortens the makespan, or keeps it and saves launches.

    Args:
        found: schedule of `dag`. The result keeps its budget and does not exceed its makespan.
        keys: by node; the starts of a bucket have equal keys. None for a start that must not be merged.
        merged_ms: milliseconds of the collective that some starts, by number, become.
        multiplier, effort: as in `schedule`, for the new schedule; effort at most `FEWEST`, as it starts well.
        quick: one round, to compare graphs.

    Returns:
        The merged dag and a schedule of it; if no bucket pays, `dag` itself and `found`.

    Raises:
        GraphError: `merged_ms` is negative or not finite; names the first start.

    Examples:
        >>> from spanwise.overlap.dag import Kind, Node
        >>> nodes = [Node(name, Kind.START, 1.0, group="dp") for name in "ab"]
        >>> nodes += [Node(f"wait {i}", Kind.WAIT, deps=(i,), start=i) for i in (0, 1)]
        >>> dag = Dag((*nodes, Node("sum", Kind.COMPUTE, 1.0, (2, 3))))
        >>> merged, found = bucket(dag, schedule(dag), ["dp", "dp", None, None, None], lambda starts: 1.5)
        >>> len(merged.dag.starts), found.timeline.makespan
        (1, 2.5)
    """
    merger = _Merger(dag, keys, merged_ms, found.budget)
    effort = FEWEST if effort is None else min(FEWEST, effort)  # it starts from a good order

    def scheduled(buckets: list[Bucket], order: Ints) -> tuple[Quotient, Schedule]:
        quotient = merger.quotient(buckets, order)
        own = simulate(quotient.dag)
        return quotient, schedule(quotient.dag, budget=found.budget, before=own, effort=effort, multiplier=multiplier)

    best: tuple[Quotient, Schedule] = alone(dag), found
    for share in _LONGEST[: 1 if quick else None]:
        if share < math.inf and best[1] is found:
            break
        buckets: list[Bucket] = [(i,) for i in dag.starts]
        longest, order, now = share * found.timeline.makespan, found.timeline.order, (alone(dag), found)
        new, order = merger.merged(buckets, order, longest, found.timeline.makespan)
        while new != buckets:
            buckets, now = new, scheduled(new, order)
            if not quick:
                order = np.array(now[0].expand(now[1].order), np.int64)
                new, order = merger.merged(buckets, order, longest, now[1].timeline.makespan)
        if best[1] is found or now[1].timeline.makespan < WORTH * best[1].timeline.makespan:
            best = now
    return best


class _Merger:
    """Merges neighbours while an order with them keeps its makespan and all limits."""

    def __init__(self, dag: Dag, keys: Sequence[Hashable | None], price: _Price, budget: int) -> None:
        self.dag, self.keys, self.price, self.budget = dag, keys, price, budget
        self.engine = ListScheduler(dag)
        self.known: dict[Bucket, float] = {(i,): dag.nodes[i].ms for i in dag.starts}

    def ms(self, bucket: Bucket) -> float:
        """Milliseconds of a bucket; ``GraphError`` if its price is no number of them."""
        if bucket not in self.known:
            ms = self.price(list(bucket))
            if not 0 <= ms < math.inf:
                name = self.dag.nodes[bucket[0]].name
                raise GraphError(name, f"merged with {len(bucket) - 1} more, it would cost {ms} ms")
            self.known[bucket] = ms
        return self.known[bucket]

    def merged(self, buckets: list[Bucket], order: Ints, longest: float, limit: float) -> tuple[list[Bucket], Ints]:
        """More merges of `buckets` that take no longer than `limit` milliseconds, and the order with them."""
        refused: set[tuple[Bucket, Bucket]] = set()
        changed = True
        while changed:
            changed = False
            for odd in (0, 1):
                todo = [self.pairs(buckets, order, odd)]
                while todo:
                    pairs = [pair for pair in todo.pop() if pair not in refused and self.pays(*pair, longest)]
                    if not pairs:
                        continue
                    gone = {one for pair in pairs for one in pair}
                    new = [one for one in buckets if one not in gone]
                    new += [tuple(sorted(a + b)) for a, b in pairs]
                    run = self.run(new, order, limit * (1 + _ROUNDING))
                    if run is not None and run.makespan <= limit * (1 + _ROUNDING):
                        buckets, order, changed = new, run.order, True
                        limit = min(limit, run.makespan)
                    elif len(pairs) > 1:
                        half = len(pairs) // 2
                        todo += [pairs[half:], pairs[:half]]
                    else:
                        refused.add(pairs[0])
        return buckets, order

    def pairs(self, buckets: Sequence[Bucket], order: Ints, first: int) -> list[tuple[Bucket, Bucket]]:
        """Every second pair of neighbours of a key in the order."""
        place, alike = positions(order), dict[Hashable, list[Bucket]]()
        for one in sorted(buckets, key=lambda one: int(place[one[0]])):
            if self.keys[one[0]] is not None and one[0] in self.dag.wait_of:
                alike.setdefault(self.keys[one[0]], []).append(one)
        return [pair for of in alike.values() for pair in zip(of[first::2], of[first + 1 :: 2], strict=False)]

    def pays(self, one: Bucket, other: Bucket, longest: float) -> bool:
        """Whether two buckets take no longer together than one after the other, nor longer than `longest`."""
        together = self.ms(tuple(sorted(one + other)))
        return together <= longest and together <= (self.ms(one) + self.ms(other)) * (1 + _ROUNDING)

    def run(self, buckets: Sequence[Bucket], order: Ints, limit: float = 0.0) -> Run | None:
        """The order with these buckets, each where its last member is, or else, if it exceeds `limit`, its first.

        Its wait is where the first one was, which frees memory and flights, or at last where the last one was, which
        stalls compute least. The members of a bucket are side by side, and the first of them takes all the time.
        """
        joint, best = [one for one in buckets if len(one) > 1], None
        unit = units_of(self.dag, joint)
        ms = np.where(unit == np.arange(len(unit)), self.dag.ms, 0.0)
        ms[[one[0] for one in joint]] = [self.ms(one) for one in joint]
        for late_starts, late_waits in ((True, False), (False, False), (True, True)):
            found = self.engine.in_units(order, unit, late_starts=late_starts, late_waits=late_waits)
            if len(found) < len(order):
                return None
            run = self.engine.replay(found, ms=ms)
            if run.peak <= self.budget and run.makespan < (best.makespan if best else math.inf):
                best = run
            if best is run and run.makespan <= limit:
                break
        return best

    def quotient(self, buckets: Sequence[Bucket], order: Ints) -> Quotient:
        """The merged dag of an order in which the members of each bucket are side by side."""
        joint = [one for one in buckets if len(one) > 1]
        return joined(self.dag, split_units(order, units_of(self.dag, joint)), {one[0]: self.ms(one) for one in joint})
