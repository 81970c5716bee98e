"""Dag: what a step has to run, as plain data: work on the compute stream, collectives on the streams of their groups.

Made by `graph` from an fx graph, or by hand. `simulate` runs an order of it, `bounds` says what no order can beat,
`schedule` looks for a good one. Nodes are numbers, in an order that respects all dependencies (the graph's own).

What is modelled: one in-order compute stream; one in-order stream for each process group; a start hands a collective
over when the compute stream reaches it and costs that stream nothing; a wait keeps the compute stream until the
collective has ended.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Kind(enum.IntEnum):
    """What a node occupies.

    COMPUTE the compute stream; START the stream of its group, for the whole collective; WAIT nothing, but the compute
    stream goes no further before the collective has ended.
    """

    COMPUTE = 0
    START = 1
    WAIT = 2


class GraphError(ValueError):
    """A graph that cannot be scheduled; the text names the node.

    Attributes:
        node: its name.
    """

    def __init__(self, node: str, text: str) -> None:
        super().__init__(f"node {node!r}: {text}")
        self.node = node


@dataclasses.dataclass(frozen=True)
class Node:
    """A node as it is given.

    Attributes:
        kind: see `Kind`.
        ms: milliseconds on its stream; 0 for a wait.
        deps: nodes that must have been issued before, by number, each smaller than the node's own.
        group: process group of a start.
        start: of a wait, the start that it waits for, by number.
    """

    name: str
    kind: Kind
    ms: float = 0.0
    deps: tuple[int, ...] = ()
    group: str = ""
    start: int = -1


@dataclasses.dataclass(frozen=True)
class Storage:
    """Memory that a node allocates.

    Attributes:
        num_bytes: its size.
        maker: the node that allocates it.
        users: nodes after the last of which it is free; a wait is a user of what its collective reads and writes.
        kept: whether it outlives the graph, as an output does.
    """

    num_bytes: int
    maker: int
    users: tuple[int, ...] = ()
    kept: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Dag:
    """Nodes in an order that respects their dependencies, and the memory that they allocate.

    Raises:
        GraphError: a dependency on a later node (a cycle, or an order that is none), milliseconds that are negative or
            not finite, a wait without a start or a start with several waits, a start without a group.
    """

    nodes: tuple[Node, ...]
    storages: tuple[Storage, ...] = ()

    def __post_init__(self) -> None:
        waited: dict[int, str] = {}
        for i, node in enumerate(self.nodes):
            if not (math.isfinite(node.ms) and node.ms >= 0):
                raise GraphError(node.name, f"its cost must be finite and not negative, got {node.ms} ms")
            for dep in node.deps:
                if not 0 <= dep < i:
                    text = f"it depends on {self.nodes[dep].name!r}" if 0 <= dep < len(self.nodes) else f"on node {dep}"
                    raise GraphError(node.name, f"{text}, which does not come before it: a cycle, or no order")
            if node.kind == Kind.START and not node.group:
                raise GraphError(node.name, "it starts a collective and has no process group")
            if node.kind == Kind.WAIT:
                if node.start not in node.deps or self.nodes[node.start].kind != Kind.START:
                    raise GraphError(node.name, f"it waits for a collective that was not started (start {node.start})")
                if node.start in waited:
                    first = waited[node.start]
                    raise GraphError(node.name, f"it waits for a collective that {first!r} has waited for")
                waited[node.start] = node.name
        for storage in self.storages:
            for user in (storage.maker, *storage.users):
                if not storage.maker <= user < len(self.nodes):
                    raise ValueError(f"a storage of node {storage.maker} is used by node {user}, of {len(self.nodes)}")

    def __len__(self) -> int:
        return len(self.nodes)

    @functools.cached_property
    def kinds(self) -> NDArray[np.int8]:
        return np.array([node.kind for node in self.nodes], np.int8)

    @functools.cached_property
    def ms(self) -> NDArray[np.float64]:
        return np.array([node.ms for node in self.nodes], np.float64)

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """All starts, ascending."""
        return tuple(i for i, node in enumerate(self.nodes) if node.kind == Kind.START)

    @functools.cached_property
    def wait_of(self) -> dict[int, int]:
        """The wait of each start that has one."""
        return {node.start: i for i, node in enumerate(self.nodes) if node.kind == Kind.WAIT}

    @functools.cached_property
    def groups(self) -> tuple[str, ...]:
        """Process groups in the order in which they appear."""
        return tuple(dict.fromkeys(self.nodes[i].group for i in self.starts))

    @functools.cached_property
    def unique_deps(self) -> tuple[tuple[int, ...], ...]:
        """Of each node, the nodes that it depends on, each once."""
        return tuple(n.deps if len(n.deps) < 2 else tuple(dict.fromkeys(n.deps)) for n in self.nodes)

    @functools.cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """Of each node, the nodes that depend on it, ascending."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for i, deps in enumerate(self.unique_deps):
            for dep in deps:
                found[dep].append(i)
        return tuple(map(tuple, found))

    @functools.cached_property
    def _edges(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Dependencies: what comes first, and what follows it."""
        following = np.repeat(np.arange(len(self)), [len(deps) for deps in self.unique_deps])
        return np.array([dep for deps in self.unique_deps for dep in deps], np.int64), following

    @functools.cached_property
    def _storage_users(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Users of all storages one after another, each one's maker first, and where each one's begin."""
        users = [(storage.maker, *storage.users) for storage in self.storages]
        begins = np.cumsum([0, *map(len, users)], dtype=np.int64)[:-1]
        return np.array([user for of_one in users for user in of_one], np.int64), begins

    @functools.cached_property
    def compute_ms(self) -> float:
        """All work of the compute stream."""
        return float(self.ms[self.kinds == Kind.COMPUTE].sum())

    def check_order(self, order: Sequence[int]) -> None:
        """``GraphError`` unless `order` has every node once, after all that it depends on."""
        numbers = np.asarray(order, np.int64)
        if not np.array_equal(np.sort(numbers), np.arange(len(self))):
            raise ValueError(f"an order of {len(self)} nodes has each of them once, got {len(order)} numbers")
        place = np.empty(len(self), np.int64)
        place[numbers] = np.arange(len(self))
        deps, following = self._edges
        wrong = np.flatnonzero(place[deps] > place[following])
        if len(wrong):
            node, dep = self.nodes[following[wrong[0]]], self.nodes[deps[wrong[0]]]
            raise GraphError(node.name, f"it comes before {dep.name!r}, on which it depends")

    def peak_bytes(self, order: Sequence[int] | None = None) -> int:
        """Most bytes of the storages alive at once, in the given order or the graph's own."""
        return int(self.alive_bytes(order).max(initial=0))

    def alive_bytes(self, order: Sequence[int] | None = None) -> NDArray[np.int64]:
        """Bytes of the storages alive while each node runs, by its place in the order; int64 ``[n]``.

        What a node allocates is there beside what it frees. Storages without a user are free at once, kept ones never.
        """
        if not self.storages:
            return np.zeros(len(self), np.int64)
        place = np.arange(len(self))
        if order is not None:
            place[np.asarray(order, np.int64)] = np.arange(len(order))
        users, begins = self._storage_users
        num_bytes = np.array([storage.num_bytes for storage in self.storages], np.int64)
        freed = np.array([not storage.kept for storage in self.storages])
        change = np.zeros(len(self) + 1, np.int64)
        np.add.at(change, place[users[begins]], num_bytes)
        np.subtract.at(change, np.maximum.reduceat(place[users], begins)[freed] + 1, num_bytes[freed])
        return change[:-1].cumsum()
