"""Fused collectives: the dag in which several collectives are one.

dag, buckets, an order ─► merge ─► merged dag
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from spanwise.overlap.ir.dag import Dag, GraphError, Kind, Node, Storage
from spanwise.overlap.ir.order import positions

_COMPUTE, _START = int(Kind.COMPUTE), int(Kind.START)


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
    if order is not None:
        dag.check_order(order)
    return MergePlan(dag, buckets, ms, order, late=late).merged()


class MergePlan:
    """Buckets, and an order with them, before the merged dag is made: most are given up for their makespan.

    Args, errors: as of `merge`, but a legal order is taken as one.

    Attributes:
        order: of each node of the merged dag, its smallest member.
    """

    def __init__(
        self,
        dag: Dag,
        buckets: Sequence[Sequence[int]],
        ms: Sequence[float],
        order: Sequence[int] | None = None,
        *,
        late: bool = False,
    ) -> None:
        if len(ms) != len(buckets):
            raise ValueError(f"expected milliseconds of {len(buckets)} buckets, got {len(ms)}")
        self.dag = dag
        self._members, self._unit = _members(dag, buckets)
        self._ms = {min(bucket): cost for bucket, cost in zip(buckets, ms, strict=True)}
        # Dependencies of merged nodes; the others keep theirs.
        self._deps = {u: [dep for i in of_unit for dep in dag.nodes[i].deps] for u, of_unit in self._members.items()}
        for u, of_unit in self._members.items():
            if any(self._unit.get(dep) == u for dep in self._deps[u]):
                text = f"it depends on a member of its bucket: {_names(dag, of_unit)}"
                raise GraphError(dag.nodes[of_unit[-1]].name, text)
        self.order = self._numbering(range(len(dag)) if order is None else order, late)

    def _numbering(self, order: Sequence[int], late: bool) -> list[int]:
        """Merged nodes in the order of their first members (`late`: the last starts), after their dependencies."""
        nodes, members, unit = self.dag.nodes, self._members, self._unit
        place = positions(order).tolist() if members else []
        first = place.copy()
        for u, of_unit in members.items():
            first[u] = min([place[i] for i in of_unit])
        done, passed = bytearray(len(order)), bytearray(len(order))
        for u, of_unit in members.items() if late else ():
            if nodes[u].kind == Kind.START:
                for i in of_unit:
                    passed[i] = True
                passed[max(of_unit, key=place.__getitem__)] = False
        found: list[int] = []
        for i in order:
            if done[i] or passed[i]:
                continue
            if i not in unit:
                for dep in nodes[i].deps:
                    if not done[dep]:
                        break
                else:
                    done[i] = True
                    found.append(i)
                    continue
            self._run_with_dependencies(unit.get(i, i), first, done, found)
        return found

    def _run_with_dependencies(self, u: int, place: Sequence[int], done: bytearray, found: list[int]) -> None:
        """Add a merged node after the dependencies that are missing, the first by `place` first."""
        unit, members = self._unit, self._members

        def missing(u: int) -> list[int]:
            deps = self._deps.get(u, self.dag.nodes[u].deps)
            return sorted({unit.get(dep, dep) for dep in deps if not done[dep]}, key=place.__getitem__, reverse=True)

        path, left = [u], {u: missing(u)}  # of each node on the path, its missing dependencies, the first one last
        while path:
            u = path[-1]
            while left[u] and done[left[u][-1]]:
                left[u].pop()
            if not left[u]:
                del left[path.pop()]
                for i in members.get(u, (u,)):
                    done[i] = True
                found.append(u)
                continue
            dep = left[u][-1]
            if dep in left:
                raise self._cycle(path[path.index(dep) :])
            path.append(dep)
            left[dep] = missing(dep)

    def _cycle(self, cycle: Sequence[int]) -> GraphError:
        """The error of merged nodes that would wait for one another."""
        dag, of_units = self.dag, [self._members.get(u, (u,)) for u in cycle]
        bad = next(of_unit for of_unit in of_units if len(of_unit) > 1)
        text = f"no bucket of {_names(dag, bad)}: they would wait for one another"
        through = _names(dag, [of_unit[0] for of_unit in of_units if len(of_unit) == 1][:3])
        return GraphError(dag.nodes[bad[0]].name, text + (f" through {through}" if through else ""))

    @functools.cached_property
    def makespan(self) -> float:
        """Milliseconds of the merged dag in its own order, as `simulate` finds."""
        nodes, kinds, ms = self.dag.nodes, self.dag.kinds.tolist(), self.dag.ms.tolist()
        free, end = dict.fromkeys(self.dag.groups, 0.0), [0.0] * len(nodes)
        now = 0.0
        for u in self.order:
            if kinds[u] == _COMPUTE:
                now += ms[u]
            elif kinds[u] == _START:
                group = nodes[u].group
                end[u] = free[group] = max(now, free[group]) + self._ms.get(u, ms[u])
            else:
                start = nodes[u].start
                now = max(now, end[self._unit.get(start, start)])
        return max([now, *free.values()])

    def peak_bytes(self) -> int:
        """Most bytes alive at once in the merged dag in its own order."""
        return self.dag.lifetimes.peak_at(np.array(self._numbers(), np.int64))

    def _numbers(self) -> list[int]:
        """Of each node of the dag, its number in the merged one."""
        number = [0] * len(self.dag)
        for at, u in enumerate(self.order):
            number[u] = at
        for u, of_unit in self._members.items():
            for i in of_unit:
                number[i] = number[u]
        return number

    def merged(self) -> Merged:
        """The merged dag."""
        number, nodes = self._numbers(), []
        for u in self.order:
            node, of_unit = self.dag.nodes[u], self._members.get(u, (u,))
            deps = self._deps.get(u, node.deps)
            name = node.name if len(of_unit) == 1 else f"{node.name} and {len(of_unit) - 1} more"
            start = number[node.start] if node.start >= 0 else -1
            new_deps = (number[deps[0]],) if len(deps) == 1 else tuple(sorted({number[dep] for dep in deps}))
            nodes.append(Node(name, node.kind, self._ms.get(u, node.ms), new_deps, node.group, start))
        members = tuple(self._members.get(u) or (u,) for u in self.order)
        return Merged(Dag(tuple(nodes), _storages(self.dag, number)), members)


def renumbered(dag: Dag, order: Sequence[int]) -> Dag:
    """`dag` numbered by a legal order of it."""
    if list(order) == list(range(len(dag))):
        return dag
    position = positions(order).tolist()
    nodes = []
    for i in order:
        node = dag.nodes[i]
        deps, start = tuple([position[dep] for dep in node.deps]), position[node.start] if node.start >= 0 else -1
        nodes.append(Node(node.name, node.kind, node.ms, deps, node.group, start))
    return Dag(tuple(nodes), _storages(dag, position))


def _names(dag: Dag, nodes: Sequence[int]) -> str:
    return ", ".join(repr(dag.nodes[i].name) for i in nodes)


def _members(dag: Dag, buckets: Sequence[Sequence[int]]) -> tuple[dict[int, tuple[int, ...]], dict[int, int]]:
    """Nodes that become one, ascending, by the smallest; and of each of them, the smallest."""
    members: dict[int, tuple[int, ...]] = {}
    unit: dict[int, int] = {}
    for bucket in buckets:
        starts = tuple(sorted(bucket))
        groups = {dag.nodes[i].group if 0 <= i < len(dag) else "" for i in starts}
        if len(groups) != 1 or "" in groups or len(set(starts)) < len(starts):
            raise ValueError(f"a bucket has starts of one process group, each once, got nodes {list(bucket)}")
        for i in starts:
            if i in unit:
                raise GraphError(dag.nodes[i].name, "it is in two buckets")
            unit[i] = starts[0]
        members[starts[0]] = starts
        ends = tuple(sorted(dag.wait_of[i] for i in starts if i in dag.wait_of))
        if ends:
            members[ends[0]] = ends
            unit.update(dict.fromkeys(ends, ends[0]))
    return members, unit


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
