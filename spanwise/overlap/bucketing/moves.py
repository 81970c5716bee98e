"""Moves that may make a schedule shorter: collectives that are worth merging, buckets that are worth cutting in two.

Asked by `bucket`, which tries them. A collective counts if it is on the chain that the makespan is made of: compute
stood still for it, or it kept the stream from one for which compute did. Pure, deterministic, linear but for buckets.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence

from spanwise.overlap.ir.dag import Dag, Kind
from spanwise.overlap.ir.simulate import Timeline

_APART = 3  # how far from one another, among those of their key, collectives that are merged may be
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class Move:
    """Another way to run some collectives.

    Attributes:
        units: their starts in the timeline's dag.
        buckets: what takes their place, by the members of `units`.
    """

    units: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]


def moves(
    timeline: Timeline,
    members: Sequence[tuple[int, ...]],
    keys: Sequence[Hashable | None],
    saved: Callable[[Sequence[int]], float],
) -> list[Move]:
    """Collectives of a key that can be merged, what saves most and then the nearest first; then cuts of buckets.

    Args:
        timeline: of a dag with or without buckets.
        members: what its nodes stand for.
        keys: by node of the timeline's dag; only collectives of equal key are merged.
        saved: milliseconds that become fewer when two collectives of a key, by their starts, are merged.
    """
    chain, needed = critical(timeline), _needed(timeline.dag)
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
        for apart in range(1, _APART + 1):
            for first, second in zip(starts, starts[apart:], strict=False):
                waits = needed[first] >> number[second] | needed[second] >> number[first]
                if (first in chain or second in chain) and not waits & 1:
                    together = tuple(sorted(members[first] + members[second]))
                    merges.append((-saves, apart, Move((first, second), (together,))))
    found = [move for *_, move in sorted(merges, key=lambda merge: merge[:2])]
    for start in sorted(chain):
        of_start = members[start]
        found += [Move((start,), (of_start[:cut], of_start[cut:])) for cut in range(1, len(of_start))]
    return found


def batched(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Batches of moves that can all be made at once, as they come; and then their halves, as in group testing."""
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


def critical(timeline: Timeline) -> set[int]:
    """Starts of the collectives on the chain that the makespan is made of, from its end backward.

    It goes through the compute stream to the last time that this stood still, through the collective that it waited
    for to those before it on its stream, for as long as they kept it waiting, and on from where the first was started.
    """
    dag, begin, end, issued = timeline.dag, timeline.begin.tolist(), timeline.end.tolist(), timeline.issued.tolist()
    tiny = _ROUNDING * timeline.makespan
    before: dict[int, int] = {}  # on the same stream
    last: dict[str, int] = {}
    waits: list[int] = []  # at which compute stood still
    for i in timeline.order.tolist():
        node = dag.nodes[i]
        if node.kind == Kind.START:
            before[i] = last.get(node.group, -1)
            last[node.group] = i
        elif node.kind == Kind.WAIT and end[i] - begin[i] > tiny:
            waits.append(i)
    now = timeline.makespan
    found: set[int] = set()
    start = next((i for i in last.values() if end[i] >= now - tiny), -1)
    while True:
        if start < 0:
            while waits and end[waits[-1]] > now + tiny:
                waits.pop()
            if not waits:
                return found
            start = dag.nodes[waits.pop()].start
        found.add(start)
        now = issued[start]
        start = before[start] if begin[start] > now + tiny else -1


def _needed(dag: Dag) -> dict[int, int]:
    """Of each start, the collectives whose wait it depends on, as bits by their numbers among the starts."""
    number = {start: at for at, start in enumerate(dag.starts)}
    found: list[int] = []
    for node, deps in zip(dag.nodes, dag.unique_deps, strict=True):
        bits = 1 << number[node.start] if node.kind == Kind.WAIT else 0
        for dep in deps:
            bits |= found[dep]
        found.append(bits)
    return {start: found[start] for start in dag.starts}
