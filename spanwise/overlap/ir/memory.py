"""Memory along an order of nodes: lifetimes of storages, the bytes alive, and a limit that no order may exceed.

    storages ─► Lifetimes ─► profile of a whole order       (from scratch, numpy)
                         └─► ResourceLimit, node by node    (incremental, on a Profile)

Both forms rest on one definition of events, `Lifetimes.spans`: a storage opens at its maker and closes after the last
of its users. A limit need not be one of memory. Anything that one node takes and the last of some others gives back
will do, such as collectives in flight.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spanwise.overlap.ir.order import positions

_ISSUED = int(np.iinfo(np.int64).min) // 4  # added to the row of a node that has run: no later sum comes near zero


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

    def __post_init__(self) -> None:
        if self.maker < 0 and (self.kept or not self.users):
            raise ValueError("memory that the graph is given has users, after the last of which it is freed")

    @property
    def is_given(self) -> bool:
        """Whether it is there when the graph begins, as a saved activation is when a backward does."""
        return self.maker < 0

    @property
    def touched_by(self) -> tuple[int, ...]:
        """Its maker and its users."""
        return self.users if self.maker < 0 else (self.maker, *self.users)


def interval_sums(
    size: int, first: NDArray[np.int64], end: NDArray[np.int64], values: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Sum of the values whose interval ``[first, end)`` covers each position; int64 ``[size]``.

    >>> interval_sums(4, np.array([0, 1]), np.array([2, 4]), np.array([10, 1])).tolist()
    [10, 11, 1, 1]
    """
    change = np.zeros(size + 1, np.int64)
    np.add.at(change, first, values)
    np.subtract.at(change, end, values)
    return change[:-1].cumsum()


class Lifetimes:
    """Storages of a graph of `num_nodes` nodes, and when each opens and closes in an order.

    Attributes:
        num_bytes: of each storage, int64.
        kept: of each storage, whether it is never freed.

    >>> lifetimes = Lifetimes(3, (Storage(8, 0, (1,)), Storage(2, 1, kept=True)))
    >>> lifetimes.profile().tolist(), lifetimes.peak([0, 2, 1])
    ([8, 10, 2], 10)
    """

    def __init__(self, num_nodes: int, storages: Sequence[Storage]) -> None:
        self.num_nodes, self.storages = num_nodes, storages
        self.num_bytes = np.array([storage.num_bytes for storage in storages], np.int64)
        self.kept = np.array([storage.kept for storage in storages], bool)

    @functools.cached_property
    def users(self) -> list[tuple[int, ...]]:
        """Of each storage, its maker and its users, each once, the maker first."""
        return [tuple(dict.fromkeys(storage.touched_by)) for storage in self.storages]

    @functools.cached_property
    def used(self) -> list[list[int]]:
        """Of each node, the storages that it makes or uses."""
        found: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for number, users in enumerate(self.users):
            for user in users:
                found[user].append(number)
        return found

    @functools.cached_property
    def allocated(self) -> list[int]:
        """Of each node, the bytes that it allocates."""
        found = [0] * self.num_nodes
        for storage in self.storages:
            if not storage.is_given:
                found[storage.maker] += storage.num_bytes
        return found

    @functools.cached_property
    def given(self) -> NDArray[np.bool_]:
        """Of each storage, whether it is there when the graph begins."""
        return np.array([storage.is_given for storage in self.storages], bool)

    @functools.cached_property
    def given_bytes(self) -> int:
        """Bytes that are there when the graph begins, and that it frees; they are not part of a profile."""
        return int(self.num_bytes[self.given].sum())

    @functools.cached_property
    def _flat_users(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`users` of all storages one after another, and where those of each begin."""
        begins = np.cumsum([0, *map(len, self.users)], dtype=np.int64)[:-1]
        return np.array([user for of_one in self.users for user in of_one], np.int64), begins

    def spans(self, position: NDArray[np.int64] | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where each storage opens and closes (`num_nodes` if kept); `position` of each node, by default its number."""
        users, begins = self._flat_users
        if not len(begins):
            return begins, begins
        at = users if position is None else position[users]
        return np.where(self.given, 0, at[begins]), np.where(
            self.kept, self.num_nodes, np.maximum.reduceat(at, begins) + 1
        )

    def profile(self, order: Sequence[int] | None = None) -> NDArray[np.int64]:
        """Bytes alive while each node runs, by its position in the order; int64 ``[n]``.

        A node's results count together with the arguments that it frees. A storage without users is freed at once.
        Bytes count from what was alive when the graph began: where it has freed memory that it was given, fewer than 0.
        """
        opens, closes = self.spans(None if order is None else positions(order))
        return interval_sums(self.num_nodes, opens, closes, self.num_bytes) - self.given_bytes

    def peak(self, order: Sequence[int] | None = None) -> int:
        """Most bytes alive at once, in the given order or by the nodes' own numbers."""
        return int(self.profile(order).max(initial=0))

    def peak_at(self, position: NDArray[np.int64]) -> int:
        """Most bytes alive at once if nodes run at these positions, several maybe at one.

        A storage that is used before its maker has run counts to the end; see `bucketing.merge`.
        """
        users, begins = self._flat_users
        if not len(begins):
            return 0
        at = position[users]
        opens, closes = self.spans(position)
        closes[~self.given & (np.minimum.reduceat(at, begins) < opens)] = self.num_nodes
        alive = interval_sums(self.num_nodes, opens, closes, self.num_bytes) - self.given_bytes
        return int(alive.max(initial=0))


class Profile:
    """Bytes by position, changed interval by interval; changes are summed only when somebody asks.

    Attributes:
        pending: changes to come: first position, end, bytes. Callers in an inner loop append to it.
    """

    def __init__(self, num_bytes: NDArray[np.int64]) -> None:
        self._bytes = num_bytes
        self.pending: list[tuple[int, int, int]] = []

    def copy(self) -> Profile:
        other = Profile(self._bytes.copy())
        other.pending = self.pending.copy()
        return other

    def peak(self, first: int, end: int | None = None) -> int:
        """Most bytes at positions from `first` to before `end`; 0 if there are no such positions."""
        if self.pending:
            self._apply()
        return int(self._bytes[first:end].max(initial=0))

    def _apply(self) -> None:
        self._bytes += interval_sums(len(self._bytes), *np.array(self.pending, np.int64).T)
        self.pending.clear()


class ResourceLimit:
    """Bytes of a partly issued graph, and whether a node may be issued next without a later dead end.

    The banker's algorithm (E. W. Dijkstra, EWD 623), with a known order as the safe sequence. A state is safe if all
    nodes left, run in the known order from here, stay within the budget. The known order does so from the start; its
    next node may always run, and leaves a safe state.

    Args:
        lifetimes: of the limited storages.
        budget: most bytes.
        order: the known order; default: the nodes' own numbers.

    Attributes:
        alive: bytes alive now.
        peak: most bytes so far.
        allocated: of each node, the bytes that it allocates.

    Raises:
        ValueError: the known order needs more than the budget.
    """

    def __init__(self, lifetimes: Lifetimes, budget: float, order: Sequence[int] | None = None) -> None:
        count = lifetimes.num_nodes
        self.lifetimes, self.budget, self.alive, self.peak = lifetimes, budget, 0, 0
        self._order = range(count) if order is None else order
        self.allocated, self._used = lifetimes.allocated, lifetimes.used
        self._num_bytes, self._kept = lifetimes.num_bytes.tolist(), lifetimes.kept.tolist()
        at = positions(self._order)
        self._position = position = at.tolist()
        # Of each storage, the positions of its users, ascending; the last that has not run, as index and as position.
        self._users = [sorted([position[user] for user in users]) for users in lifetimes.users]
        self._last = [len(users) - 1 for users in self._users]
        self._last_position = [users[-1] for users in self._users]
        # Memory peaks where a node allocates, so that the profile has rows for these nodes only.
        rows = np.zeros(count + 1, np.int64)
        allocated = self.allocated
        np.cumsum([allocated[node] > 0 for node in self._order], out=rows[1:])
        self._row = rows.tolist()  # of each position, the rows before it
        opens, closes = lifetimes.spans(at)
        # Bytes at each node that is left, if these ran next in the known order.
        alive = interval_sums(self._row[-1], rows[opens], rows[closes], lifetimes.num_bytes)
        self._profile = Profile(alive - lifetimes.given_bytes)
        self._bound = self._profile.peak(0)  # at least the bytes that any node left needs
        self._has_run = bytearray(count)  # by position
        self._next = 0
        if self._bound > budget:
            raise ValueError(
                f"the known order needs {self._bound:,} bytes at its peak, more than the budget of {budget:,}: "
                f"allow at least {self._bound:,}"
            )

    def copy(self) -> ResourceLimit:
        """An independent limit in the same state."""
        other = copy.copy(self)
        other._last, other._last_position = self._last.copy(), self._last_position.copy()
        other._has_run, other._profile = self._has_run.copy(), self._profile.copy()
        return other

    @property
    def next_in_order(self) -> int:
        """The first node of the known order that is left; it is always safe."""
        return self._order[self._next]

    def is_safe(self, node: int) -> bool:
        """Whether `node`, whose dependencies have all run, may be issued now."""
        new = self.allocated[node]
        if new == 0:
            return True
        position = self._position[node]
        if position == self._next:
            return True
        if self.alive + new > self.budget:
            return False
        if self._bound + new <= self.budget:
            return True
        first = self._row[self._next]
        self._bound = self._profile.peak(first)
        # Storages that the node frees by running early are ignored: the test is on the safe side.
        return self._profile.peak(first, self._row[position]) + new <= self.budget

    def run(self, node: int) -> None:
        """Issue `node`."""
        position, first, rows, has_run = self._position[node], self._next, self._row, self._has_run
        pending, last_position = self._profile.pending, self._last_position
        has_run[position] = True
        row = rows[position]
        new = self.allocated[node]
        if new:
            self.alive += new
            if self.alive > self.peak:
                self.peak = self.alive
            if rows[first] < row:
                pending.append((rows[first], row, new))
                self._bound += new
            pending.append((row, row + 1, _ISSUED))
        for number in self._used[node]:
            if last_position[number] != position:
                continue
            users, last = self._users[number], self._last[number]
            while last >= 0 and has_run[users[last]]:
                last -= 1
            self._last[number] = last
            last_position[number] = users[last] if last >= 0 else -1
            if self._kept[number]:
                continue
            if last < 0:
                self.alive -= self._num_bytes[number]
                closed = rows[first]
            else:
                closed = rows[max(users[last] + 1, first)]
            if closed < row:
                pending.append((closed, row, -self._num_bytes[number]))
        if position == first:
            first = has_run.find(0, first)
            self._next = first if first >= 0 else len(has_run)


class AllLimits:
    """Several limits with the same known order, as one."""

    def __init__(self, limits: Sequence[ResourceLimit]) -> None:
        self._limits = tuple(limits)

    def is_safe(self, node: int) -> bool:
        """Whether every limit lets `node` be issued now."""
        return all(limit.is_safe(node) for limit in self._limits)

    def run(self, node: int) -> None:
        """Issue `node` to every limit."""
        for limit in self._limits:
            limit.run(node)
