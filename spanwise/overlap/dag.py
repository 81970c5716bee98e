"""Dag: a step as plain data: work on the compute stream, and collectives on the streams of their process groups.

`fx.graph` makes one from an fx graph; tests make one by hand. `engine` runs orders of it, `bounds` bounds every order
from below, and `search` looks for a good one. Nodes are numbered in an order that respects all dependencies: the
graph's own.

The model: one in-order compute stream, and one in-order stream for each process group, or for each link that groups
share. A start launches its collective when the compute stream reaches it, and takes no time there. A wait blocks the
compute stream until the collective ends.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Order: TypeAlias = Sequence[int] | NDArray[np.int64]


class Kind(enum.IntEnum):
    """The stream that a node occupies.

    COMPUTE occupies the compute stream. START occupies the stream of its group for the whole collective, or the link
    that this shares. WAIT occupies none, but blocks the compute stream until the collective ends.
    """

    COMPUTE = 0
    START = 1
    WAIT = 2


_COMPUTE = Kind.COMPUTE


class GraphError(ValueError):
    """A graph that cannot be scheduled; the text names the node.

    Attributes:
        node: the node's name.

    >>> GraphError("wait_3", "waits for no collective").node
    'wait_3'
    """

    def __init__(self, node: str, text: str) -> None:
        super().__init__(f"node {node!r}: {text}")
        self.node = node


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A node of a `Dag`.

    Attributes:
        kind: its stream; see `Kind`.
        ms: milliseconds on that stream; 0 for a wait.
        deps: numbers of the nodes that must be issued before it; each is smaller than the node's own number.
        group: process group of a start.
        start: number of the start that a wait waits for; -1 for other nodes.
        link: of a start, what its group shares with other groups; "" if nothing.
    """

    name: str
    kind: Kind
    ms: float = 0.0
    deps: tuple[int, ...] = ()
    group: str = ""
    start: int = -1
    link: str = ""

    @property
    def stream(self) -> str:
        """What a start occupies: its link, or else its group."""
        return self.link or self.group


@dataclasses.dataclass(frozen=True, slots=True)
class Storage:
    """Memory that a node allocates, or that the graph is given and may free.

    Attributes:
        num_bytes: its size.
        maker: the node that allocates it; -1 for memory that is there when the graph begins.
        users: nodes that read or write it; it is freed after the last of them. A wait uses all that its collective
            reads and writes.
        kept: whether it outlives the graph, as an output does.
    """

    num_bytes: int
    maker: int
    users: tuple[int, ...] = ()
    kept: bool = False

    @property
    def is_given(self) -> bool:
        """Whether it is there when the graph begins, as a saved activation is when a backward does."""
        return self.maker < 0

    @property
    def touched_by(self) -> tuple[int, ...]:
        """Its maker and its users, each once, the maker first."""
        return tuple(dict.fromkeys(self.users if self.maker < 0 else (self.maker, *self.users)))


@dataclasses.dataclass(frozen=True, eq=False)
class Dag:
    """Nodes in an order that respects their dependencies, and the memory that they allocate.

    Raises:
        GraphError: a node depends on itself or a later node, its milliseconds are negative or not finite, a wait has
            no start, a start has several waits or no group.
        ValueError: the user of a storage comes before its maker, or is no node.

    >>> start, wait = Node("gather", Kind.START, 4.0, group="dp"), Node("wait", Kind.WAIT, deps=(0,), start=0)
    >>> dag = Dag((start, Node("other", Kind.COMPUTE, 3.0), wait), (Storage(8, 0, (2,)),))
    >>> dag.compute_ms, dag.peak_bytes(), dag.wait_of
    (3.0, 8, {0: 2})
    """

    nodes: tuple[Node, ...]
    storages: tuple[Storage, ...] = ()

    def __post_init__(self) -> None:
        waited: dict[int, str] = {}
        count = len(self.nodes)
        for i, node in enumerate(self.nodes):
            if not 0 <= node.ms < math.inf:  # NaN is not, either
                raise GraphError(node.name, f"its cost must be finite and not negative, got {node.ms} ms")
            for dep in node.deps:
                if not 0 <= dep < i:
                    text = f"it depends on {self.nodes[dep].name!r}" if 0 <= dep < count else f"on node {dep}"
                    raise GraphError(node.name, f"{text}, which does not come before it: a cycle, or no order")
            if node.kind == _COMPUTE:
                continue
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
            earliest = storage.maker if storage.maker > 0 else 0
            touched = storage.touched_by
            if touched and not (earliest <= min(touched) and max(touched) < count):
                user = next(user for user in touched if not earliest <= user < count)
                raise ValueError(f"a storage of node {storage.maker} is used by node {user}, of {count}")

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
    def streams(self) -> tuple[str, ...]:
        """What collectives occupy, links and groups without one, in the order in which they appear."""
        return tuple(dict.fromkeys(self.nodes[i].stream for i in self.starts))

    def with_links(self, links: Mapping[str, str]) -> Dag:
        """The same with other links of groups, and with none for groups that `links` does not name."""
        nodes = (dataclasses.replace(n, link=links.get(n.group, "")) if n.group else n for n in self.nodes)
        return Dag(tuple(nodes), self.storages)

    @functools.cached_property
    def unique_deps(self) -> tuple[tuple[int, ...], ...]:
        """Of each node, its dependencies, each once."""
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
        """All dependencies: the node that comes first, and the node that follows it."""
        following = np.repeat(np.arange(len(self)), [len(deps) for deps in self.unique_deps])
        return np.array([dep for deps in self.unique_deps for dep in deps], np.int64), following

    @functools.cached_property
    def allocated(self) -> NDArray[np.int64]:
        """Bytes that each node allocates, int64 ``[n]``."""
        found = np.zeros(len(self), np.int64)
        for storage in self.storages:
            if not storage.is_given:
                found[storage.maker] += storage.num_bytes
        return found

    @functools.cached_property
    def touched(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The nodes that touch each storage, all in one array, and where those of each begin; the maker is first."""
        touched = [storage.touched_by for storage in self.storages]
        begins = np.cumsum([0, *map(len, touched)], dtype=np.int64)
        return np.array([node for of_one in touched for node in of_one], np.int64), begins

    def alive_bytes(self, order: Order | None = None) -> NDArray[np.int64]:
        """Bytes alive while each node runs, by its position in an order or the graph's own; int64 ``[n]``.

        A node's results count together with the arguments that it frees. A storage without users is freed at once.
        Bytes count from what was alive when the graph began: where it has freed memory that it was given, fewer than 0.
        """
        change = np.zeros(len(self) + 1, np.int64)
        if self.storages:
            nodes, begins = self.touched
            at = nodes if order is None else positions(order)[nodes]
            num_bytes = np.array([storage.num_bytes for storage in self.storages], np.int64)
            given = np.array([storage.is_given for storage in self.storages])
            kept = np.array([storage.kept for storage in self.storages])
            np.add.at(change, at[begins[:-1]][~given], num_bytes[~given])
            np.subtract.at(change, (np.maximum.reduceat(at, begins[:-1]) + 1)[~kept], num_bytes[~kept])
        return change[:-1].cumsum()

    @functools.cached_property
    def compute_ms(self) -> float:
        """Milliseconds of all work on the compute stream."""
        return float(self.ms[self.kinds == Kind.COMPUTE].sum())

    def check_order(self, order: Order) -> None:
        """Check that `order` has every node once (``ValueError``), each after its dependencies (``GraphError``)."""
        if not np.array_equal(np.sort(np.asarray(order, np.int64)), np.arange(len(self))):
            raise ValueError(f"an order of {len(self)} nodes has each of them once, got {len(order)} numbers")
        position = positions(order)
        deps, following = self._edges
        wrong = np.flatnonzero(position[deps] > position[following])
        if len(wrong):
            node, dep = self.nodes[following[wrong[0]]], self.nodes[deps[wrong[0]]]
            raise GraphError(node.name, f"it comes before {dep.name!r}, on which it depends")

    def peak_bytes(self, order: Order | None = None) -> int:
        """Most bytes alive at once, in the given order or the graph's own; see `alive_bytes`."""
        return int(self.alive_bytes(order).max(initial=0))


def rounding(ms: float) -> float:
    """Milliseconds below which a difference is rounding, for sums of about `ms`."""
    return 1e-9 * max(1.0, ms)


def positions(order: Order) -> NDArray[np.int64]:
    """The position of each number from 0 to n - 1 in an order of them, int64 ``[n]``.

    >>> positions([2, 0, 1]).tolist()
    [1, 2, 0]
    """
    found = np.empty(len(order), np.int64)
    found[np.asarray(order, np.int64)] = np.arange(len(order))
    return found
