"""Moves that may shorten a schedule: collectives to merge, buckets to cut in two; `bucket` tries them.

Only collectives on the critical chain count: compute waited for them, or they kept the stream from one for which
compute waited.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence

from spanwise.overlap.ir.critical_path import waits_before
from spanwise.overlap.ir.dag import Kind
from spanwise.overlap.ir.simulate import Timeline

# Between collectives to merge, among those of their key. With 1, test_of_all_sets_of_buckets_the_best_is_found fails;
# the zoo does not need more.
_MAX_DISTANCE = 3
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class Move:
    """Another way to run some collectives.

    Attributes:
        units: their starts in the timeline's dag.
        buckets: the buckets that replace them, of the members of `units`.
    """

    units: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]


def candidate_moves(
    timeline: Timeline,
    members: Sequence[tuple[int, ...]],
    keys: Sequence[Hashable | None],
    saved: Callable[[Sequence[int]], float],
) -> list[Move]:
    """Merges of two collectives of a key, those that save most and then the nearest first; then cuts of buckets.

    Args:
        timeline: of a dag with or without buckets.
        members: the original nodes that each of its nodes stands for.
        keys: by node of the timeline's dag; only collectives of equal key are merged.
        saved: milliseconds that merging two collectives, by their starts, saves.
    """
    chain, needed = critical_collectives(timeline), waits_before(timeline.dag)
    number = {start: at for at, start in enumerate(timeline.dag.starts)}
    alike: dict[Hashable, list[int]] = {}
    for start in sorted(timeline.dag.starts, key=lambda i: (timeline.begin[i], timeline.issued[i], i)):
        if keys[start] is not None:
            alike.setdefault(keys[start], []).append(start)
    merges: list[tuple[float, int, Move]] = []
    for starts in alike.values():
        saves = saved(starts[:2]) if len(starts) > 1 else 0.0
        if saves <= 0:
            continue
        for distance in range(1, _MAX_DISTANCE + 1):
            for first, second in zip(starts, starts[distance:], strict=False):
                waits = needed[first] >> number[second] | needed[second] >> number[first]
                if (first in chain or second in chain) and not waits & 1:
                    together = tuple(sorted(members[first] + members[second]))
                    merges.append((-saves, distance, Move((first, second), (together,))))
    found = [move for *_, move in sorted(merges, key=lambda merge: merge[:2])]
    for start in sorted(chain):
        of_start = members[start]
        found += [Move((start,), (of_start[:cut], of_start[cut:])) for cut in range(1, len(of_start))]
    return found


def in_batches(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Batches of moves that can all be made at once, in order; then their halves, as in group testing."""
    batches: collections.deque[list[Move]] = collections.deque()
    left = list(moves)
    while left:
        moved: set[int] = set()
        batch, rest = [], []
        for move in left:
            if moved.isdisjoint(move.units):
                moved.update(move.units)
                batch.append(move)
            else:
                rest.append(move)
        batches.append(batch)
        left = rest
    while batches:
        batch = batches.popleft()
        yield batch
        half = len(batch) // 2
        batches += [part for part in (batch[:half], batch[half:]) if half]


def critical_collectives(timeline: Timeline) -> set[int]:
    """Starts of the collectives on the critical chain of the makespan.

    The chain runs backward: along the compute stream to the last time at which it waited, to the collective it waited
    for, along the stream of that for as long as collectives were queued, and on from where the first was started.
    """
    dag, begin, end, issued = timeline.dag, timeline.begin.tolist(), timeline.end.tolist(), timeline.issued.tolist()
    rounding = _ROUNDING * timeline.makespan
    before: dict[int, int] = {}  # on the same stream
    last: dict[str, int] = {}
    waits: list[int] = []  # at which compute waited
    for i in timeline.order.tolist():
        node = dag.nodes[i]
        if node.kind == Kind.START:
            before[i] = last.get(node.group, -1)
            last[node.group] = i
        elif node.kind == Kind.WAIT and end[i] - begin[i] > rounding:
            waits.append(i)
    now = timeline.makespan
    found: set[int] = set()
    start = next((i for i in last.values() if end[i] >= now - rounding), -1)
    while True:
        if start < 0:
            while waits and end[waits[-1]] > now + rounding:
                waits.pop()
            if not waits:
                return found
            start = dag.nodes[waits.pop()].start
        found.add(start)
        now = issued[start]
        start = before[start] if begin[start] > now + rounding else -1
