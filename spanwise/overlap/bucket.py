"""Buckets: several collectives of a `Dag` as one, so that latency is paid once and fewer kernels are launched.

`merge` makes of a dag and the buckets that were chosen the dag of merged collectives, in a legal order; `bucket` has a
schedule's buckets chosen by `replay`, and what is merged scheduled again.

    dag, schedule ─► bucket ─► merged dag, its schedule ─► emit
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from spanwise.overlap.dag import Dag, GraphError, Kind, Node, Storage
from spanwise.overlap.replay import replay
from spanwise.overlap.schedule import Schedule, schedule
from spanwise.overlap.simulate import simulate

# Shares of the time to spare that buckets may use; the next one is tried where a makespan comes out longer.
_SLACKS = (0.5, 0.1)
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True, eq=False)
class Merged:
    """A dag whose nodes stand for nodes of another one.

    Attributes:
        dag: numbered in a legal order.
        members: of each node of `dag`, the nodes of the original that it stands for, ascending: several starts for a
            merged start, their waits for a merged wait, one for any other. Each node of the original is there once.
    """

    dag: Dag
    members: tuple[tuple[int, ...], ...]

    @property
    def launches(self) -> int:
        """How many collectives are started."""
        return len(self.dag.starts)


def unmerged(dag: Dag) -> Merged:
    """`dag` without buckets."""
    return Merged(dag, tuple((i,) for i in range(len(dag))))


def merge(
    dag: Dag,
    buckets: Sequence[Sequence[int]],
    ms: Sequence[float],
    order: Sequence[int] | None = None,
    *,
    late: bool = False,
) -> Merged:
    """The dag in which the collectives of each bucket are one: one start, one wait, the union of their dependencies.

    Args:
        buckets: starts that become one, by number; no start in two of them, those of a bucket in one group.
        ms: of each bucket, milliseconds of the merged collective.
        order: legal order of `dag`'s nodes which that of the merged dag follows; default: its own. A merged collective
            is started where the first of its members was, and what the others depend on is moved in front of it.
        late: start it where the last of its members was instead, unless somebody waits for it before.

    Raises:
        GraphError: two nodes would wait for one another; names a member of the bucket that must not be.
        ValueError: buckets that are no sets of starts of one group, or not as many costs.
    """
    if len(ms) != len(buckets):
        raise ValueError(f"expected milliseconds of {len(buckets)} buckets, got {len(ms)}")
    if order is not None:
        dag.check_order(order)
    members = _members(dag, buckets, range(len(dag)) if order is None else order)
    unit = [0] * len(dag)
    for u, of_unit in enumerate(members):
        for i in of_unit:
            unit[i] = u
    deps: list[set[int]] = []
    for u, of_unit in enumerate(members):
        found = {unit[dep] for i in of_unit for dep in dag.nodes[i].deps}
        if u in found:
            raise GraphError(
                dag.nodes[of_unit[-1]].name, f"it depends on a member of its bucket: {_names(dag, of_unit)}"
            )
        deps.append(found)
    walk: Sequence[int] = range(len(members))
    if late:
        last: dict[int, int] = {}
        for place, i in enumerate(range(len(dag)) if order is None else order):
            if dag.nodes[i].kind == Kind.START or unit[i] not in last:
                last[unit[i]] = place
        walk = sorted(walk, key=last.__getitem__)
    numbering = _legal(dag, members, deps, walk)

    number = [0] * len(members)
    for new, u in enumerate(numbering):
        number[u] = new
    merged_ms = {unit[bucket[0]]: cost for bucket, cost in zip(buckets, ms, strict=True)}
    nodes = []
    for u in numbering:
        of_unit = members[u]
        node = dag.nodes[of_unit[0]]
        name = node.name if len(of_unit) == 1 else f"{node.name} and {len(of_unit) - 1} more"
        start = number[unit[node.start]] if node.kind == Kind.WAIT else -1
        cost = merged_ms.get(u, node.ms)
        nodes.append(Node(name, node.kind, cost, tuple(sorted(number[dep] for dep in deps[u])), node.group, start))
    return Merged(Dag(tuple(nodes), _storages(dag, unit, number)), tuple(members[u] for u in numbering))


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
) -> tuple[Merged, Schedule]:
    """Merge collectives of equal keys where the makespan gains, or stays as it is with fewer launches.

    Args:
        found: schedule of `dag`; its budget holds for what is returned, and its makespan is not exceeded.
        keys: by node, what the starts of a bucket must have in common; None for those that must not be merged.
        merged_ms: milliseconds of the collective that starts, by number, become.
        multiplier, in_flight, in_flight_bytes, effort: as in `schedule`, of the new schedule. The order that is there
            is that in which the buckets were found; a bucket is one collective in flight.

    Returns:
        The merged dag and a schedule of it; without a bucket, `dag` itself and `found`.

    Raises:
        GraphError: `merged_ms` is negative or not finite; names the first start.
        ValueError: keys of another dag.
    """
    if len(keys) != len(dag):
        raise ValueError(f"expected a key or None for each of {len(dag)} nodes, got {len(keys)}")
    options: dict[str, Any] = {"in_flight": in_flight, "in_flight_bytes": in_flight_bytes, "multiplier": multiplier}
    if effort is not None:
        options["effort"] = effort
    limit = found.timeline.makespan * (1 + _ROUNDING)
    order = found.order
    in_order = merge(_slower(dag, multiplier), [], [], order).dag
    timeline = simulate(in_order)
    for slack in _SLACKS:
        replayed = replay(
            in_order,
            timeline,
            [keys[i] for i in order],
            lambda starts: multiplier * merged_ms([order[i] for i in starts]),
            budget=found.budget,
            slack=slack,
        )
        if not replayed.buckets:
            break
        buckets = [[order[i] for i in starts] for starts in replayed.buckets]
        ms = [cost / multiplier for cost in replayed.ms]
        merged = merge(dag, buckets, ms, [order[i] for i in replayed.order], late=True)
        own = simulate(merged.dag)
        if own.makespan > limit or own.peak_bytes > found.budget:
            continue
        again = schedule(merged.dag, budget=found.budget, **options)
        if again.timeline.makespan > limit:
            again = dataclasses.replace(again, timeline=own)
        return merged, again
    return unmerged(dag), found


def _slower(dag: Dag, multiplier: float) -> Dag:
    if multiplier == 1.0:
        return dag
    nodes = (dataclasses.replace(n, ms=n.ms * multiplier) if n.kind == Kind.START else n for n in dag.nodes)
    return Dag(tuple(nodes), dag.storages)


def _names(dag: Dag, nodes: Sequence[int]) -> str:
    return ", ".join(repr(dag.nodes[i].name) for i in nodes)


def _members(dag: Dag, buckets: Sequence[Sequence[int]], order: Sequence[int]) -> list[tuple[int, ...]]:
    """What becomes one node, by the place of its first member in `order`; members ascending."""
    waits = {node.start: i for i, node in enumerate(dag.nodes) if node.kind == Kind.WAIT}
    together: dict[int, tuple[int, ...]] = {}
    for bucket in buckets:
        starts = tuple(sorted(bucket))
        groups = {dag.nodes[i].group if 0 <= i < len(dag) else "" for i in starts}
        if len(groups) != 1 or "" in groups or len(set(starts)) < len(starts):
            raise ValueError(f"a bucket has starts of one process group, each once, got nodes {list(bucket)}")
        for i in starts:
            if i in together:
                raise GraphError(dag.nodes[i].name, "it is in two buckets")
            together[i] = starts
        ends = tuple(sorted(waits[i] for i in starts if i in waits))
        together.update(dict.fromkeys(ends, ends))
    found: dict[tuple[int, ...], None] = {}
    for i in order:
        found.setdefault(together.get(i, (i,)))
    return list(found)


def _legal(dag: Dag, members: Sequence[tuple[int, ...]], deps: Sequence[set[int]], walk: Sequence[int]) -> list[int]:
    """Merged nodes as in `walk`, each after all that it depends on: what is missing is moved in front of it."""
    found: list[int] = []
    done, under_way = bytearray(len(members)), bytearray(len(members))
    for first in walk:
        path = [first] if not done[first] else []
        while path:
            u = path[-1]
            missing = sorted(dep for dep in deps[u] if not done[dep])
            if not missing:
                path.pop()
                under_way[u] = False
                done[u] = True
                found.append(u)
                continue
            under_way[u] = True
            if under_way[missing[0]]:
                cycle = path[path.index(missing[0]) :]
                bad = next(u for u in cycle if len(members[u]) > 1)
                text = f"no bucket of {_names(dag, members[bad])}: they would wait for one another"
                through = _names(dag, [members[u][0] for u in cycle if len(members[u]) == 1][:3])
                raise GraphError(dag.nodes[members[bad][0]].name, text + (f" through {through}" if through else ""))
            path.append(missing[0])
    return found


def _storages(dag: Dag, unit: Sequence[int], number: Sequence[int]) -> tuple[Storage, ...]:
    found = []
    for storage in dag.storages:
        maker = number[unit[storage.maker]]
        users = tuple(sorted({number[unit[user]] for user in storage.users}))
        # A user that does not depend on the maker stands for the end of all, which may be another node now.
        kept = storage.kept or any(user < maker for user in users)
        found.append(Storage(storage.num_bytes, maker, tuple(u for u in users if u >= maker), kept))
    return tuple(found)
