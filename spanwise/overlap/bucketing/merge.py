"""Fused collectives: the dag in which several collectives are one.

dag, buckets, an order ─► merge ─► merged dag
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from spanwise.overlap.ir.dag import Dag, GraphError, Kind, Node, Storage
from spanwise.overlap.ir.order import positions


@dataclasses.dataclass(frozen=True)
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
        """Number of collectives that are started."""
        return len(self.dag.starts)

    @property
    def longest_bucket(self) -> float:
        """Milliseconds of the longest merged collective."""
        return max((self.dag.nodes[i].ms for i in self.dag.starts if len(self.members[i]) > 1), default=0.0)


def without_buckets(dag: Dag) -> Merged:
    """`dag` as it is, each node standing for itself."""
    return Merged(dag, tuple((i,) for i in range(len(dag))))


def merge(
    dag: Dag,
    buckets: Sequence[Sequence[int]],
    ms: Sequence[float],
    order: Sequence[int] | None = None,
    *,
    late: bool = False,
) -> Merged:
    """Make the collectives of each bucket one: one start, one wait, the union of their dependencies.

    Args:
        buckets: starts that become one, by number: of one group, and each in one bucket only.
        ms: milliseconds of each bucket.
        order: a legal order of `dag`'s nodes, which the merged dag follows; default: its own. A merged collective
            starts where the first of its members did; dependencies of the others are moved in front of it.
        late: start it where the last of its members did instead, unless its wait comes before.

    Raises:
        GraphError: two nodes would wait for one another; names a member of the bucket at fault.
        ValueError: a bucket is no set of starts of one group, or the number of costs is wrong.

    Examples:
        >>> starts = tuple(Node(name, Kind.START, 2.0, group="dp") for name in "ab")
        >>> merged = merge(Dag((*starts, Node("wait", Kind.WAIT, deps=(0,), start=0))), [[0, 1]], [3.0])
        >>> merged.members, merged.dag.nodes[0].ms
        (((0, 1), (2,)), 3.0)
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
    given = dag.nodes
    deps = [
        [unit[dep] for dep in given[of_unit[0]].deps]
        if len(of_unit) == 1
        else [unit[dep] for i in of_unit for dep in given[i].deps]
        for of_unit in members
    ]
    for u, of_unit in enumerate(members):
        if len(of_unit) > 1 and u in deps[u]:
            raise GraphError(
                dag.nodes[of_unit[-1]].name, f"it depends on a member of its bucket: {_names(dag, of_unit)}"
            )
    walk: Sequence[int] = range(len(members))
    if late:
        last: dict[int, int] = {}
        for place, i in enumerate(range(len(dag)) if order is None else order):
            if dag.nodes[i].kind == Kind.START or unit[i] not in last:
                last[unit[i]] = place
        walk = sorted(walk, key=last.__getitem__)
    numbering = _with_dependencies_first(dag, members, deps, walk)

    place = positions(numbering).tolist()  # of each unit
    number = [place[u] for u in unit]
    merged_ms = {unit[bucket[0]]: cost for bucket, cost in zip(buckets, ms, strict=True)}
    nodes = []
    for u in numbering:
        of_unit, of_deps = members[u], deps[u]
        node = given[of_unit[0]]
        name = node.name if len(of_unit) == 1 else f"{node.name} and {len(of_unit) - 1} more"
        start = number[node.start] if node.start >= 0 else -1
        new_deps = (place[of_deps[0]],) if len(of_deps) == 1 else tuple(sorted({place[dep] for dep in of_deps}))
        nodes.append(Node(name, node.kind, merged_ms.get(u, node.ms), new_deps, node.group, start))
    return Merged(Dag(tuple(nodes), _storages(dag, number)), tuple(members[u] for u in numbering))


def renumbered(dag: Dag, order: Sequence[int], multiplier: float) -> Dag:
    """`dag` numbered by a legal order of it, its collectives slower by the multiplier."""
    position = positions(order).tolist()
    nodes = []
    for i in order:
        node = dag.nodes[i]
        deps, start = tuple([position[dep] for dep in node.deps]), position[node.start] if node.start >= 0 else -1
        ms = node.ms * multiplier if node.kind == Kind.START else node.ms
        nodes.append(Node(node.name, node.kind, ms, deps, node.group, start))
    return Dag(tuple(nodes), _storages(dag, position))


def _names(dag: Dag, nodes: Sequence[int]) -> str:
    return ", ".join(repr(dag.nodes[i].name) for i in nodes)


def _members(dag: Dag, buckets: Sequence[Sequence[int]], order: Sequence[int]) -> list[tuple[int, ...]]:
    """Nodes that become one, in the order of their first members in `order`; members ascending."""
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
        ends = tuple(sorted(dag.wait_of[i] for i in starts if i in dag.wait_of))
        together.update(dict.fromkeys(ends, ends))
    found: dict[tuple[int, ...], None] = {}
    for i in order:
        found.setdefault(together.get(i, (i,)))
    return list(found)


def _with_dependencies_first(
    dag: Dag, members: Sequence[tuple[int, ...]], deps: Sequence[Sequence[int]], walk: Sequence[int]
) -> list[int]:
    """Merged nodes in the order of `walk`, with missing dependencies moved in front of each."""
    found: list[int] = []
    done, on_path = bytearray(len(members)), bytearray(len(members))
    for first in walk:
        path = [first] if not done[first] else []
        while path:
            u = path[-1]
            left = [dep for dep in deps[u] if not done[dep]]
            if not left:
                path.pop()
                on_path[u] = False
                done[u] = True
                found.append(u)
                continue
            on_path[u] = True
            missing = min(left)
            if on_path[missing]:
                cycle = path[path.index(missing) :]
                bad = next(u for u in cycle if len(members[u]) > 1)
                text = f"no bucket of {_names(dag, members[bad])}: they would wait for one another"
                through = _names(dag, [members[u][0] for u in cycle if len(members[u]) == 1][:3])
                raise GraphError(dag.nodes[members[bad][0]].name, text + (f" through {through}" if through else ""))
            path.append(missing)
    return found


def _storages(dag: Dag, number: Sequence[int]) -> tuple[Storage, ...]:
    """Storages by the new number of each node."""
    found = []
    for storage in dag.storages:
        maker = number[storage.maker] if storage.maker >= 0 else -1
        users = [number[user] for user in storage.users]
        kept = storage.kept
        if users and min(users) < maker:
            # A user that does not depend on the maker stands for the end of the graph, which may be another node now.
            kept, users = True, [user for user in users if user >= maker]
        found.append(Storage(storage.num_bytes, maker, tuple(users), kept))
    return tuple(found)
