"""A `Dag` without its views: nodes that take neither time nor memory, joined to the one node that they follow.

    dag ─► contract ─► Contracted.dag ─► schedule, bucket ─► Contracted.expand ─► an order of dag

Views and items of tuples are a third to two thirds of the nodes of an ATen graph. Nothing is gained by running one
later than it could, so that the search need not place it. Bounds, makespans and peaks of memory stay the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from spanwise.overlap.ir.dag import Dag, Kind, Node
from spanwise.overlap.ir.memory import Storage

_COMPUTE = int(Kind.COMPUTE)


@dataclasses.dataclass(frozen=True, eq=False)
class Contracted:
    """A dag whose nodes stand for one node of another, and for those that run right after it.

    Attributes:
        dag: the contracted dag, in the order of the given one.
        members: of each of its nodes, the nodes of the given dag, in the order in which they run.
        first: nodes of the given dag that follow none; they run first.

    >>> from spanwise.overlap.ir.dag import Node
    >>> product, view = Node("mm", Kind.COMPUTE, 1.0), Node("view", Kind.COMPUTE, deps=(0,))
    >>> contracted = contract(Dag((product, view, Node("add", Kind.COMPUTE, 1.0, (1,)))))
    >>> contracted.members, contracted.dag.nodes[1].deps, contracted.expand([0, 1])
    (((0, 1), (2,)), (0,), [0, 1, 2])
    """

    dag: Dag
    members: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]

    def expand(self, order: Iterable[int]) -> list[int]:
        """The order of the given dag that an order of the contracted one stands for."""
        members = self.members
        return [*self.first, *(i for unit in order for i in members[unit])]


def contract(dag: Dag) -> Contracted:
    """Join each node that takes no time, allocates nothing and follows one node at most to the one that it follows.

    A node that follows several stays: it could only run after the last of them, which depends on the order. So does one
    that alone frees memory which the graph was given, and one that would add to the bytes of a collective in flight.
    """
    joins = [
        n.kind == _COMPUTE and n.ms == 0.0 and not new
        for n, new in zip(dag.nodes, dag.lifetimes.allocated, strict=True)
    ]
    frees: dict[int, list[tuple[int, ...]]] = {}  # of the last user of given memory, all users
    for storage in dag.storages:
        if storage.is_given:
            frees.setdefault(max(storage.users), []).append(storage.users)
    used = dag.lifetimes.used
    number: list[int] = []  # of each node, that of the contracted one; -1 for those that follow none
    nodes: list[Node] = []
    members: list[list[int]] = []
    first: list[int] = []
    for i, node in enumerate(dag.nodes):
        deps = {number[dep] for dep in node.deps}
        deps.discard(-1)
        if joins[i]:  # what follows a wait follows its start
            deps.difference_update([nodes[dep].start for dep in deps])
        if joins[i] and len(deps) < 2:
            at = max(deps, default=-1)
            if at < 0:
                stays = any(all(number[user] < 0 for user in users if user < i) for users in frees.get(i, ()))
            else:
                stays = nodes[at].kind == Kind.START and not set(used[i]) <= set(used[members[at][0]])
            if not stays:
                (members[at] if at >= 0 else first).append(i)
                number.append(at)
                continue
        number.append(len(nodes))
        members.append([i])
        start = number[node.start] if node.start >= 0 else -1
        nodes.append(Node(node.name, node.kind, node.ms, tuple(sorted(deps)), node.group, start))
    storages = []
    for storage in dag.storages:
        if not storage.num_bytes:
            continue
        users = dict.fromkeys([number[user] for user in storage.users])
        users.pop(-1, None)
        maker = number[storage.maker] if storage.maker >= 0 else -1
        storages.append(Storage(storage.num_bytes, maker, tuple(users), storage.kept))
    return Contracted(Dag(tuple(nodes), tuple(storages)), tuple(map(tuple, members)), tuple(first))
