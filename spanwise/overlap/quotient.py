"""Quotients: a dag in which some nodes of another one are joined, and the way back to its nodes.

    dag ─► contract ─► without its views ─► search ─► merge ─► collectives in buckets ─► expand ─► an order of dag

Views and items of tuples are a third to two thirds of the nodes of an ATen graph. Nothing is gained by running one
later than it could, so that the search need not place it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from spanwise.overlap.arrays import Ints, graph_of
from spanwise.overlap.dag import Dag, GraphError, Kind, Node, Storage
from spanwise.overlap.engine import in_units


@dataclasses.dataclass(frozen=True, eq=False)
class Quotient:
    """A dag whose nodes stand for nodes of another one.

    Attributes:
        dag: the new dag.
        members: of each of its nodes, the nodes that it stands for, in the order in which they run; every node once.
    """

    dag: Dag
    members: tuple[tuple[int, ...], ...]

    @property
    def launches(self) -> int:
        """Number of collectives that are started."""
        return len(self.dag.starts)

    def expand(self, order: Iterable[int]) -> list[int]:
        """The nodes that an order of the new dag stands for."""
        return [i for unit in order for i in self.members[unit]]


def joined(dag: Dag, members: Sequence[Sequence[int]], ms: dict[int, float] | None = None) -> Quotient:
    """The quotient with these members, in an order that respects all dependencies; the first member leads.

    Args:
        ms: milliseconds of members joined to others, by the first of them; default: its own.
    """
    number = [0] * len(dag)
    for unit, of_unit in enumerate(members):
        for i in of_unit:
            number[i] = unit
    nodes = []
    for unit, of_unit in enumerate(members):
        node = dag.nodes[of_unit[0]]
        deps = {number[dep] for i in of_unit for dep in dag.nodes[i].deps} - {unit}
        bucket = node.kind != Kind.COMPUTE and sum(dag.nodes[i].kind == node.kind for i in of_unit)
        name = f"{node.name} and {bucket - 1} more" if bucket > 1 else node.name
        start = number[node.start] if node.start >= 0 else -1
        cost = node.ms if ms is None else ms.get(of_unit[0], node.ms)
        nodes.append(Node(name, node.kind, cost, tuple(sorted(deps)), node.group, start, node.link))
    storages = []
    for storage in dag.storages:
        maker = number[storage.maker] if storage.maker >= 0 else -1
        users, kept = list(dict.fromkeys(number[user] for user in storage.users)), storage.kept
        if users and min(users) < maker:
            # A user that does not depend on the maker stands for the end of the graph, which may be another node now.
            kept, users = True, [user for user in users if user >= maker]
        storages.append(Storage(storage.num_bytes, maker, tuple(users), kept))
    return Quotient(Dag(tuple(nodes), tuple(storages)), tuple(map(tuple, members)))


def alone(dag: Dag) -> Quotient:
    """`dag` as it is, each node standing for itself."""
    return Quotient(dag, tuple((i,) for i in range(len(dag))))


def contract(dag: Dag) -> Quotient:
    """Join each node that takes no time, allocates nothing and follows one node at most to the one that it follows.

    Those that follow none become the first node. A node that follows several stays: it could only run after the last of
    them, which depends on the order. So does one that alone frees memory which the graph was given, and one that would
    add to the bytes of a collective in flight. Bounds, makespans and peaks of memory stay the same.

    >>> product, view = Node("mm", Kind.COMPUTE, 1.0), Node("view", Kind.COMPUTE, deps=(0,))
    >>> found = contract(Dag((product, view, Node("add", Kind.COMPUTE, 1.0, (1,)))))
    >>> found.members, found.dag.nodes[1].deps, found.expand([0, 1])
    (((0, 1), (2,)), (0,), [0, 1, 2])
    """
    frees: dict[int, list[tuple[int, ...]]] = {}  # of the last user of given memory, all users
    used: list[set[int]] = [set() for _ in dag.nodes]
    for number, storage in enumerate(dag.storages):
        if storage.is_given:
            frees.setdefault(max(storage.users), []).append(storage.users)
        for i in storage.touched_by:
            used[i].add(number)
    unit: list[int] = []  # of each node, its unit; -1 for those that follow none
    members: list[list[int]] = []
    first: list[int] = []
    for i, node in enumerate(dag.nodes):
        deps = {unit[dep] for dep in node.deps} - {-1}
        if node.kind == Kind.COMPUTE and node.ms == 0.0 and not dag.allocated[i]:
            # What follows a wait follows its start.
            deps -= {unit[dag.nodes[members[dep][0]].start] for dep in deps if dag.nodes[members[dep][0]].start >= 0}
            if len(deps) < 2:
                at = max(deps, default=-1)
                if at < 0:
                    stays = any(all(unit[user] < 0 for user in users if user < i) for users in frees.get(i, ()))
                else:
                    leader = members[at][0]
                    stays = dag.nodes[leader].kind == Kind.START and not used[i] <= used[leader]
                if not stays:
                    (members[at] if at >= 0 else first).append(i)
                    unit.append(at)
                    continue
        unit.append(len(members))
        members.append([i])
    return joined(dag, [first, *members] if first else members)


def merge(
    dag: Dag,
    buckets: Sequence[Sequence[int]],
    ms: Sequence[float],
    order: Sequence[int] | None = None,
    *,
    late: bool = False,
) -> Quotient:
    """Make the collectives of each bucket one: one start, one wait, the union of their dependencies.

    Args:
        buckets: starts that become one, by number: of one group, and each in one bucket only.
        ms: milliseconds of each bucket.
        order: a legal order of `dag`'s nodes, which the merged dag follows; default: its own. A merged collective
            starts where the first of its members did, or once all that they depend on is there.
        late: start it, and wait for it, where the last of its members did instead. What needs it before moves behind.

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
    seen: set[int] = set()
    for bucket in buckets:
        groups = {dag.nodes[i].group if 0 <= i < len(dag) else "" for i in bucket}
        if len(groups) != 1 or "" in groups or len(set(bucket)) < len(bucket):
            raise ValueError(f"a bucket has starts of one process group, each once, got nodes {list(bucket)}")
        for i in bucket:
            if i in seen:
                raise GraphError(dag.nodes[i].name, "it is in two buckets")
        seen.update(bucket)
    known = np.arange(len(dag)) if order is None else np.array(order, np.int64)
    unit = units_of(dag, buckets)
    found = in_units(graph_of(dag), known, unit, late_starts=late, late_waits=late)
    if len(found) < len(dag):
        raise _circle(dag, buckets, unit, set(found.tolist()))
    return joined(dag, split_units(found, unit), {min(bucket): cost for bucket, cost in zip(buckets, ms, strict=True)})


def units_of(dag: Dag, buckets: Iterable[Sequence[int]]) -> Ints:
    """Of each node, the smallest member of its unit: the starts of a bucket are one, and so are their waits."""
    unit = np.arange(len(dag))
    for bucket in buckets:
        for members in (list(bucket), [dag.wait_of[i] for i in bucket if i in dag.wait_of]):
            unit[members] = min(members, default=0)
    return unit


def split_units(order: Ints, unit: Ints) -> list[list[int]]:
    """Members of the units of an order in which they are side by side."""
    return [one.tolist() for one in np.split(order, np.flatnonzero(np.diff(unit[order])) + 1) if len(one)]


def _circle(dag: Dag, buckets: Sequence[Sequence[int]], unit: Ints, done: set[int]) -> GraphError:
    """The error for buckets that wait for one another: follow what units wait for until one is there again."""
    waits_for = {int(unit[i]): int(unit[dep]) for i in range(len(dag)) for dep in dag.nodes[i].deps if dep not in done}
    seen = [next(iter(waits_for))]
    while waits_for[seen[-1]] not in seen:
        seen.append(waits_for[seen[-1]])
    circle = {dag.nodes[i].start if dag.nodes[i].start >= 0 else i for i in seen[seen.index(waits_for[seen[-1]]) :]}
    bucket = sorted(next(bucket for bucket in buckets if len(bucket) > 1 and circle & set(bucket)))
    names = ", ".join(repr(dag.nodes[i].name) for i in bucket)
    return GraphError(dag.nodes[bucket[0]].name, f"no bucket of {names}: they would wait for one another")
