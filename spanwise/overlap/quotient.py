"""Quotients: a dag in which some nodes of another one are joined, and the way back to its nodes.

    dag ─► contract ─► without its views ─► search ─► bucket ─► collectives in buckets ─► expand ─► an order of dag

Views and items of tuples are a third to two thirds of the nodes of an ATen graph. Nothing is gained by running one
later than it could, so that the search need not place it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from spanwise.overlap.dag import Dag, Kind, Node, Storage
from spanwise.overlap.scheduler import Ints


@dataclasses.dataclass(frozen=True, eq=False)
class Quotient:
    """A dag whose nodes stand for nodes of another one.

    Attributes:
        dag: the new dag.
        members: of each of its nodes, the nodes that it stands for, in the order in which they run; every node once.
    """

    dag: Dag
    members: tuple[tuple[int, ...], ...]

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
    them, which depends on the order. So does one that alone frees memory which the graph was given. Bounds, makespans
    and peaks of memory stay the same.

    >>> product, view = Node("mm", Kind.COMPUTE, 1.0), Node("view", Kind.COMPUTE, deps=(0,))
    >>> found = contract(Dag((product, view, Node("add", Kind.COMPUTE, 1.0, (1,)))))
    >>> found.members, found.dag.nodes[1].deps, found.expand([0, 1])
    (((0, 1), (2,)), (0,), [0, 1, 2])
    """
    frees: dict[int, list[tuple[int, ...]]] = {}  # of the last user of given memory, all users
    for storage in dag.storages:
        if storage.is_given:
            frees.setdefault(max(storage.users), []).append(storage.users)
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
                if at >= 0 or not any(all(unit[user] < 0 for user in users if user < i) for users in frees.get(i, ())):
                    (members[at] if at >= 0 else first).append(i)
                    unit.append(at)
                    continue
        unit.append(len(members))
        members.append([i])
    return joined(dag, [first, *members] if first else members)


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
